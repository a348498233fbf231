"""A checkpoint that somebody made up: nothing in it runs, nothing outside of it is read."""

from __future__ import annotations

import io
import os
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.checkpoint import CheckpointError, load, save
from fzero.checkpoint._metadata import read_index
from fzero.checkpoint._pieces import Wanted
from tests.checkpoint.forge import Runs, body_of, data_of, edit, edit_index, rewrite
from tests.checkpoint.states import ADAM, snapshot
from tests.strategies import same

PARAMS = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.ones(2)}


def _state(stage: int = 0) -> Any:
    return fzero.init(PARAMS, ADAM, stage=stage)


def _refused(path: Path, match: str, *, error: type[Exception] = CheckpointError) -> None:
    """Loading raises that, and changes neither the state nor a random generator."""
    into = _state(stage=3)
    before, drawn = snapshot(into), torch.get_rng_state()
    with pytest.raises(error, match=match) as raised:
        load(path, into)
    assert "Fix: " in str(raised.value)
    same(into, before)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (os.system, ("touch here",)),
        (eval, ("open('here', 'w')",)),
        (torch.load, ("here",)),
        (type("x", (), {}).__class__, ("Name", (), {})),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_pickle_with_a_call_is_refused_and_not_run(
    function: Any, args: Any, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "x", _state())
    evil = Runs(function, *args)
    if inside:
        edit_index(tmp_path / "x", lambda index: setattr(index, "planner_data", evil))
    else:
        rewrite(tmp_path / "x", ".metadata", pickle.dumps(evil))
    (tmp_path / "here").unlink(missing_ok=True)  # `edit_index` itself may have run it
    _refused(tmp_path / "x", r"\.metadata names [\w.]+, which no index of tensors has")
    assert not (tmp_path / "here").exists()


def test_a_name_with_dots_finds_nothing(tmp_path: Path) -> None:
    save(tmp_path, _state())
    module, name = "torch.distributed.checkpoint.metadata", "MetadataIndex.__init__.__globals__"
    parts = [b"\x80\x04"]
    for text in (module, name):
        parts.append(b"\x8c" + bytes([len(text)]) + text.encode())
    rewrite(tmp_path, ".metadata", b"".join([*parts, b"\x93."]))
    _refused(tmp_path, "names torch.distributed.checkpoint.metadata.MetadataIndex.__init__")


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_any_bytes_as_an_index_are_refused(junk: bytes, at: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, _state())
        files = body_of(folder)["files"]
        good = (data_of(folder) / ".metadata").read_bytes()
        wanted = {"params/w": Wanted(6, torch.float32), "params/b": Wanted(2, torch.float32)}
        before = read_index(data_of(folder), files, wanted)
        (data_of(folder) / ".metadata").write_bytes(good[:at] + junk + good[at + len(junk) :])
        try:  # a byte in a place that nobody reads may change
            assert read_index(data_of(folder), files, wanted) == before
        except CheckpointError as error:
            assert "Fix: " in str(error)


def _entry(index: Any, name: str) -> Any:
    return index.state_dict_metadata[name]


def _place(index: Any, name: str) -> Any:
    return next(place for key, place in index.storage_data.items() if key.fqn == name)


