"""The corpus: deterministic, split by file, capped, and refused by name when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fzero.errors import LayoutError
from fzero.job.text import HELD_OUT, SKIPPED, read_corpus


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
