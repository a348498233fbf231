"""Checkpoints by DeepSpeed's calls: one folder for each tag, and a file that names the latest."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fzero.checkpoint import load_with_extra
from fzero.checkpoint import save as save_to
from fzero.checkpoint._driven import options_of, set_options
from fzero.checkpoint._everywhere import Ranks, first_of
from fzero.errors import LayoutError, explain

if TYPE_CHECKING:
    from fzero.adapter.deepspeed._engine import DeepSpeedEngine

PathLike = str | os.PathLike[str]
_LATEST = "latest"


def save(
    engine: DeepSpeedEngine,
    folder: PathLike,
    tag: str | int | None,
    client_state: Mapping[str, Any],
    latest: bool,
) -> None:
    """See `DeepSpeedEngine.save_checkpoint`."""
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    scheduler = engine.lr_scheduler
    extra = {
        "client_state": dict(client_state),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "global_steps": engine.global_steps,
    }
    save_to(Path(folder) / name, engine, extra=extra)
    if latest:
        ranks = Ranks(axis=engine.axis)
        first_of(ranks, lambda: _write(Path(folder), name), what=f"write {folder}/{_LATEST}")


def load(
    engine: DeepSpeedEngine,
    folder: PathLike,
    tag: str | int | None,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    counters: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """See `DeepSpeedEngine.load_checkpoint`."""
    if not strict:
        raise LayoutError(
            explain(
                "load_checkpoint(load_module_strict=False).",
                cause="a checkpoint of another model.",
                fix="load it with strict=True; or take single values: engine.set_full_parameter.",
            )
        )
    if tag is None:
        ranks = Ranks(axis=engine.axis)
        tag = first_of(ranks, lambda: _read(Path(folder)), what=f"read {folder}/{_LATEST}")
    if tag is None:
        warnings.warn(
            f"load_checkpoint: there is no file {folder}/{_LATEST}; nothing was loaded.",
            UserWarning,
            stacklevel=3,
        )
        return None, None
    path = Path(folder) / str(tag)
    before, options = engine.state, options_of(engine.optimizer)
    extra = load_with_extra(path, engine, rng=counters)[1]
    if not optimizer:
        _keep_optimizer(engine, before, options, counters)
    position = extra.get("lr_scheduler")
    if scheduler and engine.lr_scheduler is not None and position is not None:
        engine.lr_scheduler.load_state_dict(position)
    if counters:
        engine.global_steps = extra.get("global_steps", int(engine.state.step))
    return str(path), extra.get("client_state", {})


def _keep_optimizer(
    engine: DeepSpeedEngine, before: Any, options: list[dict[str, Any]], counters: bool
) -> None:
    """Take the optimizer back that the engine had; its masters follow the parameters."""
    loaded = engine.state
    step = loaded.step if counters else before.step
    engine.state = loaded.replace(optimizer=before.optimizer, scale=before.scale, step=step)
    driver = engine._driver
    driver.masters.take(driver.state, range(len(driver.state.setup.layout.groups)))
    set_options(engine.optimizer, options)


def _write(folder: Path, name: str) -> None:
    """Replace the file in one move: a reader finds the old tag or the new one."""
    new = folder / f"{_LATEST}.new"
    new.write_text(name)
    new.replace(folder / _LATEST)


def _read(folder: Path) -> str | None:
    file = folder / _LATEST
    return file.read_text().strip() if file.is_file() else None
