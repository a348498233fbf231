"""Passes over the graph of a step: fewer collectives, started earlier, and fewer activations.

A pass changes the graph in place. All of them are functions of the graph alone, which is the same
on every rank but for the rank's own offsets: so all ranks still make the same collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import collectives
from fzero.errors import LayoutError
from fzero.machine.packing import shard_of
from fzero.optim.recorded import SCHEDULES, update_in_place
from fzero.ranks.mesh import Axis
from fzero.tools.trace import program
from fzero.tools.trace.draws import Randomness, draws

DRAW = "draw"
"""Under which name the meta of a node has its `Draw`."""

aten = torch.ops.aten
GATHER, SCATTER, REDUCE = (
    getattr(torch.ops.fzero, name).default
    for name in ("all_gather", "reduce_scatter", "all_reduce")
)


def wait_late(graph: fx.Graph) -> None:
    """Move readers of reduced gradients behind other ops, so that waits are late.

    Needs: no op that writes to its arguments. Keeps: which collectives there are, and their order
    among reductions that do not depend on each other; the order of random numbers. Results of
    reductions wait longer.
    """
    after: set[fx.Node] = set()
    last = graph.output_node()
    drawn = False  # by an op that has moved
    for node in list(graph.nodes):
        sums = node.target in (SCATTER, REDUCE)
        reads = any(x in after for x in node.all_input_nodes)
        if (reads or (drawn and DRAW in node.meta)) and node is not last:
            drawn = drawn or DRAW in node.meta
            after.add(node)
            last.prepend(node)
        elif sums:
            after.update(node.users)
            for user in list(node.users):
                last.prepend(user)


def gather_early(graph: fx.Graph, *, most_bytes: int) -> None:
    """Start each gather of parameters during the one before it, as far as memory allows.

    Needs: gathers of arguments of the step (stage 3), for which nothing has to be computed.
    Keeps: which collectives there are, what each gives, and the order of gathers. At most
    `most_bytes` of full values are gathered before their first read.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    place = -1  # where the last gather that did not move stands
    last: fx.Node | None = None
    waiting: list[tuple[int, int]] = []  # where it is read first, and its bytes
    for node in list(graph.nodes):
        if node.target is not GATHER:
            last = None if program.is_collective(node) else last
            continue
        reader = min((order[user] for item in node.users for user in item.users), default=0)
        waiting = [(at, size) for at, size in waiting if at > place]
        fits = sum(size for _, size in waiting) + _bytes(node) <= most_bytes
        chains = [_chain(x) for x in node.all_input_nodes]
        if last is not None and fits and None not in chains:
            behind = [x for chain in chains for x in chain or () if order[x] > place]
            for moved in (node, *reversed(behind)):
                last.append(moved)
                order[moved] = place
            last = node
        else:
            last, place = node, order[node]
        waiting.append((reader, _bytes(node)))


def merge_collectives(graph: fx.Graph, *, bucket_bytes: int) -> None:
    """Merge consecutive small collectives, as each costs a latency.

    Needs: collectives of one kind, axis and dtype, with nothing between them that reads one or that
    a later one reads. Keeps: the sum of each element over ranks, in the same order; the bytes on
    the wire. Copies what is merged, at most `bucket_bytes` of full buffers at a time.
    """
    run: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if program.is_collective(node):
            if not (
                run and _goes_with(node, run) and sum(map(_bytes, [*run, node])) <= bucket_bytes
            ):
                _merge(graph, run, bucket_bytes)
                run = []
            run += [node] if node.target in (GATHER, SCATTER, REDUCE) else []
        elif any(_base(x) in run for x in node.all_input_nodes) and not program.is_item(node):
            _merge(graph, run, bucket_bytes)
            run = []
    _merge(graph, run, bucket_bytes)


