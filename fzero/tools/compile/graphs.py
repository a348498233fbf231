"""`compile`: a step that runs its compiled graph."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import optree
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from fzero.collectives import disagreement, performer_of, told_everywhere
from fzero.context.current_rank import current_ranks, is_abstract
from fzero.context.modes import in_transform, is_recorded, wants_graph
from fzero.errors import FzeroError, LayoutError, PhaseError, explain
from fzero.errors.check import is_count
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, TrainState
from fzero.tools.compile import passes
from fzero.tools.compile.key import FunctionsRun, Surroundings, key_of, shared_memory
from fzero.tools.trace.draws import Randomness, RecordedDraws, draws
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.program import (
    RecordedStep,
    inputs_of,
    is_collective,
    on_axes,
    record_step,
    unfused_recurrence,
)
from fzero.tools.trees import bits_of, copied, tensors_in
from fzero.transforms.donation import take_over, undo_take_over
from fzero.transforms.models import flatten_states
from fzero.transforms.pipeline import P, R, Step, require_order

Backend = Literal["inductor", "eager"]
MERGED_BYTES = 2**20
EARLY_BYTES = 8 * 2**20


def compile(
    fn: Callable[P, R],
    /,
    *,
    backend: Backend = "inductor",
    max_graphs: int = 8,
    bucket_bytes: int = MERGED_BYTES,
    gather_bytes: int = EARLY_BYTES,
) -> Step[P, R]:
    """Return a step that runs the graph of `fn` (see `fzero.trace`): the same numbers, less Python.

    The first call with arguments of some shapes records the graph, applies the passes of
    `fzero.compile`, and compiles what lies between two collectives as one. A collective is started
    where the step starts it, and waited for where its result is read. Other shapes, another
    schedule of stage 3, options of the step that changed, another mode of a functionalized module
    (`module.eval()`), and another value of what functions of the step read (globals, cells,
    attributes, entries, torch's switches) are another graph; so are arguments of which others are
    one tensor, or overlap in memory.

    Random numbers are those of the step, also where it recomputes, forks or seeds generators. The
    first call of each graph also runs the step itself, from the same random state, and compares
    what both return, bit for bit, and the random state afterwards: the graph before a compiler
    rounds. Where they differ, and where a step has no graph (it reads a list of 10,000 numbers, or
    writes into a tensor that it closes over; logical ranks, local updates, encoded moments), the
    step itself runs from then on, on all ranks, with a warning that says why.

    With `shard(..., donate=True)` the new state is written into the memory of the old one, which is
    used up. The update is the kernel that the step itself runs, the learning rate of a schedule is
    asked for in each call. Kernels of a compiler may round otherwise than torch's: on exact inputs
    the bits are the same.

    Args:
        fn: (state, *args) -> (state, aux), sharded; outermost but for nothing.
        backend: "inductor" compiles; "eager" runs the ops of the graph one by one.
        max_graphs: how many graphs are kept. Arguments that would need one more run `fn` itself,
            with a warning.
        bucket_bytes: up to which size of full buffers small collectives in a row become one.
        gather_bytes: up to which size stage 3 gathers parameters before they are read.

    Returns:
        A step that is called as `fn` is, with its `init`. A collective.

    Raises:
        LayoutError: for bad options; for an optimizer whose options are read from a torch.optim
            instance, which a graph would hold fast; for a loss that writes into its arguments.
        PhaseError: in a call, on virtual ranks, and if the step reads values (`.item()`).
        MismatchError: in a call, on every rank, if the ranks run other graphs.

    Source: Reed et al., "torch.fx", arXiv 2112.08429; Ansel et al., "PyTorch 2", ASPLOS 2024.

    Example:
        >>> import torch, fzero
        >>> from fzero.compile import compile
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = compile(fzero.shard(step_fn, stage=2), backend="eager")
        >>> state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.5))
        >>> state, loss = step(state, torch.tensor([1.0, 2.0]))
        >>> loss, fzero.full_params(state)["w"]
        (tensor(3.), tensor([0.5000, 0.0000]))
    """
    sizes = {"bucket_bytes": bucket_bytes, "gather_bytes": gather_bytes}
    right = "fzero.compile(step), once"
    require_order("compile", fn, never_around=("compile", "simulate"), right=right)
    counts = {"max_graphs": max_graphs, **sizes}
    bad = [f"{name}={number!r}" for name, number in counts.items() if not is_count(number, 0)]
    bad += [] if backend in COMPILERS else [f"backend={backend!r}"]
    if bad:
        raise LayoutError(
            f"compile: {', '.join(bad)}.",
            cause="a number that is no count, or another compiler.",
            fix=f"give numbers of at least 0, and one of {sorted(COMPILERS)}.",
        )
    graphs: list[tuple[Any, Graph]] = []
    given_up: list[str] = []
    donate = _donates(fn)

    def around(inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        arguments: Any = (*args, kwargs)
        leaves = optree.tree_leaves(arguments, namespace=NAMESPACE)
        if given_up or is_abstract() or in_transform() or is_recorded(()) or wants_graph(leaves):
            return inner(*args, **kwargs)
        if current_ranks() is not None:
            raise PhaseError(
                "a compiled step on virtual ranks.",
                cause="fzero.simulate around fzero.compile.",
                fix="simulate the step itself; compile it for one process or for torchrun.",
            )
        key, tensors = key_of(arguments), tensors_in(arguments)
        alike = (one for one in graphs if one[0] == key)
        holds = (x for x in alike if (r := x[1].reads) is None or r.are_as_before(tensors))
        found = next(holds, (key, None))
        graph = found[1]
        is_new = graph is None or graph.run is None
        if graph is None and len(graphs) >= max_graphs:
            warnings.warn(_MANY.format(max_graphs), UserWarning, stacklevel=4)
            graph = Graph(axis=_axis_of(arguments))
        elif graph is None or graph.run is None:
            again = graph is not None
            graph = _graph_of(inner, arguments, backend, sizes, donate=donate, again=again)
        step = functools.partial(inner, *args, **kwargs)
        seen, returned = graph(step, arguments, is_new=is_new)
        if seen:
            given_up.append(seen)
            warnings.warn(_OTHERWISE.format(seen), UserWarning, stacklevel=4)
        elif is_new and (graph.changes or seen == ""):
            graphs[:] = [*(one for one in graphs if one is not found), (key, graph)]
        return returned

    options = {} if backend == "inductor" else {"backend": backend}
    return Step("compile", fn, around, options=options)


def _donates(fn: Any) -> bool:
    """Return whether a step donates its state, as in `shard(donate=True)`."""
    if not isinstance(fn, Step):
        return False
    return fn.options.get("donate", False) if fn.name == "shard" else _donates(fn.inner)


_MANY = explain(
    "compile: there are {0} graphs, and these arguments need another one: the step itself runs.",
    cause="batches of many shapes; an argument, or a variable that a function of the step reads, "
    "that is another number or tensor in each call.",
    fix="pad batches to few shapes, pass numbers as tensors, write new values into a tensor that "
    "is held (x.copy_(new)), or raise max_graphs.",
)


_OTHERWISE = explain(
    "compile: the step itself runs from now on: {0}.",
    cause="what a graph does not have: numbers of Python's random or a clock, large tables that "
    "Python reads, tensors that the loss writes, generators that it hides; or an op that gives "
    "other bits in each run.",
    fix="pass what changes as a tensor, draw random numbers by torch, and return what is to be "
    "kept; or leave fzero.compile out.",
)


# The graph of one kind of call: recorded, compared with the step at first, then run.

_FIRST, _CHANGES, _LACKS = 1, 2, 3
"""What a rank says of a call: that its graph is new, or none yet, or that it never has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """What runs in the place of a step; without `run` nothing does, for what it `lacks`.

    reads: what it holds as long as; None for all calls.
    plain: what the first call runs: as recorded, for a compiler and sums of merged buffers round
    otherwise. It runs for good if the ranks read other parts of what collectives give, and so would
    merge and move others.
    """

    axis: Axis
    run: Compiled | None = None
    plain: Compiled | None = None
    random: Randomness | None = None
    paths: tuple[str, ...] = ()
    reads: Surroundings | None = None
    lacks: str = ""
    changes: str = ""  # what the first call leaves for later ones, which are recorded anew

    def __call__(
        self, step: Callable[[], Any], arguments: Any, *, is_new: bool
    ) -> tuple[str | None, Any]:
        """Run the graph, or the step, or both to compare them: what all ranks do.

        Returns:
            Why the step is to run itself from now on, "" for no reason, None if it ran itself in
            this call; and what it returns.

        Raises `MismatchError` on every rank if their graphs make other collectives.
        """
        performer = performer_of(self.axis)
        said = [0, 0, _LACKS if self.lacks else _CHANGES]
        if self.run is not None and self.plain is not None:
            said = [self.run.number, self.plain.number, _FIRST * is_new]
        call = "a call of a compiled step"
        heard = performer.call_with(call, lambda: said) if performer else ((*said,),)
        runs, plains, statuses = map(set, zip(*heard, strict=True))
        if _LACKS in statuses:
            return self.lacks or "another rank has no graph of it", step()
        if _CHANGES in statuses or self.plain is None or self.random is None or self.run is None:
            return None, step()
        if performer is not None and len(plains) > 1:
            everyone = performer.tell(self.plain.collectives)
            raise disagreement(everyone, what="the collectives of a compiled step")
        if statuses == {0}:
            return "", (self.run if len(runs) == 1 else self.plain)(arguments)
        # The state is the step's, and may be used up.
        given = (copied(arguments[0]), *arguments[1:]) if self.plain.donate else arguments
        seen, returned = compare(self.plain, given, step, self.random, self.paths)
        said_of_it = performer.call("a compared step", int(bool(seen))) if performer else ()
        return seen or "another rank warns of this call" * (1 in said_of_it), returned


