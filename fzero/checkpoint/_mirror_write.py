"""A state to copies: into the memory of this host now, the rest beside the steps that follow."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from fzero.checkpoint._mirror_file import (
    CopyFile,
    Header,
    Label,
    copy_bytes,
    fill,
    header_text,
    seal,
    slot_bytes,
    table_of,
    take_slot,
)
from fzero.checkpoint._mirror_home import SLOTS, WRITING, Home, explains_no_room
from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint._process_states import Held
from fzero.checkpoint._save import AsyncSave, Draft, pieces_of, run_beside
from fzero.checkpoint.collective import everywhere
from fzero.checkpoint.engine_state import buffer_pieces, form_of
from fzero.collectives import exchange_beside

Slots = MutableMapping[int, list[CopyFile]]
"""{rank: the files of its copies that this process writes, the older one first}."""


_BESIDE: list[AsyncSave] = []
"""The copies that this process has on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A copy that is on its way."""

    update: int
    sealed: threading.Event  # set when it is on this host, or never will be
    handle: AsyncSave

    def land(self) -> None:
        """Wait until it is on all hosts that keep it; raise what went wrong."""
        self.handle.result()


def wait_for_copies() -> None:
    """Wait until nothing is on its way from this process, of any mirror; errors are its own."""
    for handle in _BESIDE:
        with suppress(Exception):
            handle.result()


def part_of(held: Held) -> list[TensorPiece]:
    """Return what a process copies of its states, and of its module's buffers: views."""
    forms = {path: {"0": form_of(value)} for path, value in held.buffers.items()}
    return [*pieces_of(held), *buffer_pieces(held.buffers, forms, 0)]


def start_copy(home: Home, draft: Draft, slots: Slots, *, update: int, complete: int) -> Flight:
    """Copy what this process has into memory that no step writes; start the rest. A collective.

    complete: the update that is whole on all ranks, of which no copy is touched.

    Raises `CheckpointError` on every rank if one lacks the memory; the last update is still whole.
    """
    label = Label(home.attempt, update, home.rank, len(home.hosts.of_ranks))
    forms = {path: {"0": form_of(value)} for path, value in draft.buffers.items()}
    own = {path: {str(home.rank): form["0"]} for path, form in forms.items()}
    pieces = [*draft.pieces, *buffer_pieces(draft.buffers, own, home.rank)]
    module = {**draft.manifest.module, "buffers": forms}
    tensors = table_of(pieces, label.name)
    manifest = replace(draft.manifest, data=f"data-{home.attempt}", module=module, tensors=tensors)
    text = header_text(Header(label=label, complete=complete, rng=draft.rng, manifest=manifest))
    nbytes = copy_bytes(pieces, text)

    def copied() -> CopyFile:
        slot = _take(home, slots, label._replace(update=complete), nbytes)
        fill(slot, pieces)
        return slot

    slot, sealed = everywhere(home.ranks, copied, what=f"write {home.folder}"), threading.Event()

    def seal_own() -> Tensor:
        try:
            seal(slot, text, nbytes)
            _commit(home, slots, slot, label)
        finally:
            sealed.set()
        return slot.memory[:nbytes]

    def run() -> None:
        if home.hosts.held:
            _send(home, slots, seal_own, label, complete)
        else:
            seal_own()

    handle = run_beside(run, what=f"Mirror: the copies of update {update}")
    _BESIDE[:] = [handle, *(one for one in _BESIDE if not one.done())]
    return Flight(update=update, sealed=sealed, handle=handle)


def _send(
    home: Home, slots: Slots, seal_own: Callable[[], Tensor], label: Label, complete: int
) -> None:
    """Give the copy that is sealed to ranks that keep it, and keep those of others. A collective.

    An error of one rank is raised on all: nobody waits for a copy that does not come.
    """
    mine = everywhere(home.beside, seal_own, what=f"write {home.folder}")
    sizes = home.beside.tell(mine.numel())
    kept = home.hosts.kept_by(home.rank)

    def take() -> dict[int, CopyFile]:
        last = {rank: label._replace(rank=rank, update=complete) for rank in kept}
        return {rank: _take(home, slots, one, sizes[rank]) for rank, one in last.items()}

    taken = everywhere(home.beside, take, what=f"write {home.folder}")
    exchange_beside(
        [(rank, mine) for rank in home.hosts.keepers(home.rank)],
        [(rank, slot.memory[: sizes[rank]]) for rank, slot in taken.items()],
        home.beside.axis,
    )
    for rank, slot in taken.items():
        _commit(home, slots, slot, label._replace(rank=rank))


def _take(home: Home, slots: Slots, last: Label, nbytes: int) -> CopyFile:
    """Return a file to write a rank's copy into: an older one, or a new one.

    last: the label of its last copy that counts, which stays.
    """
    own = slots.setdefault(last.rank, [])
    spare = [slot for slot in own if slot.file.name != last.name]
    old = spare[0] if len(own) >= SLOTS else None
    if old is not None:
        own.remove(old)
    name = f"{WRITING}{last.rank:05d}-{home.attempt}-{secrets.token_hex(8)}"
    more = slot_bytes(nbytes) - (0 if old is None else old.memory.numel())
    with explains_no_room(home, more):
        return take_slot(home.folder / name, old, nbytes)


def _commit(home: Home, slots: Slots, slot: CopyFile, label: Label) -> None:
    """Give a file that is whole the name of a copy."""
    slots[label.rank].append(slot.named(home.folder / label.name))
