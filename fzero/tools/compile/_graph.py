"""The graph of one kind of call: recorded, compared with the step at first, then run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from fzero.collectives import disagreement, performer_of, told_everywhere
from fzero.errors import FzeroError
from fzero.ranks.mesh import Axis
from fzero.state import NAMESPACE, TrainState
from fzero.tools.compile._check import compare
from fzero.tools.compile._key import shared_memory
from fzero.tools.compile._random import Randomness
from fzero.tools.compile._run import Backend, Compiled, axis_of_states, compiled, recorded
from fzero.tools.compile._surroundings import FunctionsRun, Surroundings
from fzero.tools.compile._writes import NoGraphError
from fzero.tools.trace.found import AsFound
from fzero.transforms.models import flatten_states

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
