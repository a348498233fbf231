"""The ops of a recorded step: names, phases, parameters, FLOPs, and bytes alive while each runs."""

from __future__ import annotations

import itertools
import math
import re
import string
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from fzero.collectives import CollectiveEvent
from fzero.state import Layout, Part, Setup
from fzero.tools.trace.program import (
    FIELD,
    SAME,
    UPDATE,
    RecordedStep,
    in_module,
    inputs_of,
    is_collective,
    is_item,
    is_op,
    ran_by_autograd,
)

# Count the floating-point operations of an op, for traces and for plans.
#
# Counted are matrix products, convolutions and attention; a multiplication and the addition that
# goes with it are two. For products of matrices and for convolutions torch has formulas
# (`torch.utils.flop_counter`). Here are those of ops that it leaves out (the fused attention of
# CPUs, products with vectors, ops that write into an argument), or that it counts for as many heads
# of queries as of keys only. A recurrent layer is counted as its products: see `_recurrent`.

_aten = torch.ops.aten


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the operations of one call of an ATen op; of its tensors only shapes are looked at."""
    packet = getattr(op, "overloadpacket", op)
    own = _OWN.get(packet)
    if own is not None:
        return int(own(*args, **kwargs))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores, and sums of values: of all pairs, also of those that a mask drops."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """The scores again; the gradients of weights and values, then those of queries and keys."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """[..., m, k] with [..., k, n]; or [m, k] with [k]."""
    return 2 * a.numel() * (b.shape[-1] if b.ndim > 1 else 1)


def _added_product(_to: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return _product(a, b)


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Groups of rows, each with a matrix of its own; of two stacks, a product of each pair."""
    shared = a.shape[0] if a.ndim == 3 and b.ndim == 2 else 1  # groups of the columns of b
    return 2 * a.numel() * b.shape[-1] // shared


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, e1: Any, e2: Any, e3: Any, *_: Any, **__: Any
) -> int:
    """A sum of products of three, as two matrix products, of which the first is counted."""
    ndim = a.ndim + len(e1)
    factors = [_unsqueezed(x, dims, ndim) for x, dims in ((a, e1), (b, e2), (c, e3))]
    return 2 * math.prod(map(max, *factors))


def _unsqueezed(x: Tensor, dims: Any, ndim: int) -> list[int]:
    sizes = iter(x.shape)
    return [1 if i in dims else next(sizes) for i in range(ndim)]


def _distances(a: Tensor, b: Tensor) -> int:
    """|x|^2 - 2 x y + |y|^2 of rows, as one product of matrices with two more columns."""
    return 2 * math.prod(a.shape[:-1]) * b.shape[-2] * (a.shape[-1] + 2)


def _packets(formula: Callable[..., int], *names: str) -> dict[Any, Callable[..., int]]:
    """A formula, by the ops of these names that this version of torch has."""
    return {getattr(_aten, name): formula for name in names if hasattr(_aten, name)}


