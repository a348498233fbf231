"""A copy whose bits have changed, the choice of an update, and who keeps whose copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.checkpoint import CheckpointError
from fzero.checkpoint.mirror import Hosts, RankCopy, missing, whole_updates
from tests.checkpoint.states import blank, contents, make, mixed
from tests.checkpoint.test_mirror import copies, mirror_of
from tests.strategies import same


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    mirror = mirror_of(folder)
    mirror.update(make(mixed(), stage=0))
    mirror._flight.handle.result()
    return folder


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_or_changes_nothing(copied: Path, where: float, bit: int) -> None:
    every = sorted(x for x in copied.rglob("*") if x.is_file() and x.stat().st_size)
    file = every[int(where * len(every))]
    data = bytearray(good := file.read_bytes())
    data[int(where * len(every) % 1 * len(data))] ^= 1 << bit
    file.write_bytes(bytes(data))
    try:
        found, _ = mirror_of(copied).restore(make(blank(mixed()), stage=1))
    except CheckpointError as error:
        assert "no update is whole" in str(error)
    else:  # a space of JSON
        same(contents(found), contents(make(mixed(), stage=0)))
        assert file.name == "checkpoint.json"
    finally:
        file.write_bytes(good)


def _file(copy: Path) -> Path:
    return next(copy.rglob("*.distcp"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda copy: _file(copy).write_bytes(b""),
        lambda copy: _file(copy).write_bytes(_file(copy).read_bytes()[:300]),
        lambda copy: _file(copy).unlink(),
        lambda copy: (copy / "checkpoint.json").unlink(),
        lambda copy: ((copy / "checkpoint.json").unlink(), (copy / "checkpoint.json").mkdir()),
        lambda copy: (shutil.rmtree(copy), copy.touch()),
    ],
)
def test_what_is_no_copy_is_damaged(
    spoil: Callable[[Path], Any], copied: Path, tmp_path: Path
) -> None:
    shutil.copytree(copied, tmp_path / "base")
    (copy,) = copies(tmp_path / "base")
    spoil(copy)
    with pytest.raises(CheckpointError, match="no update is whole"):
        mirror_of(tmp_path / "base").restore(make(blank(mixed()), stage=0))


hosts_of = st.lists(st.sampled_from("abcd"), min_size=1, max_size=8)


@given(of_ranks=hosts_of, copies=st.integers(0, 4))
def test_any_hosts_but_one_more_than_the_copies_may_go(of_ranks: list[str], copies: int) -> None:
    hosts = Hosts(of_ranks=tuple(of_ranks), rank=0, copies=copies)
    assert hosts.held == min(copies, len(set(of_ranks)) - 1)
    for rank, host in enumerate(of_ranks):
        there = {host, *(of_ranks[keeper] for keeper in hosts.keepers(rank))}
        assert len(there) == 1 + hosts.held
        assert all((rank in hosts.parts_on(one)) == (one in there) for one in hosts.names)


found = st.builds(
    RankCopy,
    st.sampled_from("ab"),
    st.integers(1, 3),
    st.integers(0, 1),
    st.just(2),
    st.just(0),
    st.sampled_from("xy"),
)


@given(st.lists(found, max_size=12, unique=True))
def test_the_newest_update_is_of_one_attempt_and_has_all_ranks(copies: list[RankCopy]) -> None:
    updates = whole_updates(copies)
    for some in updates:
        assert len({(one.attempt, one.update) for one in some}) == 1
        assert missing(some) == []
    numbers = [some[0].update for some in updates]
    assert numbers == sorted(numbers, reverse=True)
    pairs = {(one.attempt, one.update, one.rank) for one in copies}
    whole = [key for key in pairs if key[2] == 0 and (*key[:2], 1) in pairs]
    assert len(updates) == len(whole)
