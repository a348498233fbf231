"""Faults planted in fzero, each of which is reported; what it runs without one has no report.

A fault changes what fzero does in one place: a wait is taken away, a stream or an event is another,
memory is given away early. No number is looked at: on a device it might be right by luck.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import _process_states, _save, mesh_transition
from fzero.collectives import lowering
from fzero.collectives.lowering import InFlight
from fzero.machine import offload, owners, reduce, unshard
from fzero.machine.offload import CopyStream
from fzero.machine.reduce import LocalGradients, Reducer
from fzero.machine.unshard import Gatherer
from fzero.optim import _muon, encoded_moments, precision
from fzero.transforms import donation
from tests.device import on_sim
from tests.device.order import Order, checked
from tests.gpu import training
from tests.gpu.training import Task, by_engine, by_function

Plant = Callable[[pytest.MonkeyPatch], None]
HOST = fzero.Offload(optimizer="cpu", gradients="cpu")
ALL = fzero.Offload(optimizer="cpu", gradients="cpu", params="cpu")


def steps(by: Callable[..., Any], stage: int, **options: Any) -> Callable[[], None]:
    """Two steps, and the full parameters."""
    return lambda: by(Task(stage=stage, steps=2, **options), dist.get_rank(), "sim")


def with_rule(rule: Any) -> Callable[..., Any]:
    """Functional steps of another rule."""
    return partial(by_function, rule=lambda _: rule)


def saved(save: Callable[..., Any] = fzero.checkpoint.save, device: str = "sim") -> None:
    """A step with the parameters in host memory, and a checkpoint of it."""
    task = Task(stage=3, offload=fzero.Offload(params="cpu"))
    model, rule = training.make_model(task, device), fzero.optim.sgd(0.1)
    step, state = training.make_step(task, model, rule=lambda _: rule)
    state, _ = step(state, [training.make_batch(device, step=0, at=0, rank=dist.get_rank())])
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    save(f"{folder[0]}/saved", state)
    dist.barrier()
    if dist.get_rank() == 0:  # all ranks have written
        shutil.rmtree(folder[0])


def saved_beside(path: str, state: Any) -> None:
    """By a thread."""
    fzero.checkpoint.save_async(path, state, rng=False).result()


def mirrored(path: str, state: Any) -> None:
    """In memory, by a thread."""
    with fzero.checkpoint.Mirror(path, every=1) as mirror:
        mirror.update(state)


def resharded() -> None:
    """A state in host memory at another stage."""
    task = Task(stage=1, offload=HOST)
    _, state = training.make_step(task, training.make_model(task, "sim"))
    fzero.reshard(state, 3)


def on_a_stream(run: Callable[[], None]) -> Callable[[], None]:
    """On a stream of the user's."""

    def body() -> None:
        with torch.Stream("sim") as stream:
            stream.wait_stream(torch.sim.default_stream())
            run()

    return body


def transformed(transform: Callable[[Any], Any], stage: int, steps: int = 2) -> Callable[[], None]:
    """Steps of a transform."""

    def run() -> None:
        task = Task(stage=stage, dtype=torch.float32)
        apply, params = fzero.functionalize(training.make_model(task, "sim"))

        def step_fn(state: Any, batch: Tensor) -> Any:
            loss = fzero.grad_and_reduce(lambda p, x: training.loss_of(partial(apply, p), x), state)
            state, value = loss(batch)
            return fzero.apply_gradients(state), value

        step = fzero.shard(transform(step_fn), stage=stage)
        state = step.init(params, fzero.optim.adamw(0.1))
        for k in range(steps):
            state, _ = step(state, training.make_batch("sim", step=k, at=0, rank=dist.get_rank()))

    return run


def by_host() -> None:
    """A group that has no backend for the device."""
    group: Any = dist.new_group(backend="gloo")
    mesh = DeviceMesh.from_group(group, "sim", mesh_dim_names=("dp",))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*go through host memory")
        by_engine(Task(stage=3, steps=1), dist.get_rank(), "sim", mesh)


ENCODED = fzero.optim.Encoding(fzero.codecs.int8(block=32), smallest=1)
MOMENTS = fzero.optim.adamw(0.1, state_dtype=ENCODED)
NARROW = fzero.optim.adamw(0.1, state_dtype=torch.bfloat16)
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