_SDPA = "_scaled_dot_product_"
_FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_MORE = ("fused_attention_overrideable", "attention_math_for_mps")
_ADDED = ("addmv", "addmv_", "addmm_", "addbmm", "addbmm_", "baddbmm_", "_addmm_activation")
_OWN = {
    **_packets(_attention, *(f"{_SDPA}{kind}" for kind in (*_FUSED, *_MORE))),
    **_packets(_attention_backward, *(f"{_SDPA}{kind}_backward" for kind in _FUSED)),
    **_packets(_product, "mv", "dot", "vdot", "_int_mm"),
    **_packets(_added_product, *_ADDED),
    **_packets(_grouped_product, "_grouped_mm", "_scaled_grouped_mm"),
    **_packets(_trilinear, "_trilinear"),
    **_packets(_distances, "_euclidean_dist"),
}


Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the program: an input, or what an op gives.

    parameter: whose values it has, and no others. holds: the parameters that a buffer of the state
    is made of, or a shard of.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str = ""  # where an input or an output is in the arguments or the result
    parameter: str = ""
    holds: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{short(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Bytes that are alive at one moment, by what they are. Each storage is of one kind.

    parameters, optimizer (with masters): of the state, and what becomes those of the new state.
    gradients: of parameters; whole on the rank, reduced, or waiting in a window.
    gathered: full parameters that collectives give, and what is made of parameters alone, in the
    forward and the backward: a cast, a dequantized one.
    activations: all else that the forward and the backward make.
    other: the batch, counters, what an update makes on its way.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel or collective.

    name: of the ATen op, "addmm", or of the collective, "all_gather". reads, gives: names of
    values. A view is an op that computes nothing. detail: of a collective, the axis and the
    parameters that it is about; of a view, which part of what it reads it is; of another op, the
    module in whose forward it is, or whose backward.
    """

    name: str
    phase: Phase
    reads: tuple[str, ...]
    gives: tuple[Value, ...]
    detail: str = ""
    wire_bytes: int = 0  # that this rank sends
    flops: int = 0
    kind: Literal["compute", "pointwise", "view", "collective"] = "compute"
    alive: Alive = Alive()  # all tensors, while it runs

    @property
    def is_collective(self) -> bool:
        """Whether ranks do it together."""
        return self.kind == "collective"

    @property
    def live_bytes(self) -> int:
        """Bytes of all tensors that are alive while it runs."""
        return self.alive.total


def short(dtype: torch.dtype) -> str:
    """Return "f32" for torch.float32: as in a jaxpr."""
    name = str(dtype).removeprefix("torch.")
    for long, brief in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return brief + name[len(long) :]
    return name


def ops_of(program: RecordedStep) -> tuple[tuple[Value, ...], tuple[Op, ...], tuple[Value, ...]]:
    """Return the inputs, the ops and the outputs of a program."""
    nodes = list(program.graph.graph.nodes)
    names = names_of(program)
    phases = _phases(nodes, program.inputs)
    about = events_of(program)
    flats = flats_of(program, about)
    of_parameters = {node for node, some in about.items() if any(one.paths for one in some)}
    alive = _alive_at(nodes, _kinds_of(program, phases, of_parameters))

    def value_of(x: Tensor, name: str, path: str = "") -> Value:
        flat = flats.get(x.untyped_storage()._cdata)
        parameter = flat.parameter(x) if flat is not None and flat.is_whole else ""
        holds = () if flat is None or parameter else flat.paths
        shape = tuple(x.shape)
        return Value(
            name=name, shape=shape, dtype=x.dtype, path=path, parameter=parameter, holds=holds
        )

    def values(node: fx.Node) -> Iterator[Value]:
        """Yield the results of a node: one or several values; unread ones are called "_"."""
        val = node.meta.get("val")
        read = {user.args[1]: names[user] for user in node.users if is_item(user)}
        made = enumerate(val) if isinstance(val, list | tuple) else [(None, val)]
        for i, x in made:
            if isinstance(x, Tensor):
                yield value_of(x, names[node] if i is None else read.get(i, "_"))

    def of_ends(some: Sequence[fx.Node], paths: Sequence[str]) -> tuple[Value, ...]:
        pairs = zip(some, paths, strict=True)
        return tuple(value_of(node.meta["val"], names[node], path) for node, path in pairs)

    ops = list[Op]()
    for node, now in zip(filter(is_op, nodes), alive, strict=True):
        target, events = cast("Any", node.target), about.get(node, ())
        args, kwargs, out = tree_map(
            lambda x: x.meta.get("val") if isinstance(x, fx.Node) else x,
            (node.args, node.kwargs, node),
        )
        kind, name, detail = "compute", target._schema.name.split("::")[1], in_module(node)
        if events:
            kind, name, detail = "collective", events[0].op, _about_what(node, events)
        elif target.is_view or target in SAME:
            kind, detail = "view", _index_of_view(node)
        elif torch.Tag.pointwise in target.tags or target.overloadpacket in _ELEMENTWISE:
            kind = "pointwise"
        ops.append(
            Op(
                name=str(node.args[0]) if target is UPDATE else name,
                phase=phases[node],
                reads=tuple(names[one] for one in node.all_input_nodes),
                gives=tuple(values(node)),
                detail=detail,
                wire_bytes=sum(event.wire_bytes for event in events),
                flops=flops_of(target, args, kwargs, out),
                kind=kind,
                alive=now,
            )
        )
    outputs = of_ends(cast("Any", nodes[-1].args[0]), program.outputs)
    return of_ends(inputs_of(nodes), program.inputs), tuple(ops), outputs


def names_of(program: RecordedStep) -> dict[fx.Node, str]:
    """Name each value: a, b, ..., z, aa, ...; not as a parameter, which has its path for a name."""
    taken = {leaf.path for state in program.states for leaf in state.setup.layout.leaves}
    words = (itertools.product(string.ascii_lowercase, repeat=n) for n in itertools.count(1))
    letters = map("".join, itertools.chain.from_iterable(words))
    free = (name for name in letters if name not in taken)

    def has_no_name(node: fx.Node) -> bool:
        return node.op == "output" or (any(map(is_item, node.users)) and not is_item(node))

    return {node: "" if has_no_name(node) else next(free) for node in program.graph.graph.nodes}


def _phases(nodes: Sequence[fx.Node], paths: Sequence[str]) -> dict[fx.Node, Phase]:
    """Return the phase of each node.

    Up to the last op that autograd runs, its ops and their readers are backward, the others
    forward. After it, the update begins at the first read of the state.
    """
    marked = list(map(ran_by_autograd, nodes))
    last = max((i for i, inside in enumerate(marked) if inside), default=-1)
    of_gradient, inputs = set[fx.Node](), zip(inputs_of(nodes), paths, strict=True)
    of_state = {node for node, path in inputs if path.startswith("state")}
    phases: dict[fx.Node, Phase] = {}
    updates = False
    for i, node in enumerate(nodes):
        if marked[i] or any(one in of_gradient for one in node.all_input_nodes):
            of_gradient.add(node)
        updates = updates or (i > last and any(one in of_state for one in node.all_input_nodes))
        before = i <= last and node not in of_gradient
        phases[node] = "forward" if before else "update" if updates else "backward"
    return phases


def events_of(program: RecordedStep) -> dict[fx.Node, list[CollectiveEvent]]:
    """Return the events of each collective, one for each buffer."""
    events = deque(event for event in program.log.of(program.rank) if event.op != "agree")
    nodes = filter(is_collective, program.graph.graph.nodes)
    return {node: [events.popleft() for _ in node.args[0]] for node in nodes}


_ELEMENTWISE = tuple(
    getattr(torch.ops.aten, name)
    for name in ("_to_copy", "clone", "copy", "empty_like", "full_like", "ones_like", "zeros_like")
)
"""Ops that a compiler puts into one kernel with pointwise ones, and that torch does not tag."""


def _about_what(node: fx.Node, about: Sequence[CollectiveEvent]) -> str:
    if node.target is torch.ops.fzero.ppermute.default:
        *_, sources, destinations = node.args
        pairs: Any = zip(sources, destinations, strict=True)  # type: ignore
        return f"{about[0].axis} {' '.join(f'{s}>{d}' for s, d in pairs)}".rstrip()
    paths = ", ".join(path for event in about for path in event.paths)
    return f"{about[0].axis}: {paths}" if paths else about[0].axis


def _index_of_view(node: fx.Node) -> str:
    """Return a view as an index of its input, such as "[:, 2]"; "" for all of it.

    Several views, of a split, are told apart by their numbers.
    """
    args: Any = node.args
    if node.target is torch.ops.aten.select.int:
        return _index(args[1], str(args[2]), args[0])
    if node.target is torch.ops.aten.slice.Tensor:
        size, given = node.meta["val"].numel(), args[0].meta["val"].numel()
        start, stop = (args[2] if len(args) > 2 else 0), (args[3] if len(args) > 3 else None)
        last = "" if stop is None or stop >= 2**62 else stop
        return "" if size == given else _index(args[1], f"{start or 0}:{last}", args[0])
    if node.target is torch.ops.aten.diagonal.default:
        return ".diagonal"
    return ""


def _index(dim: int, what: str, of: fx.Node) -> str:
    ndim = of.meta["val"].ndim
    return f"[{':, ' * (dim % ndim)}{what}]"


# Which values are parameters, or parts of them.

_FLAT = re.compile(r"^(state.*)\.params\.flats\[(\d+)\]$")


class Flat(NamedTuple):
    """The flat buffer of a group, full or a shard."""

    layout: Layout
    index: int
    start: int  # of it in its storage, in elements
    is_whole: bool
    part: Part  # which one of it this rank updates

    @property
    def paths(self) -> tuple[str, ...]:
        """The parameters of the group."""
        return tuple(self.layout.leaves[i].path for i in self.layout.groups[self.index].leaves)

    def parameter(self, x: Tensor) -> str:
        """Return the path of the parameter that has all elements of a view and no other ones."""
        group = self.layout.groups[self.index]
        begin = int(x.storage_offset()) - self.start
        for leaf, offset in zip(group.leaves, group.offsets, strict=True):
            if begin == offset and x.numel() == self.layout.leaves[leaf].numel > 0:
                return self.layout.leaves[leaf].path
        return ""

    def leaf_of(self, x: Tensor) -> tuple[str, int] | None:
        """Return the parameter that a view is in, and where it starts there, in bytes."""
        group = self.layout.groups[self.index]
        begin = self._begin(x)
        reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
        end = begin + reach * x.itemsize if x.numel() else begin
        for leaf, offset in zip(group.leaves, group.offsets, strict=True):
            first, size = offset * group.dtype.itemsize, group.dtype.itemsize
            if first <= begin and end <= first + self.layout.leaves[leaf].numel * size:
                return self.layout.leaves[leaf].path, begin - first
        return None

    def is_own_shard(self, x: Tensor) -> bool:
        """Whether a view is the part of the flat that this rank updates."""
        numel = self.layout.full_numel(self.index) // self.part.count
        begin = self.part.index * numel * self.layout.groups[self.index].dtype.itemsize
        return x.ndim == 1 and x.numel() == numel and self._begin(x) == begin

    def _begin(self, x: Tensor) -> int:
        size = self.layout.groups[self.index].dtype.itemsize
        return int(x.storage_offset()) * x.itemsize - self.start * size


def flats_of(
    program: RecordedStep, events: Mapping[fx.Node, Sequence[CollectiveEvent]]
) -> dict[int, Flat]:
    """Return the flat buffers of parameters, of the state and gathered, by storage key.

    events: of each collective, one for each buffer.
    """
    setups = program.setups
    found: dict[int, Flat] = {}

    def note(x: Tensor, setup: Setup, index: int, *, is_whole: bool) -> None:
        if x.numel():
            part = setup.part(setup.optimizer_state, program.rank)
            flat = Flat(setup.layout, index, int(x.storage_offset()), is_whole, part)
            found.setdefault(x.untyped_storage()._cdata, flat)

    for node, path in zip(inputs_of(list(program.graph.graph.nodes)), program.inputs, strict=True):
        if match := _FLAT.match(path):
            setup, index = setups[match[1]], int(match[2])
            whole = node.meta["val"].numel() == setup.layout.full_numel(index)
            note(node.meta["val"], setup, index, is_whole=whole)
    for node, about in events.items():
        if node.target is torch.ops.fzero.all_gather.default:
            for x, event in zip(node.meta["val"], about, strict=True):
                for one in setups.values():
                    for index in range(len(one.layout.groups)):
                        has_all = x.numel() == one.layout.full_numel(index)
                        if has_all and one.layout.paths([index]) == [tuple(event.paths)]:
                            note(x, one, index, is_whole=True)
    return found


def is_params(path: str) -> bool:
    """Whether the path of an input is that of a flat buffer of parameters."""
    return _FLAT.match(path) is not None


# Bytes alive. Storages are counted, each from the op that creates it to its last reader.

_KINDS = tuple(field.name for field in fields(Alive))
_OF_FIELD = {"params": "parameters", "optimizer": "optimizer"}
_OF_FIELD |= {"gradients": "gradients", "window": "gradients"}

_PUT_TOGETHER = (torch.ops.aten.cat, torch.ops.aten.constant_pad_nd, torch.ops.aten._to_copy)
"""Ops, beside pointwise ones, through which the pieces of a gradient become the gradient."""


def _alive_at(nodes: Sequence[fx.Node], kinds: Mapping[int, str]) -> list[Alive]:
    """Return the live bytes while each op runs. Inputs and outputs live to the end.

    `kinds` has the kind of each storage, by its key.
    """
    order = {node: i for i, node in enumerate(nodes)}
    size: dict[int, int] = {}
    born: dict[int, int] = {}
    dies: dict[int, int] = defaultdict(int)
    for node in nodes:
        for key, nbytes in _storages(node):
            size[key] = nbytes
            born[key] = min(born.get(key, order[node]), order[node])
            readers = [order[user] for user in node.users]
            end = len(nodes) if node.op in ("placeholder", "get_attr") else order[node]
            dies[key] = max(dies[key], end, *readers, 0)
    changes = {kind: [0] * (len(nodes) + 2) for kind in _KINDS}
    for key, nbytes in size.items():
        change = changes[kinds[key]]
        change[0 if nodes[born[key]].op == "placeholder" else born[key]] += nbytes
        change[min(dies[key], len(nodes)) + 1] -= nbytes
    alive = {kind: list(itertools.accumulate(change)) for kind, change in changes.items()}
    return [
        Alive(**{kind: some[order[node]] for kind, some in alive.items()})
        for node in nodes
        if is_op(node)
    ]


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    """Return (key, bytes) of each storage that the results of a node are in."""
    val = node.meta.get("val")
    tensors = val if isinstance(val, list | tuple) else [val]
    found = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
    return [(storage._cdata, storage.nbytes()) for storage in found]


def _kinds_of(
    program: RecordedStep, phases: Mapping[fx.Node, Phase], of_parameters: AbstractSet[fx.Node]
) -> dict[int, str]:
    """Return the kind of each storage. `of_parameters`: collectives that are about parameters."""
    nodes, kinds = list(program.graph.graph.nodes), dict[int, str]()
    held = {node: [key for key, _ in _storages(node)] for node in nodes}
    maker: dict[int, fx.Node] = {}
    for node in reversed(nodes):
        maker.update((key, node) for key in held[node])
    gather = torch.ops.fzero.all_gather.default
    reduces = {node for node in of_parameters if node.target is not gather}

    def of_path(path: str) -> str:
        found = FIELD.match(path)
        if found is None:
            return "other"
        return "gathered" if found[3] else _OF_FIELD.get(found[2], "other")

    def put(keys: Iterable[int], kind: str) -> None:
        for key in keys:
            kinds.setdefault(key, kind)

    for node, path in zip(inputs_of(nodes), program.inputs, strict=True):
        kinds |= dict.fromkeys(held[node], of_path(path))
    for node, path in zip(nodes[-1].args[0], program.outputs, strict=True):
        if (kind := of_path(path)) != "other":
            put(held[node], kind)

    # Gradients: inputs of reductions and of the update, and their parts.
    gradients = set[int]()
    for node in reversed(nodes):
        mine = {key for key in held[node] if phases[maker[key]] == "backward"}
        if any(is_op(x) and (x in reduces or phases[x] == "update") for x in node.users):
            gradients |= mine
        if mine & gradients and _puts_together(node):
            read = (key for one in node.all_input_nodes for key in held[one])
            gradients.update(key for key in read if phases[maker[key]] == "backward")
    gathered = of_parameters - reduces
    put((key for key in gradients if maker[key] not in gathered), "gradients")

    for node in nodes:
        of = {kinds[key] for one in node.all_input_nodes for key in held[one]}
        kind = "activations"
        if not is_op(node) or phases[node] == "update":
            kind = "other"
        elif node in of_parameters or (of and of <= {"parameters", "gathered"}):
            kind = "gathered"
        put(held[node], kind)
    return kinds


def _puts_together(node: fx.Node) -> bool:
    target: Any = node.target
    if not is_op(node) or not isinstance(target, torch._ops.OpOverload):
        return False
    pointwise = torch.Tag.pointwise in target.tags
    return target.is_view or pointwise or target.overloadpacket in _PUT_TOGETHER
