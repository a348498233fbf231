"""`save_checkpoint`, `load_checkpoint`: a folder for each tag, and a file with the latest tag."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fzero.adapter.engine import Engine
from fzero.adapter.writes import masters_follow
from fzero.checkpoint import load_with_extra, save
from fzero.checkpoint.collective import Ranks, from_first
from fzero.checkpoint.engine_state import idle, options_of, set_options
from fzero.checkpoint.folders import is_there, put_text, read_text
from fzero.checkpoint.manifest import leaves_out, read_manifest
from fzero.errors import LayoutError
from fzero.state.scale import with_slot

_LATEST = "latest"


class CheckpointedEngine(Engine):
    """An engine with DeepSpeed's methods that save and load, and with what these keep beside.

    Attributes:
        lr_scheduler: is stepped after each update; None without one.
        global_steps: updates that were due, also those that an overflow skipped.
        global_samples: samples of those, on all ranks; 0 if the config has no batch size.
    """

    lr_scheduler: Any = None
    global_steps = 0
    global_samples = 0

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """`fzero.checkpoint.save(save_dir / tag, engine)`, with the scheduler. A collective.

        Gradients that wait for an update stay in the engine and are not saved, with a warning.

        Args:
            save_dir: a folder of several checkpoints.
            tag: the name of this one; default global_step<n>.
            client_state: what JSON can hold; `load_checkpoint` returns it.
            save_latest: write the tag to save_dir / "latest", for `load_checkpoint`.
            exclude_frozen_parameters: parameters that do not learn are left out.

        Returns:
            True. What goes wrong is raised, on every rank: see `fzero.checkpoint.save`.
        """
        folder = _folder("save_checkpoint", save_dir)
        if backwards := self.state.progress.backwards:
            warnings.warn(
                f"save_checkpoint: the gradients of {backwards} backwards wait for an update. They "
                "are not in the checkpoint; the engine goes on with them.",
                UserWarning,
                stacklevel=2,
            )
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        extra = {
            "client_state": dict(client_state or {}),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
        }
        save(folder / name, idle(self), extra=extra, frozen=not exclude_frozen_parameters)
        if save_latest:
            file = folder / _LATEST
            from_first(
                Ranks(axis=self.axis),
                lambda: put_text(file, name, through=file.with_suffix(".new")),
                what=f"write {file}",
            )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved, at any stage and number of ranks. A collective.

        Args:
            load_dir: as for `save_checkpoint`.
            tag: as for `save_checkpoint`; default what save_dir / "latest" says.
            load_module_strict: False: frozen parameters that the checkpoint leaves out stay as they
                are. All others must be those of the module.
            load_optimizer_states: False: parameters and buffers are loaded, masters follow them;
                other slots, the loss scale and the options of param groups stay.
            load_lr_scheduler_states: whether the scheduler goes on where it was.
            load_module_only: neither of both; `global_steps` and random generators stay, too.

        Returns:
            The path and the client_state; (None, None), with a warning, without a tag and without
            a file `latest`.

        Raises:
            CheckpointError, LayoutError: see `fzero.checkpoint.load`.
        """
        folder, ranks = _folder("load_checkpoint", load_dir), Ranks(axis=self.axis)
        if tag is None:
            file = folder / _LATEST
            tag = from_first(
                ranks,
                lambda: read_text(file).strip() if is_there(file) else None,
                what=f"read {file}",
            )
        if tag is None:
            warnings.warn(
                f"load_checkpoint: there is no file {folder}/{_LATEST}; nothing was loaded.",
                UserWarning,
                stacklevel=2,
            )
            return None, None
        path = folder / str(tag)
        whole = from_first(ranks, lambda: not leaves_out(read_manifest(path)), what=f"read {path}")
        if load_module_strict and not whole:
            raise LayoutError(
                f"load_checkpoint: {path} has no frozen parameters.",
                cause="save_checkpoint(exclude_frozen_parameters=True).",
                fix="load_checkpoint(..., load_module_strict=False): frozen parameters then stay "
                "as they are in the engine. Nothing was changed.",
            )
        more = not load_module_only
        before, options = self.state, options_of(self.optimizer)
        extra = load_with_extra(path, self, rng=more)[1]
        if not (load_optimizer_states and more):  # the optimizer is what it was before
            loaded = self.state
            slots = with_slot(loaded.slots, before.scale)
            step = loaded.step if more else before.step
            self.state = loaded.replace(optimizer=before.optimizer, slots=slots, step=step)
            state = self._driver.state
            masters_follow(state, state.setup.layout.trainable)
            set_options(self.optimizer, options)
        position = extra.get("lr_scheduler")
        if load_lr_scheduler_states and more and None not in (self.lr_scheduler, position):
            self.lr_scheduler.load_state_dict(position)
        if more:
            self.global_steps = extra.get("global_steps", int(self.state.step))
            self.global_samples = extra.get("global_samples", 0)
        return str(path), extra.get("client_state", {})

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return `full_state_dict()`: copies, at stage 3 too. A collective.

        With `exclude_frozen_parameters` parameters that do not learn are left out.
        """
        values = self.full_state_dict()
        frozen = {path for path, p in self.module.named_parameters() if not p.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        return {name: value for name, value in values.items() if name not in left_out}

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `module_state_dict()` to save_dir / save_filename, by torch.save. A collective.

        At stage 3, too, whatever stage3_gather_16bit_weights_on_model_save says.
        """
        folder = _folder("save_16bit_model", save_dir)
        values = self.module_state_dict(exclude_frozen_parameters)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(values, folder / save_filename)

        from_first(Ranks(axis=self.axis), write, what=f"write {folder / save_filename}")
        return True


def _folder(name: str, folder: Any) -> Path:
    """Return the path. Raises `LayoutError` for no folder, or an empty one."""
    if folder is None or not os.fspath(folder):
        raise LayoutError(
            f"{name}: the folder is {folder!r}.",
            cause="an option or a variable that was not set.",
            fix=f'give the folder of the checkpoints: engine.{name}("checkpoints").',
        )
    return Path(folder)
