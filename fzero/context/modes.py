"""Which of torch's modes is active: they decide between the fast path and the general one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import optree
import torch
from torch import Tensor
from torch._C import _DisableFuncTorch
from torch._C._functorch import (
    TransformType,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_bdim,
    maybe_get_level,
)
from torch._functorch import pyfunctorch
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fzero.context.current_rank import in_forward_mode, is_abstract
from fzero.context.device import accelerator
from fzero.errors import FzeroError, LayoutError, PhaseError

P = ParamSpec("P")
R = TypeVar("R")
LEFT: dict[int, Callable[[Any], None]] = {}
"""Of each tensor that a record has left in the program: what judges the outcome of a step."""


def in_transform() -> bool:
    """Whether a torch.func transform (or forward-mode AD) surrounds this call."""
    return maybe_current_level() is not None or in_forward_mode()


def for_training(do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return `do(...)`; in inference mode, with tensors that training can use afterwards."""
    if not torch.is_inference_mode_enabled():
        return do(*args, **kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return do(*args, **kwargs)


@contextmanager
def explains_inference(arguments: Any) -> Iterator[None]:
    """Raise `LayoutError` where autograd fails in this block by an argument of inference mode."""
    try:
        yield
    except RuntimeError as error:
        made = [x for x in optree.tree_leaves(arguments) if isinstance(x, Tensor)]
        bad = next((x for x in made if x.is_inference()), None)
        if bad is None or isinstance(error, FzeroError):
            raise
        first = str(error).partition("\n")[0]
        raise LayoutError(
            f"an argument of {bad.dtype}, shape {[*bad.shape]}, was made under inference_mode; "
            f"torch says: {first:.200}",
            cause="a batch, or features of another model, computed under torch.inference_mode(): "
            "autograd cannot save it for a backward.",
            fix="compute it under torch.no_grad(), or pass x.clone().",
        ) from error


def require_autograd(name: str) -> None:
    """Raise `PhaseError` in inference mode, where every gradient would be a silent zero."""
    if torch.is_inference_mode_enabled():
        raise PhaseError(
            f"{name} inside torch.inference_mode().",
            cause="an evaluation's context around a training step; autograd records nothing.",
            fix="leave it, or use torch.no_grad(), inside which grad_and_reduce works.",
        )


def holds(condition: Tensor) -> bool:
    """Whether a condition is true; under vmap, whether it is for all that is mapped over."""
    while is_functorch_wrapped_tensor(condition):
        condition = get_unwrapped(condition)
    with _DisableFuncTorch():
        return bool(condition.all())


def samples(x: Tensor) -> list[Tensor]:
    """Return the values of x inside of transforms: of each sample that vmap maps over."""
    if not is_functorch_wrapped_tensor(x):
        return [x]
    inner = get_unwrapped(x)
    parts = inner.unbind(maybe_get_bdim(x)) if is_batchedtensor(x) else [inner]
    return [sample for part in parts for sample in samples(part)]


def is_differentiated(x: Tensor) -> bool:
    """Whether a gradient by `x` is wanted, by autograd or by any level of torch.func."""
    while True:
        if torch.is_grad_enabled() and x.requires_grad:
            return True
        if not is_functorch_wrapped_tensor(x):
            return False
        x = get_unwrapped(x)


def without_transforms(name: str, x: Tensor) -> Tensor:
    """Return the values of x inside of transforms. Raises `PhaseError` if vmap maps over it."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            raise PhaseError(
                f"{name} under torch.func.vmap.",
                cause="each sample has values of its own, and the host needs one for all of them.",
                fix="compute it outside of vmap, and map over the other arguments: in_dims.",
            )
        x = get_unwrapped(x)
    return x


def is_recorded(tensors: Iterable[Any]) -> bool:
    """Whether this call is being traced (make_fx, fake tensors).

    On an abstract rank fake tensors are what real ones are elsewhere.
    """
    fake = (isinstance(t, FakeTensor) for t in tensors)
    return get_proxy_mode() is not None or (not is_abstract() and any(fake))


def needs_func(tensors: Iterable[Any]) -> bool:
    """Whether gradients are made by torch.func: under a transform, or recorded on one real rank.

    What is recorded on an abstract rank is what runs on real ones.
    """
    return in_transform() or (is_recorded(tensors) and not is_abstract())


def wants_graph(tensors: Iterable[Any]) -> bool:
    """Whether the caller differentiates by one of these with ordinary autograd."""
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in tensors
    )


# torch's thread-local modes: captured where a call is made, entered in the thread that runs it.


@functools.cache
def kinds_of_autocast() -> tuple[str, ...]:
    """The kinds of devices that autocast may be on for."""
    kind = accelerator()
    return ("cpu", kind) if kind and torch.amp.is_autocast_available(kind) else ("cpu",)


@contextmanager
def without_cast_cache() -> Iterator[None]:
    """Let every use of a parameter in the block have a cast of its own under autocast.

    With the cache, the gradients of all uses are added up in the lower dtype, before one cast back.
    It has only leaves that are no views, so that gradients would depend on the stage and the
    driver; and it is one for the process, under a lock, while a cast may wait for another rank.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class AutocastModes(NamedTuple):
    """For each kind of device: its name, whether autocast is on, and its dtype."""

    modes: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def take() -> AutocastModes:
        """As it is in this thread."""
        kinds = kinds_of_autocast()
        found = ((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        return AutocastModes(tuple(found))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes until the block ends, without autocast's cache of casts."""
        with ExitStack() as stack:
            stack.enter_context(without_cast_cache())
            for kind, enabled, dtype in self.modes:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


@contextmanager
def computed_in(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Run the block under torch.autocast(dtype), whatever is around it; None changes nothing.

    In both cases autocast has no cache of casts in the block.
    """
    with without_cast_cache():
        if dtype is None:
            yield
        else:
            with torch.autocast(device.type, dtype=dtype):
                yield


def other_autocast(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype of an autocast that is on and has another one; None if there is none."""
    there = torch.get_autocast_dtype(device.type)
    return there if torch.is_autocast_enabled(device.type) and there is not dtype else None


class Ambient(NamedTuple):
    """Modes of one thread: gradients, inference, the default device, autocast."""

    grad: bool
    inference: bool
    device: torch.device
    autocast: AutocastModes

    @staticmethod
    def take() -> Ambient:
        """The modes of this thread."""
        return Ambient(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            device=torch.get_default_device(),
            autocast=AutocastModes.take(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes until the block ends."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if self.device != torch.get_default_device():
                stack.enter_context(torch.device(self.device))
            stack.enter_context(self.autocast.entered())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


# At which levels a tensor is differentiated: by autograd, and by the transforms of torch.func.

_TORCH: Any = torch  # what wraps tensors has no types
BASE, _TANGENT, _FIRST = 1, 2, 2
"""The bits of ordinary autograd and of its forward mode; how many come before torch.func's."""


def _levels() -> list[Any]:
    """What torch.func is doing around this call, the innermost transform last."""
    if maybe_current_level() is None:
        return []
    return pyfunctorch.retrieve_all_functorch_interpreters()


def nesting() -> str:
    """Return which transforms of torch.func are around this call, the innermost last."""
    names = [
        f"vmap of {level.batch_size()}" if level.key() == TransformType.Vmap else level.key().name
        for level in _levels()
    ]
    return ", ".join(names)


def followed(x: Tensor) -> int:
    """Return, bit by bit, the levels at which `x` is differentiated or mapped over."""
    levels, parts, mode = _levels(), dict[int, Tensor](), torch.is_grad_enabled()
    while is_functorch_wrapped_tensor(x):
        parts[maybe_get_level(x)] = x
        x = get_unwrapped(x)
    bits = 0
    for i, level in reversed([*enumerate(levels)]):
        part, key = parts.get(level.level()), level.key()
        if part is not None and _is_followed(part, level, mode=mode):
            bits |= 1 << _FIRST + i
        mode = mode and (key != TransformType.Grad or level.prev_grad_mode())
    bits |= BASE * (mode and x.requires_grad)
    if in_forward_mode():
        with _lowered(None):
            bits |= _TANGENT * _has_tangent(x)
    return bits


def _is_followed(x: Tensor, level: Any, *, mode: bool) -> bool:
    if level.key() == TransformType.Jvp:
        with _lowered(level):
            return _has_tangent(x)
    return (mode and x.requires_grad) if level.key() == TransformType.Grad else True


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x, level=0).tangent is not None


def reverse(bits: int) -> bool:
    """Whether one of these levels has a graph, by which a backward comes."""
    grads = (i for i, one in enumerate(_levels()) if one.key() == TransformType.Grad)
    return bool(bits & BASE) or any(bits >> _FIRST + i & 1 for i in grads)


def beyond_reach(bits: int, known: Mapping[int, Tensor]) -> bool:
    """Whether one of these levels is a backward of the user's by torch.func, see `tokens`.

    It comes to what is behind its inputs alone: to no token that is made here.
    """
    grads = ((i, one) for i, one in enumerate(_levels()) if one.key() == TransformType.Grad)
    return any(bits >> _FIRST + i & 1 and one.level() not in known for i, one in grads)


def by_func(bits: int) -> bool:
    """Whether one of these levels is of torch.func."""
    return bool(bits >> _FIRST)


def tokens(bits: int, known: Mapping[int, Tensor]) -> list[Tensor]:
    """Return tensors without elements that are followed at these levels.

    known: by level those that are there already; 0 is autograd's own.
    """
    found = [known.get(0, _new(None))] if bits & BASE else []
    found += [_new("tangent")] if bits & _TANGENT else []
    for i, level in enumerate(_levels()):
        if bits >> _FIRST + i & 1:
            one = known.get(level.level())
            found.append(_new(level) if one is None else one)
    return found


def _new(level: Any) -> Tensor:
    with _lowered(level):
        if level == "tangent":
            return forward_ad.make_dual(torch.zeros(0), torch.zeros(0))
        if level is None:
            return torch.zeros(0, requires_grad=True)
        if level.key() == TransformType.Jvp:
            return forward_ad.make_dual(torch.zeros(0), torch.zeros(0))
        if level.key() == TransformType.Vmap:
            zeros = torch.zeros(level.batch_size(), 0)
            return _TORCH._C._functorch._add_batch_dim(zeros, 0, level.level())
        with enable_inplace_requires_grad(True):
            return torch.zeros(0).requires_grad_()


@contextmanager
def _lowered(level: Any) -> Generator[None]:
    """Be at a level of torch.func, or outside of all of them, in this block."""
    down_to = 0 if level is None or level == "tangent" else level.level()
    with ExitStack() as stack:
        for one in reversed(_levels()):
            if one.level() > down_to:
                stack.enter_context(pyfunctorch.temporarily_pop_interpreter_stack())
        yield


def levels_of_backwards() -> list[int]:
    """Return the levels of torch.func around this call at which a backward is taken."""
    return [one.level() for one in _levels() if one.key() == TransformType.Grad]


def made_at(level: int) -> Tensor:
    """Return a tensor without elements of a level around this call, see `is_alive`."""
    with _lowered(next(one for one in _levels() if one.level() == level)), torch.no_grad():
        return torch.zeros(0)


def is_alive(x: Tensor) -> bool:
    """Whether the level of torch.func at which this tensor was made is still going on."""
    return maybe_get_level(x) >= 0


def at_level(x: Tensor, level: int) -> Tensor:
    """Return what `x` is at a level: without the wrappers of those inside of it."""
    while is_functorch_wrapped_tensor(x) and not 0 <= maybe_get_level(x) <= level:
        x = get_unwrapped(x)
    return x
