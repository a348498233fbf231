"""The model, loss and batches that `certify` runs, in any precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fzero.errors import LayoutError
from fzero.machine.partition import named_leaves
from fzero.state.layout import learns
from fzero.tools.compare import cast, copy_of_tree

Loss = Callable[[Any, Any], Tensor]
"""(model, batch) -> a scalar. `model` is called like the module, or is the pytree of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model with its loss and batches; `model` itself is never run or changed."""

    model: Any  # an nn.Module, or a pytree of tensors
    loss: Loss
    batches: Callable[[int], Any]
    names: tuple[str, ...] = ()  # of axes, which the loss may name in one process too

    @property
    def is_module(self) -> bool:
        """Whether an engine can train it."""
        return isinstance(self.model, nn.Module)

    @property
    def name(self) -> str:
        """What a report calls it."""
        return type(self.model).__name__ if self.is_module else "a pytree of parameters"

    def copy(self, dtype: torch.dtype) -> Any:
        """Return a copy with floating tensors in `dtype`; ties stay tied, frozen leaves frozen."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model).to(dtype)
        return copy_of_tree(self.model, dtype)

    def batch(self, number: int, dtype: torch.dtype) -> Any:
        """Batch `number`, floating tensors in `dtype`."""
        return cast(self.batches(number), dtype)


class CalledModule:
    """What a loss is given in the place of a module: it is called, and has the parameters.

    Submodules and tensors of the module are not those that are trained, so it has none.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any], params: Any = None) -> None:
        self._module, self._call, self._params = module, call, params

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters in training, by path."""
        yield from (self._params or dict(self._module.named_parameters())).items()

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters in training."""
        yield from (p for _, p in self.named_parameters())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, nn.Module | Tensor) or callable(found):
            raise self._read(name)
        return found

    def __getitem__(self, at: Any) -> Any:
        raise self._read(f"[{at!r}]")

    def _read(self, what: str) -> LayoutError:
        return LayoutError(
            f"certify: the loss reads {what} of the model.",
            cause="a part of the module that is called alone, or changed, in the loss.",
            fix="call the model as a whole, with a forward that returns what the loss needs; "
            "model.parameters() and model.named_parameters() may be read.",
        )


def subject_of(model: Any, loss: Loss, batches: Any, names: tuple[str, ...] = ()) -> Subject:
    """Return the subject of the user's arguments. Raises `LayoutError` for invalid ones."""
    if not callable(loss):
        raise LayoutError(
            f"certify: the loss is a {type(loss).__name__}.",
            cause="arguments in another order.",
            fix="certify(model, loss, batches) with loss(model, batch) -> a scalar tensor.",
        )
    subject = Subject(model=model, loss=loss, batches=_numbered(batches), names=names)
    for path, tensor in tensors_of(model).items():
        if tensor.is_complex():
            raise LayoutError(
                f"certify: {path} is complex; its cells are tried in real numbers, of 64 to 16 "
                "bits.",
                cause="a model with complex parameters, which fzero trains, and certify does not "
                "examine.",
                fix="compare two runs with fzero.diff; or give a model with real parameters, "
                "[*, 2], that uses torch.view_as_complex(p).",
            )
    if not any(learns(tensor) for tensor in tensors_of(model).values()):
        raise LayoutError(
            "certify: nothing in the model learns.",
            cause="every parameter is frozen, or there is none.",
            fix="give a module, or a pytree of tensors, with a parameter that requires grad.",
        )
    return subject


def tensors_of(model: Any) -> dict[str, Tensor]:
    """{path: tensor} of all parameters, tied ones once, in their order."""
    if isinstance(model, nn.Module):
        return dict(model.named_parameters())
    paths, tensors, _ = named_leaves(model)
    tensor_at: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, tensor in zip(paths, tensors, strict=True):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensor_at[path] = tensor
    return tensor_at


def _numbered(batches: Any) -> Callable[[int], Any]:
    if callable(batches):
        return batches
    if not isinstance(batches, Sequence) or not batches:
        raise LayoutError(
            f"certify: the batches are a {type(batches).__name__}.",
            cause="one batch, or an iterator, in the place of many batches.",
            fix="give a list of batches, or a function of the number of a batch.",
        )

    def batch(number: int) -> Any:
        if number < len(batches):
            return batches[number]
        raise LayoutError(
            f"certify: batch {number} was wanted, and there are {len(batches)}.",
            cause="a cell takes updates x ranks x micro-batches batches, all different: else "
            "it would not show that one took the place of another.",
            fix="give more batches, or a function of the number; or restrict `worlds`, "
            "`micro_batches` or `updates`.",
        )

    return batch
