"""The exceptions of fzero: six kinds, each also the builtin kind a caller would expect.

In: what was seen, the usual cause, the fix (`explain`). Out: one message of three sentences.
`check` has the checks of options and calls, which raise them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FzeroError(Exception):
    """Base of every error that fzero raises on purpose.

    Example:
        >>> print(FzeroError("2 ranks, a state of 4.", cause="two meshes.", fix="pass one."))
        2 ranks, a state of 4.
        Usual cause: two meshes.
        Fix: pass one.
    """

    def __init__(self, *seen: Any, cause: str = "", fix: str = "") -> None:
        """Make the text of what was seen, the usual cause and the fix, or take it as it is."""
        super().__init__(*([explain(*seen, cause=cause, fix=fix)] if fix else seen))


class LayoutError(FzeroError, ValueError):
    """Parameters, batches or options that do not fit together; nothing was changed."""


class CallError(FzeroError, TypeError):
    """A function of fzero that was called with arguments that it does not take."""


class PhaseError(FzeroError, RuntimeError):
    """A call that is not legal in the phase the state is in; the state is still good."""


class DonatedError(PhaseError):
    """A state (or its gradients) was used again after its buffers were donated."""


class AxisError(FzeroError, RuntimeError):
    """The axis of ranks is missing, of another size, or its ranks do different things."""


class PeerFailedError(AxisError):
    """Another rank raised; no other rank needs to be told."""


class LostRankError(AxisError):
    """A collective failed because a rank is gone, or did not come within the timeout.

    Attributes:
        ranks: those to blame, as they are numbered in the world; empty if nobody can say.
        late: whether they are alive, and did not come within the timeout.
    """

    def __init__(
        self,
        *seen: Any,
        cause: str = "",
        fix: str = "",
        ranks: Sequence[int] = (),
        late: bool = False,
    ) -> None:
        super().__init__(*seen, cause=cause, fix=fix)
        self.ranks, self.late = tuple(ranks), late


class MismatchError(AxisError, PhaseError):
    """The ranks make different calls, or the same one with other options; all of them raise."""


class CheckpointError(FzeroError, OSError):
    """A checkpoint that is missing or damaged, or could not be written; the state is still good."""


class NonFiniteError(FzeroError, ArithmeticError):
    """A loss or a gradient is NaN or infinite; no update was made. All ranks raise the same.

    See `fzero.check_finite`, and `check_finite=True` of an engine, which look for it.

    Attributes:
        step: the updates made before.
        rank: in the world, whose own loss or gradient it is; the lowest one if there are several.
        what: "loss", or "gradient" if that rank's loss is finite.
        path: of the parameter whose gradient was the first one of that rank's backward to be not
            finite, the one nearest to the loss; None if its gradients are finite, or not looked at.
        backward: how many backwards came before it since the last update.
        ranks: all ranks with such a loss or gradient.
    """

    def __init__(
        self,
        step: int,
        rank: int,
        what: str,
        path: str | None,
        backward: int = 0,
        ranks: Sequence[int] = (),
    ) -> None:
        self.step, self.rank, self.what, self.path = step, rank, what, path
        self.backward, self.ranks = backward, tuple(ranks) or (rank,)
        super().__init__(step, rank, what, path, backward, self.ranks)

    def __str__(self) -> str:
        gradient = f"the gradient of {self.path}, the first one of its backward to be so"
        where = f"after {self.step} updates, in backward {self.backward + 1} since the last one"
        if self.what == "gradient":
            seen = f"{where}: rank {self.rank} has a NaN or an infinity in {gradient}"
        else:
            seen = f"{where}: the loss of rank {self.rank} is NaN or infinite"
            seen += f"; so is {gradient}" if self.path is not None else ""
        others = [rank for rank in self.ranks if rank != self.rank]
        seen += f". Ranks {others} have some, too." if others else ". No other rank has one."
        return explain(
            seen,
            cause="on one rank, its data, or an operation without a derivative there: a division "
            "by zero, log or sqrt at 0. On all of them, a learning rate that is too high, or "
            "parameters that were not finite before.",
            fix="look at the batch of that rank, and at what uses that parameter; or use a lower "
            "learning rate. Nothing was updated: go on with the state from before the step, or "
            "call engine.zero_grad(), and leave the batch out.",
        )


def explain(seen: str, *, cause: str, fix: str) -> str:
    """Return the text of an error: what was seen, its usual cause, and the fix."""
    return f"{seen}\nUsual cause: {cause}\nFix: {fix}"
