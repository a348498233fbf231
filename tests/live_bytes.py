"""Bytes of tensors that are alive, counted after every operation of this thread."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PATIENCE_S = 5.0  # a thread of gloo is a moment late to let go of a buffer, more on a busy machine


class LiveBytes(TorchDispatchMode):
    """The storages that were made since it was entered, as long as anybody holds them.

    By weak references to storages: what only C++ holds (autograd, gloo) counts, too; what was
    resized to nothing, or is a file, does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._bound, self._peak = math.inf, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a placeholder goes first; what it runs comes back here
        out = func(*args, **kwargs)
        made = _storages(out)
        for given in _storages((args, kwargs)):
            made.pop(given, None)
        for key, storage in made.items():
            self._storages[key] = StorageWeakRef(storage)
        del made
        self._look()
        return out

    def _look(self) -> None:
        self._peak = max(self._peak, self.settled(max(self._bound, self._peak)))

    @contextmanager
    def at_most(self, bound: float, what: str) -> Iterator[None]:
        """Raise if more than `bound` bytes were alive after an operation of the block.

        What seems to be more is looked at again, for as long as gloo may take to let go.
        """
        self._bound, self._peak = bound, 0
        yield
        gc.collect()
        self._bound, peak = math.inf, self._peak
        assert peak <= bound, f"{what}: {peak:,} bytes, at most {bound:,.0f} were promised"

    def begin(self) -> None:
        """Begin to look for the most that is alive: `peak`."""
        self._bound, self._peak = math.inf, 0

    @property
    def peak(self) -> int:
        """The most bytes that were alive after an operation since `begin`."""
        return self._peak

    def settled(self, bound: float) -> int:
        """Bytes that are alive, once they are `bound` at most, or gloo has had time to let go."""
        live, deadline = self.alive(), time.monotonic() + PATIENCE_S
        while live > bound and time.monotonic() < deadline:
            time.sleep(0.001)
            live = self.alive()
        return live

    def alive(self) -> int:
        """Bytes that are alive now."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    leaves = [x for x in tree_leaves(tree) if type(x) in (Tensor, torch.nn.Parameter)]
    found = [x.untyped_storage() for x in leaves if x.device.type == "cpu"]
    return {storage._cdata: storage for storage in found if storage.filename is None}
