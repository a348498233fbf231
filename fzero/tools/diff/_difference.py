"""`Difference`, the result of `diff`, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

START, GATHER, MODULE, LOSS, GRADIENT = "start", "gather", "module", "loss", "gradient"
REDUCTION, NORM, CLIP, SLOT, UPDATE = "reduction", "norm", "clip", "optimizer state", "update"
COUNTER, SCALE, STATE, REPLICA = "counter", "loss scale", "state", "replica"

# In the order in which a step makes them: (what is compared, what else makes it differ).
OPERATIONS = {
    START: (
        "the parameters that a run starts from",
        "another seed, or another version of the model.",
    ),
    GATHER: (
        "the full values that a loss reads, and those that the ranks hold",
        "a shard in the place of another one, or values from before an update.",
    ),
    MODULE: (
        "what the modules of a forward are given and return, as losses or gradients differ",
        "in the forward of this module, or in what it reads: a weight that is transposed, another "
        "constant (the theta of rope, an eps), another precision of an op, other dropout masks.",
    ),
    LOSS: (
        "the loss, summed as its gradients are",
        "another model or loss; batches that are missing, counted twice or another rank's; a "
        "factor or a divisor (of micro-batches, of ranks) too much; other dropout masks.",
    ),
    GRADIENT: (
        "the gradient by a parameter, before it is reduced",
        "a detached or frozen parameter, a gradient that is changed or zeroed on its way, or a "
        "micro-batch whose loss was computed and not differentiated.",
    ),
    REDUCTION: (
        "the gradient by a parameter that an update begins with",
        "a reduction that is missing or was made twice, another divisor, a shard in the place of "
        "another one, gradients of an earlier step, or a state that was thrown away.",
    ),
    NORM: ("the norm of the gradients", "a norm of one rank's shard, or with the loss scale."),
    CLIP: (
        "the gradient that the optimizer is given",
        "another bound of the norm, clipping on one side only, or gradients that were clipped "
        "before they were reduced, or not divided by the loss scale.",
    ),
    SLOT: (
        "the state that the optimizer keeps for a parameter",
        "other betas or momentum, weight decay inside of the gradient, or masters that are stale.",
    ),
    UPDATE: (
        "what an update adds to a parameter",
        "another learning rate, schedule, eps or weight decay, a parameter group that holds other "
        "parameters, or an update that a rank skips.",
    ),
    COUNTER: (
        "a counter: of updates, of backwards that wait",
        "an update that is made twice or not at all, or a counter that starts elsewhere.",
    ),
    SCALE: ("the loss scale after the update", "another policy, or an overflow on one side only."),
    STATE: (
        "the state that the step returns, and that of its last update",
        "a step that returns an older state, or changes it after the update.",
    ),
    REPLICA: (
        "a number that several ranks of one run must have alike",
        "a rank that took another branch, or computed from data of its own.",
    ),
}


def operation_of(operation: str) -> str:
    """Return the operation without the name of a slot, counter or module."""
    return max((kind for kind in OPERATIONS if operation.startswith(kind)), key=len)


class Moment(NamedTuple):
    """The call, update and backward of a difference, counted from 1."""

    step: int  # which call of the step
    update: int  # which update in it
    backward: int | None  # which backward before it; None where all of them are summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first number of two runs that differs by more than another order of sums explains.

    In a `replica`, a and b are of one run: of the lowest rank that has the number, and of another.
    """

    at: Moment
    operation: str  # one of `OPERATIONS`; of a slot with its name: "optimizer state exp_avg"
    path: str  # of the parameter, or of the module; "" for what belongs to none
    ranks: tuple[int, ...]  # that have another number; empty for a sum over ranks
    index: tuple[int, ...]  # of the element that differs most, on the first of these ranks
    a: float
    b: float
    bound: float  # what rounding may explain of |a - b|
    compared_in: torch.dtype  # of the parameters while the two were compared

    @property
    def rank(self) -> int | None:
        """The first rank that has another number; None for a sum over ranks."""
        return self.ranks[0] if self.ranks else None

    @property
    def kind(self) -> str:
        """The operation, without the name of a slot or counter."""
        return operation_of(self.operation)

    def __str__(self) -> str:
        compared, cause = OPERATIONS[self.kind]
        kinds = [kind for kind in self._kinds[: self._place] if kind != MODULE]
        before = [OPERATIONS[kind][0] for kind in kinds]
        agree = [f"all of steps 1 to {self.at.step - 1}"] if self.at.step > 1 else []
        agree += [f"in step {self.at.step}: {'; '.join(before)}"] if before else []
        lines = [
            f"{self._where}{self._what}: {self.a:.9g} in run a, {self.b:.9g} in run b, "
            f"{abs(self.a - self.b):.2e} apart; rounding explains at most {self.bound:.1e} "
            f"(compared in {str(self.compared_in).removeprefix('torch.')}).",
            f"Compared here: {compared}.",
            *self._others,
            f"Equal until then: {', and '.join(agree) or 'nothing was compared before'}.",
            f"Usual cause: {cause}",
        ]
        if self.kind == REPLICA:
            lines[0] = lines[0].replace("in run a", "on the lowest rank")
            lines[0] = lines[0].replace("in run b", "here")
        return "\n".join(lines)

    @property
    def _others(self) -> list[str]:
        return []

    @property
    def _place(self) -> int:
        return 0 if self.kind == START else self._kinds.index(self.kind)

    @property
    def _kinds(self) -> list[str]:
        """What is compared, in order."""
        return list(OPERATIONS)

    @property
    def _what(self) -> str:
        is_module = self.kind == MODULE
        return self.operation.removeprefix(MODULE) if is_module else f" of {self.operation}"

    @property
    def _where(self) -> str:
        step, update, backward = self.at
        ranks = ", ".join(map(str, self.ranks))
        sort = "module" if self.kind == MODULE else "parameter"
        parts = [
            f"step {step}" if step else "the start",
            *([f"update {update}"] if update > 1 else []),
            *([f"backward {backward}"] if backward else []),
            *([f"rank{'s' * (len(self.ranks) > 1)} {ranks}"] if ranks else []),
            *([f"{sort} {self.path}{list(self.index) if self.index else ''}"] * bool(self.path)),
        ]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDifference(Difference):
    """The first gradient that differs, in the order in which the backward makes them.

    All before it in that order agree, so the fault is in what the backward does between.
    """

    agree: tuple[str, ...]  # the parameters whose gradients are equal, in that order
    differ: tuple[str, ...]  # the others, `path` first

    @property
    def _others(self) -> list[str]:
        if not self.differ:
            return []
        more = self.differ[1:]
        agree = f"The gradients by {_some(self.agree)} agree" if self.agree else "No other agrees"
        also = f"; those by {_some(more)} differ, too" if more else ""
        return [f"It is the first that the backward makes differently. {agree}{also}."]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDifference(GradientDifference):
    """The first difference of what two training loops tell; without `agree` if of no gradient."""

    @property
    def _kinds(self) -> list[str]:
        return [START, LOSS, GRADIENT, UPDATE]


def _some(paths: Sequence[str], most: int = 6) -> str:
    rest = f", ... ({len(paths)} of them)" if len(paths) > most else ""
    return ", ".join(paths[:most]) + rest


def difference_of(
    at: Moment, apart: Any, compared_in: torch.dtype, *, prefix: str = "", of_loop: bool = False
) -> Difference:
    """Return the difference of an `Apart`, with the path of its state before those in it."""

    def named(path: str) -> str:
        return ".".join([x for x in (prefix, path) if x])

    said: dict[str, Any] = {
        "at": at,
        "operation": apart.operation,
        "path": named(apart.path),
        **apart.found._asdict(),
        "compared_in": compared_in,
    }
    if apart.beside is None and not of_loop:
        return Difference(**said)
    agree, differ = (tuple(map(named, some)) for some in apart.beside or ((), ()))
    kind = LoopDifference if of_loop else GradientDifference
    return kind(**said, agree=agree, differ=differ)
