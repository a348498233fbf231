"""What a `Mirror` refuses: other copies, a second mirror, odd options, too little memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import CheckpointError, Mirror
from fzero.checkpoint import mirror as module
from fzero.errors import LayoutError, PhaseError
from tests.checkpoint.states import make, mixed
from tests.checkpoint.test_mirror import copies, mirror_of

PART = 3 * (4000 + 2**11) + 2**17  # bytes of a copy of 1,000 elements, at most


def test_copies_of_another_model_or_optimizer_are_refused(tmp_path: Path) -> None:
    mirror = mirror_of(tmp_path)
    mirror.update(make({"w": torch.ones(3)}, stage=0))
    with pytest.raises(LayoutError, match=r"parameters in .* are not those of this state"):
        mirror_of(tmp_path).restore(make({"w": torch.ones(4)}, stage=0))
    with pytest.raises(LayoutError, match=r"optimizer state in .* is not that of this state's"):
        sgd = fzero.optim.sgd(0.1)
        mirror_of(tmp_path).restore(make({"w": torch.ones(3)}, stage=0, optimizer=sgd))
    assert len(copies(tmp_path)) == 1, "nothing was changed"


def test_copies_that_nobody_restored_are_not_overwritten(tmp_path: Path) -> None:
    state, mirror = make(mixed(), stage=0), mirror_of(tmp_path)
    mirror.update(state)
    other = mirror_of(tmp_path)
    for _ in range(2):
        with pytest.raises(PhaseError, match="has copies that were not restored"):
            other.update(state)


def test_two_mirrors_in_one_folder_are_refused(tmp_path: Path) -> None:
    state, one, two = make(mixed(), stage=0), mirror_of(tmp_path), mirror_of(tmp_path, every=2)
    two.update(state)
    one.update(state)
    with pytest.raises(PhaseError, match="another Mirror of this program"):
        two.update(state)


def test_a_mirror_that_was_taken_over_is_refused(tmp_path: Path) -> None:
    state, old, new = make(mixed(), stage=0), mirror_of(tmp_path), mirror_of(tmp_path)
    old.update(state)
    new.restore(state)
    with pytest.raises(PhaseError, match="another Mirror of this program"):
        old.update(state)
    new.update(state)


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"every": 1.5}, {"copies": -1}, {"copies": True}]
)
def test_options_that_cannot_be(options: Any, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=f"{next(iter(options))}="):
        mirror_of(tmp_path, **options)


@pytest.mark.parametrize("folder", ["", 7])
def test_a_folder_that_is_none(folder: Any) -> None:
    with pytest.raises(LayoutError, match="the path is"):
        Mirror(folder, every=1)


def test_a_state_in_the_middle_of_a_step_is_refused(tmp_path: Path) -> None:
    state, mirror = make({"w": torch.ones(3)}, stage=0), mirror_of(tmp_path)
    with pytest.raises(LayoutError, match="cannot be written as JSON"):
        mirror.update(state, extra={"x": torch.ones(1)})
    grad = fzero.grad_and_reduce(lambda params: params["w"].sum(), state)
    with pytest.raises(PhaseError, match="between gradient and update"):
        mirror.update(grad()[0])
    mirror.update(state)  # and it is good after that


def test_too_little_shared_memory_is_one_error_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SimpleNamespace(f_bavail=10, f_frsize=100)
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    state = make({"w": torch.ones(1000)}, stage=0)
    expected = rf"need {2 * PART:,} bytes in .*, and 1,000 bytes are free"
    with pytest.raises(CheckpointError, match=expected):
        mirror_of(tmp_path).restore(state)
    with pytest.raises(CheckpointError, match=expected):
        mirror_of(tmp_path, every=9).update(state)
    assert copies(tmp_path) == []


@pytest.mark.parametrize("others", [True, False])
def test_memory_that_is_short_later_is_said_as_it_is_then(
    others: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for, and what was free, at that moment; and who has taken the rest."""

    def held() -> int:
        return sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())

    size, foreign = [400_000], [0]

    def statvfs(_: Any) -> Any:
        return SimpleNamespace(f_bavail=size[0] - held() - foreign[0], f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    mirror, state = mirror_of(tmp_path), make({"w": torch.ones(1000)}, stage=0)
    mirror.update(state, extra={"next": 1})
    assert mirror._flight is not None
    mirror._flight.handle.result()
    own = held()
    foreign[0] = 250_000 if others else 0
    with pytest.raises(CheckpointError) as caught:
        mirror.update(state, extra={"x": "y" * (0 if others else 400_000)})
    text, need = str(caught.value), PART + len('{"x": ""}') + (0 if others else 400_000)
    assert f"a copy needs {need:,} bytes more in" in text
    assert f"and {400_000 - own - foreign[0]:,} bytes are free now" in text
    assert f"Its copies take {own:,} bytes there." in text
    assert f"400,000 bytes were free for the {2 * PART:,} that it needs in all" in text
    assert ("since then others have taken 250,000 bytes" in text) == others
    assert ("another program on this host" if others else "a state that has grown") in text
    foreign[0] = 0
    assert mirror_of(tmp_path).restore(state)[1] == {"next": 1}, "the last copy is still there"


def test_a_copy_that_finds_no_memory_costs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that was taken between the look at it and the write."""
    mirror, state = mirror_of(tmp_path), make({"w": torch.ones(1000)}, stage=0)
    mirror.update(state)
    assert mirror._flight is not None
    mirror._flight.handle.result()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_draft", cut_off)
        mirror.update(state)
        with pytest.raises(CheckpointError, match="No space left on device"):
            mirror.update(state)
    mirror.update(state)  # and it goes on
    mirror.close()
    assert not list(tmp_path.rglob("writing-*"))


def cut_off(draft: Any, folder: Path) -> None:
    (folder / "checkpoint.json").write_text("{")
    raise OSError(errno.ENOSPC, "No space left on device")