def _graph_of(
    step: Callable[..., Any],
    arguments: Any,
    backend: Backend,
    sizes: dict[str, int],
    *,
    donate: bool,
    again: bool,
) -> Graph:
    """Return the graph of a step for arguments like these, of which the last has the keywords.

    again: the step was recorded for them before, and changed what it holds.
    """
    axis, states = _axis_of(arguments), flatten_states("compile", arguments[0])[0]
    tensors, held = tensors_in(arguments), len(tensors_in(arguments[0]))
    shares = donate and any(i < held for group in shared_memory(tensors) for i, *_ in group)
    if lacks := "another argument has memory of the donated state" * shares or _lacking(states):
        return Graph(axis=axis, lacks=lacks)
    ran, drawn = FunctionsRun(), list[Randomness]()
    with (
        told_everywhere(axis, what="a compiled step"),
        AsFound("compile", step, arguments) as found,
    ):

        def with_keywords(*given: Any) -> Any:
            with RecordedDraws(found.generators()) as noted, ran:
                returned = step(*given[:-1], **given[-1])
            drawn[:] = [noted.randomness]
            return returned

        try:
            program = record_step(with_keywords, arguments, axis, axis.rank, found)
            program = replace(program, graph=passes.without_writes(program.graph))
            (random,) = drawn
            nodes = filter(draws, program.graph.graph.nodes)
            for node, draw in zip(nodes, random.draws, strict=True):
                node.meta[passes.DRAW] = draw
            if found.left:
                lacks = f"each call changes {found.left.lstrip('.')}" * again
                return Graph(axis=axis, changes=found.left, lacks=lacks)
            made_with = [x for one in states for x in (one.setup.optimizer, *one.setup.transforms)]
            leaves = optree.tree_leaves(arguments, namespace=NAMESPACE)
            others = [x for x in leaves if not isinstance(x, Tensor)]
            reads = Surroundings(ran, [step, *made_with, *others], tensors)
            if reads.lacks:
                return Graph(axis=axis, lacks=reads.lacks)
            plain = _compiled(program, random, axis, "eager", donate=donate)
            run = _compiled(program, random, axis, backend, sizes, donate=donate)
        except FzeroError:
            raise
        except passes.NoGraphError as error:
            return Graph(axis=axis, lacks=str(error))
        except Exception as error:
            first = str(error).partition("\n")[0]
            return Graph(axis=axis, lacks=f"recording raises {type(error).__name__}: {first}")
    paths = program.outputs
    return Graph(axis=axis, run=run, plain=plain, random=random, paths=paths, reads=reads)


