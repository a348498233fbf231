"""Writes to the module's parameters, noticed by torch's version counters (stages 0 to 2).

    a root forward wrote        refused: each rank writes as its own data say, and replicas part
    anybody else wrote          compared at the next update: equal writes on all ranks are right

At stage 3 a placeholder refuses every write. A write through `p.data` or NumPy is counted nowhere:
`fzero.check_replicas` compares values.
"""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor

from fzero.adapter._masters import Masters
from fzero.adapter._module import ModuleParameters
from fzero.collectives import Performer
from fzero.errors import PhaseError
from fzero.machine.packing import digest
from fzero.state import Setup, TrainState
from fzero.transforms.state_entries import unequal

_version = attrgetter("_version")


class Writes:
    """What was written to the parameters of an engine, frozen ones too.

    alone: whether there is one rank. masters: of the parameters, which follow what was written.
    """

    def __init__(self, params: ModuleParameters, setup: Setup, *, alone: bool) -> None:
        pairs = [
            (params.paths[leaf][0], p)
            for leaf in (() if setup.gathers_by_unit else params.paths)
            for p in params.objects(leaf)
        ]
        self.masters = Masters(params, setup)
        self._paths, self._watched = [path for path, _ in pairs], [p for _, p in pairs]
        self._by_forward: dict[int, str] = {}  # parameters that a forward wrote, by id
        self._begun: list[int] = []
        self._alone = alone
        self.settle()

    def follow(self, state: TrainState) -> None:
        """Let the masters of a state follow what was written to its parameters."""
        self.masters.follow(state)

    def published(self) -> None:
        """An update has written all parameters, and their masters."""
        self.masters.published()
        self.settle()

    def settle(self) -> None:
        """All ranks have equal parameters now."""
        self._settled = [] if self._alone else self._counted()

    def agree(self, params: list[Tensor]) -> None:
        """These parameters have equal values on all ranks again."""
        for p in params:
            self._by_forward.pop(id(p), None)

    def begin_forward(self) -> None:
        """A root forward begins."""
        self._begun = self._counted()

    def end_forward(self) -> PhaseError | None:
        """A root forward is over: return an error if it wrote to a parameter."""
        now = self._counted()
        if now == self._begun:
            return None
        rows = zip(self._watched, self._paths, self._begun, now, strict=True)
        self._by_forward |= {id(p): path for p, path, before, after in rows if after != before}
        return self.error()

    def error(self) -> PhaseError | None:
        """Return an error if a forward has written to parameters that are not equal since."""
        return written_by_forward([*self._by_forward.values()]) if self._by_forward else None

    def since(self) -> list[str]:
        """Return the paths of the parameters that were written since all ranks had them equal."""
        now = [] if self._alone else self._counted()
        if now == self._settled:
            return []
        rows = zip(self._paths, self._settled, now, strict=True)
        return [path for path, before, after in rows if after != before]

    def compare(self, performer: Performer) -> None:
        """Raise on every rank if ranks differ in a parameter that any of them has written.

        A collective, which every rank makes if one of them has written. Masters then follow on all
        ranks: a rank that got the values by dist.broadcast(p.data) has counted no write.
        """
        written = {path for some in performer.tell(self.since()) for path in some}
        pairs = zip(self._paths, self._watched, strict=True)
        mine = [(f"parameter {path}", digest(p)) for path, p in pairs if path in written]
        if (error := unequal(performer.tell(mine))) is not None:
            raise error
        self.masters.note(written)
        self.settle()

    def _counted(self) -> list[int]:
        return list(map(_version, self._watched))


def written_by_forward(paths: list[str]) -> PhaseError:
    """Return the error for parameters that a forward has written."""
    more = f" and {len(paths) - 1} more" * (len(paths) > 1)
    return PhaseError(
        f"the forward wrote to {paths[0]}{more}; what it wrote is there.",
        cause="F.embedding(max_norm=), weight clipping, a codebook or a cache that is updated in "
        "the forward. Each rank writes as its own data say, and optimizers hold copies and shards: "
        "ranks would train other parameters.",
        fix="write between steps, the same on every rank, under no_grad, or in `with "
        "fzero.adapter.gathered(module, modify=True):`, which also makes ranks equal again after "
        "this error; make a codebook that is no parameter a buffer (register_buffer), which each "
        "rank has for itself.",
    )
