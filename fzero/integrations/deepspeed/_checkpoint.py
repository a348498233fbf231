"""`save_checkpoint`, `load_checkpoint`: a folder for each tag, and a file with the latest tag."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fzero.adapter.engine import Engine
from fzero.checkpoint import load_with_extra
from fzero.checkpoint import save as save_to
from fzero.checkpoint.collective import Ranks, from_first
from fzero.checkpoint.engine_state import idle, options_of, set_options
from fzero.checkpoint.folders import is_there, put_text, read_text
from fzero.checkpoint.manifest import leaves_out, read_manifest
from fzero.errors import LayoutError
from fzero.state.scale import with_slot

PathLike = str | os.PathLike[str]
_LATEST = "latest"


def save(
    engine: Any,
    folder: PathLike,
    tag: str | int | None,
    client_state: Mapping[str, Any] | None,
    *,
    latest: bool,
    frozen: bool,
) -> None:
    """Save to folder / tag, and write that name to folder / "latest". A collective.

    engine: a `DeepSpeedEngine`. frozen: whether parameters that do not learn are saved.
    """
    _require("save_checkpoint", folder)
    if backwards := engine.state.progress.backwards:
        warnings.warn(
            f"save_checkpoint: the gradients of {backwards} backwards wait for an update. They are "
            "not in the checkpoint; the engine goes on with them.",
            UserWarning,
            stacklevel=3,
        )
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    scheduler = engine.lr_scheduler
    extra = {
        "client_state": dict(client_state or {}),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
    }
    save_to(Path(folder) / name, idle(engine), extra=extra, frozen=frozen)
    if latest:
        file = Path(folder) / _LATEST
        from_first(
            Ranks(axis=engine.axis),
            lambda: put_text(file, name, through=file.with_suffix(".new")),
            what=f"write {file}",
        )


def save_model(engine: Engine, folder: PathLike, name: str, *, frozen: bool) -> None:
    """Write the whole state dict of the module to folder / name. A collective.

    frozen: whether parameters that do not learn are in it.
    """
    _require("save_16bit_model", folder)
    values = engine.full_state_dict()
    learn = {path: p.requires_grad for path, p in engine.module.named_parameters()}
    kept = {path: x for path, x in values.items() if frozen or learn.get(path, True)}

    def write() -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(kept, Path(folder) / name)

    from_first(Ranks(axis=engine.axis), write, what=f"write {Path(folder) / name}")


def load(
    engine: Any,
    folder: PathLike,
    tag: str | int | None,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    counters: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load folder / tag; return its path and its client_state. A collective.

    engine: a `DeepSpeedEngine`.
    tag: None for what folder / "latest" says; without such a file a warning, and (None, None).
    strict: whether the checkpoint must have all parameters, frozen ones too.
    optimizer: else it stays as it was, and its masters follow the parameters.
    scheduler: whether it goes on where it was.
    counters: whether the steps and the random generators are loaded.
    """
    _require("load_checkpoint", folder)
    if tag is None:
        file = Path(folder) / _LATEST
        tag = from_first(Ranks(axis=engine.axis), lambda: _read(file), what=f"read {file}")
    if tag is None:
        warnings.warn(
            f"load_checkpoint: there is no file {folder}/{_LATEST}; nothing was loaded.",
            UserWarning,
            stacklevel=3,
        )
        return None, None
    path = Path(folder) / str(tag)
    whole = from_first(
        Ranks(axis=engine.axis), lambda: not leaves_out(read_manifest(path)), what=f"read {path}"
    )
    if strict and not whole:
        raise LayoutError(
            f"load_checkpoint: {path} has no frozen parameters.",
            cause="save_checkpoint(exclude_frozen_parameters=True).",
            fix="load_checkpoint(..., load_module_strict=False): frozen parameters then stay as "
            "they are in the engine. Nothing was changed.",
        )
    before, options = engine.state, options_of(engine.optimizer)
    extra = load_with_extra(path, engine, rng=counters)[1]
    if not optimizer:
        _keep_optimizer(engine, before, options, counters)
    position = extra.get("lr_scheduler")
    if scheduler and None not in (engine.lr_scheduler, position):
        engine.lr_scheduler.load_state_dict(position)
    if counters:
        steps = extra.get("global_steps", int(engine.state.step))
        engine._go_on_from(steps, extra.get("global_samples", 0))
    return str(path), extra.get("client_state", {})


def _keep_optimizer(
    engine: Engine, before: Any, options: list[dict[str, Any]], counters: bool
) -> None:
    """Restore the optimizer state from before the load; masters are set to the parameters."""
    loaded = engine.state
    step = loaded.step if counters else before.step
    slots = with_slot(loaded.slots, before.scale)
    engine.state = loaded.replace(optimizer=before.optimizer, slots=slots, step=step)
    driver = engine._driver
    driver.writes.masters.take(driver.state, range(len(driver.state.setup.layout.groups)))
    set_options(engine.optimizer, options)


def _read(file: Path) -> str | None:
    return read_text(file).strip() if is_there(file) else None


def _require(name: str, folder: Any) -> None:
    """Raise `LayoutError` for no folder, or an empty one."""
    if folder is None or not os.fspath(folder):
        raise LayoutError(
            f"{name}: the folder is {folder!r}.",
            cause="an option or a variable that was not set.",
            fix=f'give the folder of the checkpoints: engine.{name}("checkpoints").',
        )
