"""Copies to a state: the newest update that is whole somewhere, read here or sent from there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint._load import LoadPlan, finished, planned
from fzero.checkpoint._mirror_file import (
    Header,
    extent,
    joined,
    mapped,
    names_of,
    read_header,
    read_pieces,
    require_body,
)
from fzero.checkpoint._mirror_find import HostCopy, missing, newest_of, source_for, whole_updates
from fzero.checkpoint._mirror_home import Home, copies_in, sweep
from fzero.checkpoint._mirror_hosts import restarts
from fzero.checkpoint._process_states import Held
from fzero.checkpoint.collective import CheckpointError, damaged, everywhere, results_of_ranks
from fzero.checkpoint.manifest import Manifest, require_tensors
from fzero.collectives import exchange_beside
from fzero.errors import explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What came of the copies."""

    thing: Any  # the state, or the engine
    update: int
    extra: dict[str, Any]


def restored(home: Home, held: Held) -> Restored | None:
    """Return the newest whole update in the place of what is held; None without copies. Collective.

    Raises `CheckpointError` where there are copies and no update is whole, and as `load`.
    """
    copies = _newest(home)
    if copies is None:
        return None
    saved, rng = _manifest(home, copies)
    where = home.folder

    def prepare() -> LoadPlan:
        plan = planned(held, saved, where, rng=rng)
        require_tensors(saved, plan.pieces, where)
        return plan

    def read() -> None:
        read_pieces(plan.pieces, saved, memories)

    with torch.no_grad():
        plan = everywhere(home.ranks, prepare, what=f"read {where}")
        memories = _memories(home, copies, names_of(plan.pieces, saved))
        everywhere(home.ranks, read, what=f"read {where}")
        thing = finished(held, saved, plan)
    everywhere(home.ranks, lambda: sweep(home, copies), what=f"sweep {where}")
    return Restored(thing=thing, update=copies[0].label.update, extra=saved.extra)


def _newest(home: Home) -> list[HostCopy] | None:
    """Return the good copies of the newest update that is whole. A collective."""

    def look() -> tuple[list[HostCopy], list[str]]:
        return _listed(home) if home.hosts.leads else ([], [])

    told = results_of_ranks(home.ranks, look, what=f"list {home.folder}")
    copies = [one for some, _ in told for one in some]
    bad = [text for _, texts in told for text in texts]
    whole = whole_updates(copies)
    for some in whole:
        found = results_of_ranks(
            home.ranks, lambda some=some: _damaged_of(home, some), what=f"read {home.folder}"
        )
        worse = {one: text for texts in found for one, text in texts.items()}
        bad += worse.values()
        good = [one for one in some if one not in worse]
        if good and not missing(good):
            return good
    if not copies and not bad:
        if home.rank == 0 and restarts()[0]:
            _warn_begins_anew(home, "torchrun has started the ranks again, and there are no copies")
        return None
    if whole or bad or any(one.complete for one in copies):
        raise _nothing_whole(home, copies, bad)
    if home.rank == 0:
        some = newest_of(copies)
        first, lost = some[0].label.update, ", ".join(map(str, missing(some)))
        _warn_begins_anew(home, f"of update {first}, the first one, rank {lost} has no copy")
    everywhere(home.ranks, lambda: sweep(home), what=f"sweep {home.folder}")
    return None


def _listed(home: Home) -> tuple[list[HostCopy], list[str]]:
    """Return the copies of this host, by their headers, and what is wrong with others."""
    found: list[HostCopy] = []
    bad: list[str] = []
    for file in copies_in(home.folder):
        try:
            memory = mapped(file)
            header = read_header(memory, file)
            if header.label.name != file.name:
                raise damaged(file, f"is the copy {header.label.name}")
            nbytes = extent(memory, file)
            found.append(HostCopy(home.hosts.own, header.label, header.complete, nbytes))
        except CheckpointError as error:
            bad.append(str(error).splitlines()[0])
    return found, bad


