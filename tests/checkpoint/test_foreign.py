"""A checkpoint that somebody made up: nothing in it runs, nothing outside of it is read."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import CheckpointError, load, save
from tests.checkpoint.forge import Runs, data_of, edit, rewrite
from tests.checkpoint.states import ADAM, snapshot
from tests.strategies import same

PARAMS = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.ones(2)}


def _state(stage: int = 0) -> Any:
    return fzero.init(PARAMS, ADAM, stage=stage)


def _refused(path: Path, match: str) -> None:
    """Loading raises that, and changes neither the state nor a random generator."""
    into = _state(stage=3)
    before, drawn = snapshot(into), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match) as raised:
        load(path, into)
    assert "Fix: " in str(raised.value)
    same(into, before)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_the_pickle_beside_the_data_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.distributed.checkpoint writes it, and would run what is in it."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path, _state())
    rewrite(tmp_path, ".metadata", pickle.dumps(Runs(os.system, "touch here")))
    same(load(tmp_path, _state(stage=3)).params, _state(stage=3).params)
    assert not (tmp_path / "here").exists()


def _chunk(body: Any) -> list[Any]:
    return body["tensors"]["params/w"]["chunks"][0]


INDEX_EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a tensor is not there": (
        lambda body: body["tensors"].pop("params/w"),
        "does not fit params/w: the manifest does not have it",
    ),
    "more elements": (
        lambda body: _chunk(body).__setitem__(1, 7), "7 elements are there, 6 are wanted",
    ),
    "a hole": (lambda body: _chunk(body).__setitem__(0, 1), "elements 0 to 1 are in no chunk"),
    "no chunk": (
        lambda body: body["tensors"]["params/w"]["chunks"].clear(), "0 elements are there",
    ),
    "twice the same": (
        lambda body: body["tensors"]["params/w"]["chunks"].append(_chunk(body)),
        "in no chunk, or in two",
    ),
    "another dtype": (
        lambda body: body["tensors"]["params/w"].update(dtype="torch.int32"),
        "does not fit params/w: it is torch.int32 there",
    ),
    "negative": (lambda body: _chunk(body).__setitem__(1, -1), "params/w/chunks/0/1 is -1"),
    "outside": (
        lambda body: _chunk(body).__setitem__(2, "../../x"),
        r"it is in '../../x', which is not in the manifest",
    ),
    "absolute": (lambda body: _chunk(body).__setitem__(2, "/etc/passwd"), "it is in '/etc/passwd'"),
    "a file that was not checked": (
        lambda body: body["files"].pop("__0_0.distcp"),
        "__0_0.distcp', which is not in the manifest",
    ),
    "behind the end": (
        lambda body: _chunk(body).__setitem__(3, 10**9), r"it is at 1000000000 \+ ",
    ),
    "a length that is text": (lambda body: _chunk(body).__setitem__(4, "1"), "0/4 is '1'"),
    "a short chunk": (lambda body: _chunk(body).pop(), "params/w/chunks/0 is "),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEX_EDITS)
def test_an_index_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    save(tmp_path, _state())
    change, match = INDEX_EDITS[name]
    edit(tmp_path, change)
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

    edit(tmp_path, lambda body: _chunk(body).__setitem__(slice(3, 5), [len(old), len(new)]))
    _refused(tmp_path, match)
    assert not (tmp_path / "here").exists()


def test_links_to_elsewhere_are_refused(tmp_path: Path) -> None:
    for number, what in enumerate(("folder", "file")):
        path = tmp_path / str(number)
        save(path, _state())
        data = data_of(path)
        target = data if what == "folder" else data / "__0_0.distcp"
        target.rename(tmp_path / f"away{number}")
        target.symlink_to(tmp_path / f"away{number}")
        _refused(path, f"{re.escape(target.name)} is a link")
