"""`Mirror`: copies of a training in the memory of its hosts, which outlives its processes.

    update    a copy in memory of its own -> a thread writes it, as `save` writes a checkpoint of
              one process, and sends it to other hosts
    restore   which update is whole -> send each host what it lacks -> read, as `load` does

A copy is what one rank has at one update, in a folder whose name says so:

    <host>/<attempt>-update-000008-rank-00000-of-00002-after-000004/

While it is written it has a name that nobody reads; a rename ends that. Copies of all ranks of an
update, put together, are a checkpoint.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.checkpoint._load import finished, planned
from fzero.checkpoint._pieces import TensorPiece, pieces_of_rank
from fzero.checkpoint._process_states import LocalStates, local_states
from fzero.checkpoint._save import AsyncSave, draft_of, group_beside, run_beside, write_draft
from fzero.checkpoint._storage import chunks_of, read_pieces
from fzero.checkpoint.collective import (
    CheckpointError,
    Ranks,
    damaged,
    from_first,
    on_all_ranks,
    results_of_ranks,
    run_on_all_ranks,
)
from fzero.checkpoint.engine_state import RNG, EngineLike, buffer_pieces, form_of
from fzero.checkpoint.folders import PathLike, as_path, read_text, require_whole
from fzero.checkpoint.manifest import Manifest, read_manifest, require_tensors
from fzero.collectives import assert_same_everywhere, exchange_beside
from fzero.errors import AxisError, LayoutError, PhaseError, explain
from fzero.errors.check import is_count, require
from fzero.ranks.mesh import Axis
from fzero.state import TrainState

Thing = TypeVar("Thing")
T = TypeVar("T")

SLOTS = 2  # of each part on a host: the last whole update, and the one that is written
_WRITING = "writing-"  # how a folder is named that is no copy yet, or no more
_ENDED = "ended-"  # how a folder is named that says, with the rank, that its process has ended well
_TEXTS, _OF_PIECE = 2**17, 2**11  # bytes of a copy beside its values: at most, and of each piece

_WRITERS: dict[Path, str] = {}
"""{folder: the attempt that writes there}, of all mirrors of this process."""

_FLIGHTS: list[AsyncSave] = []
"""The copies that this process has on their way, of all its mirrors."""


class RankCopy(NamedTuple):
    """What a rank has copied at an update."""

    attempt: str  # of the processes that wrote it: another one after each restart
    update: int
    rank: int
    ranks: int
    complete: int  # the update before, of which all copies were there; 0: none
    host: str = ""  # where it is

    @property
    def name(self) -> str:
        """Of its folder."""
        rank = f"rank-{self.rank:05d}-of-{self.ranks:05d}"
        return f"{self.attempt}-update-{self.update:06d}-{rank}-after-{self.complete:06d}"


class _Flight(NamedTuple):
    """A copy that is on its way."""

    update: int
    written: threading.Event  # set when it is on this host, or never will be
    handle: AsyncSave  # over when it is on all hosts that keep it


class Mirror:
    """Copies of every k-th update in the memory of hosts: a restart goes on from there, no disk.

    A launcher as `torchrun --max-restarts` starts all ranks again when one has died. What they held
    is lost; what is in /dev/shm is not. Each rank copies its own part, P / W elements of parameters
    and of what the optimizer keeps, there and into the memory of a rank on another host:

        mirror = fzero.checkpoint.Mirror(every=10)
        state, extra = mirror.restore(train_step.init(params, optimizer))
        for number in range(extra.get("next", 0), steps):
            state, loss = train_step(state, batches[number])
            mirror.update(state, extra={"next": number + 1})
        mirror.close()

    A copy is taken while the update waits, and written and sent by a thread beside the next steps.
    There are two of each part: the last update that is whole on all ranks stays until the next one
    is. So a host holds 2 (1 + copies) times the parts of its ranks;
    `fzero.plan(...).mirror_bytes(copies)` says how many bytes that is. While it is written, a rank
    holds one more.

    The copies go when the run ends well: at `close()`, at the end of a `with` block without an
    exception, and else when all processes of a host have ended without one that nobody caught.
    `sys.exit(2)` is such an end, too; in a `with` block it keeps the copies.

    Args:
        folder: in a file system in memory, on each host; one run at a time uses it. Each host has a
            folder of its name in it. Default: one in /dev/shm, named after the user and the launch
            of torchrun; without torchrun only this process finds it again.
        every: k: the updates from one copy to the next. A restart repeats at most k of them; where
            a host or its memory is gone at most 2 k, for copies are sent beside the steps.
        copies: on how many other hosts each part is kept, too; on all others, if there are fewer:
            so on one host there are none.

    Raises:
        LayoutError: for options that cannot be, and without a folder where there is no /dev/shm; in
            a call, for a folder of another user, or one that others can write to.

    Example:
        >>> import tempfile, torch, fzero
        >>> def state_of(value):
        ...     return fzero.init({"w": torch.full((3,), value)}, fzero.optim.sgd(0.1), stage=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mirror = fzero.checkpoint.Mirror(folder, every=1)
        ...     mirror.update(state_of(5.0), extra={"next": 1})
        ...     again = fzero.checkpoint.Mirror(folder, every=1)  # of a process that was restarted
        ...     state, extra = again.restore(state_of(0.0))
        ...     again.close()
        >>> fzero.full_params(state), extra
        ({'w': tensor([5., 5., 5.])}, {'next': 1})
    """

    def __init__(self, folder: PathLike | None = None, *, every: int, copies: int = 1) -> None:
        require("every", every, is_count, "an int of 1 or more: updates between copies")
        wanted = "an int of 0 or more: on how many other hosts a part is copied"
        require("copies", copies, lambda value: is_count(value, 0), wanted)
        where = None if folder is None else Path(os.path.abspath(as_path("Mirror", folder)))
        self._folder, self._every, self._copies = where, every, copies
        self._home: _Home | None = None
        self._updates = 0  # that it was told of
        self._complete = 0  # the last one that is whole on all ranks
        self._flight: _Flight | None = None

    def update(
        self, state: TrainState | EngineLike, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Copy every k-th update that it is called after; otherwise return at once.

        Call it on all ranks after each update; the first, each k-th call and the one after it are
        collectives. All that `fzero.checkpoint.save` saves is copied: also random generators,
        buffers of an engine's module, options of its optimizer. With virtual ranks, give the
        stacked state.

        Args:
            state: one state or engine, idle, of the same ranks each time.
            extra: as for `save`: what JSON can hold, e.g. the position in the data; rank 0's.

        Raises:
            PhaseError: for a state between gradient and update, and where copies are there that
                nobody has restored.
            DonatedError: for a used-up one.
            LayoutError: for an `extra` or an optimizer state that cannot be copied.
            AxisError: when the ranks are at different updates, or others than before.
            CheckpointError: for too little shared memory, with both numbers: at the first call, if
                not by `restore` before; and what went wrong with the copies before.
        """
        updates = self._updates + 1
        if self._home is None:
            self._open(local_states("Mirror.update", state, apart=True), _require_empty)
        home = self._home
        assert home is not None
        if updates % self._every == 0:
            self._copy(home, state, extra, updates)
        elif self._flight is not None and updates % self._every == 1:
            # On all ranks, so that a restart repeats no more than k updates: one that is slow to
            # write may have taken part in this step, too.
            run_on_all_ranks(home.ranks, self._flight.written.wait, what="wait for the copies")
        self._updates = updates

    def _copy(self, home: _Home, thing: Any, extra: Mapping[str, Any] | None, update: int) -> None:
        """A state to copies: beside the steps that follow."""
        held = local_states("Mirror.update", thing, apart=True)
        if held.processes.axis != home.ranks.axis:
            raise AxisError(
                f"Mirror.update: a state on {held.processes.axis}, before on {home.ranks.axis}.",
                cause="states of two models, or of two meshes, given to one Mirror.",
                fix="use one Mirror, with a folder= of its own, for each of them.",
            )
        flight, self._flight = self._flight, None  # whether it has landed, or raises now

        def ready() -> None:
            if _WRITERS.setdefault(home.folder, home.attempt) != home.attempt:
                raise PhaseError(
                    f"Mirror.update: another Mirror of this program keeps its copies in "
                    f"{home.folder}.",
                    cause="two models, each with a Mirror, and no folder= for them; or a Mirror "
                    "that was made anew and restored, while the old one is still used.",
                    fix="give each Mirror a folder= of its own, and use one for each model.",
                )
            if flight is not None:
                flight.handle.result()

        _wait_for_copies()  # of another mirror, over the same process group
        draft = draft_of(held, extra, copies=True, ready=ready)
        if flight is not None:  # and so it has landed on all ranks
            _remove_earlier(home)
            self._complete = flight.update
        hosts, what = home.hosts, f"write {home.folder}"
        copy = RankCopy(home.attempt, update, hosts.rank, len(hosts.of_ranks), self._complete)
        nbytes = _bytes_of(draft.pieces) + len(json.dumps(draft.manifest.extra))
        run_on_all_ranks(home.ranks, lambda: _make_room(home, copy, nbytes), what=what)
        written, alone = threading.Event(), Ranks(axis=Axis(size=1), beside=True)

        def write() -> None:
            try:
                with _new_copy(home, copy) as folder:
                    write_draft(replace(draft, ranks=alone), folder)
            finally:
                written.set()

        def write_and_send() -> None:
            if not hosts.held:
                return write()
            run_on_all_ranks(home.beside, write, what=what)
            pairs = [(rank, to) for rank in range(copy.ranks) for to in hosts.keepers(rank)]
            _send(home, [(rank, to, copy._replace(rank=rank)) for rank, to in pairs])

        handle = run_beside(write_and_send, what=f"Mirror: the copies of update {update}")
        _FLIGHTS[:] = [handle]
        self._flight = _Flight(update, written, handle)

    def restore(self, like: Thing) -> tuple[Thing, dict[str, Any]]:
        """Return the newest update that is whole somewhere, placed as `like` is. A collective.

        Each rank reads what it needs from the memory of its own host, or is sent it by another; the
        number of ranks, the stage and the hosts may be others than before. A damaged copy is passed
        over for a good one of the same update, or else for the update before. Random generators are
        set as by `load`.

        Args:
            like: as for `fzero.checkpoint.load`: a new state, or an engine, which gets the values.

        Returns:
            The state or engine, and the `extra` of that update. Without copies, as at the first
            start: `like` itself, and {}.

        Raises:
            LayoutError: for copies of another model or optimizer, naming every difference.
            CheckpointError: where copies are left and no update is whole; for too little shared
                memory.
            PhaseError: inside a coalesced step.
        """
        held = local_states("Mirror.restore", like, apart=True)
        found = self._open(held, lambda home: _restored(home, held))
        assert self._home is not None
        _WRITERS[self._home.folder] = self._home.attempt
        if found is None:
            return like, {}
        thing, update, extra = found
        self._updates = self._complete = update
        return thing, extra

    def close(self) -> None:
        """Remove the copies: the run is over. A collective, if anything was copied or restored.

        Raises:
            CheckpointError: what went wrong with the last copies, which stay then; of a rank that
                is gone, `AxisError`.
        """
        home, flight = self._home, self._flight
        self._forget()
        if home is None:
            return
        with on_all_ranks(home.ranks, what="wait for the copies"):
            if flight is not None:
                flight.handle.result()
        if home.hosts.leads:
            _remove_all(home.folder)
        let_go(home.folder.parent)

    def _open(self, held: LocalStates, begin: Callable[[_Home], T]) -> T:
        """Make the folders, as a new attempt; return what it begins with. A collective."""
        _wait_for_copies()
        self._forget()
        home = _open_home(self._folder, self._every, self._copies, held)
        begun = begin(home)
        self._home = home
        atexit.register(self._ends)
        return begun

    def _ends(self) -> None:
        """Leave at the end of the process, unclosed."""
        failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if (home := self._home) is None or (failed and _outlives(self._folder)):
            return
        if os.getpid() != home.pid or _WRITERS.get(home.folder, home.attempt) != home.attempt:
            return  # another process, or another mirror of this one, has the folder now
        # The last one of a host to end removes the copies. So one that ends early, or badly by
        # `sys.exit`, takes no copy from those that are still at work.
        ranks = home.hosts.ranks_on(home.hosts.own)
        marks = {rank: home.folder / f"{_ENDED}{rank:05d}-{home.attempt}" for rank in ranks}
        with suppress(OSError):  # somebody has removed the folder
            marks[home.hosts.rank].mkdir(exist_ok=True)
            if all(mark.exists() for mark in marks.values()):
                _remove_all(home.folder)

    def _forget(self) -> None:
        """Hold nothing any more; the copies stay."""
        atexit.unregister(self._ends)
        if self._home is not None and _WRITERS.get(self._home.folder) == self._home.attempt:
            del _WRITERS[self._home.folder]
        self._home, self._flight, self._updates, self._complete = None, None, 0, 0

    def __enter__(self) -> Mirror:
        """Return the mirror itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it; after an exception, leave the copies."""
        if error[0] is None:
            self.close()
        elif _outlives(self._folder):
            self._forget()

    def __repr__(self) -> str:
        if (home := self._home) is None:
            return f"<Mirror: every {self._every} updates, nothing is copied yet>"
        return (
            f"<Mirror: every {self._every} updates, in {home.folder}; each part is on "
            f"{home.hosts.held} other hosts; update {self._complete} is whole>"
        )


def part_bytes(state: TrainState, rank: int) -> int:
    """Return the bytes of the values that one rank copies of a state."""
    return sum(piece.values.nbytes for piece in pieces_of_rank(state, rank))


def mirror_bytes(part_bytes: int, copies: int) -> int:
    """Return the memory for each rank, in the folder on its host: 2 (1 + copies) parts.

    A host keeps as many parts of other hosts' ranks as others keep of its own.
    """
    return SLOTS * (1 + copies) * part_bytes


def _wait_for_copies() -> None:
    """Wait until nothing is on its way from this process, of any mirror; errors are its own."""
    for handle in _FLIGHTS:
        with suppress(Exception):
            handle.result()


def _send(home: _Home, moves: Sequence[tuple[int, int, RankCopy]]) -> None:
    """Send copies from host to host: (sender, receiver, what). A collective.

    An error of one rank is raised on all: nobody waits for a copy that does not come.
    """
    me = home.hosts.rank

    def look() -> dict[str, dict[str, int]]:
        found = {}
        for name in {copy.name for sender, _, copy in moves if sender == me}:
            files = [x for x in (home.folder / name).rglob("*") if x.is_file() and x.name != LOCK]
            sizes = {os.fspath(x.relative_to(home.folder / name)): x.stat().st_size for x in files}
            found[name] = dict(sorted(sizes.items()))
        return found

    told = results_of_ranks(home.beside, look, what=f"list {home.folder}")
    sent, got = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
    taken = defaultdict[RankCopy, dict[str, Tensor]](dict)
    for sender, receiver, copy in moves:
        for file, size in told[sender][copy.name].items():
            if sender == me:
                path = os.fspath(home.folder / copy.name / file)
                sent.append((receiver, torch.from_file(path, size=size, dtype=torch.uint8)))
            if receiver == me:
                taken[copy][file] = torch.empty(size, dtype=torch.uint8, device="cpu")
                got.append((sender, taken[copy][file]))
    exchange_beside(sent, got, home.beside.axis)

    with on_all_ranks(home.beside, what=f"write {home.folder}"):
        for copy, files in taken.items():
            _make_room(home, copy, sum(x.nbytes for x in files.values()))
            with _new_copy(home, copy) as folder:
                for file, x in files.items():
                    (folder / file).parent.mkdir(mode=0o700, exist_ok=True)
                    values: Any = x.numpy()
                    (folder / file).write_bytes(values)


# Copies to a state.


def _restored(home: _Home, held: LocalStates) -> tuple[Any, int, dict[str, Any]] | None:
    """Return what is held with the values of the newest whole update, its number and `extra`.

    None without copies. A collective. Raises `CheckpointError` where there are copies and no update
    is whole, and as `load`.
    """
    if (found := _newest(home)) is None:
        return None
    where, saved = home.folder, _joined(found)
    texts = {copy.rank: part.rng for copy, part in found.items()}

    with torch.no_grad():
        with on_all_ranks(home.ranks, what=f"read {where}"):
            plan = planned(held, saved, where, rng=texts.get(home.hosts.rank))
            require_tensors(saved, plan.pieces, where)
        chunks = (chunk for piece in plan.pieces for chunk, *_ in chunks_of(saved, piece))
        needed = {chunk.file.partition("/")[0] for chunk in chunks}
        hosts, of_ranks = home.hosts, home.ranks.tell(needed)
        moves = list[tuple[int, int, RankCopy]]()  # to each host what its ranks read and it lacks
        for host in hosts.names:
            there, own = {x.name for x in found if x.host == host}, hosts.ranks_on(host)
            for name in sorted({x for rank in own for x in of_ranks[rank]} - there):
                source = next(x for x in found if x.name == name)
                pair = (hosts.ranks_on(source.host), own)  # the ranks of a host take turns
                sender, receiver = (ranks[source.rank % len(ranks)] for ranks in pair)
                moves.append((sender, receiver, source))
        _send(home, moves)
        with on_all_ranks(home.ranks, what=f"read {where}"):
            # No other file is checked: all were, before.
            here = {k: x for k, x in saved.files.items() if k.partition("/")[0] in needed}
            read_pieces(plan.pieces, where, replace(saved, files=here), (-1, 1))
        thing = finished(held, saved, plan)
    _remove_earlier(home, [*found])
    return thing, next(iter(found)).update, saved.extra


class _Part(NamedTuple):
    """What a good copy says."""

    manifest: Manifest
    rng: str  # the random generators of its rank


def _newest(home: _Home) -> dict[RankCopy, _Part] | None:
    """Return the good copies of the newest update that is whole. A collective."""

    def look() -> list[RankCopy]:
        return copies_in(home.folder) if home.hosts.leads else []

    told = results_of_ranks(home.ranks, look, what=f"list {home.folder}")
    copies, bad = [one for some in told for one in some], list[str]()
    for some in whole_updates(copies):
        found = results_of_ranks(
            home.ranks, lambda some=some: _checked(home, some), what=f"read {home.folder}"
        )
        checked = {one: part for parts in found for one, part in parts.items()}
        bad += [part for part in checked.values() if isinstance(part, str)]
        good = {one: part for one, part in checked.items() if not isinstance(part, str)}
        if good and not missing([*good]):
            return good
    if not copies:
        if home.hosts.rank == 0 and _restarts():
            _warn_begins_anew(home, "torchrun has started the ranks again, and there are no copies")
        return None
    newest = max((one.update, one.attempt) for one in copies)
    last = [one for one in copies if (one.update, one.attempt) == newest]
    lost = ", ".join(map(str, missing(last)))
    if bad or any(one.complete for one in copies):
        lines = [f"\n  update {newest[0]}: no copy of rank {lost}"] if lost else []
        raise CheckpointError(
            f"Mirror.restore: no update is whole in {home.folder.parent}:"
            f"{''.join(lines + [f'{chr(10)}  {text}' for text in bad[:8]])}",
            cause="a host that is gone with the only copy of a rank, copies that were removed when "
            "a rank had ended, or memory that another program wrote to.",
            fix="load a checkpoint of fzero.checkpoint.save, and remove the folder on all hosts; "
            "with copies=1 and more hosts than one, one of them may go. Nothing was changed.",
        )
    if home.hosts.rank == 0:
        seen = f"of update {newest[0]}, the first one, rank {lost} has no copy"
        _warn_begins_anew(home, seen)
    _remove_earlier(home)
    return None


def whole_updates(copies: Sequence[RankCopy]) -> list[list[RankCopy]]:
    """Return the copies of each update of which all ranks have one, the newest update first.

    Example:
        >>> here, there = RankCopy("a", 8, 0, 2, 4, "x"), RankCopy("b", 8, 1, 2, 4, "y")
        >>> len(whole_updates([here, there])), len(whole_updates([here, here._replace(rank=1)]))
        (0, 1)
    """
    updates: dict[Any, list[RankCopy]] = defaultdict(list)
    for one in sorted(copies):
        updates[one.update, one.attempt, one.ranks].append(one)
    newest = sorted(updates, reverse=True)
    return [updates[key] for key in newest if not missing(updates[key])]


def missing(copies: Sequence[RankCopy]) -> list[int]:
    """Return the ranks of one update of which there is no copy."""
    there = {one.rank for one in copies}
    return [rank for rank in range(copies[0].ranks) if rank not in there]


def _checked(home: _Home, copies: Sequence[RankCopy]) -> dict[RankCopy, _Part | str]:
    """Return what the copies on this host say, or what is wrong with them; its ranks share them."""
    own, ranks = home.hosts.own, home.hosts.ranks_on(home.hosts.own)
    found: dict[RankCopy, _Part | str] = {}
    here = [one for one in copies if one.host == own]
    for one in here[ranks.index(home.hosts.rank) :: len(ranks)]:
        path = home.folder / one.name
        try:
            if seen := why_not_private(path):
                raise damaged(path, seen)
            saved = read_manifest(path)
            require_whole(path / saved.data, saved.files)
            found[one] = _Part(saved, read_text(path / saved.data / RNG.format(0)))
        except CheckpointError as error:
            found[one] = str(error).splitlines()[0]
    return found


def _joined(found: Mapping[RankCopy, _Part]) -> Manifest:
    """Return the manifest of all copies of an update as one of a checkpoint, in their folder."""
    tensors: dict[str, Any] = {}
    buffers: dict[str, dict[str, str]] = defaultdict(dict)
    files: dict[str, list[int]] = {}
    manifests = {copy.rank: (copy.name, part.manifest) for copy, part in found.items()}
    for rank, (folder, one) in sorted(manifests.items()):
        files |= {f"{folder}/{one.data}/{file}": digest for file, digest in one.files.items()}
        for name, entry in one.tensors.items():
            own = re.sub("^buffers/0/", f"buffers/{rank}/", name)  # each rank has its own
            whole = tensors.setdefault(own, {"dtype": entry["dtype"], "chunks": []})
            for start, numel, file, *place in entry["chunks"]:
                whole["chunks"].append([start, numel, f"{folder}/{one.data}/{file}", *place])
        for path, forms in one.module["buffers"].items():
            buffers[path][str(rank)] = forms["0"]
    first = manifests[0][1]
    module = {**first.module, "buffers": dict(buffers)}
    return replace(first, tensors=tensors, files=files, module=module)


def _warn_begins_anew(home: _Home, seen: str) -> None:
    text = explain(
        f"Mirror.restore: {seen} in {home.folder.parent}: training begins anew.",
        cause="a rank that died before the first copies were whole; or ranks that ended with "
        "sys.exit(n), outside of a `with` block of the mirror.",
        fix="a smaller every= has the first copies earlier; `with Mirror(...) as mirror:`.",
    )
    warnings.warn(text, UserWarning, stacklevel=5)


# Which ranks share a host, who keeps whose copy, and where.


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where the ranks are, as one of them sees it."""

    of_ranks: tuple[str, ...]
    rank: int
    copies: int  # on other hosts, if there are so many

    @property
    def own(self) -> str:
        """The host of this rank."""
        return self.of_ranks[self.rank]

    @property
    def names(self) -> list[str]:
        """All hosts, in the order of their first ranks."""
        return list(dict.fromkeys(self.of_ranks))

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its host, which looks after the folder."""
        return self.ranks_on(self.own)[0] == self.rank

    @property
    def held(self) -> int:
        """How many copies there are of each part on other hosts."""
        return min(self.copies, len(self.names) - 1)

    def ranks_on(self, host: str) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, one in enumerate(self.of_ranks) if one == host]

    def keepers(self, rank: int) -> list[int]:
        """Return the ranks, each on another host than `rank` and than the others, that copy it.

        Example:
            >>> Hosts(of_ranks=("a", "a", "b", "b"), rank=0, copies=1).keepers(1)
            [3]
        """
        names, host = self.names, self.of_ranks[rank]
        place, own = self.ranks_on(host).index(rank), names.index(host)
        after = (names[(own + step) % len(names)] for step in range(1, self.held + 1))
        return [ranks[place % len(ranks)] for ranks in map(self.ranks_on, after)]

    def parts_on(self, host: str) -> list[int]:
        """Return the ranks of which a host has the part, its own ones and those that it keeps."""
        every = range(len(self.of_ranks))
        return [x for x in every if host in {self.of_ranks[k] for k in (x, *self.keepers(x))}]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Home:
    """Where the processes of a training keep copies."""

    ranks: Ranks
    beside: Ranks  # the same, over a group that a mirror's thread has to itself
    hosts: Hosts
    folder: Path  # on this host
    attempt: str
    pid: int  # a forked process runs what is left to do at the end, too
    needed: int  # bytes, of all copies on this host
    free: int  # for them when the mirror was made


