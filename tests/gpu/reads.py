"""No step waits for a GPU: nothing on the device is read by the host, and nothing is copied to it.

Nor is a kernel of the device given memory of the host.

On CUDA torch says so, on the simulated device its order does. On a CPU, `Device` keeps book of what
would be on the device: what was put
there, what is made with `device=`, and what is computed from such tensors. Counters that fzero
makes on the CPU, and the rounds of its own group, are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fzero.machine.placeholder import LazyParam

# What has a result whose value, or whose shape, the host must know.
READS = {
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}
# What reads memory without a kernel, so that only the Python call shows it.
CALLS = {"tolist", "numpy", "__array__", "cpu", "__dlpack__", "__contains__"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPIES = {"copy_", "_foreach_copy_", "_to_copy"}


class HostReadError(AssertionError):
    """The host would wait for the device here."""


class MixedDevicesError(AssertionError):
    """A kernel of the device would be given memory of the host here."""


class Device(TorchDispatchMode):
    """A device that is none; the host waits for it where it would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, UntypedStorage] = {}  # held, so that no address is used again
        self.strict = False
        self.called = 0  # Python calls that are under way

    def put(self, value: Any) -> Any:
        """Let the tensors of a pytree, or of a module, be on the device."""
        tensors = value.parameters() if isinstance(value, nn.Module) else tree_leaves(value)
        for x in tensors:
            if isinstance(x, Tensor) and not isinstance(x, LazyParam):
                storage = x.untyped_storage()
                self._storages[storage._cdata] = storage
        return value

    def has(self, x: Any) -> bool:
        """Return whether it is on the device."""
        if isinstance(x, LazyParam):
            return True
        if not isinstance(x, Tensor):
            return False
        storage = x.untyped_storage()
        return storage._cdata in self._storages or self._is_part(storage)

    def _is_part(self, storage: UntypedStorage) -> bool:
        """Whether it is memory of another storage that is there: DLPack makes such."""
        first, size = storage.data_ptr(), storage.nbytes()
        there = size > 0 and any(
            one.data_ptr() <= first and first + size <= one.data_ptr() + one.nbytes()
            for one in self._storages.values()
        )
        if there:
            self._storages[storage._cdata] = storage
        return there

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """Raise where the host would wait."""
        self.strict = True
        try:
            yield
        finally:
            self.strict = False

    def require_no_wait(self, seen: str, read: bool) -> None:
        """Raise if the host would wait."""
        if self.strict and read:
            raise HostReadError(f"{seen} waits for the device.")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(kind, nn.Parameter) and kind is not Tensor for kind in types):
            return NotImplemented  # placeholders and stand-ins: what they run comes here again
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = any(map(self.has, tensors))
        if here:
            self._require_no_mix(func, tensors)
        self.require_no_wait(str(func), here and self._reads(func, args, tensors))
        result = func(*args, **kwargs)
        # What a node of autograd makes for itself is where its gradients are.
        by_node = not tensors and not self.called and torch._C._current_graph_task_id() != -1
        return self.put(result) if here or by_node else result

    def _require_no_mix(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Raise where CUDA would: a kernel of it takes single numbers of the host at most."""
        name = func._schema.name.removeprefix("aten::")
        takes_numbers = not name.startswith(("_foreach", "_fused"))
        wrong = [x for x in tensors if not self.has(x) and not (takes_numbers and x.dim() == 0)]
        if wrong and name not in COPIES | INDEXING and not name.startswith("c10d::"):
            shapes = ", ".join(str(list(x.shape)) for x in wrong)
            raise MixedDevicesError(f"{name} is given tensors of the host, of shapes {shapes}.")

    def _reads(self, func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":  # from one side to the other
            return self.has(args[0]) is not self.has(args[1])
        if name in INDEXING:  # by a mask: the result has as many elements as are true
            return any(x is not None and x.dtype is torch.bool for x in args[1])
        return name in READS


class _Calls(TorchFunctionMode):
    """The part of a `Device` that only Python calls show."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        # A kernel is not told who chose the device. By its name "cpu" the host is meant.
        made = kwargs.get("device") not in (None, "cpu")
        read = name in CALLS and self._device.has(args[0])
        # torch.tensor copies from the host, and the host waits for that.
        self._device.require_no_wait(name, read or (made and func is torch.tensor))
        nodes = name in {"backward", "grad"}  # their kernels are not called by Python
        self._device.called += not nodes
        try:
            result = func(*args, **kwargs)
        finally:
            self._device.called -= not nodes
        if name == "to" and not self._device.has(args[0]) and _names_device(args[1:], kwargs):
            return self._device.put(result.clone())  # it would be a copy
        return self._device.put(result) if made else result


def _names_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(x, torch.device | str) for x in (*args, *kwargs.values()))


class Gpu:
    """A real one: tensors were made there, and torch says where the host waits."""

    def put(self, value: Any) -> Any:
        """Return what is there already."""
        return value

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """Raise where the host waits."""
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Simulated(Gpu):
    """The simulated one, whose order counts where the host waits."""

    def __init__(self, order: Any) -> None:
        self._order = order

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """Raise if the host has waited."""
        before = self._order.waits.copy()
        yield
        if waits := self._order.waits - before:
            raise HostReadError(f"the host waits for the device: {dict(waits)}")


@contextmanager
def on_device(device: str) -> Iterator[Gpu | Device]:
    """Watch a device: `put` tensors there, and let nothing wait for it inside of `no_waits()`."""
    if device == "cuda":
        yield Gpu()
        return
    if device == "sim":
        from tests.device.order import checked

        with checked() as order:
            yield Simulated(order)
        return
    watched = Device()
    with _Calls(watched), watched:
        yield watched