def _axis_of(arguments: Any) -> Axis:
    """Return the common axis of the states, after checking that a graph can hold their optimizers.

    Raises `LayoutError` for several axes, and for a torch.optim instance.
    """
    states: Sequence[TrainState] = flatten_states("compile", arguments[0])[0]
    axes = {state.setup.axis for state in states}
    if len(axes) > 1:
        raise LayoutError(
            f"compile: the states are on {len(axes)} meshes.",
            cause="models that are sharded over other groups of ranks.",
            fix="put them on one mesh, or run the step itself.",
        )
    for state in states:
        groups = state.setup.optimizer.param_groups(state.setup.layout.leaves, 0)
        if groups.instance is not None:
            raise LayoutError(
                "compile: the options of the optimizer are read from a "
                f"{type(groups.instance).__name__} at each update.",
                cause="fzero.optim.from_torch(instance): a scheduler would change them, and a "
                "graph would not see it.",
                fix="use a rule of fzero.optim, whose lr is a number or a schedule.",
            )
    return axes.pop()


def _lacking(states: Sequence[TrainState]) -> str:
    """Return what of some states no graph has; "" for nothing."""

    def precisions(rule: Any) -> list[Any]:
        own = getattr(rule, "precision", None)  # ours have one
        inner = [x for _, part in getattr(rule, "rules", ()) for x in precisions(part)]
        return inner if own is None else [own, *inner]

    kept = [one for state in states for one in precisions(state.setup.optimizer)]
    if any(state.setup.logical is not None for state in states):
        return "logical ranks run one after another, which no graph does"
    if any(state.outer is not None for state in states):
        return "replicas of local updates meet in some calls only, and a graph is for all of them"
    if any(one.encoding is not None or one.stochastic_rounding for one in kept):
        return "the optimizer keeps encoded moments, or rounds at random, which no graph does"
    return ""


