"""Faults planted in fzero, each of which is reported; what it runs without one has no report.

A fault changes what fzero does in one place: a wait is taken away, a stream or an event is another,
memory is given away early. No number is looked at: on a device it might be right by luck.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero.checkpoint import _process_states
from fzero.collectives.lowering import InFlight
from fzero.machine import offload, reduce, unshard
from fzero.machine.offload import CopyStream
from fzero.machine.reduce import Reducer
from fzero.machine.unshard import Gatherer
from tests.device import on_sim
from tests.device.order import Order, checked
from tests.gpu import training
from tests.gpu.training import Task, by_engine, by_function

Plant = Callable[[pytest.MonkeyPatch], None]
HOST = fzero.Offload(optimizer="cpu", gradients="cpu")


def steps(by: Callable[..., Any], stage: int, **options: Any) -> Callable[[], None]:
    """Two steps, and the full parameters."""
    return lambda: by(Task(stage=stage, steps=2, **options), dist.get_rank(), "sim")


def with_rule(rule: Any) -> Callable[..., Any]:
    """Functional steps of another rule."""
    return partial(by_function, rule=lambda _: rule)


def saved() -> None:
    """A step with the parameters in host memory, and a checkpoint of it."""
    task = Task(stage=3, offload=fzero.Offload(params="cpu"))
    model, rule = training.make_model(task, "sim"), fzero.optim.sgd(0.1)
    step, state = training.make_step(task, model, rule=lambda _: rule)
    state, _ = step(state, [training.make_batch("sim", step=0, at=0, rank=dist.get_rank())])
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    fzero.checkpoint.save(f"{folder[0]}/saved", state)
    if dist.get_rank() == 0:  # all ranks have written
        shutil.rmtree(folder[0])


ENCODED = fzero.optim.Encoding(fzero.codecs.int8(block=32), smallest=1)
MOMENTS = fzero.optim.adamw(0.1, state_dtype=ENCODED)
OWNED = fzero.optim.partition(
    {"matrices": fzero.optim.muon(0.1), "rest": fzero.optim.sgd(0.1)},
    lambda leaf: "matrices" if len(leaf.shape) == 2 else "rest",
)


def evaluated() -> None:
    """A forward of gathered parameters alone."""
    task = Task(stage=3)
    apply, _ = fzero.functionalize(training.make_model(task, "sim"))
    _, state = training.make_step(task, training.make_model(task, "sim"))
    batch = training.make_batch("sim", step=0, at=0, rank=dist.get_rank())
    loss = fzero.evaluate(lambda p, x: training.loss_of(partial(apply, p), x), state)(batch)
    loss.item()


def summed() -> None:
    """A collective of the user's."""
    fzero.psum(torch.ones(8, device="sim") * 2).add_(1)


RUNS: dict[str, Callable[[], None]] = {
    "engine 0": steps(by_engine, 0),
    "engine 2": steps(by_engine, 2, adam=False),
    "engine 3": steps(by_engine, 3),
    "function 1": steps(by_function, 1),
    "function 2": steps(by_function, 2, max_norm=0.5),
    "function 3": steps(by_function, 3, checkpoint="remat"),
    "host memory": steps(by_function, 2, offload=HOST),
    "host memory, engine": steps(by_engine, 2, offload=HOST),
    "host memory, accumulated": steps(
        by_function, 3, dtype=torch.bfloat16, offload=HOST, backwards=2, accumulates=True
    ),
    "saved": saved,
    "encoded moments": steps(with_rule(MOMENTS), 3, dtype=torch.float32, offload=HOST),
    "owners": steps(with_rule(OWNED), 2, dtype=torch.float32),
    "evaluated": evaluated,
    "a sum": summed,
}


def around(owner: Any, name: str, of: Callable[..., Any]) -> Plant:
    """Have `of(original, *args)` be called in the place of a function of fzero."""

    was = getattr(owner, name)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, lambda *args, **options: of(was, *args, **options))

    return plant


def no_wait(op: str) -> Plant:
    """A collective is not waited for."""

    def wait(was: Any, flight: InFlight) -> Any:
        if flight.op == op:
            flight.works = ()
        return was(flight)

    return around(InFlight, "wait", wait)


def early(op: str) -> Plant:
    """What a collective gives is made before it is waited for."""

    def wait(was: Any, flight: InFlight) -> Any:
        if flight.op == op and flight._outs is None:
            works, flight.works = flight.works, ()
            outs = was(flight)
            [x.add_(0) for x in outs if isinstance(x, Tensor)]
            [work.wait() for work in works]
            return outs
        return was(flight)

    return around(InFlight, "wait", wait)


def elsewhere(was: Any, *args: Any, **options: Any) -> Any:
    """On a stream that waits for nothing, and for which nothing waits."""
    with torch.Stream("sim"):
        return was(*args, **options)


def written_under(was: Any, xs: Any, *args: Any, **options: Any) -> Any:
    """What a collective sends is written while it is under way."""
    flight = was(xs, *args, **options)
    xs[0].mul_(1)
    return flight


def freed_under(was: Any, xs: Any, *args: Any, **options: Any) -> Any:
    """What a collective sends is freed while it is under way."""
    flight = was(xs, *args, **options)
    xs[0].untyped_storage().resize_(0)
    return flight


def read_under(was: Any, xs: Any, *args: Any, **options: Any) -> Any:
    """What a collective writes in place is read while it is under way."""
    flight = was(xs, *args, **options)
    xs[0].sum()
    return flight


