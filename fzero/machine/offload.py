"""Offloaded tensors, in host memory or in files: allocated, copied to the device, written back.

Everything here is ordered by the stream that runs now: a copy to or from pinned memory returns at
once, and what is computed next waits for it on the device. So host memory that was written this way
is read by the host only after `wait_for_copies`.

Files are mapped into memory. The kernel of the operating system reads ahead and writes behind,
beside what is computed: it is told when (`page_out`, `CopyStream`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fzero.context.current_rank import has_no_values, kind_of
from fzero.context.device import accelerator
from fzero.errors import LayoutError
from fzero.state import NAMESPACE, TrainState
from fzero.state.setup import Home, Offload, is_on_disk

# To its home, and to the device: where a value is used, and where it is updated.


def offloaded(home: Home, x: Tensor, offload: Offload) -> Tensor:
    """Return `x` at `home` (host memory, disk, or None: the device): itself, or a copy."""
    if home is None:
        return x
    if has_no_values(x):
        there = home_of_empty(x) == home
    elif home == "disk":
        there = is_on_disk(x) or not x.numel()
    else:  # beside a device, host memory is pinned
        beside = offload.device is not None and offload.device.type != "cpu"
        there = x.device.type == "cpu" and not (beside and x.numel() and not is_pinned(x))
    if there:
        return x
    if has_no_values(x):
        made = _described(home, x.detach())
    elif home == "disk":
        made = _in_file(x, os.fspath(offload.folder or ""))
    else:
        made = torch.empty_like(x, device="cpu", pin_memory=True, requires_grad=False)
    with torch.no_grad():
        return _filled(made, x)


def to_device(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x` on `device` in `dtype`: itself if it is so already."""
    if has_no_values(x) and kind_of(device) != "cpu" and not is_here(x, device):
        return x.to(dtype=dtype or x.dtype, copy=True)
    if device.type != "cpu" and is_pinned(x):  # in another dtype it would go by pageable memory
        x = x.to(device=device, non_blocking=True)
    return x.to(device=device, dtype=dtype or x.dtype)


def write_back(home: Tensor, used: Tensor) -> None:
    """Copy a tensor that was changed on the device back to its home."""
    if used is not home:
        _filled(home, used)
    else:
        page_out(home)


def change(home: Tensor, device: torch.device, write: Callable[[Tensor], Any]) -> None:
    """Let `write` change a tensor in place, on `device`."""
    used = to_device(home, device)
    write(used)
    write_back(home, used)


def add_to(home: Tensor, x: Tensor) -> None:
    """home += x, computed where `x` is."""
    change(home, x.device, lambda used: used.add_(x))


def at_home(state: TrainState, *, device: torch.device | None = None) -> TrainState:
    """Return the state with each buffer at the home that its setup says.

    device: where those live that are not offloaded; None: they are there already.
    """
    offload = state.setup.offload
    if offload.neutral and device is None:
        return state

    def of(home: Home) -> Callable[[Any], Any]:
        def moved(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.ndim):  # counters are no buffers
                return x
            if home is None and device is not None:
                return x.clone() if is_on_disk(x) else to_device(x, device)
            return offloaded(home, x, offload)

        return lambda tree: optree.tree_map(moved, tree, namespace=NAMESPACE)

    window = of(offload.gradients)(state.window.pending)
    return state.replace(
        params=of(offload.params)(state.params),
        gradients=of(offload.gradients)(state.gradients),
        window=replace(state.window, pending=window),
        optimizer=of(offload.optimizer)(state.optimizer),
        slots={
            name: slot
            if slot.form.kind == "window" or slot.form.leaves == "number"
            else of(offload.optimizer)(slot)
            for name, slot in state.slots.items()
        },
    )


# Where a tensor lives, and others that live there.


