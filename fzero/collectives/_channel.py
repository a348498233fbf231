"""How the ranks of an axis agree on what comes next: short rounds over a CPU group of fzero's own.

A round is one small all_to_all: every rank posts one `Message`, and gets those of all ranks. Ranks
that announce the same pass or the same call go on without asking each other again until it ends:
so a step costs a constant number of rounds. Ranks that announce different things raise, or serve
each other, collective by collective, until they announce the same again.

    PASS   "my forward (or backward) begins"      replayed if all ranks announce the same
    ASK    "I need this collective now"           every rank takes part in it
    DONE   "my pass is over"                      waits until no rank is in a pass
    CALL   "step(), full_params(), ..."           waits until every rank makes the same call
    FAILED "I raised"                             every other rank raises, too

The rounds go over a gloo group whatever the backend of the axis is, so no rank waits for a GPU.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from fzero._modes import for_training
from fzero.collectives import _lowering as lowering
from fzero.collectives._round import Kind, Round, What, each_once, mismatch
from fzero.errors import AxisError, PeerFailedError, PhaseError
from fzero.mesh import Axis, Runtime

CODES = 8
"""How many collectives a rank may ask for in one round."""

FUNCTIONAL = 0
"""The number of the functional pass that runs."""

EVALUATION = 2**30
"""The number of an evaluation, which may run inside a pass; of one inside it, the next."""

_MANY = 2**24
"""More units than a state has."""


class Member(Protocol):
    """Whoever has units: the channel asks it to take part in a collective that a rank needs."""

    number: int
    drop_if_raised: Callable[[], None] | None  # while it is in a pass

    def serve(self, what: What, unit: int) -> None:
        """Take part in that collective with what this rank has of the unit."""
        ...

    def end_plan(self) -> None:
        """Another member's pass begins or asks in the middle of its own: end its plan first."""
        ...

    def sync(self) -> None:
        """A collective of the user's comes in the middle of its pass: be where the others are."""
        ...

    def wait_all(self) -> None:
        """All ranks are at one place: wait for the reductions that were started."""
        ...