def _damaged_of(home: Home, copies: Sequence[HostCopy]) -> dict[HostCopy, str]:
    """Return what is wrong with copies on this host; its ranks share the reading."""
    own, ranks = home.hosts.own, home.hosts.ranks_on(home.hosts.own)
    here = [one for one in copies if one.host == own]
    found = {}
    for one in here[ranks.index(home.rank) :: len(ranks)]:
        file = home.folder / one.label.name
        try:
            require_body(mapped(file), file)
        except CheckpointError as error:
            found[one] = str(error).splitlines()[0]
    return found


def _manifest(home: Home, copies: Sequence[HostCopy]) -> tuple[Manifest, str | None]:
    """Return the manifest of all copies, and the random generators of this rank. A collective."""

    def read() -> dict[int, Header]:
        chosen = (source_for("", rank, copies) for rank in range(copies[0].label.ranks))
        here = [one for one in chosen if home.hosts.leads and one.host == home.hosts.own]
        files = {one.label.rank: home.folder / one.label.name for one in here}
        return {rank: read_header(mapped(file), file) for rank, file in files.items()}

    told = results_of_ranks(home.ranks, read, what=f"read {home.folder}")
    headers = {rank: header for some in told for rank, header in some.items()}
    own = headers.get(home.rank)
    return joined(dict(sorted(headers.items()))), None if own is None else own.rng


def _memories(home: Home, copies: Sequence[HostCopy], names: set[str]) -> Mapping[str, Tensor]:
    """Return the bytes of the copies that this rank reads; a host is sent what it has not."""
    hosts = home.hosts
    needed = sorted({one.label.rank for one in copies if one.label.name in names})
    chosen = [source_for(hosts.own, rank, copies) for rank in needed]
    wanted = home.ranks.tell([one for one in chosen if one.host != hosts.own])
    memories = {
        one.label.name: mapped(home.folder / one.label.name)
        for one in chosen
        if one.host == hosts.own
    }
    sent: list[tuple[int, Tensor]] = []
    got: list[tuple[int, Tensor]] = []
    for to, sender, one in _transfers(home, wanted):
        if sender == home.rank:
            sent.append((to, mapped(home.folder / one.label.name)[: one.nbytes]))
        if to == home.rank:
            memories[one.label.name] = torch.empty(one.nbytes, dtype=torch.uint8, device="cpu")
            got.append((sender, memories[one.label.name]))
    exchange_beside(sent, got, home.beside.axis)
    return memories


def _transfers(
    home: Home, wanted: Sequence[Sequence[HostCopy]]
) -> Iterator[tuple[int, int, HostCopy]]:
    """Yield (to, from, copy): the ranks of a host take turns to send."""
    for to, some in enumerate(wanted):
        for one in some:
            ranks = home.hosts.ranks_on(one.host)
            yield to, ranks[one.label.rank % len(ranks)], one


def _nothing_whole(home: Home, copies: Sequence[HostCopy], bad: Sequence[str]) -> CheckpointError:
    lines = [f"\n  {text}" for text in bad[:8]]
    some = newest_of(copies) if copies else []
    if some and missing(some):
        lost = ", ".join(map(str, missing(some)))
        lines.insert(0, f"\n  update {some[0].label.update}: no copy of rank {lost}")
    return CheckpointError(
        f"Mirror.restore: no update is whole in {home.folder.parent}:{''.join(lines)}",
        cause="a host that is gone with the only copy of a rank, copies that were removed when a "
        "rank had ended, or memory that another program wrote to.",
        fix="load a checkpoint of fzero.checkpoint.save, and remove the folder on all hosts; with "
        "copies=1 and more hosts than one, one of them may go. Nothing was changed.",
    )


def _warn_begins_anew(home: Home, seen: str) -> None:
    text = explain(
        f"Mirror.restore: {seen} in {home.folder.parent}: training begins anew.",
        cause="a rank that died before the first copies were whole; or ranks that ended with "
        "sys.exit(n), outside of a `with` block of the mirror.",
        fix="a smaller every= has the first copies earlier; `with Mirror(...) as mirror:`.",
    )
    warnings.warn(text, UserWarning, stacklevel=5)
