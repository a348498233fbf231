"""Which virtual rank the calling thread is: one of `fzero.ranks.virtual`, or an abstract one.

An abstract rank is planned alone: what the others would say is what it says itself, and its tensors
have shapes and no values.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._functorch import eager_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

from fzero.errors import AxisError, PhaseError

_LOCAL = threading.local()
_RUNS: set[object] = set()
"""The runs of virtual ranks, and of abstract ones, that are under way in this process."""

BASE_NESTING = 1
"""torch.func.jvp counts its nesting, and opens the one dual level there is, for the whole
process. Ranks that take turns inside jvp would close it for each other; so it is held open
around all ranks, and the count is kept for each rank, starting here."""


Make = Callable[[list[Any]], Any]
"""What is made, once for all ranks, of the values that they have handed in, in rank order."""


class Here(NamedTuple):
    """The virtual rank that the calling thread is."""

    rank: int
    size: int
    exchange: Callable[[str, Any, Make], Any]
    kept: dict[Any, Any]  # what is to live as long as this run of the rank
    stands_for: str | None = None  # of an abstract rank: the kind of device it is planned for


@contextmanager
def ranks_run() -> Iterator[None]:
    """Say that virtual ranks run, in this block, in threads of this process."""
    run = object()
    _RUNS.add(run)
    try:
        yield
    finally:
        _RUNS.discard(run)


def refuse_stray_thread() -> None:
    """Raise `AxisError` in a thread that is no virtual rank, while those run in other threads.

    It would take itself for the only rank.
    """
    if _RUNS and current_ranks() is None:
        raise AxisError(
            f"ranks are asked for, or a collective is called, in the thread "
            f"{threading.current_thread().name!r}, while virtual ranks run in other threads.",
            cause="a thread of your own inside of fzero.simulate, a plan or a trace, such as that "
            "of a ThreadPoolExecutor. It is no rank, so nothing would be summed.",
            fix="call collectives in the function that is simulated, and give the thread what they "
            "return; what has nothing to do with it waits until fzero.simulate has returned.",
        )


def in_forked_child(what: str, rank: str) -> AxisError:
    """Return the error of a collective in a process that was forked from a rank."""
    return AxisError(
        f"{what} in process {os.getpid()}, which was forked from {rank}.",
        cause="a collective in a Dataset or a collate_fn, in a worker of a DataLoader, or under "
        "multiprocessing: the other ranks would never come.",
        fix="call it in the process of the rank, before the fork or on what the worker returns. "
        "fzero.axis_index() may be asked in a worker that was forked.",
    )


_FORKED: list[int] = []


def was_forked() -> bool:
    """Whether this process was forked from one that had imported fzero: it knows what that knew."""
    return bool(_FORKED)


def _after_fork() -> None:
    """A child has one thread: that of the rank that was forked, which no other rank waits for."""
    _FORKED.append(os.getpid())
    here = current_ranks()
    if here is None or here.stands_for is not None:
        return

    def refuse(op: str, *_: Any) -> Any:
        raise in_forked_child(op, f"virtual rank {here.rank} of {here.size}")

    _LOCAL.here = here._replace(exchange=refuse)


os.register_at_fork(after_in_child=_after_fork)


def be(here: Here) -> None:
    """Make the calling thread a virtual rank, for as long as it lives."""
    _LOCAL.here = here


@contextmanager
def standing_as(here: Here | None) -> Iterator[None]:
    """Be another virtual rank in this block, or, with None, an ordinary thread."""
    before = current_ranks()
    _LOCAL.here = here
    try:
        yield
    finally:
        _LOCAL.here = before


def current_ranks() -> Here | None:
    """Return the calling thread's virtual rank, or None in an ordinary thread."""
    return getattr(_LOCAL, "here", None)


@contextmanager
def abstract_rank(rank: int, size: int, *, device: str = "cuda") -> Iterator[None]:
    """Be rank `rank` of `size` in this block, without the others: each is taken to do the same.

    What ranks tell each other is then what this one says. What a collective gives has a shape and
    no values: inside of a trace it is an op. Tensors on the meta device, or fake ones, stand for
    tensors on a type of device: "cpu" ones communicate over gloo, "cuda" ones over nccl, ...
    """
    with ranks_run(), standing_as(Here(rank, size, _alone(size), {}, stands_for=device)):
        yield


def _alone(size: int) -> Callable[[str, Any, Make], Any]:
    return lambda _, value, make: make([value] * size)


def is_abstract() -> bool:
    """Whether this is an abstract rank."""
    here = getattr(_LOCAL, "here", None)  # one call less, in what is asked most
    return here is not None and here.stands_for is not None


def kind_of(device: torch.device) -> str:
    """The type of a device; on an abstract rank, that of the device that it is planned for."""
    here = current_ranks()
    return device.type if here is None or here.stands_for is None else here.stands_for


class WithoutMemory(torch.Tensor):
    """A tensor whose values are made when somebody reads them, like a parameter of stage 3."""


def has_no_values(x: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    return x.is_meta or isinstance(x, FakeTensor)


def is_planned() -> bool:
    """Whether this is an abstract rank of which nobody records a graph."""
    return is_abstract() and get_proxy_mode() is None


@contextmanager
def unseen() -> Iterator[None]:
    """Hide tensors that only describe others from what watches an abstract rank."""
    if is_abstract() and get_proxy_mode() is None:
        with _disable_current_modes():
            yield
    else:
        yield


def require_no_trace(op: str) -> None:
    """Raise `PhaseError` while `make_fx` traces what virtual ranks tell each other."""
    if get_proxy_mode() is not None and not is_abstract():
        raise PhaseError(
            f"{op} on virtual ranks inside a trace (make_fx).",
            cause="the other ranks' values would be constants of the graph.",
            fix="trace the step on one rank, or in a process of a real group.",
        )


def read_elsewhere(path: str, owner: str, reader: str) -> PhaseError:
    """Return the error for a parameter of one rank of this process that another one reads."""
    return PhaseError(
        f"the parameter {path!r} of {owner} is read on {reader}.",
        cause="one module for all ranks, into which torch.func.functional_call put the parameters "
        "of a rank while another one was inside of its forward.",
        fix="call it by `apply, params = fzero.functionalize(module)`, or give functional_call "
        "a copy of its own: `functional_call(copy.deepcopy(module), params, args)`.",
    )


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is under way on this rank."""
    if current_ranks() is None or is_abstract():
        return forward_ad._current_level >= 0
    return eager_transforms.JVP_NESTING > BASE_NESTING
