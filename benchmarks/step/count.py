"""See what one step moves and holds: collectives, bytes on the loopback device, live bytes."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Built = TypeVar("Built")
_LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
# Names of the operations of both namespaces, without underscores, to the usual letters.
_KINDS = {
    "allreduce": "AR",
    "allgather": "AG",
    "reducescatter": "RS",
    "alltoall": "A2A",
    "broadcast": "BC",
}
_NOT_DATA = ("barrier", "monitoredbarrier", "waittensor", "wraptensorautograd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one kind in one step of one rank."""

    kind: str
    calls: int
    payload_bytes: int  # the full buffer: all-reduce, broadcast; all-gather output; scatter input

    def ring_bytes(self, world_size: int) -> float:
        """Bytes a rank sends, on average over ranks, when no byte is sent that need not be.

        An all-reduce of P bytes costs 2 P (W-1)/W, every other collective P (W-1)/W.
        """
        rounds = 2 if self.kind == "AR" else 1
        return rounds * self.payload_bytes * (world_size - 1) / world_size


class _Watch(TorchDispatchMode):
    """Calls `see` after every operation, also inside tensor subclasses and custom operations."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, then look at it."""
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # DTensor asks for a shape; nothing is computed
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # DTensor and its like go first; what they run comes back here
        if func.namespace in ("aten", "prim", "prims", "c10d", "_c10d_functional"):
            out = func(*args, **kwargs)
        else:
            # While a mode handles a call it is off, so it would not see what a custom operation
            # does inside. Enter the kernel itself with the mode on again.
            with self:
                out = func.redispatch(_backend_of(args, kwargs), *args, **kwargs)
        self.see(func, args, kwargs, out)
        return out

    @abstractmethod
    def see(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: object,
    ) -> None:
        """Take note of one operation."""


def _backend_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch._C.DispatchKeySet:
    on_cuda = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves((args, kwargs)))
    key = torch._C.DispatchKey.CUDA if on_cuda else torch._C.DispatchKey.CPU
    return torch._C.DispatchKeySet(key)


class CollectiveCounter(_Watch):
    """Counts every collective that goes through torch's dispatcher, C++ reducers included.

    The payload of a call is its largest argument: the output of an all-gather, the input of a
    reduce-scatter, the buffer of an all-reduce.
    """

    def __init__(self) -> None:
        """Start with nothing counted."""
        super().__init__()
        self._calls: dict[str, list[int]] = {}

    def see(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: object,
    ) -> None:
        """Count `func` if it is a collective."""
        name = func._schema.name.split("::")[1].replace("_", "")
        if func.namespace not in ("c10d", "_c10d_functional") or name in _NOT_DATA:
            return
        kind = next((short for long, short in _KINDS.items() if name.startswith(long)), name)
        sizes = [_tensor_bytes(item) for item in (*args, *kwargs.values(), out)]
        self._calls.setdefault(kind, []).append(max(sizes))

    def traffic(self) -> list[Traffic]:
        """What was counted, by kind, in the order of first use."""
        return [
            Traffic(kind=kind, calls=len(sizes), payload_bytes=sum(sizes))
            for kind, sizes in self._calls.items()
        ]


def _tensor_bytes(item: object) -> int:
    leaves = [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def loopback_bytes() -> int | None:
    """Bytes sent over the loopback device since boot, by anybody; None where Linux is not."""
    return int(_LOOPBACK.read_text()) if _LOOPBACK.exists() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that one rank holds in tensors for one contestant, its batches not counted."""

    resident_bytes: int  # after a step
    peak_bytes: int  # after the worst operation of a step


class LiveBytes(_Watch):
    """Keeps a weak reference to every storage that an operation made while the mode was on.

    Weak references are to the storages below the tensors, so that what C++ alone holds (the
    buckets of DDP) counts too, and a storage resized to nothing (FSDP2) does not. What a kernel
    or gloo allocates for itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        """Start with nothing seen."""
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak_bytes = 0

    def see(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: object,
    ) -> None:
        """Note the storages of `out` that are in no argument, and how much is now alive."""
        made = _storages(out)
        for storage in _storages((args, kwargs)):
            made.pop(storage, None)
        if made:
            self._storages |= {key: StorageWeakRef(storage) for key, storage in made.items()}
            self.peak_bytes = max(self.peak_bytes, self.live_bytes())

    def live_bytes(self) -> int:
        """Bytes of the storages that are still alive."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total


def _storages(tree: object) -> dict[int, torch.UntypedStorage]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    real = [leaf for leaf in leaves if leaf.device.type == "cpu" and not is_fake(leaf)]
    storages = [tensor.untyped_storage() for tensor in real]
    in_memory = (storage for storage in storages if storage.filename is None)
    return {storage._cdata: storage for storage in in_memory}


def measure_memory(
    build: Callable[[], Built], use: Callable[[Built], object]
) -> tuple[Built, Memory]:
    """Build something, use it twice, and see how many bytes of tensors that took.

    Args:
        build: makes the thing, for example a model with its optimizer.
        use: for example one training step. It runs once to fill lazily made state, then again.

    Returns:
        What was built, with what is alive after the second `use` and the most during it.
    """
    with LiveBytes() as seen:
        built = build()
        use(built)
        gc.collect()
        seen.peak_bytes = 0
        use(built)
    gc.collect()
    return built, Memory(resident_bytes=seen.live_bytes(), peak_bytes=seen.peak_bytes)
