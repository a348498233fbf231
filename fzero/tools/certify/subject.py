"""What `certify` runs, in any precision: the model, its loss, the batches, and who reads which.

Random numbers of a loss are drawn from a seed that its batch gives. A rank draws the dropout masks
of its batches, and the one process those of all batches: so they are equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch._C import _DisableFuncTorch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero.errors import LayoutError
from fzero.machine.partition import named_leaves
from fzero.ranks.mesh import Axis, Mesh, running_on
from fzero.state import NAMESPACE
from fzero.state.layout import learns
from fzero.tools.trees import cast, copy_of_tree, tensors_in

Loss = Callable[[Any, Any], Tensor]
"""(model, batch) -> a scalar. `model` is called like the module, or is the pytree of parameters."""

Cut = Mapping[str, Any]
"""{axis: dim of every tensor, or a pytree of dims, or fn(batch, index, size) -> the piece}."""

_PRIME = 2654435761  # Knuth's multiplicative hash; of int64, modulo 2^64


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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let one process know the axes by their names, each with one rank."""
        if not self.names:
            yield
            return
        own = self.names[0] if len(self.names) == 1 else "_".join(["dp", *self.names])
        named = tuple((name, 1) for name in self.names) if len(self.names) > 1 else ()
        with running_on(Axis(name=own, size=1, named=named)):
            yield


def subject_of(model: Any, loss: Loss, batches: Any, names: tuple[str, ...] = ()) -> Subject:
    """Return the subject of the user's arguments. Raises `LayoutError` for invalid ones."""
    if not callable(loss):
        raise LayoutError(
            f"certify: the loss is a {type(loss).__name__}.",
            cause="arguments in another order.",
            fix="certify(model, loss, batches) with loss(model, batch) -> a scalar tensor.",
        )
    tensors = tensors_of(model)
    if not callable(batches) and (not isinstance(batches, Sequence) or not batches):
        raise LayoutError(
            f"certify: the batches are a {type(batches).__name__}.",
            cause="one batch, or an iterator, in the place of many batches.",
            fix="give a list of batches, or a function of the number of a batch.",
        )
    for path, tensor in tensors.items():
        if tensor.is_complex():
            raise LayoutError(
                f"certify: {path} is complex; its cells are tried in real numbers, of 64 to 16 "
                "bits.",
                cause="a model with complex parameters, which fzero trains, and certify does not "
                "examine.",
                fix="compare two runs with fzero.diff; or give a model with real parameters, "
                "[*, 2], that uses torch.view_as_complex(p).",
            )
    if not any(map(learns, tensors.values())):
        raise LayoutError(
            "certify: nothing in the model learns.",
            cause="every parameter is frozen, or there is none.",
            fix="give a module, or a pytree of tensors, with a parameter that requires grad.",
        )

    given: Any = batches

    def batch(number: int) -> Any:
        if number < len(given):
            return given[number]
        raise LayoutError(
            f"certify: batch {number} was wanted, and there are {len(given)}.",
            cause="a cell takes updates x ranks x micro-batches batches, all different: else "
            "it would not show that one took the place of another.",
            fix="give more batches, or a function of the number; or restrict `worlds`, "
            "`micro_batches` or `updates`.",
        )

    numbered = batches if callable(batches) else batch
    return Subject(model=model, loss=loss, batches=numbered, names=names)


def tensors_of(model: Any) -> dict[str, Tensor]:
    """{path: tensor} of all parameters, tied ones once, in their order."""
    if isinstance(model, nn.Module):
        return dict(model.named_parameters())
    paths, tensors, _ = named_leaves(model)
    first = {id(tensor): path for path, tensor in reversed([*zip(paths, tensors, strict=True)])}
    return {path: x for path, x in zip(paths, tensors, strict=True) if first[id(x)] == path}


class CalledModule:
    """What a loss is given in the place of a module: it is called, and has the parameters.

    Submodules and tensors of the module are not those that are trained, so it has none.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any], params: Any = None) -> None:
        self._module, self._call, self._params = module, call, params

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module does."""
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


# The seed of a batch.


@contextmanager
def seeded(batch: Any) -> Iterator[int | None]:
    """Draw torch's random numbers from the seed of a batch; afterwards they go on as before.

    Where a transform hides the values of the batch there is no seed, and nothing is changed.
    """
    seed = seed_of(batch)
    if seed is None:
        yield None
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield seed


