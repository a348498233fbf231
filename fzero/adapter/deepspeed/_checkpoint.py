"""Checkpoints by DeepSpeed's calls: one folder for each tag, and a file that names the latest."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero.adapter._engine import Engine
from fzero.checkpoint import load_with_extra
from fzero.checkpoint import save as save_to
from fzero.checkpoint._disk import is_there, put_text, read_text
from fzero.checkpoint._driven import options_of, set_options
from fzero.checkpoint._everywhere import Ranks, first_of

PathLike = str | os.PathLike[str]
_LATEST = "latest"


def save(
    engine: Engine, folder: PathLike, name: str, extra: Mapping[str, Any], *, latest: bool
) -> None:
    """Save to folder / name, and write that name to folder / "latest". A collective."""
    save_to(Path(folder) / name, engine, extra=extra)
    if latest:
        file = Path(folder) / _LATEST
        first_of(
            Ranks(axis=engine.axis),
            lambda: put_text(file, name, through=file.with_suffix(".new")),
            what=f"write {file}",
        )


def load(
    engine: Engine, folder: PathLike, tag: str | int | None, *, optimizer: bool, counters: bool
) -> tuple[str, dict[str, Any]] | None:
    """Load folder / tag; return its path and its `extra`. A collective.

    tag: None for what folder / "latest" says; without such a file None is returned, with a warning.
    optimizer: else it stays as it was, and its masters follow the parameters.
    counters: whether the step and the random generators are loaded.
    """
    if tag is None:
        file = Path(folder) / _LATEST
        tag = first_of(Ranks(axis=engine.axis), lambda: _read(file), what=f"read {file}")
    if tag is None:
        warnings.warn(
            f"load_checkpoint: there is no file {folder}/{_LATEST}; nothing was loaded.",
            UserWarning,
            stacklevel=3,
        )
        return None
    path = Path(folder) / str(tag)
    before, options = engine.state, options_of(engine.optimizer)
    extra = load_with_extra(path, engine, rng=counters)[1]
    if not optimizer:
        _keep_optimizer(engine, before, options, counters)
    return str(path), extra


def _keep_optimizer(
    engine: Engine, before: Any, options: list[dict[str, Any]], counters: bool
) -> None:
    """Take the optimizer back that the engine had; its masters follow the parameters."""
    loaded = engine.state
    step = loaded.step if counters else before.step
    engine.state = loaded.replace(optimizer=before.optimizer, scale=before.scale, step=step)
    driver = engine._driver
    driver.masters.take(driver.state, range(len(driver.state.setup.layout.groups)))
    set_options(engine.optimizer, options)


def _read(file: Path) -> str | None:
    return read_text(file).strip() if is_there(file) else None
