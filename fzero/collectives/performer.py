"""The rounds of a rank with the others of its axis: states and engines on them share one performer.

    an event -> advance -> effects, one after another -> rounds, gatherers, reducers
                  ^-------- what the rounds bring --------'

A round is one small all_to_all: every rank posts one `Message`, and gets those of all ranks. It
goes over a gloo group whatever the backend of the axis is, so no rank waits for a GPU. The
`Performer` does what the protocol says, and decides nothing. Calls that all ranks make, and
collectives of the user's, come to the same place by it.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.collectives import liveness, lowering
from fzero.collectives.lowering import explained, ranks_of
from fzero.collectives.recompute import keeping
from fzero.context.current_rank import Here, current_ranks, is_abstract
from fzero.context.modes import for_training
from fzero.errors import AxisError, FzeroError, MismatchError, PeerFailedError, PhaseError
from fzero.ranks.mesh import Axis, Runs, Runtime, carried_here, own_group
from fzero.ranks.virtual import UNUSED, different
from fzero.state import protocol as rank
from fzero.state.effects import (
    Effect,
    Exchange,
    Look,
    Post,
    Raise,
    Read,
    WaitForReductions,
)
from fzero.state.protocol import (
    SYNC,
    Answer,
    Begin,
    Broke,
    Call,
    FirstGradient,
    GiveUp,
    Join,
    Leave,
    Met,
    ProtocolEvent,
    Raised,
    SyncPoint,
    Units,
)
from fzero.state.rounds import CODES, Round, Served, row_of

_TORCH: Any = torch  # what it has no types for

FUNCTIONAL = 2**29
"""The number of a functional pass; of one inside its loss, the next."""

EVALUATION = 2**30
"""The number of an evaluation, which may run inside a pass; of one inside it, the next."""

PULLS = 2**28
"""What the numbers of pulls of `vjp` begin at, by the place of their states."""


_DEFERRING = (Begin, FirstGradient, GiveUp)
"""The events at which a backward is deferred, or is not any more."""

_BY = "_fzero_raised_by"
"""Of an error, the performer that raised it: a loss may have states on several sets of ranks."""


class Performer:
    """The protocol of one rank on an axis, its rounds, and the parties that perform its effects.

    Every rank makes the same rounds in the same order.

    Attributes:
        axis: the ranks, for rounds.
        data: the same, for gathers and reductions; see `over`.
        rounds: how many were posted.
        forwards: how many of `vjp` there were, since the last error.
        pulls: the states, by their layouts, whose pulls may come before their next update, by their
            place in `Message.served`.
        serves: whom a call of this rank serves, see `Message.served`.
    """

    def __init__(self, axis: Axis, data: Axis) -> None:
        self.axis, self.data, self.protocol, self.rounds = axis, data, rank.Protocol(), 0
        self._posted = lowering.given((), axis)  # the last round
        self._parties: dict[int, weakref.ref[Any]] = {}
        self._running: dict[int, Any] = {}  # those in a pass live until it is over
        self._joined = 0
        self.forwards, self.pulls = 0, dict[int, tuple[Any, ...]]()
        self.serves: int = Served.ALL

    def over(self, axis: Axis) -> Axis:
        """Return the axis that gathers and reductions of the states on `axis` go over.

        The same ranks with groups of fzero's own, also of its two dims if it has them. A collective
        at first.
        """
        own = replace(self.data, name=axis.name, dims=axis.dims, named=axis.named)
        for part in (own.replicas, own.shards) if own.dims is not None else ():
            if part.runtime is Runtime.PROCESSES:
                with explained("making the groups of the mesh", axis):
                    part.group()
        return own

    # Models.

    def number(self) -> int:
        """Return the next number, the same on every rank that makes the same engines. A collective.

        Models that are gone on all ranks, with a pass that nobody will end, leave.
        """
        gone = {n for n in self.protocol.inside if self._parties.get(n, lambda: None)() is None}
        for number in gone.intersection(*self.tell(gone)):
            self.leave(number)
        self._joined += 1
        return self._joined

    def join(self, party: Any, units: Units, number: int, gathered: tuple[int, ...] = ()) -> None:
        """Add a model by its number, which is the same on every rank; see `Join`.

        party: the owner of its values (a `Pass`), which does the effects on them.
        """
        self._parties[number] = weakref.ref(party)
        self.send(Join(number, units, gathered))

    def leave(self, number: int) -> None:
        """Remove a model."""
        self._parties.pop(number, None)
        self.send(Leave(number))

    def _party(self, number: int) -> Any:
        party = self._parties.get(number, lambda: None)()
        if party is None:
            raise PhaseError(
                f"rank {self.axis.rank}: another rank uses model {number} of this axis, which "
                "is closed or gone here.",
                cause="close(), or the last reference to an engine or a state, on some ranks only.",
                fix="keep it on every rank for as long as any rank uses it.",
            )
        return party

    def drop_raised(self) -> None:
        """End the passes of backwards that raised here without a word to the other ranks.

        An engine does not see the exception of a plain loss.backward(). It may be gone before its
        pass is over, at another time on each rank.
        """
        for number in sorted(self._running):
            if number in self._running:
                self._running[number].drop_raised()

    # Events.

    def send(self, event: ProtocolEvent) -> None:
        """Tell the protocol of an event, and do what follows from it.

        In inference mode too, with tensors that training can use afterwards.
        """
        if torch.is_inference_mode_enabled():
            for_training(self.send, event)
            return
        todo: deque[Effect] = deque()
        try:
            self._advance(event, todo)
            while todo:
                match effect := todo.popleft():
                    case WaitForReductions():
                        # A reduction may communicate again when it is waited for. So no rank waits
                        # for one alone, while another waits for it in a round.
                        for number in sorted(self._parties):
                            party = self._parties[number]()
                            if party is not None:
                                party.perform(effect)
                    case Look(number):
                        has_room = self._party(number).perform(effect)
                        self._advance(Answer(() if has_room else None), todo)
                    case Post(message):  # nobody waits, but for the round before
                        self._posted.wait()
                        row, self.rounds = row_of(message), self.rounds + 1
                        self._posted = lowering.begin_exchange(
                            row, self.axis, Round, width=4 + CODES, said=message.text
                        )
                    case Read(waits):
                        is_here = waits or self._posted.is_over
                        said: Round | None = self._posted.wait()[0] if is_here else None
                        self._advance(Answer(said), todo)
                    case Exchange(value):
                        values = tuple(lowering.gather_objects(value, self.axis, each_once))
                        if value is not None:
                            self._advance(Answer(values), todo)
                    case Raise(failed):
                        raise self._error(failed)
                    case _:
                        # Another rank may ask, inside of a transform here.
                        with _TORCH._C._DisableFuncTorch():
                            self._party(effect.model).perform(effect)
        except BaseException as error:
            self._advance(Broke(tuple(todo)), todo)
            if not hasattr(error, _BY):
                setattr(error, _BY, self)
            raise

    def knows(self, error: BaseException) -> bool:
        """Whether all of these ranks have an error: not one that other ranks have made known."""
        return isinstance(error, AxisError) and getattr(error, _BY, self) is self

    def _advance(self, event: ProtocolEvent, todo: deque[Effect]) -> None:
        before = self.protocol
        self.protocol, effects = rank.advance(before, event)
        todo.extend(effects)
        if self.protocol.known and not before.known:
            self.forwards, self.pulls = 0, {}  # ranks that raised have made other ones
        if self.protocol.running is not before.running or isinstance(event, _DEFERRING):
            self._running = {number: self._party(number) for number in self.protocol.under_way}

    def _error(self, failed: tuple[int, ...]) -> Exception:
        """What all ranks raise. A collective if they make different calls."""
        if not failed:
            posted = self.protocol.posted
            return mismatch(self.tell("" if posted is None else posted.text))
        return PeerFailedError(
            f"rank {self.axis.rank}: the step raised on rank{'s' * (len(failed) > 1)} "
            f"{[*failed]}, so its gradients cannot be reduced.",
            cause="an error in the loss, the forward or the backward, on that rank only.",
            fix=f"see the error of rank {failed[0]}; here nothing was changed.",
        )

    # Calls that all ranks make.

    def call(self, text: str, value: int = 0) -> frozenset[int]:
        """Wait until every rank makes this call; return the values that they give, each once.

        Ranks that are in a pass are served until they come here. Raises `MismatchError` on every
        rank if the ranks make calls that differ, naming them.
        """
        each_once = frozenset(self.call_with(text, lambda: [value]))
        return frozenset(values[0] for values in each_once)

    def call_with(
        self, text: str, values: Callable[[], Sequence[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """As `call`, with up to `CODES` numbers of 0 or more; return those of each rank.

        They are asked for before each round: what this rank holds changes while it serves others.
        """
        self.drop_raised()
        self.send(Call(text, tuple(values()), self.serves))
        while not self.protocol.heard:
            self.send(Call(text, tuple(values()), self.serves))
        return self.protocol.heard

    def tell(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order."""
        return lowering.gather_objects(value, self.axis)

    def fail(self) -> None:
        """Say that this rank raised. The others raise where they read it."""
        with suppress(AxisError):
            self.send(Raised())