class Channel:
    """The rounds of one axis. Every rank makes the same rounds in the same order."""

    def __init__(self, axis: Axis, data: Axis) -> None:
        self.axis, self.data = axis, data  # for rounds; for gathers and reductions, see `over`
        self._members: dict[int, weakref.ref[Member]] = {}
        self._joined = 0
        self._posted: lowering.Started | None = None
        self._text = ""  # what this rank said last
        self._unread: Round | None = None
        self._announced: dict[str, Any] = {}
        self.rounds = 0
        self.ended_in_error = False  # the last round, on every rank
        self.running: list[Member] = []  # those in a pass; they live until it is over

    def over(self, axis: Axis) -> Axis:
        """Return the axis that gathers and reductions of the states on `axis` go over.

        The same ranks with groups of fzero's own, also of its two dims if it has them. A collective
        at first.
        """
        own = replace(self.data, name=axis.name, dims=axis.dims)
        for part in (own.replicas, own.shards) if own.dims is not None else ():
            if part.runtime is Runtime.PROCESSES:
                part.group()
        return own

    # Members.

    def join(self, member: Member, number: int | None = None) -> int:
        """Add somebody who has units; return its number, which is the same on every rank.

        `FUNCTIONAL` is that of the one functional pass that can run at a time.
        """
        number = self.number() if number is None else number
        self._members[number] = weakref.ref(member)
        return number

    def number(self) -> int:
        """Return the next number, the same on every rank that makes the same engines."""
        self._joined += 1
        return self._joined

    def leave(self, number: int) -> None:
        """Remove it."""
        self._members.pop(number, None)

    def drop_raised(self) -> None:
        """End the passes of backwards that raised here without a word to the other ranks.

        An engine does not see the exception of a plain loss.backward(). It may be gone before its
        pass is over, at another time on each rank.
        """
        for member in sorted(self.running, key=lambda one: one.number):
            if member.drop_if_raised is not None:
                member.drop_if_raised()

    # Rounds.

    def post(
        self,
        kind: Kind,
        text: str = "",
        *,
        hint: int = 0,
        served: bool = True,
        codes: Sequence[int] = (),
    ) -> None:
        """Say `kind`; nobody waits. `text` is what is announced: equal texts go together."""
        self._complete()
        row = [kind, zlib.crc32(text.encode()), hint, served, *codes]
        self._posted = lowering.begin_exchange(row, self.axis, Round, width=4 + CODES, said=text)
        self._text, self._unread = text, None
        self.rounds += 1
        self.ended_in_error = False

    def read(self) -> Round:
        """Return what every rank said in the last round.

        Raises `PeerFailedError` if a rank said that it raised, again each time it is asked.
        """
        self._complete()
        assert self._unread is not None
        failed = self._unread.failed
        if failed:
            self.ended_in_error = True
            self._wait_all()
            raise PeerFailedError(
                f"rank {self.axis.rank}: the step raised on rank{'s' * (len(failed) > 1)} "
                f"{failed}, so its gradients cannot be reduced.",
                cause="an error in the loss, the forward or the backward, on that rank only.",
                fix=f"see the error of rank {failed[0]}; here nothing was changed.",
            )
        return self._unread

    def _complete(self) -> None:
        posted, self._posted = self._posted, None
        if posted is not None:
            (self._unread,) = posted.wait()

    def exchange(self, kind: Kind, text: str = "", *, codes: Sequence[int] = ()) -> Round:
        """Post and read."""
        self.post(kind, text, codes=codes)
        return self.read()

    # What is made of rounds.

    def announce(self, text: str, *, hint: int = 0, served: bool = False) -> None:
        """Begin a pass: post it. `served`: ranks that make a call meanwhile take part in it."""
        self.drop_raised()
        self._announced = {"hint": hint, "served": served}
        self.post(Kind.PASS, text, **self._announced)

    def answer(self) -> bool:
        """Whether every rank announced the pass that this rank did, in the same order.

        Then nobody needs to ask for a collective. Otherwise all do, also of a rank that is done or
        makes a call, and so is not in this pass. Takes part in what ranks ask for that are still in
        the pass before. Raises `MismatchError`, on every rank, if the ranks announce what cannot go
        together, naming it.
        """
        while True:
            said = self.read()
            if Kind.ASK not in said.kinds:
                if not said.is_same and not said.is_served:
                    self._raise_mismatch()
                return said.is_same and said.is_in_order
            self._serve(said)
            self.post(Kind.PASS, self._text, **self._announced)

    @property
    def is_answered(self) -> bool:
        """Whether every rank has posted this round, so that `answer` need not wait for them."""
        return self._posted is None or self._posted.is_over

    def ask(self, number: int, what: What, units: Sequence[int]) -> None:
        """Have every rank take part in `what` of each unit; so does this one, here."""
        codes = [1 + what + len(What) * (unit + number * _MANY) for unit in units]
        for begin in range(0, len(codes), CODES):
            self._serve(self.exchange(Kind.ASK, codes=codes[begin : begin + CODES]))

    def finish(self, *, asked: bool) -> bool:
        """Take part in what other ranks ask for until no rank is in a pass.

        Returns whether any rank has `asked`, the same on every rank.
        """
        while True:
            self.post(Kind.DONE, hint=int(asked))
            said = self.read()
            if said.is_over:
                self._wait_all()
                return said.has_asked
            self._serve(said)

    def tell(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order."""
        return lowering.gather_objects(value, self.axis)

    def tell_each_once(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks that differ, in the order of the ranks."""
        return lowering.gather_objects(value, self.axis, each_once)

    def call(self, text: str, value: int = 0) -> frozenset[int]:
        """Wait until every rank makes this call; return the values that they give, each once.

        Ranks that are in a pass are served until they come here. Raises `MismatchError` on every
        rank if the ranks make calls that differ, naming them.
        """
        return frozenset(values[0] for values in self.call_with(text, lambda: [value]))

    def call_with(self, text: str, values: Callable[[], Sequence[int]]) -> list[tuple[int, ...]]:
        """As `call`, with up to `CODES` numbers of 0 or more; return those of each rank.

        They are asked for before each round: what this rank holds changes while it serves others.
        """
        self.drop_raised()
        while True:
            said = self.exchange(Kind.CALL, text, codes=[1 + value for value in values()])
            if said.kinds <= {Kind.PASS, Kind.CALL}:
                everybody = said.kinds == {Kind.CALL}
                if not said.is_same and (everybody or not said.is_served):
                    self._raise_mismatch()
                if everybody:
                    return said.values
            self._serve(said)
            if said.is_over:
                self._wait_all()
                if said.has_asked:
                    self.tell_each_once(None)  # those that end their pass tell what they did

    def fail(self) -> None:
        """Say that this rank raised. The others raise where they read it."""
        with suppress(AxisError):
            self.exchange(Kind.FAILED)

    def _serve(self, said: Round) -> None:
        for code in said.asked:
            rest, what = divmod(code - 1, len(What))
            number, unit = divmod(rest, _MANY)
            for_training(self._member(number).serve, What(what), unit)

    def _wait_all(self) -> None:
        """Every rank has read this round: wait for all that was started, on every rank alike.

        A reduction may communicate again when it is waited for. So no rank waits for one alone,
        while another waits for it in a round.
        """
        for number in sorted(self._members):
            member = self._members[number]()
            if member is not None:
                member.wait_all()

    def _member(self, number: int) -> Member:
        member = self._members.get(number, lambda: None)()
        if member is None:
            raise PhaseError(
                f"rank {self.axis.rank}: another rank uses model {number} of this axis, which "
                "is closed or gone here.",
                cause="close(), or the last reference to an engine or a state, on some ranks only.",
                fix="keep it on every rank for as long as any rank uses it.",
            )
        return member

    def _raise_mismatch(self) -> None:
        self.ended_in_error = True
        self._wait_all()
        raise mismatch(lowering.gather_objects(self._text, self.axis))
