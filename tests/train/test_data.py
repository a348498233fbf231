"""The corpus, split by file, and the windows of it that each logical rank gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.data import Order
from fzero.errors import LayoutError
from fzero.state.logical import carried
from train.settings import resolve
from train.stream import even_windows, make_order, micro_batches, windows
from train.text import HELD_OUT, SKIPPED, read_corpus


@given(
    logical_ranks=st.sampled_from([1, 2, 4, 6]),
    micro=st.sampled_from([1, 2]),
    accumulate=st.sampled_from([1, 3]),
    position=st.integers(0, 1000),
    seed=st.integers(0, 1000),
)
def test_logical_ranks_get_the_same_windows_on_any_number_of_ranks_in_any_number_of_passes(
    logical_ranks: int, micro: int, accumulate: int, position: int, seed: int
) -> None:
    text = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    given = {"logical_ranks": logical_ranks, "global_batch": 72, "seed": seed, "context": 16}
    settings = resolve({**given, "micro_batches": micro, "accumulate": accumulate})
    order = make_order(text, settings)
    order = dataclasses.replace(order, position=position)

    ids = torch.tensor(order.parts(range(logical_ranks)))  # [logical_ranks, batch_size]
    want = windows(text, ids.flatten(), context=16).unflatten(0, ids.shape)
    for size in range(1, logical_ranks + 1):
        found = []
        for rank in range(size):
            ranks = carried(rank, size, logical_ranks)
            with mock.patch.object(Order, "carried", lambda self, here=ranks: here):
                parts = micro_batches(text, order, context=16, count=micro)
            assert len(parts) == micro
            each = [part.unflatten(0, (len(ranks), -1)) for part in parts]
            found.append(torch.cat(each, dim=1))
        assert torch.equal(torch.cat(found), want)


def test_a_window_is_the_bytes_and_the_next_byte() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    got = windows(text, torch.tensor([5, 90]), context=3)
    assert got.tolist() == [[5, 6, 7, 8], [90, 91, 92, 93]]


@pytest.mark.parametrize(
    ("logical_ranks", "micro", "near"), [(3, 1, "6 or 9"), (2, 3, "6 or 12"), (16, 1, "16")]
)
def test_a_batch_that_cannot_be_split_is_refused_by_name(
    logical_ranks: int, micro: int, near: str
) -> None:
    settings = resolve({"logical_ranks": logical_ranks, "micro_batches": micro, "context": 8})
    message = rf"(?s)--global-batch 8 .*{logical_ranks} logical .*Fix: --global-batch {near},"
    with pytest.raises(LayoutError, match=message):
        make_order(torch.zeros(100), settings)


def test_a_text_shorter_than_a_window_is_refused() -> None:
    for call in (
        lambda: make_order(torch.zeros(8), resolve({"context": 8})),
        lambda: even_windows(torch.zeros(8), context=8, count=1),
    ):
        with pytest.raises(LayoutError, match=r"(?s)8 bytes hold no window of 8 \+ 1"):
            call()


def test_every_window_is_in_an_order() -> None:
    order = make_order(torch.zeros(25), resolve({"global_batch": 16, "context": 9}))
    ids, after = order.next(range(8))
    assert sorted(ids) == [*range(16)] and after.epoch == 1


@given(numel=st.integers(9, 200), context=st.integers(1, 8), count=st.integers(1, 300))
def test_scored_windows_are_disjoint_and_as_many_as_fit(
    numel: int, context: int, count: int
) -> None:
    got = even_windows(torch.arange(numel), context=context, count=count)
    assert got.shape == (min(count, numel // (context + 1)), context + 1)
    assert got.unique().numel() == got.numel()
    assert got.max() < numel


# The corpus


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def numbered(count: int) -> dict[str, bytes]:
    return {f"part{i % 3}/file{i}.py": bytes([i]) * (10 + 7 * i) for i in range(count)}


def test_the_standard_library_is_read_up_to_the_cap() -> None:
    corpus = read_corpus(cap_bytes=400_000)
    assert corpus.train.dtype == torch.uint8
    assert corpus.train.numel() + corpus.valid.numel() == 400_000
    assert b"import" in bytes(corpus.train.tolist())


def test_the_order_does_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    # The second tree is written in the opposite order, so that a listing order would show.
    files = numbered(30)
    one = read_corpus(write(tmp_path / "a", files))
    two = read_corpus(write(tmp_path / "b" / "c", dict(reversed(files.items()))))
    assert one.sha256 == two.sha256
    assert torch.equal(one.train, two.train)


def test_the_split_is_by_file_and_loses_no_byte(tmp_path: Path) -> None:
    files = numbered(40)  # file i consists of byte i alone, so a byte tells its file
    corpus = read_corpus(write(tmp_path, files))
    train, valid = set(corpus.train.tolist()), set(corpus.valid.tolist())
    assert not train & valid
    assert train | valid == set(range(40))
    total = sum(map(len, files.values()))
    assert corpus.train.numel() + corpus.valid.numel() == total
    longest = max(map(len, files.values()))
    assert HELD_OUT * total <= corpus.valid.numel() < HELD_OUT * total + longest


def test_the_cap_keeps_the_first_files_and_cuts_the_last(tmp_path: Path) -> None:
    root = write(tmp_path, numbered(40))
    whole, part = read_corpus(root), read_corpus(root, cap_bytes=1_500)
    assert part.train.numel() + part.valid.numel() == 1_500
    whole_text = torch.cat((whole.valid, whole.train))
    assert torch.equal(torch.cat((part.valid, part.train)), whole_text[:1_500])


def test_generated_installed_and_foreign_files_are_left_out(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", numbered(10))
    more = {f"{name}/x.py": b"no" for name in SKIPPED}
    mixed = write(tmp_path / "mixed", {**numbered(10), **more, "notes.txt": b"no", "empty.py": b""})
    assert read_corpus(mixed).sha256 == read_corpus(plain).sha256
    assert read_corpus(mixed).files == 10


@pytest.mark.parametrize(
    ("files", "cap_bytes"),
    [({}, 100), ({"a.py": b"x" * 50}, 100), ({"a.py": b"x" * 50, "b.py": b"y" * 50}, 50)],
    ids=["none", "one", "cap below two"],
)
def test_too_few_files_are_refused(tmp_path: Path, files: dict[str, bytes], cap_bytes: int) -> None:
    with pytest.raises(LayoutError, match=r"(?s)text: .*Fix: pass a folder .*--text"):
        read_corpus(write(tmp_path, files), cap_bytes=cap_bytes)