def rematerialize(graph: fx.Graph) -> None:
    """Recompute cheap activations in the backward instead of keeping them.

    Needs: pointwise ops without randomness, of arguments of the step and of values that the
    backward keeps anyway. Keeps: every value, bit for bit, and the collectives. Takes these ops a
    second time, for one tensor less that waits for the backward.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    kept = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    free = set(kept)  # and what pointwise ops make of these
    for node in list(graph.nodes):
        if program.ran_by_autograd(node):
            continue
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and not draws(node)
        cheap = pointwise and all(x in free for x in node.all_input_nodes)
        readers = [user for user in node.users if program.ran_by_autograd(user)]
        if cheap:
            free.add(node)
        elif readers:
            kept.add(node)
            free.add(node)
        if cheap and readers:
            with graph.inserting_before(min(readers, key=order.__getitem__)):
                again = _again(graph, node, kept)
            for reader in readers:
                reader.replace_input_with(node, again)


def _again(graph: fx.Graph, node: fx.Node, kept: set[fx.Node]) -> fx.Node:
    """Return a copy of a node and of its inputs, up to kept ones."""
    if node in kept:
        return node
    made = {x: _again(graph, x, kept) for x in node.all_input_nodes}
    return graph.node_copy(node, made.__getitem__)


def _items(node: fx.Node) -> Sequence[fx.Node]:
    """Return the input buffers of a collective."""
    items: Any = node.args[0]
    return items


def _base(node: fx.Node) -> fx.Node:
    """Return the collective that a value is a result of, or None."""
    return node.args[0] if program.is_item(node) else node  # type: ignore


def _chain(node: fx.Node) -> list[fx.Node] | None:
    """Return the ops (views, a cast) from an argument of the step to this value, in order.

    None if there are other ops between them.
    """
    if node.op == "placeholder":
        return []
    if program.is_collective(_base(node)) or len(node.all_input_nodes) != 1:
        return None
    before = _chain(node.all_input_nodes[0])
    return None if before is None else [*before, node]


def _bytes(node: fx.Node) -> int:
    """Return the bytes of the full buffers of a collective."""
    return max(_nbytes(x.meta["val"] for x in _items(node)), _nbytes(node.meta["val"]))


def _nbytes(values: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in values)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Add a node, with the shape of its result."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda x: x.meta["val"]))
    return node


def _goes_with(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    first = run[0]
    same = node.target is first.target and node.args[1:] == first.args[1:]
    dtypes = {x.meta["val"].dtype for one in (first, node) for x in _items(one)}
    return bool(same) and len(dtypes) == 1 and not any(_base(x) in run for x in _items(node))


def _merge(graph: fx.Graph, run: Sequence[fx.Node], bucket_bytes: int) -> None:
    """[x0], [x1], ... -> one buffer, in which the parts of each rank lie together.

    Not one collective alone that is larger than `bucket_bytes`.
    """
    parts = [x for node in run for x in _items(node)]
    if len(parts) < 2 or sum(map(_bytes, run)) > bucket_bytes:
        return
    last, size = run[-1], int(run[-1].args[3])  # type: ignore
    rows = 1 if last.target is not SCATTER else size
    with graph.inserting_before(last):
        flat = [_call(graph, aten.view.default, x, [rows, -1]) for x in parts]
        packed = _call(graph, aten.view.default, _call(graph, aten.cat.default, flat, 1), [-1])
        done = _call(graph, last.target, [packed], *last.args[1:])
        whole = _call(graph, operator.getitem, done, 0)
        out = size if last.target is GATHER else 1
        matrix = _call(graph, aten.view.default, whole, [out, -1])
        widths = [x.meta["val"].numel() // rows for x in parts]
        pieces = _call(graph, aten.split_with_sizes.default, matrix, widths, 1)
        shapes = [list(x.shape) for node in run for x in node.meta["val"]]
        given = [
            _call(graph, aten.reshape.default, _call(graph, operator.getitem, pieces, i), shape)
            for i, shape in enumerate(shapes)
        ]
    rest = iter(given)
    for node in run:
        mine = [next(rest) for _ in _items(node)]
        for user in list(node.users):
            user.replace_all_uses_with(mine[user.args[1]])  # type: ignore
            graph.erase_node(user)
        graph.erase_node(node)


# Passes about memory: functionalization, so that ops can move; later, writes into donated inputs.
#
# See `_passes` for the rules of all passes.


_MAKERS = (aten.cat, aten.clone, aten.mm)  # a compiler may give `x` for `x + 0`, but not for these
_VIEWS = (aten.detach, aten.view, aten.t)
OWNED = "owned"
"""Under which name the meta of an update says which of its arguments it may write to."""

INTO = "into"
"""Under which name the meta of a gather says the inputs of the step in whose memory it ends."""


def without_writes(graph: fx.GraphModule) -> fx.GraphModule:
    """Replace in-place ops by out-of-place ones, so that the passes may move ops.

    Needs: no write into an argument of the step. Keeps: every value. A compiler writes in place
    again where it can. Raises `LayoutError` where an argument is written to.
    """
    if not any(map(_writes, graph.graph.nodes)):
        return graph
    if any(x.op == "get_attr" for node in graph.graph.nodes for x in _written(node)):
        raise NoGraphError("the step writes into a tensor that is none of its arguments")
    inputs = [node.meta["val"] for node in program.inputs_of(list(graph.graph.nodes))]

    def run(*values: Tensor) -> Any:
        return _InMemoryOrder(graph).run(*values)

    with fx_traceback.preserve_node_meta(), inputs[0].fake_mode:
        pure: Any = torch.func.functionalize(run, remove="mutations")
        made = make_fx(pure, _allow_non_fake_inputs=True)(*inputs)
    found = next(filter(_writes, made.graph.nodes), None)
    if found is not None:
        raise LayoutError(
            f"compile: the step writes into one of its arguments ({found.target}).",
            cause="an op with a trailing underscore on the batch, or on a view of it.",
            fix="clone it first, or run the step without fzero.compile.",
        )
    return program.without_unused(made)


class NoGraphError(Exception):
    """What a step does and a graph cannot, as a sentence; the step itself runs, with a warning."""


class _InMemoryOrder(fx.Interpreter):
    """Draws random numbers in the memory order of the tensor that they were written to.

    A new tensor is contiguous: without this, a transposed one would get other numbers.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if not random or 0 not in _writes_to(target) or not isinstance(args[0], Tensor):
            return super().call_function(target, args, kwargs)
        x, *rest = args
        order = sorted(range(x.ndim), key=x.stride, reverse=True)
        super().call_function(target, (x.permute(order), *rest), kwargs)
        return x