_OPEN: dict[tuple[tuple[int, ...], str], Performer] = {}
"""The performer of each set of processes and backend: a handle, like torch's own table of groups.
It lives as long as the process group, for garbage is collected at another time on each rank."""

SETUP_OR_CHECKPOINT = "init, an Engine or a checkpoint"
"""The call that ranks announce. One name for all: a rank that raised does not know in which of them
the others wait."""


def performer_of(axis: Axis) -> Performer | None:
    """Return the performer of the ranks of `axis`; None on one local rank. A collective at first.

    States and engines on the same ranks share it.
    """
    if axis.runtime is Runtime.LOCAL:
        return None
    here = current_ranks()
    if here is not None:  # virtual ranks: it lives for one run
        place = Performer, axis.size, axis.stride  # all of them, or those of a replica
        if place not in here.kept:
            whole = axis.plain
            here.kept[place] = Performer(whole, whole)
        return here.kept[place]
    group = axis.group()
    processes = tuple(dist.get_process_group_ranks(group)), dist.get_backend_config(group)
    found = _OPEN.get(processes)
    if found is None or not ranks_of(found.axis):  # torch.distributed may have been restarted
        liveness.start_signs()
        whole = axis.plain
        with explained("the first call of fzero", axis, cause=_ALONE):
            found = Performer(own_group(whole, backend="gloo"), own_group(whole))
        _OPEN[processes] = found
    return found