def _open_home(given: Path | None, every: int, copies: int, held: LocalStates) -> _Home:
    """Make the folder of each host, and see that there is room in it. A collective."""
    ranks = held.processes

    def say() -> tuple[str, str]:
        if given is not None:
            return host_name(), os.fspath(given)
        if not SHARED_MEMORY.is_dir():
            raise LayoutError(
                f"Mirror: there is no {SHARED_MEMORY} on this system.",
                cause="a system without a file system in memory, as macOS.",
                fix="Mirror(folder=..., every=...), with a folder that outlives the processes.",
            )
        run, pid = _launch()  # each launch has another one
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", run)[:64]
        digest = hashlib.sha256(f"{run} {pid} {process_of(pid)}".encode()).hexdigest()
        folder = SHARED_MEMORY / f"{MIRROR}-{os.geteuid()}-{safe}-{digest[:16]}"
        return host_name(), os.fspath(folder)

    told = results_of_ranks(ranks, say, what="make a Mirror")
    assert_same_everywhere([f"every={every}", f"copies={copies}"], ranks.axis, what="the Mirror")
    hosts = Hosts(of_ranks=tuple(host for host, _ in told), rank=ranks.axis.rank, copies=copies)
    base = Path(told[hosts.ranks_on(hosts.own)[0]][1])
    folder = base / hosts.own

    def make() -> tuple[int, int]:
        if given not in (None, base):
            raise LayoutError(
                f"Mirror: folder={given} on rank {hosts.rank}, {base} on another rank of the host "
                f"{hosts.own}.",
                cause="a folder whose name has the rank in it.",
                fix="give all ranks of a host the same folder.",
            )
        if hosts.leads:
            sweep_gone()
        if given is None:
            hold(base, "Mirror", process_of(_launch()[1]) if hosts.leads else "")
        for each in (base, folder):  # a folder= is held by nobody: it outlives the processes
            make_private(each, "Mirror")
        forms = {path: {"0": form_of(value)} for path, value in held.buffers.items()}
        part = buffer_pieces(held.buffers, forms, 0)
        for state, rank in zip(held.states, held.ranks, strict=True):
            part += pieces_of_rank(state, rank)
        return _bytes_of(part), sum(_bytes_in(folder)) if hosts.leads else 0

    sizes = results_of_ranks(ranks, make, what=f"make {folder}")
    parts = {host: hosts.parts_on(host) for host in hosts.names}
    needed = {host: SLOTS * sum(sizes[rank][0] for rank in some) for host, some in parts.items()}
    free = {host: sizes[hosts.ranks_on(host)[0]][1] for host in hosts.names}

    for host in hosts.names:
        if needed[host] > free[host]:
            raise CheckpointError(
                f"Mirror: its copies need {needed[host]:,} bytes in {base / host} on the host "
                f"{host}, and {free[host]:,} bytes are free.",
                cause="a small /dev/shm (64 MB in a container of Docker, half of the memory "
                "elsewhere), or what other programs keep there.",
                fix=_MORE_ROOM,
            )
    return _Home(
        ranks=ranks,
        beside=Ranks(axis=group_beside(ranks.axis, use="mirrors"), beside=True),
        hosts=hosts,
        folder=folder,
        attempt=from_first(ranks, lambda: secrets.token_hex(8), what="make a Mirror"),
        pid=os.getpid(),
        needed=needed[hosts.own],
        free=free[hosts.own],
    )