def _writes_to(target: Any) -> list[int]:
    """Return the positions of the arguments that an op writes to."""
    infos = [argument.alias_info for argument in target._schema.arguments]
    return [i for i, info in enumerate(infos) if info is not None and info.is_write]


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes in whose memory an op writes."""
    found: list[Any] = [node.args[i] for i in _writes_to(node.target)] if _writes(node) else []
    return [_memory_of(x) for one in found for x in (one if isinstance(one, list) else [one])]


def _memory_of(node: fx.Node) -> fx.Node:
    """Return the node that made the memory of a value: through views, and ops that write to it."""
    target: Any = node.target
    while node.op == "call_function" and (getattr(target, "is_view", False) or _writes(node)):
        made: Any = node.args[0]
        node, target = made, made.target
    return node


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def write_back(graph: fx.Graph, pairs: Sequence[tuple[int, int]]) -> None:
    """Write output k into the memory of input i, for each (i, k), after the last read of i.

    Needs: donated inputs. Keeps: every value. The new state needs no new memory: the kernel of an
    update works in place, a gather fills its input, other values are copied.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs = program.inputs_of(list(graph.nodes))
    given_up = {inputs[i] for i, _ in pairs}
    output = graph.output_node()
    outs = list(output.args[0])  # type: ignore
    for node in graph.nodes:
        if node.target is program.UPDATE:
            node.meta[OWNED] = [
                program.root_of(x) in given_up and _last_reader(x, order) <= order[node]
                for x in made_by_update(node)
            ]
    at, alike = list(order), list[tuple[fx.Node, int]]()
    for i, k in pairs:  # of a value that is not this input, and has its shape and dtype
        x, y = (node.meta["val"] for node in (inputs[i], outs[k]))
        if inputs[i] is not outs[k] and x.shape == y.shape and x.dtype == y.dtype:
            alike.append((inputs[i], k))
    places = {outs[k]: old for old, k in alike}
    for node in graph.nodes:
        if node.target is GATHER:  # into inputs that nobody reads later
            into = {item.args[1]: places.get(item) for item in node.users}
            wanted = [into.get(i) for i in range(len(node.args[0]))]
            if all(old and _last_reader(old, order) < order[node] for old in wanted):
                node.meta[INTO] = wanted
    for old, k in alike:
        new = outs[k]
        last = max(order[new], _last_reader(old, order))
        if last >= order[output] or is_made_in(program.root_of(new), old):
            continue
        with graph.inserting_after(at[last]):
            outs[k] = graph.call_function(aten.copy_.default, (old, new))
        outs[k].meta["val"] = old.meta["val"]
    output.args = (outs,)