class NoStreamWait(torch.Stream):
    """Starts before what it needs is there."""

    def wait_stream(self, stream: torch.Stream) -> None:
        pass


class LateEvents(torch.Stream):
    """Gives the event of the work before: two events are swapped."""

    def record_event(self, event: Any = None) -> Any:
        before = vars(self).get("before", torch.Event("sim"))
        self.before = super().record_event()
        return before


def of_copies(kind: type[torch.Stream]) -> Plant:
    """A `CopyStream` with a stream of another kind."""

    def begun(was: Any, copies: CopyStream, device: torch.device) -> None:
        was(copies, device)
        copies._side = kind(device)

    return around(CopyStream, "__init__", begun)


def stored_early(was: Any, copies: CopyStream, pairs: Any) -> None:
    """A store does not wait for what is computed."""
    side: Any = copies._side
    with side:
        for home, used in pairs:
            used.record_stream(side)
            offload.write_back(home, used)


def never_recorded(of: str) -> Plant:
    """`record_stream` is dropped in a method of `CopyStream`."""

    def recorded(was: Any, x: Tensor, stream: torch.Stream) -> None:
        if sys._getframe(2).f_code.co_name != of:
            was(x, stream)

    return around(Tensor, "record_stream", recorded)


def nothing(was: Any, *args: Any) -> None:
    """Dropped."""


def read_by_host(was: Any, home: Tensor, used: Tensor) -> None:
    """The host reads what was just written back."""
    was(home, used)
    home.sum()


def overwritten(was: Any, x: Tensor, device: torch.device, *dtype: Any) -> Tensor:
    """The host writes to what is being copied to the device."""
    here = was(x, device, *dtype)
    if here is not x:
        x.numpy().fill(1)
    return here


def pageable(patch: pytest.MonkeyPatch) -> None:
    """A home is not pinned, and its copies are made as if it were."""

    def unpinned(was: Any, home: Any, x: Tensor, of: Any) -> Tensor:
        return was(home, x, of).clone() if home else was(home, x, of)

    def taken_for_pinned(was: Any, x: Tensor) -> bool:
        return x.device.type == "cpu" and x.numel() > 0

    around(offload, "offloaded", unpinned)(patch)
    around(offload, "is_pinned", taken_for_pinned)(patch)


UNORDERED: dict[str, tuple[str, Plant]] = {
    "a gather is not waited for": ("engine 3", no_wait("all_gather")),
    "nor by a step": ("function 3", no_wait("all_gather")),
    "nor by evaluate": ("evaluated", no_wait("all_gather")),
    "nor that of an update": ("function 1", no_wait("all_gather")),
    "a scatter": ("engine 2", no_wait("reduce_scatter")),
    "a reduction": ("engine 0", no_wait("all_reduce")),
    "a sum of the user's": ("a sum", no_wait("all_reduce")),
    "what owners send is not waited for": ("owners", no_wait("all_to_all")),
    "a gather is read early": ("function 3", early("all_gather")),
    "a scatter is read early": ("function 2", early("reduce_scatter")),
    "a gather on a wrong stream": ("engine 3", around(unshard, "start_gather", elsewhere)),
    "a scatter on a wrong stream": ("function 2", around(reduce, "start_scatter", elsewhere)),
    "a wrong stream waits": ("engine 2", around(InFlight, "wait", elsewhere)),
    "views of a gather on a wrong stream": ("engine 3", around(Gatherer, "wait", elsewhere)),
    "a sum is added on a wrong stream": ("engine 2", around(Reducer, "wait", elsewhere)),
    "a shard is written under its gather": (
        "function 3",
        around(unshard, "start_gather", written_under),
    ),
    "a bucket is read under its reduction": (
        "engine 0",
        around(reduce, "start_reduce", read_under),
    ),
    "copies wait for nothing": ("host memory", of_copies(NoStreamWait)),
    "two events are swapped": ("host memory", of_copies(LateEvents)),
    "a store waits for nothing": ("host memory", around(CopyStream, "store", stored_early)),
    "no stream waits for the copies": ("host memory", around(CopyStream, "end", nothing)),
}
FAULTS = {name: ("unordered", *fault) for name, fault in UNORDERED.items()} | {
    "a bucket is freed under its scatter": (
        "freed",
        "engine 3",
        around(reduce, "start_scatter", freed_under),
    ),
    "record_stream is dropped by store": ("freed", "encoded moments", never_recorded("store")),
    "the host reads what was just written": (
        "host",
        "host memory, engine",
        around(offload, "write_back", read_by_host),
    ),
    "a checkpoint waits for no copies": (
        "host",
        "saved",
        around(_process_states, "wait_for_copies", nothing),
    ),
    "the host writes what is just read": (
        "overwritten",
        "host memory, engine",
        around(offload, "to_device", overwritten),
    ),
    "memory of the host that is not pinned": ("pageable", "host memory", pageable),
}


def reported(run: str, plant: Plant | None) -> Order:
    with pytest.MonkeyPatch.context() as patch, checked() as order:
        if plant is not None:
            plant(patch)
        with suppress(*[fzero.FzeroError] * (plant is not None)):
            RUNS[run]()
    return order


@pytest.mark.parametrize("run", RUNS)
@on_sim(2)
def test_without_a_fault_there_is_no_report(run: str) -> None:
    reported(run, None).require_none()


@pytest.mark.parametrize("fault", FAULTS)
@on_sim(2)
def test_a_fault_is_reported(fault: str) -> None:
    kind, run, plant = FAULTS[fault]
    assert kind in {report.kind for report in reported(run, plant).reports}
