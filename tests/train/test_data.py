"""The corpus, split by file, and the stream of samples: a function of seed, step and index."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.errors import LayoutError
from train.stream import even_windows, rank_samples, sample_starts, windows
from train.text import HELD_OUT, SKIPPED, read_corpus

MASK = 2**64 - 1


def splitmix(x: int) -> int:
    """One round, from the published constants, in Python's unbounded integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@given(seed=st.integers(0, 2**63 - 1), step=st.integers(0, 10**6), sample=st.integers(0, 10**6))
def test_the_hash_is_splitmix64(seed: int, step: int, sample: int) -> None:
    mixed = splitmix(splitmix(splitmix(seed) + step & MASK) + sample & MASK)
    want = (mixed >> 1 & 2**62 - 1) % (997 - 8)
    got = sample_starts(997, context=8, seed=seed, step=step, samples=torch.tensor([sample]))
    assert got.tolist() == [want]


@given(
    global_batch=st.sampled_from([8, 16, 24]),
    step=st.integers(0, 1000),
    seed=st.integers(0, 1000),
    passes=st.sampled_from([1, 2]),
)
def test_a_step_sees_the_same_windows_on_any_number_of_ranks(
    global_batch: int, step: int, seed: int, passes: int
) -> None:
    text = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    seen = []
    for world_size in (1, 2, 4):
        found: Counter[bytes] = Counter()
        for rank in range(world_size):
            samples = rank_samples(global_batch, rank=rank, world_size=world_size, passes=passes)
            assert samples.shape == (passes, global_batch // world_size // passes)
            starts = sample_starts(
                5000, context=16, seed=seed, step=step, samples=samples.flatten()
            )
            found.update(bytes(row.tolist()) for row in windows(text, starts, context=16))
        seen.append(found)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0].total() == global_batch


def test_starts_are_in_range_and_spread_evenly() -> None:
    starts = sample_starts(110, context=10, seed=3, step=7, samples=torch.arange(100_000))
    counts = torch.bincount(starts, minlength=100)
    assert counts.numel() == 100  # no window reaches beyond the text
    assert (counts - 1000).abs().max() < 6 * 1000**0.5


def test_a_window_is_the_bytes_and_the_next_byte() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    got = windows(text, torch.tensor([5, 90]), context=3)
    assert got.tolist() == [[5, 6, 7, 8], [90, 91, 92, 93]]


@pytest.mark.parametrize(
    "world_size, passes, near", [(3, 1, "6 or 9"), (2, 3, "6 or 12"), (16, 1, "16")]
)
def test_a_batch_that_cannot_be_split_is_refused_by_name(
    world_size: int, passes: int, near: str
) -> None:
    message = rf"(?s)--global-batch 8 .*{world_size} rank\(s\).*Fix: --global-batch {near},"
    with pytest.raises(LayoutError, match=message):
        rank_samples(8, rank=0, world_size=world_size, passes=passes)


def test_a_text_shorter_than_a_window_is_refused() -> None:
    for call in (
        lambda: sample_starts(8, context=8, seed=0, step=0, samples=torch.arange(1)),
        lambda: even_windows(torch.zeros(8), context=8, count=1),
    ):
        with pytest.raises(LayoutError, match=r"(?s)8 bytes hold no window of 8 \+ 1"):
            call()


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