_ALONE = (
    "init, an Engine or a collective under `if rank == 0:`, which every rank must call; or a rank "
    "that raised or ended before, or did not come within the timeout."
)


class UserCall(NamedTuple):
    """A collective of the user's: its name, and the shapes and dtypes of what this rank gives.

    said: of it, in bits: all ranks hear what any of them has said. connects: as of a `SyncPoint`.
    """

    name: str
    shapes: str
    backward: bool = False  # of one that was made before
    said: tuple[int, ...] = ()
    connects: bool = False

    def __str__(self) -> str:
        """Return it as virtual ranks write it."""
        return f"{self.name}[{self.shapes}]"


def before_collective(
    axis: Axis, call: UserCall | None = None, *, connects: bool = False
) -> tuple[int, ...]:
    """A collective begins: ranks in the middle of a pass come to the same place.

    All ranks of a mesh do, also for a collective over one of its dims. The name and the shapes of a
    user's `call`, and what is said of it, go with the round in which they come. Returns what any
    rank has said, bit by bit. Raises `MismatchError`, on every rank, if ranks make other calls, or
    one with other shapes on the ranks that it is over. `connects`: as of a `SyncPoint`.
    """
    whole = axis.whole or axis
    codes: tuple[int, ...] = ()
    performers = _in_a_pass(whole)
    # An abstract rank stands for a process, and is planned with the rounds of one.
    as_process = axis.runtime is Runtime.PROCESSES or (call is not None and is_abstract())
    by_round = as_process or any(
        # A backward that is announced where its first gradient comes, as that of an engine is:
        # virtual ranks wait in the round of it, and so have to come to a call in a round, too.
        number < FUNCTIONAL
        for performer in performers
        for number in performer.protocol.inside
    )
    if call is not None and by_round:
        codes = digest(f"{call.name} {axis.name}"), digest(call.shapes), *call.said
    met = None
    for performer in performers:
        performer.drop_raised()
        if not performer.protocol.inside:
            continue
        backward, own = (False, connects) if call is None else (call.backward, call.connects)
        performer.send(SyncPoint(codes, backward, own))
        if performer.protocol.meeting and performer.axis.size == whole.size:
            met = performer
    if call is None:
        return ()
    if not by_round:
        rows = lowering.told(call.name, call.said, axis, call.shapes) if call.said else [()]
        return lowering.any_of(rows)
    return lowering.any_of(_rows_of_call(call, codes, axis, met))


