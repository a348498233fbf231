"""Tensors that stand for values without memory of their own, and what asks for that memory.

numpy(), np.asarray, tolist()       the values, in a copy that cannot be written
data_ptr(), storages, DLPack        an error that names the way: what is written there is lost
C++ that takes the address          torch's own error, in the place of a read at address 0
"""

from __future__ import annotations

import functools
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fzero.context.here import WithoutMemory
from fzero.errors import FzeroError, PhaseError
from fzero.machine.written import flat

ADDRESS, STORAGE, EXPORT = "the address", "the storage", "an export by DLPack"


class Memoryless(WithoutMemory):
    """A tensor with a shape, and with values that are made when somebody reads them."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def values(self) -> Tensor:
        """Return the values, which may be those of another tensor."""
        raise NotImplementedError

    def begin_write(self, func: Any) -> None:
        """Raise if what `func` is about to write to it would be lost."""
        raise NotImplementedError

    def without_memory(self, what: str) -> FzeroError:
        """Return the error for what asked for its memory."""
        raise NotImplementedError

    def data_ptr(self) -> int:
        """Raise: there is no memory, and a kernel would read at address 0."""
        raise self.without_memory(ADDRESS)

    def untyped_storage(self) -> Any:
        """Raise: there is no memory to write to a file, or to share."""
        if torch.compiler.is_compiling():  # which describes it, and writes nothing
            return Tensor.untyped_storage(self)
        raise self.without_memory(STORAGE)

    def storage(self) -> Any:
        """Raise, before torch warns that this is the old name."""
        raise self.without_memory(STORAGE)

    def __dlpack__(self, **_: Any) -> Any:
        """Raise: whoever is given the memory may write to it, and nobody would hear of that."""
        raise self.without_memory(EXPORT)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values in an array that is not writeable."""
        if self.requires_grad and not force:  # raises as torch does: a gradient would be lost
            torch.zeros(0, requires_grad=True).numpy()
        array = self.values().detach().cpu().clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the values as numbers in lists."""
        return self.values().tolist()


def not_for_jit(what: str) -> PhaseError:
    """Return the error for what torch.jit would make a program of."""
    return PhaseError(
        f"torch.jit of {what}.",
        cause="torch.jit.script, trace or onnx.export of a model that an engine has: its hooks are "
        "no TorchScript, and at stage 3 its parameters have no memory to save.",
        fix="engine.close() first; it gives the module back with whole parameters, and a new "
        "Engine goes on. Or give torch.jit a second model, with engine.full_state_dict().",
    )


def memoryless(cls: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """Return a tensor of a class with the shape, strides and dtype of another one."""
    made = Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # else C++ reads at address 0
    _look_into_lists()
    return made


@functools.cache
def _look_into_lists() -> None:
    """Have the collectives of torch that take lists of lists look for memoryless tensors in them.

    Gloo would meet one in a thread of its own, where no error has a name.
    """
    for name in _OF_LISTS if dist.is_available() else ():
        setattr(dist.ProcessGroup, name, _looking(name, getattr(dist.ProcessGroup, name)))


_OF_LISTS = ("allgather", "gather", "scatter", "reduce_scatter")


def _looking(name: str, collective: Any) -> Any:
    @functools.wraps(collective)
    def looks(group: Any, *of_call: Any, **options: Any) -> Any:
        given: Any = of_call
        if not any(isinstance(x, Memoryless) for x in flat(given)):
            return collective(group, *given, **options)
        for x in flat(given[:1]):  # outputs come first
            if isinstance(x, Memoryless):
                x.begin_write(f"c10d.{name}_")
        return collective(group, *optree.tree_map(_with_values, given), **options)

    return looks


def _with_values(x: Any) -> Any:
    return x.values() if isinstance(x, Memoryless) else x
