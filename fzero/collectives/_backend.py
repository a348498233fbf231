"""What torch.distributed offers: works to wait for, a backend for each kind of device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.collectives import _alive
from fzero.context.here import is_abstract, kind_of
from fzero.errors import AxisError, LostRankError
from fzero.ranks.mesh import Axis

PARTLY_TYPED: Any = dist
"""torch.distributed, for its functions that are private, or whose annotations lack types."""


class Started(NamedTuple):
    """A collective under way: its works, and what is left to do on this rank once they are over."""

    op: str
    axis: Axis
    works: Sequence[Any]
    finish: Callable[[], list[Any]]  # what it gives: tensors; of an exchange the rows of all ranks
    held: Sequence[Tensor] = ()  # what the works read, which must live as long as they do

    def wait(self) -> list[Any]:
        """Wait for the works, then finish; once only, for finishing may communicate again."""
        self.join()
        return self.finish()

    @property
    def is_over(self) -> bool:
        """Whether `join` would return, or raise, at once."""
        return all(work.is_completed() for work in self.works)

    def join(self) -> None:
        """Wait for the works: what they read may go."""
        wait_for(self.works, self.op, self.axis)


def given(outs: Sequence[Any], axis: Axis) -> Started:
    """Wrap finished tensors as a started collective."""
    return Started("nothing", axis, (), lambda: list(outs))


def wait_for(works: Sequence[Any], op: str, axis: Axis) -> None:
    """Wait for every work. Raises `AxisError` as `explained` does."""
    if works:  # virtual ranks have none, and wait often
        with explained(op, axis):
            for work in works:
                work.wait()


ENDED = "another rank ended or raised, or did not come within the timeout."


@contextmanager
def explained(op: str, axis: Axis, *, cause: str = ENDED) -> Generator[None]:
    """Turn errors of the backend in this block into a `LostRankError` with the rank at fault."""
    try:
        yield
    except RuntimeError as error:
        found = _alive.what_became_of(_ranks_of(axis))
        who = "; ".join(f"rank {rank} {what}" for rank, what in found.items())
        fault = f"{who}. So " if who else ""
        first = f"rank {next(iter(found))}'s output" if found else "the ranks' outputs"
        fix = (
            f"see the first error in {first}; FZERO_TIMEOUT_S sets how long a group that fzero "
            "starts waits."
        )
        apart = _alive.came_apart(found)
        raise LostRankError(
            f"{fault}{op} on rank {axis.rank} of {axis} failed: {error}",
            cause=_alive.ALONE if apart else cause,
            fix=_alive.APART if apart else fix,
            ranks=[*found],
            late=bool(found) and all(what.startswith(_alive.LATE) for what in found.values()),
        ) from error


def _ranks_of(axis: Axis) -> list[int]:
    with suppress(AxisError):  # the group is gone
        return dist.get_process_group_ranks(axis.group())
    return []


def is_gloo(axis: Axis, device: torch.device) -> bool:
    """Whether tensors on `device` go over gloo; those of an abstract rank would."""
    if is_abstract():
        return kind_of(device) == "cpu"
    return backend_of(axis.group(), device) == "gloo"


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that serves tensors on `device`, or "": "cpu:gloo,cuda:nccl" has two."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return next((name for kind, _, name in pairs if kind == device.type), "")


def native(op: str) -> Any:
    """Return torch's tensor collective by the name it has: 2.13 renamed both."""
    names = {
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    }[op]
    for name in names:
        if name in vars(dist):
            return getattr(dist, name)
    raise AttributeError(f"torch.distributed has neither of {names}; fzero supports torch >= 2.11")


def in_one_go(op: str, pairs: Sequence[tuple[Tensor, Tensor]], axis: Axis) -> list[Any]:
    """Start one of torch's tensor collectives for all (output, input), as one launch."""
    if is_abstract():
        return []
    group = axis.group()
    with PARTLY_TYPED._coalescing_manager(group, async_ops=True) as manager:
        for out, x in pairs:
            native(op)(out, x, group=group)
    return manager.works


def as_bytes(x: Tensor) -> Tensor:
    """Return the memory of contiguous `x`: what is only copied may have a dtype of no backend."""
    return x.view(-1).view(torch.uint8)