def also_connects(axis: Axis) -> None:
    """Let the passes here know that the backward of the last collective comes, by other ranks."""
    for performer in _in_a_pass(axis.whole or axis):
        if performer.protocol.inside:
            performer.send(Met(connects=True))


def _rows_of_call(
    call: UserCall, codes: tuple[int, ...], axis: Axis, met: Performer | None
) -> list[tuple[int, ...]]:
    """Return what each process has said of a call, which they have `met` for or meet for now."""
    whole = axis.whole or axis
    if met is None:
        met = performer_of(whole)
        assert met is not None
        performer = met
        met.call_with(SYNC, lambda: (*codes, performer.protocol.reducible))
    heard = met.protocol.heard
    shapes = axis.parts([values[1] for values in heard]).values()
    if len({values[0] for values in heard}) > 1 or any(len({*some}) > 1 for some in shapes):
        before = sys.exception()  # in a `finally`, or where an error is handled
        after = "" if before is None else f" after {type(before).__name__}: {before}"
        texts = met.tell(f"{call}{f' over {axis.name!r}' if axis.whole else ''}{after}")
        first = [rank for rank, text in enumerate(texts) if text not in texts[:rank]]
        raise different({f"rank {rank}": texts[rank] for rank in first})
    count = len(codes)
    if all(values[count:] for values in heard):
        met.send(Met(tuple([values[count] for values in heard])))
    return [values[2:count] for values in heard]


def end_of_run(here: Here) -> str:
    """Return what a virtual rank says where its run ends, as in a round: its local calls."""
    mine = here.kept.get((Performer, here.size, 1))
    return f"the end of the simulated function{mine.protocol.noted.said if mine else ''}"