_MORE_ROOM = (
    "docker run --shm-size=..., or mount -o remount,size=... /dev/shm; a folder= in more memory; "
    "copies=0; or remove what is of no use there (ls -l /dev/shm)."
)


def host_name() -> str:
    """Return the name of this host, as a file name: FZERO_HOST, or the system's.

    Raises `LayoutError` for a name without a letter or a digit.
    """
    name = os.environ.get("FZERO_HOST") or socket.gethostname()
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    if re.search(r"[A-Za-z0-9]", safe):
        return safe
    raise LayoutError(
        f"FZERO_HOST={name!r} names no host.",
        cause="a variable of the shell that was not expanded.",
        fix="export FZERO_HOST as a word, the same for all ranks of a host; or unset it.",
    )


def _launch() -> tuple[str, int]:
    """Return the name of this launch, and the process that would start its ranks again.

    Ranks that torchrun starts again have the same agent as their parent. Without torchrun nobody
    starts them again: it is this process itself.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return ("process", os.getpid()) if run is None else (run, os.getppid())


def _restarts(name: str = "RESTART_COUNT") -> int:
    """Return how often torchrun has started these ranks again."""
    return int(os.environ.get(f"TORCHELASTIC_{name}") or 0)


def _outlives(given: Path | None) -> bool:
    """Whether a later process finds the copies in a folder, if this one ends with an error."""
    return given is not None or _restarts() < _restarts("MAX_RESTARTS")


# What is in the folder of a host.


def copies_in(folder: Path) -> list[RankCopy]:
    """Return the copies in the folder of a host, the oldest update first, by their names alone."""
    found = []
    for path in folder.iterdir():
        if (name := _NAME.fullmatch(path.name)) is not None:
            update, rank, ranks, complete = map(int, name.groups()[1:])
            found.append(RankCopy(name[1], update, rank, ranks, complete, folder.name))
    return sorted(found, key=lambda one: (one.update, one))


_NAME = re.compile(r"([0-9a-f]{16})-update-(\d+)-rank-(\d+)-of-(\d+)-after-(\d+)")


@contextmanager
def _new_copy(home: _Home, copy: RankCopy) -> Iterator[Path]:
    """Make the folder of a copy; at the end of the block it gets its name, unless that raises."""
    writing = home.folder / f"{_WRITING}{copy.name}"
    shutil.rmtree(writing, ignore_errors=True)  # of an attempt that was killed; no link
    writing.mkdir(mode=0o700)
    try:
        yield writing
        writing.rename(home.folder / copy.name)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def _make_room(home: _Home, copy: RankCopy, nbytes: int) -> None:
    """Remove the older copies of a rank, but for that of the last update that is whole.

    Raises `CheckpointError` where there is less memory than a new one takes.
    """
    for old in copies_in(home.folder):
        if (old.attempt, old.rank) == (copy.attempt, copy.rank) and old.update != copy.complete:
            gone = home.folder / f"{_WRITING}{old.name}"  # no copy before its first file is gone
            shutil.rmtree(gone, ignore_errors=True)
            with suppress(OSError):
                (home.folder / old.name).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    free, own = _bytes_in(home.folder)
    if nbytes <= free:
        return
    seen = (
        f"Mirror: a copy needs {nbytes:,} bytes more in {home.folder}, and {free:,} bytes are free "
        f"now. Its copies take {own:,} bytes there. When the mirror was made, {home.free:,} bytes "
        f"were free for the {home.needed:,} that it needs in all"
    )
    cause = "a state that has grown since (an optimizer that makes its own in the first step, a "
    cause += "larger extra=)."
    if (others := home.free - own - free) > 0:
        seen += f": since then others have taken {others:,} bytes"
        cause = "another program on this host that has put files into this memory meanwhile."
    raise CheckpointError(f"{seen}.", cause=cause, fix=_MORE_ROOM)


def _bytes_of(pieces: Sequence[TensorPiece]) -> int:
    """Return how many bytes a copy of pieces takes at most."""
    return _TEXTS + sum(piece.values.nbytes + _OF_PIECE for piece in pieces)


def _bytes_in(folder: Path) -> tuple[int, int]:
    """Return the bytes that are free, and those that files in a folder take now."""
    found, taken = os.statvfs(folder), 0
    for root, _, names in os.walk(folder):  # which goes on where another rank removes something
        for name in names:
            with suppress(FileNotFoundError):
                taken += os.lstat(os.path.join(root, name)).st_size
    return found.f_bavail * found.f_frsize, taken


def _remove_earlier(home: _Home, keep: Sequence[RankCopy] = ()) -> None:
    """Remove what other attempts have left on this host, but for these copies.

    The first rank of a host does, when no other is at work there on what is removed.
    """
    if home.hosts.leads:
        names = {one.name for one in keep if one.host == home.hosts.own}
        for path in _own_files(home.folder):
            if home.attempt not in path.name and path.name not in names:
                shutil.rmtree(path, ignore_errors=True)


def _remove_all(folder: Path) -> None:
    """Remove every copy on this host; then the folders, if nothing else is in them."""
    for path in _own_files(folder):
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()
        if [path.name for path in folder.parent.iterdir()] == [LOCK]:
            (folder.parent / LOCK).unlink()
        folder.parent.rmdir()


def _own_files(folder: Path) -> list[Path]:
    kinds = ("*-update-*", f"{_WRITING}*", f"{_ENDED}*")
    return [path for kind in kinds for path in folder.glob(kind)]


def _require_empty(home: _Home) -> None:
    """Raise `PhaseError` where copies are that nobody has asked for. A collective."""
    with on_all_ranks(home.ranks, what=f"list {home.folder}"):
        if found := copies_in(home.folder):
            raise PhaseError(
                f"Mirror.update: {home.folder} has copies that were not restored: "
                f"{found[-1].name}.",
                cause="a run that was started again and did not call restore, which would have "
                "lost them now; or two mirrors in one folder.",
                fix="call mirror.restore(state) before the first update, or remove the folder; "
                "give each Mirror a folder= of its own.",
            )


# Folders in the memory of this host, of this user alone: they outlive their processes.
#
# Who can write to a folder can make a file of the name that is read next, or a link, through which
# a program would write to another file of its own user. So a folder is used only if nobody else can
# write there, nor put another one in its place.
#
# Nobody else frees what is in memory. So each folder has a lock, which its processes hold as long
# as they live, and which may name one more process, that would start them again. When the lock is
# free and that process is gone, the next program of the same user removes the folder.

SHARED_MEMORY = Path("/dev/shm")
LOCK = ".lock"
MIRROR, REPLAY = "fzero-mirror", "fzero-replay"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_HELD: dict[Path, int] = {}
"""{folder: its lock, open}, of this process."""


def new_folder(kind: str) -> Path:
    """Return a new folder in memory, which this process holds; sweep those of programs gone.

    On a system without a file system in memory, it is among the temporary files.
    """
    sweep_gone()
    folder = _memory_folder() / f"{kind}-{os.geteuid()}-{secrets.token_hex(8)}"
    hold(folder, kind)
    return folder


def hold(folder: Path, name: str, keeper: str = "") -> None:
    """Make a folder for this user alone, and hold it until the end of this process.

    name: of the call, for an error. keeper: a process that keeps it, too, as `process_of` says it.

    Raises `LayoutError` for a folder of others.
    """
    import fcntl  # not on Windows, where fzero can be imported all the same

    while not _is_held(folder):
        try:
            make_private(folder, name)
            opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
        except FileNotFoundError:
            continue  # swept just now, by another program of this user that saw no lock in it
        fcntl.flock(opened, fcntl.LOCK_SH)
        let_go(folder)
        _HELD[folder] = opened  # unless it was swept before the lock was there
    if keeper:
        os.pwrite(_HELD[folder], keeper.encode(), 0)


def _is_held(folder: Path) -> bool:
    opened = _HELD.get(folder)
    try:
        return opened is not None and os.path.samestat(os.fstat(opened), os.lstat(folder / LOCK))
    except OSError:
        return False


def let_go(folder: Path) -> None:
    """Hold a folder no longer."""
    if (opened := _HELD.pop(folder, None)) is not None:
        os.close(opened)


def remove_folder(folder: Path) -> None:
    """Remove a folder in memory, and hold it no longer."""
    shutil.rmtree(folder, ignore_errors=True)
    let_go(folder)


def sweep_gone() -> None:
    """Remove this user's folders in memory whose programs are gone."""
    import fcntl

    base, user = _memory_folder(), os.geteuid()
    for folder in [x for kind in (MIRROR, REPLAY) for x in base.glob(f"{kind}-{user}-*")]:
        if why_not_private(folder) or _is_held(folder):
            continue
        try:
            opened = os.open(folder / LOCK, os.O_RDWR | _NO_LINK)
        except FileNotFoundError:
            with suppress(OSError):
                folder.rmdir()  # of a program that has ended, or will make it again
            continue
        except OSError:
            continue
        with suppress(OSError):  # somebody holds it
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_gone(os.read(opened, 1024).decode(errors="replace")):
                shutil.rmtree(folder, ignore_errors=True)
        os.close(opened)


