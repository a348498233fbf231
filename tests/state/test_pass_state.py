"""The laws of a pass: what is announced is ended, or the others hear of it; nothing else is."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fzero.state import pass_state
from fzero.state.pass_state import Next, PassState

flags = st.booleans()


class OneRank(RuleBasedStateMachine):
    """One rank that begins, ends and gives up passes, and the others who wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = PassState()
        self.at = "rest"  # rest, forward, between, backward
        self.others_wait = False

    def go(self, to: Next) -> bool:
        """Be there; return whether the others are told."""
        self.state = to[0]
        self.others_wait = self.others_wait or to[1]
        return to[1]

    def end(self, to: Next) -> None:
        """Be there; end with the others what they were told of."""
        self.state = to[0]
        assert to[1] == self.others_wait, "ranks end what was announced, and nothing else"
        self.others_wait = False

    @precondition(lambda self: self.at in ("rest", "between"))
    @rule(reads=flags, sums=flags)
    def begin_forward(self, reads: bool, sums: bool) -> None:
        """Also a second forward before a backward."""
        waited = self.others_wait
        told = self.go(pass_state.begin_forward(self.state, reads=reads, sums=sums))
        assert told == (reads or waited)
        self.at = "forward"

    @precondition(lambda self: self.at == "forward")
    @rule()
    def end_forward(self) -> None:
        self.state = pass_state.end_forward(self.state)
        self.at = "between"

    @precondition(lambda self: self.at == "between")
    @rule()
    def finish_forward(self) -> None:
        self.end(pass_state.finish(self.state))
        self.at = "rest"

    @precondition(lambda self: self.at in ("rest", "between"))
    @rule(reads=flags, sums=flags, silent=flags, dropped=flags)
    def begin_backward(self, reads: bool, sums: bool, silent: bool, dropped: bool) -> None:
        """A silent one tells nobody; only what gathers nothing is silent."""
        silent = silent and not (reads or self.state.announced)
        waited = self.others_wait
        options = {"reads": reads, "sums": sums, "silent": silent, "dropped": dropped}
        told = self.go(pass_state.begin_backward(self.state, **options))
        crosses = reads or sums or waited
        assert told == (crosses and not silent)
        assert self.state.dropped == dropped
        self.at = "backward"

    @precondition(lambda self: self.at == "backward" and self.state.silent)
    @rule()
    def first_gradient(self) -> None:
        crosses = self.state.crosses
        assert self.go(pass_state.first_gradient(self.state)) == crosses

    @precondition(lambda self: self.at == "backward")
    @rule()
    def finish(self) -> None:
        self.end(pass_state.finish(self.state))
        self.at = "rest"

    @precondition(lambda self: self.at != "rest")
    @rule(known=flags, astray=flags)
    def fail(self, known: bool, astray: bool) -> None:
        """Who waits is told, or knows, or cannot be reached; a rank that tells keeps step."""
        in_step, tells = pass_state.fail(self.state, known=known, astray=astray)
        assert not self.others_wait or known or astray or tells
        assert in_step or not tells
        assert not (tells and known)
        self.state, self.others_wait, self.at = PassState(), False, "rest"

    @invariant()
    def nobody_waits_for_a_rank_at_rest(self) -> None:
        assert self.at != "rest" or not self.others_wait

    @invariant()
    def a_pass_runs_in_its_phases_alone(self) -> None:
        assert self.state.runs == (self.at in ("forward", "backward"))
        assert not self.state.silent or self.at == "backward"


TestOneRank = OneRank.TestCase
