"""`compile`: a step that runs its compiled graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.collectives import disagreement, performer_of, told_everywhere
from fzero.context.current_rank import current_ranks, is_abstract
from fzero.context.modes import in_transform, is_recorded, wants_graph
from fzero.errors import FzeroError, LayoutError, PhaseError, explain
from fzero.errors.check import is_count
from fzero.machine.packing import digest
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, TrainState
from fzero.tools.compile._run import (
    COMPILERS,
    EARLY_BYTES,
    MERGED_BYTES,
    Backend,
    Compiled,
    axis_of_states,
    compiled,
    recorded,
    step_donates,
)
from fzero.tools.compile.key import FunctionsRun, Surroundings, key_of, shared_memory
from fzero.tools.compile.passes import NoGraphError, Randomness
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.program import unfused_recurrence
from fzero.transforms.models import flatten_states
from fzero.transforms.pipeline import P, R, Step, require_order


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
    _check(fn, backend, max_graphs=max_graphs, **sizes)
    graphs: list[tuple[Any, Graph]] = []
    given_up: list[str] = []
    donate = step_donates(fn)

    def around(inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        arguments: Any = (*args, kwargs)
        leaves = optree.tree_leaves(arguments, namespace=NAMESPACE)
        if given_up or is_abstract() or in_transform() or is_recorded(()) or wants_graph(leaves):
            return inner(*args, **kwargs)
        _require_real_ranks()
        key, tensors = key_of(arguments), tensors_of(arguments)
        found = _known(graphs, key, tensors)
        graph = found[1] if found is not None else None
        is_new = graph is None or graph.run is None
        if graph is None and len(graphs) >= max_graphs:
            warnings.warn(_MANY.format(max_graphs), UserWarning, stacklevel=4)
            graph = Graph(axis=axis_of_states(arguments))
        elif graph is None or graph.run is None:
            again = graph is not None
            graph = graph_of(inner, arguments, backend, sizes, donate=donate, again=again)
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


def _known(
    graphs: Sequence[tuple[Any, Graph]], key: Any, tensors: Sequence[Tensor]
) -> tuple[Any, Graph] | None:
    """Return the graph of this key, if all that it reads is as it was."""
    alike = (one for one in graphs if one[0] == key)
    holds = (one for one in alike if (r := one[1].reads) is None or r.are_as_before(tensors))
    return next(holds, None)


def _require_real_ranks() -> None:
    if current_ranks() is not None:
        raise PhaseError(
            "a compiled step on virtual ranks.",
            cause="fzero.simulate around fzero.compile.",
            fix="simulate the step itself; compile it for one process or for torchrun.",
        )


def _check(fn: Callable[..., Any], backend: str, **numbers: int) -> None:
    right = "fzero.compile(step), once"
    require_order("compile", fn, never_around=("compile", "simulate"), right=right)
    bad = [f"{name}={number!r}" for name, number in numbers.items() if not is_count(number, 0)]
    bad += [] if backend in COMPILERS else [f"backend={backend!r}"]
    if bad:
        raise LayoutError(
            f"compile: {', '.join(bad)}.",
            cause="a number that is no count, or another compiler.",
            fix=f"give numbers of at least 0, and one of {sorted(COMPILERS)}.",
        )


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

_CALL = "a call of a compiled step"
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
        heard = performer.call_with(_CALL, lambda: said) if performer else ((*said,),)
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
        given = _copied(arguments) if self.plain.donate else arguments
        seen, returned = compare(self.plain, given, step, self.random, self.paths)
        said_of_it = performer.call("a compared step", int(bool(seen))) if performer else ()
        return seen or "another rank warns of this call" * (1 in said_of_it), returned


def graph_of(
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
    axis = axis_of_states(arguments)
    lacks = "another argument has memory of the donated state" * (donate and _shares(arguments))
    if lacks := lacks or _lacking(flatten_states("compile", arguments[0])[0]):
        return Graph(axis=axis, lacks=lacks)
    with (
        told_everywhere(axis, what="a compiled step"),
        AsFound("compile", step, arguments) as found,
    ):
        try:
            program, drawn = recorded(step, arguments, axis, found, ran := FunctionsRun())
            if found.left:
                lacks = f"each call changes {found.left.lstrip('.')}" * again
                return Graph(axis=axis, changes=found.left, lacks=lacks)
            reads = Surroundings(ran, [step, *_objects(arguments)], tensors_of(arguments))
            if reads.lacks:
                return Graph(axis=axis, lacks=reads.lacks)
            plain = compiled(program, drawn, axis, donate=donate)
            run = compiled(program, drawn, axis, donate=donate, backend=backend, sizes=sizes)
        except FzeroError:
            raise
        except NoGraphError as error:
            return Graph(axis=axis, lacks=str(error))
        except Exception as error:
            first = str(error).partition("\n")[0]
            return Graph(axis=axis, lacks=f"recording raises {type(error).__name__}: {first}")
    return Graph(axis=axis, run=run, plain=plain, random=drawn, paths=program.outputs, reads=reads)


def _lacking(states: Sequence[TrainState]) -> str:
    """Return what of some states no graph has; "" for nothing."""
    kept = [one for state in states for one in _precisions(state.setup.optimizer)]
    if any(state.setup.logical is not None for state in states):
        return "logical ranks run one after another, which no graph does"
    if any(state.outer is not None for state in states):
        return "replicas of local updates meet in some calls only, and a graph is for all of them"
    if any(one.encoding is not None or one.stochastic_rounding for one in kept):
        return "the optimizer keeps encoded moments, or rounds at random, which no graph does"
    return ""


def _precisions(rule: Any) -> list[Any]:
    own = [one] if (one := getattr(rule, "precision", None)) is not None else []  # ours have one
    return [*own, *(x for _, part in getattr(rule, "rules", ()) for x in _precisions(part))]


def _shares(arguments: Any) -> bool:
    """Return whether a buffer of the states overlaps with another argument."""
    count = sum(isinstance(x, Tensor) for x in _leaves(arguments[0]))
    tensors = tensors_of(arguments)
    return any(i < count for group in shared_memory(tensors) for i, *_ in group)


def _objects(arguments: Any) -> list[Any]:
    """Return the arguments that are no tensors, and what their states were made with."""
    setups = [state.setup for state in flatten_states("compile", arguments[0])[0]]
    made = [one for setup in setups for one in (setup.optimizer, *setup.transforms)]
    return [*made, *(x for x in _leaves(arguments) if not isinstance(x, Tensor))]


def tensors_of(arguments: Any) -> list[Tensor]:
    """Return the tensors among the arguments."""
    return [x for x in _leaves(arguments) if isinstance(x, Tensor)]


def _copied(arguments: Any) -> Any:
    """Return the arguments with a state of its own, which may be used up."""
    state = optree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) else x, arguments[0], namespace=NAMESPACE
    )
    return (state, *arguments[1:])


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, namespace=NAMESPACE)


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
    found, made = [one for one, _ in drawn.begins], drawn.made
    before, unused = _states(found), _states(made)
    known, seen = list[Any](), ""
    rest = iter(plain.actions)
    try:
        known = _facts(replace(plain, actions=rest)(arguments))
    except Exception as error:
        seen = f"the graph raises {type(error).__name__}: {error}"
        for action in rest:  # on this rank alone, perhaps: the others wait for it
            action.take_part()
    after = _states(found)
    for one, state in zip((*found, *made), (*before, *unused), strict=True):
        one.set_state(state)
    with unfused_recurrence():
        returned = step()
    names = iter(paths)
    for a, b in zip(known, _facts(returned), strict=False):
        name = next(names, "") if isinstance(a, _Digest) else "value"
        seen = seen or ("" if a == b else f"its graph returns another {name}")
    if not _alike(after, _states(found)):
        seen = seen or "its graph leaves another random state"
    if not _alike(unused, _states(made)):
        seen = seen or "it draws from a torch.Generator that it finds where nobody looks"
    return seen, returned


class _Digest(tuple[Any, ...]):
    """What a tensor is told apart by: dtype, shape, and a digest of its bits."""


def _facts(tree: Any) -> list[Any]:
    leaves, treespec = optree.tree_flatten(tree, namespace=NAMESPACE)
    return [*map(_fact, leaves), treespec]


def _fact(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _Digest((x.dtype, x.shape, x.device, x.requires_grad, digest(x)))
    return repr(x) if isinstance(x, float | complex) else x


def _states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    return [one.get_state() for one in generators]


def _alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, some, others))
