"""Sends what happens to a model's units and gradients to the protocol, as events."""

from __future__ import annotations

from collections.abc import Sequence

from fzero.collectives import Performer
from fzero.errors import PhaseError
from fzero.state.protocol import Changed, Model, Pin, ProtocolEvent, Ready, Unpin, Use


class ModelLine:
    """One model of a performer's protocol."""

    __slots__ = ("is_over", "number", "performer")

    def __init__(self, performer: Performer, number: int) -> None:
        self.performer, self.number = performer, number
        self.is_over = False

    def leave(self) -> None:
        """No pass of the model will follow; a later one may have its number."""
        self.is_over = True
        self.performer.leave(self.number)

    @property
    def record(self) -> Model:
        """The protocol's record of this model. Raises `PhaseError` after the model has left."""
        found = self.performer.protocol.models.get(self.number)
        if found is None or self.is_over:
            raise PhaseError(
                f"rank {self.performer.axis.rank}: a parameter of stage 3 is read, and what would "
                "gather it is over.",
                cause="a parameter that a loss was given, and that was kept beyond its call; or a "
                "backward through a forward from before engine.close() or engine.reshard().",
                fix="keep p.clone() in the loss, or use fzero.full_params(state) after it; run "
                "loss.backward() before those.",
            )
        return found

    def send(self, event: ProtocolEvent) -> None:
        """Tell the protocol of an event of this model. Raises `PhaseError` after it has left."""
        _ = self.record
        self.performer.send(event)

    def use(self, unit: int) -> None:
        """A kernel reads a unit: gather it if it is not gathered."""
        if not self.record.residency.is_current(unit):  # many kernels read one unit
            self.performer.send(Use(self.number, unit))

    def ready(self, unit: int) -> None:
        """The gradients of a unit are complete."""
        self.send(Ready(self.number, unit))

    def hold(self, units: Sequence[int]) -> Sequence[int]:
        """Gather units and keep them until `let_go`. A collective outside of passes."""
        self.performer.drop_raised()
        before = self.record.residency.blocks
        try:
            self.send(Pin(self.number, tuple(units)))
        except BaseException:
            if self.record.residency.blocks != before:  # it was held, and a gather has raised
                self.let_go(units)
            raise
        return () if self.record.rounds else units

    def let_go(self, units: Sequence[int]) -> None:
        """End a `hold`."""
        self.send(Unpin(self.number, tuple(units)))

    def changed(self) -> None:
        """The parameters changed: free the gathered units, which are stale."""
        self.send(Changed(self.number))