def seed_of(batch: Any) -> int | None:
    """Return a hash of the values of a batch; None where a transform (vmap, a trace) hides them."""
    tensors = [*map(unwrapped, tensors_in(batch))]
    if any(isinstance(x, FakeTensor) or is_functorch_wrapped_tensor(x) for x in tensors):
        return None
    seed = torch.zeros((), dtype=torch.int64)
    for x in tensors:
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(1, raw.numel() + 1, dtype=torch.int64) * _PRIME
        seed = (seed + ((raw + 1) * (places ^ (places >> 7))).sum() + 1) * _PRIME
    return int(seed) & 0x7FFFFFFFFFFF


def unwrapped(x: Tensor) -> Tensor:
    """Return the value inside of torch.func.grad and the like; vmap hides it."""
    while is_functorch_wrapped_tensor(x) and not is_batchedtensor(x):
        x = get_unwrapped(x)
    if is_functorch_wrapped_tensor(x):
        return x
    with _DisableFuncTorch():  # which would wrap it again
        return x.detach()


# Meshes of named axes, some of which cut a batch.


def require_cut(meshes: Sequence[Mesh | None], cut: Cut, given: Mapping[str, Any]) -> None:
    """Raise `LayoutError` for a cut, or axes of the matrix, that meshes of names do not allow."""
    named = [mesh for mesh in meshes if mesh is not None]
    if not named and cut:
        raise LayoutError(
            f"certify: cut={dict(cut)}, and no mesh with names.",
            cause="ranks that all read whole batches: nothing would be cut.",
            fix='name the axes too, meshes={"data": 2, "seq": 2}.',
        )
    if named and (len(named) < len(meshes) or "worlds" in given):
        raise LayoutError(
            "certify: meshes with names beside "
            f"{'`worlds`' if len(named) == len(meshes) else 'others'}.",
            cause="sizes of named axes say how many ranks there are, and a loss that names an axis "
            "has no meaning on a mesh without it.",
            fix='give meshes={"data": 2, "seq": 2}, or a list of such, and no `worlds`.',
        )
    for mesh in named:
        if mesh.whole is not None:
            raise LayoutError(
                f"certify: meshes={mesh}, which is a part of {mesh.whole}.",
                cause="a state with other values at each place of a mesh, which one process has "
                "not.",
                fix="give the whole mesh, with a model that is the same everywhere.",
            )
        names = [name for name, _ in mesh.axes]
        if unknown := [name for name in cut if name not in names]:
            raise LayoutError(
                f"certify: cut names {unknown}, and a mesh has the axes {names}.",
                cause="a mistyped name, or a mesh without that axis.",
                fix="give each mesh the axis, of size 1 where nothing is cut.",
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """What the ranks of a mesh read: those that differ in a cut axis alone share a batch."""

    axes: tuple[tuple[str, int], ...]  # the last one fastest
    cut: Cut

    def of(self, rank: int) -> tuple[int, list[tuple[str, int, int]]]:
        """Return which batch a rank reads, and its (axis, index, size) in what cuts the batch."""
        place, stride, pieces = 0, 1, list[tuple[str, int, int]]()
        for name, size in reversed(self.axes):
            rank, index = divmod(rank, size)
            if name in self.cut:
                pieces.insert(0, (name, index, size))
            else:
                place, stride = place + index * stride, stride * size
        return place, pieces

    def piece(self, batch: Any, rank: int) -> Any:
        """Return what this rank reads of a batch. Raises `LayoutError` if it cannot be cut."""
        for name, index, size in self.of(rank)[1]:
            batch = _piece(batch, name, self.cut[name], index, size)
        return batch


def _piece(batch: Any, name: str, how: Any, index: int, size: int) -> Any:
    if callable(how):
        return how(batch, index, size)
    leaves, treedef = optree.tree_flatten(batch, none_is_leaf=True, namespace=NAMESPACE)
    try:
        dims = optree.broadcast_prefix(how, batch, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        raise LayoutError(
            f"certify: cut={{{name!r}: {how!r}}} does not fit a batch ({error}).",
            cause="dims in another structure than the batch has.",
            fix="give one dim for all tensors, a dim or None for each argument, or a function "
            "fn(batch, index, size) -> the piece.",
        ) from error

    def chunk(x: Any, dim: Any) -> Any:
        if dim is None:
            return x
        is_dim = isinstance(x, Tensor) and type(dim) is int and -x.ndim <= dim < x.ndim
        if is_dim and x.shape[dim] % size == 0:
            return x.chunk(size, dim)[index]
        seen = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x)}"
        raise LayoutError(
            f"certify: {seen} cannot be cut in {size} along dim {dim!r}, for the axis {name!r}.",
            cause="a dim that it does not have, or one of a size that the ranks do not divide.",
            fix="give None for what every rank has whole, batches of another length, or a "
            "function fn(batch, index, size) -> the piece.",
        )

    return treedef.unflatten(map(chunk, leaves, dims))