# From a recorded step to a callable: passes, actions, inputs and outputs.


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled graph: a list of actions."""

    actions: Iterable[passes.Action]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    returns: Callable[[list[Tensor]], Any]  # the tensors that the graph gives -> the result
    held: Mapping[str, Tensor]  # tensors that the functions of the step read, by name
    collectives: tuple[str, ...]  # compared between ranks, which must make the same ones
    number: int  # what is compared of them in each call
    donate: bool

    def __call__(self, arguments: Any) -> Any:
        """Run the actions on the tensors of the arguments; return the result of the step."""
        given = arguments[0]
        taken = take_over(given) if self.donate else given
        given_to = zip(self.inputs, tensors_in((taken, *arguments[1:])), strict=True)
        env = {name: x.detach() for name, x in (*given_to, *self.held.items())}  # as they are now
        whole = True  # nothing was written into the old state
        try:
            with torch.no_grad():
                for action in self.actions:
                    whole = whole and not action.writes
                    action(env)
        except BaseException:
            if self.donate and whole:
                undo_take_over(given, taken)
            raise
        return self.returns([env[name] for name in self.outputs])


def _compiled(
    program: RecordedStep,
    randomness: Randomness,
    axis: Axis,
    backend: Backend,
    sizes: dict[str, int] | None = None,
    *,
    donate: bool,
) -> Compiled:
    """Return the callable that runs a recorded step on the ranks of an axis.

    sizes: of the passes that move and merge collectives, which are left out without them.
    """
    copy = fx.Graph()
    copy.output(copy.graph_copy(program.graph.graph, {}))
    if sizes is not None:
        passes.gather_early(copy, most_bytes=sizes["gather_bytes"])
        passes.wait_late(copy)
        passes.merge_collectives(copy, bucket_bytes=sizes["bucket_bytes"])
    passes.rematerialize(copy)
    copy.lint()
    graph = fx.GraphModule(program.graph, copy)
    if donate:  # the buffers of the new state go where those of the old one are
        where = {path: i for i, path in enumerate(program.inputs) if path.startswith("state")}
        ends = enumerate(program.outputs)
        passes.write_back(graph.graph, [(where[path], k) for k, path in ends if path in where])
    performer = performer_of(axis)
    over = axis if performer is None else performer.over(axis)
    axes = {name: over.along(name) for name in over.names}
    axes |= {one.name: one for one in (over.replicas, over.shards)}
    nodes = list(graph.graph.nodes)

    def line(node: fx.Node) -> str:
        values = [x.meta["val"] for x in node.all_input_nodes]
        return f"{node.target} {[(x.dtype, *x.shape) for x in values]} {node.args[1:]}"

    lines = tuple(map(line, filter(is_collective, nodes)))
    result = on_axes(program.returned, lambda _: axis)
    treespec = optree.tree_structure(result, namespace=NAMESPACE)

    def returns(tensors: list[Tensor]) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if x is None else x for x in program.others]
        return optree.tree_unflatten(treespec, filled)

    return Compiled(
        actions=passes.actions_of(graph, axes, COMPILERS[backend], randomness),
        inputs=tuple(node.name for node in inputs_of(nodes)),
        outputs=tuple(node.name for node in nodes[-1].args[0]),
        returns=returns,
        held=passes.held_in(graph),
        collectives=lines,
        number=zlib.crc32(repr(lines).encode()),
        donate=donate,
    )


def _by_inductor(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    made = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in examples
    ]
    # The modes are off, in which the compiler would see its tensors; dropout is that of torch.
    with torch.no_grad(), _disable_current_modes(), config.patch(fallback_random=True):
        run: Any = compile_fx(graph, made)
    return run


COMPILERS: dict[Backend, passes.Compiler] = {
    "inductor": _by_inductor,
    "eager": lambda graph, _: graph.forward,  # a call of the module would run all modules' hooks
}


# The first call of a graph: the step runs, too, and both are to give the same.
#
# Digests are compared, so that there is never a second new state. The step runs second: what a
# first call returns, and what it leaves behind, is the step's own.


def compare(
    plain: Compiled,
    arguments: Any,
    step: Callable[[], Any],
    drawn: Randomness,
    paths: Sequence[str],
) -> tuple[str, Any]:
    """Run a graph and then its step, from one random state.

    paths: of the tensors in what is returned. Where the graph raises, its collectives go on.

    Returns:
        What differs, "" if nothing does; and what the step returned.
    """

    def states(generators: Sequence[torch.Generator]) -> list[Tensor]:
        return [one.get_state() for one in generators]

    found, made = [one for one, _ in drawn.begins], drawn.made
    before, unused = states(found), states(made)
    known, seen = list[Any](), ""
    rest = iter(plain.actions)
    try:
        known = bits_of(replace(plain, actions=rest)(arguments))
    except Exception as error:
        seen = f"the graph raises {type(error).__name__}: {error}"
        for action in rest:  # on this rank alone, perhaps: the others wait for it
            action.take_part()
    after = states(found)
    for one, state in zip((*found, *made), (*before, *unused), strict=True):
        one.set_state(state)
    with unfused_recurrence():
        returned = step()
    names, leaves = iter(paths), optree.tree_leaves(returned, namespace=NAMESPACE)
    for x, a, b in zip((*leaves, None), known, bits_of(returned), strict=False):
        name = next(names, "") if isinstance(x, Tensor) else "value"
        seen = seen or ("" if a == b else f"its graph returns another {name}")
    if not all(map(torch.equal, after, states(found))):
        seen = seen or "its graph leaves another random state"
    if not all(map(torch.equal, unused, states(made))):
        seen = seen or "it draws from a torch.Generator that it finds where nobody looks"
    return seen, returned
