"""Files of torch.save, written whole, and read without running what is in them.

A file of torch.save is a zip of one pickle and the bytes of its tensors. torch.load's
`weights_only` builds tensors, numbers, strings and containers, and refuses a pickle that names
anything else. A few classes of DeepSpeed, which its checkpoints have beside their tensors, become
stand-ins here that keep what they were made of and run nothing. The checksums of the zip, which
torch.load does not look at, are looked at here.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fzero.checkpoint.disk import is_there
from fzero.checkpoint.everywhere import damaged

_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_KEPT = (
    f"{_SCALER}.LossScaler",
    f"{_SCALER}.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "argparse.Namespace",  # the options of Megatron
)


class ForeignObject:
    """A stand-in for an unpickled object of another program: its class name and arguments."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def require_own(file: Path, root: Path) -> None:
    """Raise `CheckpointError` unless it is a file inside of `root`, by no link."""
    for part in (file, *file.parents):
        if part == root:
            break
        if part.is_symlink():
            raise damaged(part, "is a link: it would be read from elsewhere")
    if not is_there(file):
        raise damaged(file, "is missing")


def require_sound(file: Path) -> None:
    """Raise `CheckpointError` for a file that was cut off, or whose bytes are others."""
    try:
        with zipfile.ZipFile(file) as archive:
            wrong = archive.testzip()
    except Exception as error:  # of damaged bytes: anything
        raise damaged(file, f"is no file of torch.save: {type(error).__name__}: {error}") from None
    if wrong is not None:
        raise damaged(
            file, f"is not what was written, or has no checksums (compute_crc32=False): {wrong}"
        )


def read_pickle(file: Path) -> Any:
    """Return what a file of torch.save holds; bytes of its tensors are read when they are used.

    Raises `CheckpointError`, naming what it is, for a file that names anything but tensors and
    containers, and for one that torch.load cannot read.
    """
    try:
        with torch.serialization.safe_globals([(ForeignObject, name) for name in _KEPT]):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise damaged(file, _seen(file, error)) from None


def write_pickle(file: Path, value: Any) -> None:
    """Write a new file. Who gives it its place has its bytes on the disk before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as stream:  # whose error says why; torch's own does not
        torch.save(value, stream)


def require_dense(file: Path, value: Any) -> Tensor:
    """Return a dense tensor in memory. Raises `CheckpointError` for anything else."""
    dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    if not dense or value.device.type != "cpu" or value.is_quantized:
        raise damaged(file, f"holds no plain tensor, but a {type(value).__name__}")
    return value.detach()


def _seen(file: Path, error: Exception) -> str:
    """Say why a file was not read: which names it has that are not taken, if it has."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:
        names = []
    odd = sorted({*names} - {*_KEPT})
    if odd:
        return (
            f"names {', '.join(odd[:4])}: nothing but tensors, numbers, strings and containers "
            "is read from a pickle"
        )
    return f"cannot be read: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