def process_of(pid: int) -> str:
    """Return what tells a process from all others, also from one that has its number later.

    The boot of the machine, the namespaces in which its number and the time of its start are what
    they are, both of these; "unknown" where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = ",".join(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "time"))
        return f"{boot} {spaces} {pid} {_state_and_start(pid)[1]}"
    except OSError:
        return "unknown"


def _is_gone(keeper: str) -> bool:
    """Whether the process that keeps a folder has surely ended: of another container none has."""
    here, said = process_of(os.getpid()).split(), keeper.split()
    if not said:
        return True  # nobody keeps it
    if len(said) != 4 or len(here) != 4 or not said[2].isdigit():
        return False
    if said[0] != here[0]:
        return True  # memory does not outlive a boot, nor processes
    if said[1] != here[1]:
        return False
    try:
        state, start = _state_and_start(int(said[2]))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in "ZX" or start != said[3]


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process, and when it has started, in ticks since the boot."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()  # the name before may have anything in it
    return fields[0], fields[19]


def _memory_folder() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


# Whose a folder is.


def make_private(folder: Path, name: str) -> None:
    """Make a folder for this user alone, and those above it that are not there.

    name: of the call, for an error.

    Raises `LayoutError` for one that is another user's, that others can write to, or that others
    could put another one in the place of.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            with suppress(FileExistsError):
                each.mkdir(mode=0o700)
    trusted = [os.geteuid(), 0]
    with suppress(OSError, ValueError):  # in some containers root appears as another user
        maps = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if not any(int(first) == 0 for first, _, _ in maps):
            trusted.append(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    found = [(folder, why_not_private(folder))]
    found += [(each, _seen(each, trusted, is_above=True)) for each in _way_to(folder)]
    for each, seen in found:
        if seen:
            raise LayoutError(
                f"{name}: {each} {seen}.",
                cause="a folder of another user's program, or one that several users share: "
                "whoever writes there could have this run read copies of his, or write through a "
                "link of his.",
                fix=f"give a folder of your own, as folder=/dev/shm/$USER/run, or chmod 700 {each} "
                "if it is yours.",
            )


def why_not_private(folder: Path) -> str:
    """Return why a folder is not this user's alone; "" if it is. What is above it is not seen."""
    return _seen(folder, (os.geteuid(),), is_above=False)


def _way_to(folder: Path) -> Iterator[Path]:
    """Yield the folders above one, and those above of what they are links to."""
    for each in folder.parents:
        yield each
        if each.is_symlink():
            yield each.resolve()
            yield from _way_to(each.resolve())


def _seen(folder: Path, users: Sequence[int], *, is_above: bool) -> str:
    """Return what is wrong with a folder. is_above: others may write there as in /tmp."""
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        foreign = f"is a link of {_user(found.st_uid)}" if found.st_uid not in users else ""
        return foreign if is_above else "is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid not in users:
        return f"belongs to {_user(found.st_uid)}"
    if found.st_mode & _OTHERS and not (is_above and found.st_mode & stat.S_ISVTX):
        return f"can be written by others ({stat.filemode(found.st_mode)})"
    return ""


def _user(uid: int) -> str:
    with suppress(ImportError, KeyError):
        import pwd

        return f"the user {pwd.getpwuid(uid).pw_name}"
    return f"the user {uid}"