def agreed(text: str, said: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    """Return what any rank of `axis` has said, bit by bit: a call of all of them."""
    performer = performer_of(axis)
    if performer is None:
        return said
    carried = carried_here()
    if carried is not None and carried.runs is Runs.TOGETHER:
        return lowering.any_of(lowering.told(text, said, axis))
    return lowering.any_of(performer.call_with(text, lambda: said))


def rows_of_ranks(what: str, row: Sequence[int], axis: Axis) -> list[list[int]]:
    """Return the numbers of every rank of `axis`, as many as this rank's, in rank order.

    All ranks of the mesh call it, and come to this place together. The host waits for them.
    """
    kept, _ = keeping(f"{what} {list(row)}")
    whole = axis.whole or axis

    def exchanged() -> list[list[int]]:
        before_collective(axis, UserCall(what, f"({len(row)},)"))
        performer = performer_of(whole)
        if performer is None:
            return [list(row)]
        over, width = replace(performer.axis, name=whole.name), len(row)
        rows = lowering.begin_exchange(row, over, lambda rows: rows, width=width, said=what).wait()
        return axis.parts(rows[0])[axis.first(whole.rank)]

    return exchanged() if kept is None else kept.values(exchanged)


def _in_a_pass(whole: Axis) -> list[Performer]:
    """The performers of these ranks, or of some of them, that may be in a pass."""
    here = current_ranks()
    if here is not None:
        return [one for one in here.kept.values() if isinstance(one, Performer)]
    running = [place for place, one in _OPEN.items() if one.protocol.inside]
    ours = set(ranks_of(whole) if running else ())
    return [_OPEN[place] for place in running if ours.issuperset(place[0])]


def digest(text: str) -> int:
    """Return a number of 56 bits for a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return every rank's picklable `value` in rank order. A collective.

    Ranks in a pass are served until they come here, too. Raises `MismatchError` on every rank if
    one makes another call instead, as after `if rank == 0: save(...)`.
    """
    performer = performer_of(axis)
    if performer is None:
        return [value]
    performer.call(SETUP_OR_CHECKPOINT)
    return performer.tell(value)


def gather_objects_beside(value: Any, axis: Axis) -> list[Any]:
    """`gather_objects` over the group of `axis` itself: for a thread that has it to itself.

    The performer's rounds are those of the thread that trains; a second thread would mix with them.
    """
    return lowering.gather_objects(value, axis)


def each_once(values: Sequence[Any]) -> list[Any]:
    """Return the values that differ, in the order in which they come first."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def first_difference(everyone: Sequence[Sequence[str]]) -> tuple[int, int, str, str]:
    """Return (rank, line, rank 0's text of it, that rank's): where lines first differ."""
    mine = everyone[0]
    rank, theirs = next((r, other) for r, other in enumerate(everyone) if other != mine)
    pairs = enumerate(zip_longest(mine, theirs, fillvalue="nothing"))
    line, texts = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return rank, line, *texts


def parts_that_differ(mine: str, theirs: str) -> tuple[str, str]:
    """Return the options in which two long lines of the same differ; other lines as they are."""
    both = [_OPTION.findall(text) for text in (mine, theirs)]
    names, others = ([x.partition("=")[0].split()[:1] for x in some] for some in both)
    if max(len(mine), len(theirs)) < LONG or names != others:
        return mine, theirs
    only = [[x.strip() for x in some if x not in other] for some, other in (both, both[::-1])]
    head = re.match(r"[^:=,(]*: ", mine)
    where = head[0] if head else ""  # "param group 0: "
    mine, theirs = (where + (", ".join(some) or "nothing more") for some in only)
    return mine, theirs


_OPTION = re.compile(r"\s*\w+=\([^()]*\)|\s*\w+=[^,()]*|[^,()=]+")
LONG = 150


def mismatch(texts: Sequence[str]) -> MismatchError:
    """Return the error of ranks that announce what cannot go together; a text from each rank."""
    lines = [text.splitlines() for text in texts]
    rank, line, mine, theirs = first_difference(lines)
    mine, theirs = parts_that_differ(mine, theirs)
    if line:  # after the call, which is the first one
        mine, theirs = f"{lines[0][0]} with {mine}", f"{lines[rank][0]} with {theirs}"
    return MismatchError(
        f"the ranks make different calls: rank 0 {mine}, rank {rank} {theirs}.",
        cause="a call under `if rank == 0:`, one step more on some ranks, or an option "
        "that differs by rank.",
        fix="make the same calls, with the same options, on every rank. Nothing was changed."
        + (f" {UNUSED}" if any(SYNC in text for text in texts) else ""),
    )


Explains = Callable[[int, str, str], FzeroError | None]
"""(rank, the first line of rank 0 that differs, its own) -> an error that says more; None."""


def assert_same_everywhere(
    lines: Sequence[str], axis: Axis, *, what: str, explains: Explains | None = None
) -> None:
    """Raise `AxisError` on every rank, naming the first rank and line that differ.

    One round with digests; the lines themselves travel only when the digests differ.
    """
    if axis.runtime is Runtime.LOCAL:
        return
    performer = performer_of(axis)
    assert performer is not None
    if len(performer.call(SETUP_OR_CHECKPOINT, digest("\n".join(lines)))) == 1:
        return
    raise disagreement(performer.tell(list(lines)), what=what, explains=explains)


def disagreement(
    everyone: Sequence[Sequence[str]], *, what: str, explains: Explains | None = None
) -> FzeroError:
    """Return the error that names the first rank and line that differ, of the lines of each."""
    rank, _, mine, theirs = first_difference(everyone)
    if explains is not None and (said := explains(rank, mine, theirs)) is not None:
        return said
    mine, theirs = parts_that_differ(mine, theirs)
    return MismatchError(
        f"the ranks disagree about {what}: rank 0 has {mine}, rank {rank} has {theirs}.",
        cause="the model, an option or a branch of the step depends on what differs by rank.",
        fix=f"build the same on every rank; compare ranks 0 and {rank} first.",
    )


@contextmanager
def told_everywhere(axis: Axis, *, what: str) -> Generator[None]:
    """Tell of an error in this block to ranks that wait in `assert_same_everywhere`."""
    try:
        yield
    except Exception as error:
        with suppress(AxisError):  # this rank's own error says more
            assert_same_everywhere([f"{type(error).__name__}: {error}"], axis, what=what)
        raise


def broadcast(values: Sequence[Tensor], axis: Axis, source: int) -> list[Tensor]:
    """Each [*t] -> [*t]: the values of rank `source` of the axis, on every rank."""
    if axis.runtime is Runtime.LOCAL:
        return list(values)
    with torch.no_grad():
        wanted = [value.detach() for value in values if value.numel()]
        done = iter(lowering.broadcast(wanted, axis, source))
        return [next(done) if value.numel() else value.detach().clone() for value in values]