def edited(state_dtype: Any = None) -> None:
    """What the user reads and writes of an engine whose states are in host memory."""
    model = training.make_model(Task(stage=2, dtype=torch.float32), "sim")
    rule = fzero.optim.adamw(0.1, state_dtype=state_dtype)
    engine = Engine(model, rule, stage=2, offload=HOST)
    path, p = "blocks.0.up.weight", model.get_parameter("blocks.0.up.weight")
    whole = torch.ones(p.shape)  # of the host

    def of_gradients() -> Iterator[Any]:
        yield None if p.grad is None else p.grad.zero_()
        yield setattr(p, "grad", None)
        yield engine.set_full_gradient(path, whole)
        yield engine.set_local_gradient(path, torch.ones(engine.local_gradient(path).numel()))

    def of_states() -> Iterator[Any]:
        yield engine.set_full_optimizer_state(path, "exp_avg", whole)
        part = torch.ones(engine.local_optimizer_state(path, "exp_avg").numel())
        yield engine.set_local_optimizer_state(path, "exp_avg", part)
        yield engine.set_full_optimizer_state(path, "step", 3.0)
        yield engine.full_optimizer_states()

    gradients, states = of_gradients(), of_states()
    for k in range(5):
        batch = training.make_batch("sim", step=k, at=0, rank=dist.get_rank())
        engine.backward(training.loss_of(engine, batch))
        next(gradients, None)
        engine.step()
        next(states, None)
    engine.close()


def simulated() -> None:
    """Virtual ranks with states in host memory, then more of them."""
    task = Task(stage=2, dtype=torch.float32, offload=HOST)
    train_step, _ = training.make_step(task, training.make_model(task, "sim"))
    step = fzero.simulate(train_step, world_size=2)
    _, params = fzero.functionalize(training.make_model(task, "sim"))
    state = step.init(params, fzero.optim.sgd(0.1, momentum=0.5))
    batches = [training.make_batch("sim", step=0, at=0, rank=rank) for rank in range(2)]
    state, _ = step(state, torch.stack(batches)[:, None])
    fzero.reshard(state, mesh=(1, 4))


