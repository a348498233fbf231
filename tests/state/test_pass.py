"""The laws of a pass: what is announced is ended, or the others hear of it; nothing else is."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fzero.state.effects import Effect, Post
from fzero.state.protocol import (
    Announcement,
    Begin,
    Course,
    EndForward,
    Failed,
    Finish,
    FirstGradient,
    GiveUp,
    Join,
    Protocol,
    Units,
    advance,
)
from fzero.state.protocol import Answer as Heard
from fzero.state.rounds import MessageKind, Round, row_of
from fzero.state.schedule import Program

flags = st.booleans()


class OneRank(RuleBasedStateMachine):
    """One rank that begins, ends and gives up passes, and the others who wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol = Protocol()
        self.at = "rest"  # rest, forward, between, backward
        self.others_wait = self.gathers = False
        self.join(False)

    def join(self, gathers: bool) -> None:
        """Go on with a model that gathers its units, or none that does."""
        self.gathers = gathers
        self.protocol, _ = advance(self.protocol, Join(1, Units(numels=(4,), gathers=gathers)))

    def send(self, event: object) -> list[MessageKind]:
        """Send an event; return what the others are told meanwhile, who answer the same."""
        self.protocol, effects = advance(self.protocol, event)  # type: ignore[arg-type]
        found: list[Effect] = [*effects]
        while self.protocol.agenda:
            assert self.protocol.posted is not None
            said = Round([row_of(self.protocol.posted)])
            self.protocol, effects = advance(self.protocol, Heard(said))
            found += effects
        return [effect.message.kind for effect in found if isinstance(effect, Post)]

    def begin(self, phase: int, *, sums: bool, silent: bool = False) -> bool:
        said = Announcement(text="pass", place=(0, phase), program=Program((0, ~0)))
        told = self.send(Begin(1, said, sums=sums, silent=silent))
        self.others_wait = self.others_wait or bool(told)
        return MessageKind.PASS in told

    def end(self) -> None:
        """End with the others what they were told of."""
        told = self.send(Finish(1))
        assert (MessageKind.DONE in told) == self.others_wait
        self.others_wait, self.at = False, "rest"

    @precondition(lambda self: self.at in ("rest", "between"))
    @rule(gathers=flags, sums=flags)
    def begin_forward(self, gathers: bool, sums: bool) -> None:
        """Also a second forward before a backward."""
        if self.at == "rest":
            self.join(gathers)
        waited = self.others_wait
        assert self.begin(0, sums=sums) == (self.gathers or waited)
        self.at = "forward"

    @precondition(lambda self: self.at == "forward")
    @rule()
    def end_forward(self) -> None:
        assert not self.send(EndForward(1))
        self.at = "between"

    @precondition(lambda self: self.at == "between")
    @rule()
    def finish_forward(self) -> None:
        self.end()

    @precondition(lambda self: self.at in ("rest", "between"))
    @rule(sums=flags, silent=flags)
    def begin_backward(self, sums: bool, silent: bool) -> None:
        """A silent one tells nobody; only what gathers nothing is silent."""
        silent = silent and not self.gathers
        waited = self.others_wait
        crosses = self.gathers or sums or waited
        assert self.begin(1, sums=sums, silent=silent) == (crosses and not silent)
        self.at = "backward"

    @precondition(lambda self: self.at == "backward" and self.course.silent)
    @rule()
    def first_gradient(self) -> None:
        told = self.send(FirstGradient(1))
        assert (MessageKind.PASS in told) == self.course.crosses
        self.others_wait = self.others_wait or bool(told)

    @precondition(lambda self: self.at == "backward")
    @rule()
    def finish(self) -> None:
        self.end()

    @precondition(lambda self: self.at != "rest")
    @rule(astray=flags)
    def fail(self, astray: bool) -> None:
        """Who waits is told, or cannot be reached; nobody else is told."""
        crosses = self.course.crosses
        told = self.send(Failed(1, astray=astray))
        assert (MessageKind.FAILED in told) == (crosses and not astray)
        assert MessageKind.FAILED in told or not self.others_wait or astray
        self.send(GiveUp(1))
        self.others_wait, self.at = False, "rest"

    @property
    def course(self) -> Course:
        return self.protocol.models[1].course

    @invariant()
    def nobody_waits_for_a_rank_at_rest(self) -> None:
        assert self.at != "rest" or not (self.others_wait or self.protocol.running)

    @invariant()
    def a_pass_runs_in_its_phases_alone(self) -> None:
        assert self.course.runs == (self.at in ("forward", "backward"))
        assert not self.course.silent or self.at == "backward"


TestOneRank = OneRank.TestCase
