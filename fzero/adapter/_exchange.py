"""Stage 3's collectives: ranks tell each other what they ask for, and serve the union of it.

Ranks may use other parameters (experts chosen by the data), or use them in another order. Before
each collective they exchange what they are about to ask for, and all of them take part in all of
it, in one order. A rank whose backward is over goes on serving until every rank's is. With
`lockstep` the ranks have promised to ask for the same in the same order, and exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from fzero.collectives import exchange_many
from fzero.errors import AxisError, explain
from fzero.mesh import Axis

AT_ONCE = 8
"""How much a rank may ask for in one exchange."""

_FAILED = -1


class Ask(IntEnum):
    """What a rank wants the others to take part in."""

    GATHER = 0  # the full values of a group
    REDUCE = 1  # the gradient of a group


Run = Callable[[Ask, int, bool], None]
"""(what, group, whether this rank asked): start that collective."""


class PeerFailedError(AxisError):
    """Another rank raised; nobody needs to be told so again."""


class Exchange:
    """Decides, with the other ranks, which collective comes next."""

    def __init__(self, axis: Axis, *, lockstep: bool) -> None:
        self._axis, self.lockstep = axis, lockstep

    def ask(self, what: Ask, groups: Sequence[int], run: Run) -> None:
        """Have `run` start `what` for each of `groups`, and whatever other ranks ask for."""
        if self.lockstep:
            for group in groups:
                run(what, group, True)
            return
        codes = [1 + 2 * group + what for group in groups]
        for at in range(0, len(codes), AT_ONCE):
            self._serve(codes[at : at + AT_ONCE], run)

    def finish(self, run: Run) -> None:
        """Serve the other ranks until none asks for anything."""
        while not self.lockstep and self._serve([], run):
            pass

    def fail(self) -> None:
        """Tell the others that this rank raised."""
        if not self.lockstep:
            exchange_many([_FAILED], self._axis, width=AT_ONCE)

    def _serve(self, mine: Sequence[int], run: Run) -> bool:
        asked = exchange_many(mine, self._axis, width=AT_ONCE)
        failed = [rank for rank, codes in enumerate(asked) if _FAILED in codes]
        if failed:
            raise PeerFailedError(
                explain(
                    f"rank {self._axis.rank}: rank {failed[0]} raised in the middle of a step.",
                    cause="an error in the forward or backward of that rank only.",
                    fix=f"see the error of rank {failed[0]}; the gradients of this step are gone.",
                )
            )
        wanted = sorted({code for codes in asked for code in codes if code})
        for code in wanted:
            group, what = divmod(code - 1, 2)
            run(Ask(what), group, code in mine)
        return bool(wanted)