def collective(of: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """One of the user's."""

    def run() -> None:
        of(torch.ones(8, device="sim") * 2).add_(1)

    return run


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
    "host memory, a stream": on_a_stream(
        steps(with_rule(MOMENTS), 3, dtype=torch.float32, offload=HOST)
    ),
    "host memory, no donation": transformed(partial(fzero.offload, **HOST.homes), 2),
    "host memory, narrow": steps(with_rule(NARROW), 3, dtype=torch.float32, offload=HOST),
    "host memory, masters": steps(by_function, 3, dtype=torch.bfloat16, offload=ALL),
    "loss scale": steps(by_engine, 2, dtype=torch.float16),
    "int8": transformed(partial(fzero.compress, parameters=fzero.codecs.int8(block=32)), 3),
    "local": transformed(partial(fzero.local, every=2, delay=1), 1, steps=4),
    "by host": by_host,
    "evaluated": evaluated,
    "edited": edited,
    "edited, encoded moments": partial(edited, ENCODED),
    "simulated": simulated,
    "resharded": resharded,
    "saved beside": partial(saved, saved_beside),
    "mirrored": partial(saved, mirrored),
    "on the second device": partial(saved, device="sim:1"),  # it is not the current one
    "a sum": collective(fzero.psum),
    "a maximum": collective(fzero.pmax),
    "a permutation": collective(lambda x: fzero.ppermute(x, [(0, 1), (1, 0)])),
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


def with_event(change: Callable[[CopyStream], torch.Event]) -> Plant:
    """What is fetched waits for another event."""

    def fetched(was: Any, copies: CopyStream, wanted: Any) -> Any:
        event, wait = change(copies), was(copies, wanted)
        names = wait.__code__.co_freevars
        wait.__closure__[names.index("event")].cell_contents = event
        return wait

    return around(CopyStream, "fetch", fetched)


def fetched_early(was: Any, copies: CopyStream, wanted: Any) -> Any:
    """A fetch does not wait for what wrote to the homes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_stream", lambda device: torch.Stream(device))
        return was(copies, wanted)


def waited_for_by_default(was: Any, copies: CopyStream, wanted: Any) -> Any:
    """The default stream waits for what is fetched, in the place of the current one."""
    wait = was(copies, wanted)

    def by_default() -> Any:
        with torch.sim.default_stream(copies.device):
            return wait()

    return by_default


def finished_elsewhere(was: Any, flight: InFlight) -> Any:
    """What a collective gives is made on a stream that has not waited for it."""
    works, flight.works = flight.works, ()
    for work in works:
        work.wait()
    return elsewhere(was, flight)


def half(was: Any, *args: Any) -> InFlight:
    """The second half of a reduction by exchange is not waited for."""
    flight = was(*args)
    if sys._getframe(2).f_code.co_name == "finish":
        flight.works = ()
    return flight


def sent_early(
    was: Any, call: Any, group: Any, *xs: Tensor, writes: bool = True, **how: Any
) -> Any:
    """Copies in host memory are sent before they are over."""
    copies = [x.to("cpu", non_blocking=True) for x in xs]
    work = call(*copies, group=group, **how)
    return lowering._OnCopies(work, copies, xs[0] if writes else None)


def copied_late(was: Any, work: Any) -> None:
    """Pinned memory is used again before it is copied to the device."""
    work.work.wait()
    if work.written is not None:
        pinned = work.copies[0].pin_memory()
        work.written.copy_(pinned, non_blocking=True)
        pinned.zero_()


def copied_beside(was: Any, values: Tensor, *, pin: bool = True) -> Tensor:
    """A thread is given copies that are under way."""
    made = torch.empty(values.shape, dtype=values.dtype, pin_memory=pin and values.numel() > 0)
    return made.copy_(values.detach().to("sim"), non_blocking=True)


def current_device_waited_for(was: Any, tensors: Any) -> None:
    """The host waits for the current device, whichever copied."""
    torch.accelerator.synchronize()


def in_one_copy(was: Any, x: Tensor, device: torch.device, dtype: Any = None) -> Tensor:
    """A copy to the device in another dtype, which goes by memory that is not pinned."""
    return x.to(device=device, dtype=dtype or x.dtype, non_blocking=offload.is_pinned(x))


def clones_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """Clones of pinned memory are not, and are written as if they were."""

    def filled(was: Any, made: Tensor, x: Tensor) -> Tensor:
        return made.copy_(x, non_blocking=True) if x.device != made.device else was(made, x)

    around(offload, "empty_where", lambda was, x: torch.empty_like(x))(patch)
    around(offload, "_filled", filled)(patch)


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
    "a permutation is not waited for": ("a permutation", no_wait("ppermute")),
    "a maximum is not waited for": ("a maximum", no_wait("pmax")),
    "nor its second half": ("a maximum", around(lowering, "begin_gather_into", half)),
    "nor what one rank gives all": ("host memory, engine", no_wait("broadcast")),
    "nor whether there was an overflow": ("loss scale", no_wait("all_reduce")),
    "nor the mean of local updates": ("local", no_wait("all_reduce")),
    "bytes are decoded early": ("int8", early("all_gather")),
    "bytes are decoded on a wrong stream": ("int8", around(InFlight, "wait", finished_elsewhere)),
    "a bucket is packed on a wrong stream": (
        "function 2",
        around(reduce, "pack_copied", elsewhere),
    ),
    "a mean is made on a wrong stream": (
        "engine 2",
        around(LocalGradients, "add_sum", elsewhere),
    ),
    "a norm is taken on a wrong stream": (
        "function 2",
        around(torch.linalg, "vector_norm", elsewhere),
    ),
    "owners write on a wrong stream": ("owners", around(owners, "write_back", elsewhere)),
    "parameters are written on a wrong stream": (
        "host memory, masters",
        around(encoded_moments, "write_back", elsewhere),
    ),
    "a momentum moves on a wrong stream": ("owners", around(_muon, "change", elsewhere)),
    "a window adds up on a wrong stream": (
        "host memory, accumulated",
        around(donation, "add_to", elsewhere),
    ),
    "what is fetched is not waited for": (
        "encoded moments",
        with_event(lambda _: torch.Event("sim")),
    ),
    "an event of a fetch is too early": (
        "encoded moments",
        with_event(lambda copies: torch.accelerator.current_stream(copies.device).record_event()),
    ),
    "a fetch waits for nothing": ("encoded moments", around(CopyStream, "fetch", fetched_early)),
    "another stream waits for a fetch": (
        "host memory, a stream",
        around(CopyStream, "fetch", waited_for_by_default),
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
    "masters are made of what is under way": (
        "host",
        "host memory, masters",
        around(precision, "wait_for_copies", nothing),
    ),
    "host memory is sent early": ("host", "by host", around(lowering, "_begun", sent_early)),
    "host memory is used again early": (
        "host",
        "by host",
        around(lowering._OnCopies, "wait", copied_late),
    ),
    "a thread saves what is under way": (
        "host",
        "saved beside",
        around(_save, "_copied", copied_beside),
    ),
    "a mirror has what is under way": ("host", "mirrored", around(_save, "_copied", copied_beside)),
    "reshard writes under copies": (
        "host",
        "resharded",
        around(mesh_transition, "wait_for_copies", nothing),
    ),
    "virtual ranks are stacked under copies": (
        "host",
        "simulated",
        around(importlib.import_module("fzero.transforms.simulate"), "wait_for_copies", nothing),
    ),
    "another device is waited for": (
        "host",
        "on the second device",
        around(_process_states, "wait_for_copies", current_device_waited_for),
    ),
    "the host writes what is just read": (
        "overwritten",
        "host memory, engine",
        around(offload, "to_device", overwritten),
    ),
    "memory of the host that is not pinned": ("pageable", "host memory", pageable),
    "clones that are not pinned": ("pageable", "host memory, no donation", clones_not_pinned),
    "a copy in another dtype": (
        "pageable",
        "host memory, narrow",
        around(offload, "to_device", in_one_copy),
    ),
    "a thread saves memory that is not pinned": (
        "pageable",
        "saved beside",
        around(_save, "_copied", partial(copied_beside, pin=False)),
    ),
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