def is_here(x: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is in the memory of `device`."""
    if has_no_values(x):
        return home_of_empty(x) is None or (home_of_empty(x) == kind_of(device) == "cpu")
    return x.device == device and not is_on_disk(x)


def home_of_empty(x: Tensor) -> Home:
    """Return the home of the tensor that `x`, a tensor without values, describes."""
    with torch._C.DisableTorchFunction():  # no use of a step's
        return getattr(x.untyped_storage(), "home", None)


def _described(home: Home, like: Tensor) -> Tensor:
    """Return a tensor without values for one that lives at `home`."""
    with _disable_current_modes():  # a plan counts what it sees made, and has not heard the home of
        made = torch.empty_like(like)
    made.untyped_storage().home = home  # type: ignore[attr-defined]
    return made


def empty_where(x: Tensor) -> Tensor:
    """Return a tensor like `x`, with any values, that lives where `x` does."""
    if has_no_values(x) and (home := home_of_empty(x)) is not None:
        return _described(home, x)
    if is_on_disk(x):
        return _in_file(x, os.path.dirname(str(x.untyped_storage().filename)))
    return torch.empty_like(x, pin_memory=is_pinned(x))


def cloned(x: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a copy of `x` that lives where `x` does; `device`: where it is used."""
    return _filled(empty_where(x), to_device(x, device) if device and is_pinned(x) else x)


def is_pinned(x: Tensor) -> bool:
    """Whether copies between `x` and a device run beside the host."""
    return x.device.type == "cpu" and x.numel() > 0 and not has_no_values(x) and x.is_pinned()


_COPIES_FROM = set[torch.device]()
"""The devices from which copies to pinned memory were started."""


def _filled(made: Tensor, x: Tensor) -> Tensor:
    if x.device != made.device:
        if pinned := is_pinned(made):
            _COPIES_FROM.add(x.device)
        made.copy_(x.to(made.dtype), non_blocking=pinned)
    else:  # also what is copied from the host to the host, which then waits
        wait_for_copies([x, made])
        made.copy_(x)
    page_out(made)
    return made


def wait_for_copies(tensors: Iterable[Any]) -> None:
    """Wait for copies to pinned memory, before the host reads or writes these tensors."""
    if _COPIES_FROM and any(isinstance(x, Tensor) and is_pinned(x) for x in tensors):
        for device in [*_COPIES_FROM]:
            torch.accelerator.synchronize(device)


# Files.


def require_folder(offload: Offload) -> None:
    """Raise `LayoutError` if no file can be made where the record says."""
    if "disk" in offload.homes.values():
        _in_file(torch.empty(1), os.fspath(offload.folder or ""))


def _in_file(like: Tensor, folder: str) -> Tensor:
    try:
        handle, path = tempfile.mkstemp(prefix="fzero-", dir=folder)
    except OSError as error:
        raise LayoutError(
            f"offload could not make a file in {folder!r}: {error}.",
            cause="the folder was removed, may not be written to, or its disk is full.",
            fix="give folder=... on a disk of this machine with room for the state.",
        ) from error
    try:
        nbytes = like.numel() * like.element_size()
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, not in a write later
            os.posix_fallocate(handle, 0, nbytes)
        made = torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
    except OSError as error:
        raise LayoutError(
            f"offload could not take {nbytes:,} bytes in {folder!r}: {error}.",
            cause="a disk that is full, or a file system that does not map files.",
            fix="give folder=... on a disk with room for the state.",
        ) from error
    finally:
        os.close(handle)
        os.unlink(path)  # it lives as long as the tensor does
    return made.view(like.shape)


_WILL_NEED, _PAGE_OUT = 3, 21  # of Linux, for madvise: read ahead; write, and drop from memory


def page_out(x: Tensor) -> None:
    """Let the kernel write a tensor that lives on disk, and drop it from memory."""
    if is_on_disk(x):
        _advise(x, _PAGE_OUT)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system call madvise on Linux; None elsewhere."""
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


def _advise(x: Tensor, advice: int) -> None:
    call, page = _madvise(), os.sysconf("SC_PAGE_SIZE")
    first = x.data_ptr()
    begin, end = -(-first // page) * page, (first + x.numel() * x.element_size()) // page * page
    if call is not None and begin < end:
        call(begin, end - begin, advice)


class CopyStream:
    """Copies to a device and back on a separate stream, beside the computation.

    On a CPU, or where nothing has values, there is no stream; what is there already is lent as it
    is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.Stream(device) if device.type == accelerator() else None

    def fetch(self, wanted: Sequence[tuple[Tensor, torch.dtype]]) -> Callable[[], list[Tensor]]:
        """Start to copy tensors here, each in a dtype. What is returned waits for them."""
        for x, _ in wanted:
            if is_on_disk(x):
                _advise(x, _WILL_NEED)
        if self._side is None:
            made = [to_device(x, self.device, dtype) for x, dtype in wanted]
            return lambda: made
        # What wrote to these tensors before runs on the stream that is current now.
        self._side.wait_stream(torch.accelerator.current_stream(self.device))
        with self._side:
            here = [to_device(x, self.device, dtype) for x, dtype in wanted]
            event = self._side.record_event()

        def wait() -> list[Tensor]:
            now = torch.accelerator.current_stream(self.device)
            now.wait_event(event)
            for x in here:
                x.record_stream(now)
            return here

        return wait

    def store(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Write changed tensors back: pairs of (home, tensor on the device)."""
        if self._side is None:
            for home, used in pairs:
                write_back(home, used)
            return
        self._side.wait_stream(torch.accelerator.current_stream(self.device))
        with self._side:
            for home, used in pairs:
                used.record_stream(self._side)
                write_back(home, used)

    def end(self) -> None:
        """Make the current stream wait for everything that was written back."""
        if self._side is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._side)