def made_by_update(update: fx.Node) -> list[fx.Node]:
    """Return the outputs of an update: the parameters, and each moment of all of them."""
    params, moments = update.args[2], update.args[4]
    return [*params, *moments]  # type: ignore


def is_made_in(node: fx.Node, old: fx.Node) -> bool:
    """Return whether an update or a gather writes this value into the memory of an input."""
    if not program.is_item(node):
        return False
    made: Any = node.args
    maker, place = made
    if maker.target is program.UPDATE:
        return maker.meta[OWNED][place] and program.root_of(made_by_update(maker)[place]) is old
    return INTO in maker.meta and maker.meta[INTO][place] is old


def _last_reader(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Return the position of the last read of a value's memory.

    A collective reads until it is awaited; the end of the step reads the outputs.
    """
    found, last = [program.root_of(node)], 0
    for one in found:
        for user in one.users:
            if program.root_of(user) is not user:
                found.append(user)
            elif program.is_collective(user):
                readers = (order[reader] for item in user.users for reader in item.users)
                last = max(last, min(readers, default=len(order)))
            else:
                last = max(last, order[user])
    return last


def own_buffers(graph: fx.Graph) -> None:
    """Clone the input of each all-reduce, which overwrites it, unless it was created for it alone.

    A compiler fuses the clone with a pointwise op before it.
    """
    for node in graph.find_nodes(op="call_function", target=REDUCE):
        for x in node.all_input_nodes:
            if not _is_alone(x):
                with graph.inserting_before(node):
                    own = graph.call_function(aten.clone.default, (x,))
                own.meta["val"] = x.meta["val"].clone()
                node.replace_input_with(x, own)


def _is_alone(node: fx.Node) -> bool:
    """Return whether an op created this buffer for its only reader, directly or through views."""
    packet, alone = getattr(node.target, "overloadpacket", None), len(node.users) == 1
    return alone and (
        packet in _MAKERS or (packet in _VIEWS and _is_alone(node.all_input_nodes[0]))
    )


# From a graph to actions: compiled segments of ops, and starts and waits of collectives.
#
# A segment has the ops between two collectives, compiled together. A collective starts at its place
# in the graph and is awaited at the first read of its result; the ops between overlap with it.

Compiler = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]
"""(graph, example tensors) -> a function of such tensors that returns a list."""


@dataclass(frozen=True, slots=True)
class Action:
    """A function of named values, whose results get names: a segment, or the start of a collective.

    writes: into an argument of the step, which is given up. drops: what nobody reads after it.
    collective: of a start, the values of its inputs; None for what this rank does alone.
    """

    run: Callable[..., Sequence[Any]]
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    writes: bool = False
    drops: tuple[str, ...] = ()
    collective: tuple[Tensor, ...] | None = None

    def take_part(self) -> None:
        """Make a collective of which this rank has no inputs, for the others'."""
        if self.collective is not None:
            shapes = [(x.shape, x.dtype, x.device) for x in self.collective]
            zeros = [torch.zeros(shape, dtype=kind, device=on) for shape, kind, on in shapes]
            for flight in self.run(*zeros):
                flight.wait()

    def __call__(self, env: dict[str, Any]) -> None:
        """Run it on the values by the names of their nodes."""
        env.update(zip(self.gives, self.run(*[env[name] for name in self.reads]), strict=True))
        for name in self.drops:
            del env[name]


def actions_of(
    graph: fx.GraphModule, axes: dict[str, Axis], compiler: Compiler, randomness: Randomness
) -> tuple[Action, ...]:
    """Return the actions of a graph; `axes` has the axes of its collectives by name."""
    own_buffers(graph.graph)
    held = held_in(graph)
    states = [(number, one.get_state) for one, number in randomness.begins]
    states += [(number, lambda x=x: x) for number, x in randomness.constants.items()]
    actions = [
        Action(lambda state=state: [state()], (), (_state_name(number),))
        for number, state in states
    ]
    run: list[fx.Node] = []
    pending: dict[fx.Node, None] = {}
    for node in graph.graph.nodes:
        item_of_apart = program.is_item(node) and _is_apart(cast("Any", node.args[0]))
        if node.op in ("placeholder", "get_attr") or item_of_apart:
            continue
        is_last = node.op == "output"
        needed: list[Any] = [x.args[0] for x in node.all_input_nodes if program.is_item(x)]
        needed = [*pending] if is_last else [x for x in dict.fromkeys(needed) if x in pending]
        if run and (_is_apart(node) or needed or is_last):
            actions.append(_segment(graph, run, compiler, held))
            run.clear()
        for one in needed:
            del pending[one]
            actions.append(_wait(one))
        if program.is_collective(node):
            actions.append(_start(node, axes))
            pending[node] = None
        elif node.target is program.UPDATE:
            actions.append(_update(node))
        elif node.target is program.RATE:
            actions.append(_rate(node))
        elif DRAW in node.meta:
            actions.append(_drawn(node))
        elif not is_last:
            run.append(node)
    for generator, number in randomness.ends:

        def put_back(state: Tensor, generator: torch.Generator = generator) -> list[Any]:
            generator.set_state(state)
            return []

        actions.append(Action(put_back, (_state_name(number),), ()))
    # Each value is freed after its last reader.
    needed_later = {x.name for x in graph.graph.output_node().all_input_nodes}
    made = list[Action]()
    for action in reversed(actions):
        gone = (name for name in (*action.reads, *action.gives) if name not in needed_later)
        made.append(replace(action, drops=tuple(dict.fromkeys(gone))))
        needed_later.update(action.reads)
    return tuple(reversed(made))


def held_in(graph: fx.GraphModule) -> dict[str, Tensor]:
    """Return the tensors that the step reads as free variables, by name of node, as inputs.

    As constants of a compiler they would not follow later writes. Tensors that the step creates
    from numbers stay constants, and are copied before use.
    """
    lift = torch.ops.aten.lift_fresh_copy.default
    nodes = [node for node in graph.graph.nodes if node.op == "get_attr"]
    read = [node for node in nodes if any(user.target is not lift for user in node.users)]
    found = {node.name: operator.attrgetter(str(node.target))(graph) for node in read}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def _is_apart(node: fx.Node) -> bool:
    """Return whether a node is outside of segments."""
    return (
        program.is_collective(node)
        or node.target in (program.UPDATE, program.RATE)
        or DRAW in node.meta
    )


def _items_read(node: fx.Node) -> dict[str, int]:
    """Return {name: position} of the results of a node that are read."""
    return {user.name: int(user.args[1]) for user in node.users}  # type: ignore


def _named(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _state_name(number: int) -> str:
    return f"random state {number}"


def _start(node: fx.Node, axes: dict[str, Axis]) -> Action:
    """Return the start of a collective; it gives the handle to wait for.

    A gather into the memory of donated arguments of the step has these among its inputs.
    """
    shards, name, _, _, *rest = cast("Any", node.args)
    axis, fulls = axes[name], node.meta.get(INTO, [])
    if node.target is torch.ops.fzero.uneven_all_to_all.default:
        raise LayoutError(
            f"compile: all_to_all with sizes, along {name!r}.",
            cause="experts that each take the rows which chose them; a compiled step has the "
            "sizes of its first call in its graph.",
            fix="leave this step uncompiled, and compile parts of its loss with torch.compile.",
        )
    begin = _STARTS[node.target]
    ordered = begin in (collectives.start_scatter, collectives.start_reduce)
    options = {"ordered": bool(rest[0])} if ordered else {}
    there = list(map(is_made_in, shards, fulls))  # whether a shard is where it belongs already
    if begin is collectives.start_extremum:
        rest = [node.target._opname]  # type: ignore
    elif begin is not collectives.start_permute:
        rest = []

    def run(*xs: Tensor) -> list[collectives.InFlight]:
        if not fulls:
            given = xs if rest else [x.contiguous() for x in xs]
            return [begin(given, axis, *rest, **options)]
        for shard, full, known in zip(xs, xs[len(there) :], there, strict=False):
            if not known:
                shard_of(full, axis.size, axis.rank).copy_(shard)
        return [collectives.start_gather_in_place(list(xs[len(there) :]), axis)]

    inputs = [*shards, *fulls]
    values = tuple(x.meta["val"] for x in inputs)
    return Action(run, _named(inputs), (node.name,), writes=bool(fulls), collective=values)


_STARTS: dict[Any, Callable[..., collectives.InFlight]] = {
    torch.ops.fzero.all_gather.default: collectives.start_gather,
    torch.ops.fzero.reduce_scatter.default: collectives.start_scatter,
    torch.ops.fzero.all_reduce.default: collectives.start_reduce,
    torch.ops.fzero.all_to_all.default: collectives.start_all_to_all,
    torch.ops.fzero.ppermute.default: collectives.start_permute,
    torch.ops.fzero.pmax.default: collectives.start_extremum,
    torch.ops.fzero.pmin.default: collectives.start_extremum,
}


def _wait(node: fx.Node) -> Action:
    """Return the wait for a collective; it gives those of its results that are read."""
    items = _items_read(node)

    def run(flight: collectives.InFlight) -> list[Tensor]:
        outs = flight.wait()
        return [outs[at] for at in items.values()]

    return Action(run, (node.name,), tuple(items))


def _update(node: fx.Node) -> Action:
    """Return the kernel of an optimizer, in place where it may write into its arguments."""
    rule, options, _, grads, _, count, *lr = cast("Any", node.args)
    made, items = made_by_update(node), _items_read(node)  # parameters, then moments
    owned = node.meta.get(OWNED, [False] * len(made))
    parts = len(made), len(made) + len(grads)

    def run(*xs: Tensor) -> list[Tensor]:
        held = [x if own else x.clone() for x, own in zip(xs[: parts[0]], owned, strict=True)]
        number, *rate = xs[parts[1] :]
        given = list(xs[parts[0] : parts[1]])
        update_in_place(rule, options, held, given, number, rate[0] if rate else None)
        return [held[at] for at in items.values()]

    reads = _named([*made, *grads, count, *(one for one in lr if one is not None)])
    return Action(run, reads, tuple(items), writes=any(owned))


def _rate(node: fx.Node) -> Action:
    """Return the value of a schedule of `fzero.optim` after so many updates."""
    count, number = cast("Any", node.args)
    schedule = SCHEDULES[number]

    def run(updates: Tensor) -> list[Tensor]:
        return [torch.tensor(float(schedule(int(updates))), dtype=torch.float64)]

    return Action(run, (count.name,), (node.name,))


def _drawn(node: fx.Node) -> Action:
    """Return an op that draws, as torch has it: a compiler would take others in another order."""
    target, inputs, draw = cast("Any", node.target), node.all_input_nodes, node.meta[DRAW]
    several = isinstance(node.meta["val"], tuple | list)
    items = _items_read(node) if several else {node.name: None}
    takes = any(one.name == "generator" for one in target._schema.arguments)
    own = {"generator": draw.generator} if takes else {}

    def run(state: Tensor, *xs: Any) -> list[Any]:
        draw.generator.set_state(state)
        env = dict(zip(inputs, xs, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        out = target(*args, **kwargs | own)
        made = [out if at is None else out[at] for at in items.values()]
        return [*made, draw.generator.get_state()]

    reads = (_state_name(draw.before), *_named(inputs))
    return Action(run, reads, (*items, _state_name(draw.after)))


def _segment(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], compiler: Compiler, held: Mapping[str, Tensor]
) -> Action:
    inside = set(nodes)
    outside = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside)
    constants = [x for x in outside if x.op == "get_attr" and x.name not in held]
    reads = [x for x in outside if x not in constants]
    gives = [
        node
        for node in nodes
        if isinstance(node.meta.get("val"), Tensor) and not inside.issuperset(node.users)
    ]
    part, copies = fx.Graph(), {}
    for x in reads:
        copies[x] = part.placeholder(x.name)
        copies[x].meta = x.meta
    for node in (*constants, *nodes):
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in gives))
    module = fx.GraphModule(graph, part)
    run = compiler(module, [held[x.name] if x.name in held else x.meta["val"] for x in reads])
    writes = any(node.target is torch.ops.aten.copy_.default for node in nodes)
    return Action(run, _named(reads), _named(gives), writes=writes)
