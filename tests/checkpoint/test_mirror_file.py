"""The file of a copy, the choice of an update, and who keeps whose copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fzero.checkpoint import CheckpointError
from fzero.checkpoint._mirror_file import (
    CopyFile,
    Header,
    Label,
    copy_bytes,
    fill,
    header_text,
    joined,
    mapped,
    read_header,
    read_pieces,
    require_body,
    seal,
    table_of,
    take_slot,
)
from fzero.checkpoint._mirror_find import HostCopy, missing, source_for, whole_updates
from fzero.checkpoint._mirror_hosts import Hosts
from fzero.checkpoint._pieces import TensorPiece
from fzero.checkpoint.manifest import facts_of_state
from tests.checkpoint.states import make

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.complex64)
STATE = make({"w": torch.ones(3)}, stage=0)
LABEL = Label("ab", 8, 0, 1)


def written(folder: Path, pieces: list[TensorPiece], old: CopyFile | None = None) -> CopyFile:
    manifest = facts_of_state(STATE)
    manifest.tensors.update(table_of(pieces, LABEL.name))
    manifest = type(manifest)(**{**_fields(manifest), "data": "data-0123456789abcdef"})
    text = header_text(Header(label=LABEL, complete=4, rng="{}", manifest=manifest))
    nbytes = copy_bytes(pieces, text)
    slot = take_slot(folder / "writing", old, nbytes)
    fill(slot, pieces)
    seal(slot, text, nbytes)
    return slot.named(folder / LABEL.name)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def cut(values: Tensor, name: str, at: int) -> list[TensorPiece]:
    bounds = [(0, at), (at, values.numel())]
    numel = values.numel()
    return [TensorPiece(name=name, start=a, numel=numel, values=values[a:b]) for a, b in bounds]


@given(st.data())
def test_what_is_written_comes_back_in_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    folder = tmp_path_factory.mktemp("copies")
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    tensors = {
        f"t{i}": torch.randint(0, 2, (n,)).to(data.draw(st.sampled_from(DTYPES)))
        for i, n in enumerate(sizes)
    }

    def pieces(of: dict[str, Tensor]) -> list[TensorPiece]:
        found = (cut(x, name, data.draw(st.integers(0, x.numel()))) for name, x in of.items())
        return [piece for some in found for piece in some if piece.values.numel()]

    first = written(folder, pieces({"t0": torch.zeros(1000)}))
    slot = written(folder, pieces(tensors), old=first)
    assert slot.memory is first.memory, "the memory of an older copy is used again"
    memory = mapped(slot.file)
    header = read_header(memory, slot.file)
    require_body(memory, slot.file)
    assert (header.label, header.complete, header.rng) == (LABEL, 4, "{}")
    blank = {name: torch.zeros_like(x) for name, x in tensors.items()}
    read_pieces(pieces(blank), joined({0: header}), {LABEL.name: memory})
    assert all(torch.equal(blank[name], x) for name, x in tensors.items())


def read_all(file: Path) -> Header:
    memory = mapped(file)
    require_body(memory, file)
    return read_header(memory, file)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(
    tmp_path_factory: pytest.TempPathFactory, where: float, bit: int
) -> None:
    values = torch.arange(64, dtype=torch.float32)
    slot = written(tmp_path_factory.mktemp("copies"), cut(values, "t", 10))
    size = copy_bytes(cut(values, "t", 10)) + len(header_text(read_all(slot.file))) - 10
    at = int(where * size)
    data = bytearray(slot.file.read_bytes())
    data[at] ^= 1 << bit
    slot.file.write_bytes(bytes(data))
    if not 32 <= at < 64:  # nothing is there
        with pytest.raises(CheckpointError, match="damaged"):
            read_all(slot.file)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"short"),
        lambda file: file.write_bytes(file.read_bytes()[:300]),
        lambda file: (file.unlink(), file.mkdir()),
    ],
)
def test_what_is_no_copy_is_damaged(spoil: Callable[[Path], Any], tmp_path: Path) -> None:
    slot = written(tmp_path, cut(torch.ones(100), "t", 10))
    spoil(slot.file)
    with pytest.raises(CheckpointError, match="damaged"):
        read_all(slot.file)


hosts_of = st.lists(st.sampled_from("abcd"), min_size=1, max_size=8)


@given(of_ranks=hosts_of, copies=st.integers(0, 4))
def test_any_hosts_but_one_more_than_the_copies_may_go(of_ranks: list[str], copies: int) -> None:
    hosts = Hosts(of_ranks=tuple(of_ranks), rank=0, copies=copies)
    assert hosts.held == min(copies, len(set(of_ranks)) - 1)
    for rank, host in enumerate(of_ranks):
        there = {host, *(of_ranks[keeper] for keeper in hosts.keepers(rank))}
        assert len(there) == 1 + hosts.held
        assert all(rank in hosts.kept_by(keeper) for keeper in hosts.keepers(rank))
    for host in hosts.names:
        parts = hosts.parts_on(host)
        assert len(set(parts)) == len(parts), "no host has a part twice"


found = st.builds(
    HostCopy,
    st.sampled_from("xy"),
    st.builds(Label, st.sampled_from("ab"), st.integers(1, 3), st.integers(0, 1), st.just(2)),
    st.just(0),
    st.just(9),
)


@given(st.lists(found, max_size=12, unique=True))
def test_the_newest_update_is_of_one_attempt_and_has_all_ranks(copies: list[HostCopy]) -> None:
    updates = whole_updates(copies)
    for some in updates:
        assert len({(one.label.attempt, one.label.update) for one in some}) == 1
        assert missing(some) == []
        assert {source_for("x", rank, some).label.rank for rank in (0, 1)} == {0, 1}
    numbers = [some[0].label.update for some in updates]
    assert numbers == sorted(numbers, reverse=True)
    pairs = {(one.label.attempt, one.label.update, one.label.rank) for one in copies}
    whole = [key for key in pairs if key[2] == 0 and (*key[:2], 1) in pairs]
    assert len(updates) == len(whole)