INDEX_EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a tensor is not there": (
        lambda i: i.state_dict_metadata.pop("params/w"),
        "does not fit params/w: the index does not have it",
    ),
    "another size": (
        lambda i: setattr(_entry(i, "params/w"), "size", torch.Size([7])),
        "does not fit params/w: it is",
    ),
    "another dtype": (
        lambda i: setattr(_entry(i, "params/w").properties, "dtype", torch.int32),
        "does not fit params/w: it is",
    ),
    "a hole": (
        lambda i: setattr(_entry(i, "params/w").chunks[0], "sizes", torch.Size([5])),
        "5 of 6 elements are there",
    ),
    "no chunk": (lambda i: _entry(i, "params/w").chunks.clear(), "0 of 6 elements"),
    "twice the same": (
        lambda i: _entry(i, "params/w").chunks.append(_entry(i, "params/w").chunks[0]),
        "in no chunk, or in two",
    ),
    "negative": (
        lambda i: setattr(_entry(i, "params/w").chunks[0], "sizes", torch.Size([-1])),
        "sizes -1",
    ),
    "outside": (
        lambda i: setattr(_place(i, "params/w"), "relative_path", "../../x"),
        r"it is in '../../x', which is not in the manifest",
    ),
    "absolute": (
        lambda i: setattr(_place(i, "params/w"), "relative_path", "/etc/passwd"),
        "it is in '/etc/passwd'",
    ),
    "a file that was not checked": (
        lambda i: setattr(_place(i, "params/w"), "relative_path", "extra"),
        "it is in 'extra'",
    ),
    "behind the end": (
        lambda i: setattr(_place(i, "params/w"), "offset", 10**9),
        r"it is at 1000000000 \+ ",
    ),
    "a length that is text": (
        lambda i: setattr(_place(i, "params/w"), "length", "1"),
        "it is at",
    ),
    "no place": (lambda i: i.storage_data.clear(), "does not fit params/"),
    "no tensors": (lambda i: setattr(i, "state_dict_metadata", 7), "no index of tensors"),
    "transformed": (
        lambda i: setattr(_place(i, "params/w"), "transform_descriptors", ["zstd"]),
        "it was transformed",
    ),
}


@pytest.mark.parametrize("name", INDEX_EDITS)
def test_an_index_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    save(tmp_path, _state())
    change, match = INDEX_EDITS[name]
    edit_index(tmp_path, change)
    _refused(tmp_path, match)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.ones(2, 3), "could not read"),
        (torch.ones(5), "could not read"),
        ([torch.ones(6)], "could not read"),
        (Runs(os.system, "touch here"), "UnpicklingError"),
    ],
)
def test_a_tensor_that_is_another_one_is_refused(
    value: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file of the same name with the right checksum, at a place that the index has."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path, _state())
    (name,) = [file.name for file in data_of(tmp_path).glob("*.distcp")]
    old, new = (data_of(tmp_path) / name).read_bytes(), _saved(value)
    rewrite(tmp_path, name, old + new)

    def move(index: Any) -> None:
        place = _place(index, "params/w")
        place.offset, place.length = len(old), len(new)

    edit_index(tmp_path, move)
    _refused(tmp_path, match)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    "value",
    ["/etc", "../elsewhere", "..", ".", "", "data-0123456789abcdef/../..", "data-x", 7, None, []],
)
def test_data_is_a_folder_in_the_checkpoint(value: Any, tmp_path: Path) -> None:
    save(tmp_path, _state())
    edit(tmp_path, lambda body: body.update(data=value))
    _refused(tmp_path, "the data folder .* is not one that save makes")


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "lacks .metadata"),
        ([], "'files' is no dict"),
        ({".metadata": [1]}, "no size and checksum"),
        ({".metadata": [-1, 0]}, "no size and checksum"),
        ({".metadata": [10**400, 0]}, "no size and checksum"),
        ({".metadata": ["1", 0]}, "no size and checksum"),
        ({".metadata": [1, 2], "../x": [1, 2]}, "is not one that save makes"),
        ({".metadata": [1, 2], "/x": [1, 2]}, "is not one that save makes"),
        ({".metadata": [1, 2], "..": [1, 2]}, "is not one that save makes"),
        ({".metadata": [1, 2], "a\\b": [1, 2]}, "is not one that save makes"),
    ],
)
def test_every_file_is_listed_and_is_a_plain_name(files: Any, match: str, tmp_path: Path) -> None:
    save(tmp_path, _state())
    edit(tmp_path, lambda body: body.update(files=files))
    _refused(tmp_path, match)


def test_a_file_of_tensors_that_is_not_listed_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, _state())
    edit(tmp_path, lambda body: body["files"].pop("__0_0.distcp"))
    _refused(tmp_path, "__0_0.distcp', which is not in the manifest")


def test_links_to_elsewhere_are_refused(tmp_path: Path) -> None:
    for number, what in enumerate(("folder", "file")):
        path = tmp_path / str(number)
        save(path, _state())
        data = data_of(path)
        target = data if what == "folder" else data / "__0_0.distcp"
        target.rename(tmp_path / f"away{number}")
        target.symlink_to(tmp_path / f"away{number}")
        _refused(path, f"{re.escape(target.name)} is a link")
