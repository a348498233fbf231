"""What each test does on every rank: functions of (rank, size, device, ...), whatever it is.

Every body checks by itself; what it returns is for the report or for a check across ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from tests.failing import fails_in_backward
from tests.gpu import training as t
from tests.gpu.reads import on_device
from tests.gpu.training import Task
from tests.gpu.watch import Where, delayed
from tests.transforms import wired

STAGES = (0, 1, 2, 3)
DRIVERS = {"engine": t.by_engine, "functional step": t.by_function}


def run(rank: int, size: int, device: str, body: Callable[..., Any], *args: Any) -> Any:
    """Call a body; an axis of one rank runs its collectives over its process group.

    On the simulated device its order is checked, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FZERO_ONE_RANK_GROUP", "1")
        if device != "sim":
            return body(rank, size, device, *args)
        from tests.device.order import checked

        with checked() as order:
            found = body(rank, size, device, *args)
        order.require_none()
        return found


def start_of_world(rank: int, size: int, device: str) -> str:
    """Every collective of the world gives what it should; returns what the world runs on."""
    x = torch.full((4,), float(rank + 1), device=device)
    dist.all_reduce(x)
    assert x.tolist() == [size * (size + 1) / 2] * 4
    axis = fzero.world()
    assert (axis.size, axis.rank, axis.runtime) == (size, rank, fzero.ranks.mesh.Runtime.PROCESSES)
    return dist.get_backend_config()


def numbers(rank: int, size: int, device: str, task: Task, driver: str) -> None:
    """Training on `size` ranks gives the numbers of one process with all the data."""
    t.check_close(DRIVERS[driver](task, rank, device), t.by_hand(task, range(size), device))


def numbers_on_a_mesh(rank: int, size: int, device: str, stage: int, kind: str) -> None:
    """The same on a group that the user made, and on a sub-mesh of this rank alone."""
    task = Task(stage=stage)
    if kind == "user's group":
        group: Any = dist.new_group()
        mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("dp",))
        wanted = t.by_hand(task, range(size), device)
    else:  # each rank trains alone: an axis that is taken for the world mixes their gradients
        mesh = init_device_mesh(device, (size, 1), mesh_dim_names=("other", "dp"))["dp"]
        wanted = t.by_hand(task, [rank], device)
    for by in DRIVERS.values():
        t.check_close(by(task, rank, device, mesh), wanted)


def bf16_with_masters(rank: int, size: int, device: str, stage: int) -> None:
    """Both drivers clip and come near fp32 masters trained by hand."""
    task = Task(stage=stage, dtype=torch.bfloat16, max_norm=0.5, adam=False)
    start = t.on_cpu(dict(t.make_model(task, device).named_parameters()))
    wanted = t.by_hand(task, range(size), device)
    for by in DRIVERS.values():
        t.check_moved(by(task, rank, device), wanted, start, bound=0.1)


def fp16_with_overflows(rank: int, size: int, device: str, stage: int) -> None:
    """The scale begins too high, no step waits for it, and the rest is GradScaler's training."""
    task = Task(stage=stage, dtype=torch.float16, steps=14, max_norm=1.0)
    start = t.on_cpu(dict(t.make_model(task, device).named_parameters()))
    wanted, scale = t.by_grad_scaler(task, range(size), device)
    with on_device(device) as watched:
        engine = t.make_engine(task, watched.put(t.make_model(task, device)))
        step, state = t.make_step(task, watched.put(t.make_model(task, device)))
        for number in range(task.steps):
            batch = watched.put(t.batches_of(task, device, step=number, rank=rank))
            with watched.no_waits() if number >= 3 else nullcontext():
                t.engine_step(engine, batch)
                state, _ = step(state, batch)
    for one in (engine.state, state):
        assert 3 < int(one.step) < task.steps - 3, "the first overflow, and some later"
        assert one.scale is not None and float(one.scale.scale) == scale
        t.check_moved(t.on_cpu(fzero.full_params(one)), wanted, start, bound=0.1)
    engine.close()


def offloaded(rank: int, size: int, device: str, task: Task, kinds: str, folder: Path) -> None:
    """What lives in host memory or on disk is trained with the bits of what does not."""
    for home in ("cpu", "disk"):
        names = {"o": "optimizer", "g": "gradients", "p": "params"}
        homes: dict[str, Any] = {names[kind]: home for kind in kinds}
        away = replace(task, offload=fzero.Offload(**homes, folder=folder))
        for by in DRIVERS.values():
            t.check_close(by(away, rank, device), by(task, rank, device), error=0.0)


def drivers_agree(rank: int, size: int, device: str, stage: int, dtype: torch.dtype) -> None:
    """The engine and the functional step give the same bits, with a window, clipping and AdamW."""
    task = Task(stage=stage, dtype=dtype, max_norm=0.5, backwards=2)
    t.check_close(*(by(task, rank, device) for by in DRIVERS.values()), error=0.0)


def numbers_with_delays(rank: int, size: int, device: str, task: Task, where: Where) -> None:
    """A long kernel around each collective changes nothing, also on a stream of the user's."""
    wanted = t.by_hand(task, range(size), device)
    for by in DRIVERS.values():
        for stream in (False, True) if device != "cpu" else (False,):
            context = torch.Stream(device) if stream else nullcontext()
            with delayed(where, rank, device) as seen, context:
                found = by(task, rank, device)
            assert seen, "no collective went through torch.distributed"
            t.check_close(found, wanted)


def one_rank_raises(rank: int, size: int, device: str, stage: int) -> list[str]:
    """The last rank raises in a backward: no rank updates, each gets an error, and all go on."""
    task = Task(stage=stage)
    engine = t.make_engine(task, t.make_model(task, device))
    batches = [t.make_batch(device, step=step, at=0, rank=rank) for step in range(3)]
    t.engine_step(engine, batches[:1])
    errors = []
    try:
        loss = t.loss_of(engine, batches[1])
        engine.backward(
            fails_in_backward(loss, ZeroDivisionError("on purpose")) if rank == size - 1 else loss
        )
    except (ZeroDivisionError, fzero.AxisError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    try:
        engine.step()
    except fzero.FzeroError as error:
        errors.append(f"{type(error).__name__}: {error}")
    t.engine_step(engine, batches[2:])
    found = t.on_cpu(engine.full_state_dict())
    engine.close()
    t.check_close(found, t.by_hand(task, range(size), device, steps=(0, 2)))
    return errors


def no_waits_in_a_steady_step(
    rank: int, size: int, device: str, stage: int, driver: str, dtype: torch.dtype
) -> None:
    """After three steps the host waits for nothing in a step: it reads and copies no tensor."""
    kind: Any = partial(Task, stage=stage, dtype=dtype)
    for task, rule in (
        (kind(max_norm=1.0), t.fzero_optimizer),
        (kind(max_norm=1.0, backwards=2), t.torch_on_shards),
        (kind(adam=False, backwards=2, accumulates=True), t.fzero_optimizer),
    ):
        with on_device(device) as watched:
            model = watched.put(t.make_model(task, device))
            if driver == "engine":
                step = _engine_step(task, model)
            else:
                step = _functional_step(task, model, rule)
            batches = [t.batches_of(task, device, step=k, rank=rank) for k in range(5)]
            for batch in watched.put(batches)[:3]:
                step(batch)
            with watched.no_waits():
                for batch in batches[3:]:
                    step(batch)


def _engine_step(task: Task, model: nn.Module) -> Callable[[list[Tensor]], None]:
    step = t.accumulating_step if task.accumulates else t.engine_step
    return partial(step, t.make_engine(task, model))


def _functional_step(
    task: Task, model: nn.Module, rule: Callable[[Task], Any]
) -> Callable[[list[Tensor]], None]:
    train_step, state = t.make_step(task, model, rule=rule)
    held = [state]

    def step(batches: list[Tensor]) -> None:
        held[0], _ = train_step(held[0], torch.stack(batches))

    return step


def derivatives(rank: int, size: int, device: str) -> None:
    """f(x) = sum_i psum(x_i^2)^2 / 2, in reverse mode and in forward over reverse.

    With s_i = sum_r x_ri^2: psum is its own adjoint, so df/dx = 2 x psum(s) = 2 size x s, and
    its derivative along v is 2 size (v s + x ds), where ds = 2 sum_r x_ri v_ri.
    """

    def f(x: Tensor) -> Tensor:
        return (fzero.psum(x * x) ** 2).sum() / 2

    everyone = [torch.arange(1.0, 4.0, dtype=torch.float64) + r for r in range(size)]
    along = [x.flip(0) for x in everyone]
    x, v = everyone[rank].to(device), along[rank].to(device)
    s = torch.stack([each * each for each in everyone]).sum(0).to(device)
    ds = 2 * torch.stack([a * b for a, b in zip(everyone, along, strict=True)]).sum(0).to(device)
    both: Any = torch.func.jvp(torch.func.grad(f), (x,), (v,))
    gradient, change = both
    torch.testing.assert_close(gradient, 2 * size * x * s)
    torch.testing.assert_close(change, 2 * size * (v * s + x * ds))
    leaf = x.clone().requires_grad_()
    f(leaf).backward()  # on a GPU its nodes run on autograd's thread of that device
    torch.testing.assert_close(leaf.grad, gradient)


def counted(rank: int, size: int, device: str, stage: int) -> dict[str, int]:
    """The collectives of one functional step, those that backward starts on its thread too."""
    task = Task(stage=stage)
    step, state = t.make_step(task, t.make_model(task, device))
    with fzero.count_collectives() as log:
        step(state, [t.make_batch(device, step=0, at=0, rank=rank)])
    return {op: count for op, count in log.counts(rank).items() if op != "agree"}


def saved_and_loaded(rank: int, size: int, device: str, folder: str) -> None:
    """What stage 3 saved, stage 0 trains on from, to the numbers of an uninterrupted run."""
    whole = Task(stage=3)
    step, state = t.make_step(whole, t.make_model(whole, device))
    for number in range(2):
        state, _ = step(state, [t.make_batch(device, step=number, at=0, rank=rank)])
    path = Path(folder) / f"saved-{device}-{size}"
    fzero.checkpoint.save(path, state)
    step, fresh = t.make_step(Task(stage=0), t.make_model(whole, device))
    state = fzero.checkpoint.load(path, fresh)
    state, _ = step(state, [t.make_batch(device, step=2, at=0, rank=rank)])
    t.check_close(t.on_cpu(fzero.full_params(state)), t.by_hand(whole, range(size), device))


def virtual_ranks(rank: int, size: int, device: str, stage: int) -> None:
    """Two virtual ranks in this process, on tensors of the device, give the same numbers."""
    task = Task(stage=stage)
    step = t.make_step(task, t.make_model(task, device))[0]
    simulated = fzero.simulate(step, world_size=2)
    params = fzero.functionalize(t.make_model(task, device))[1]
    state = simulated.init(params, t.fzero_optimizer(task))
    for number in range(task.steps):
        pair = [t.make_batch(device, step=number, at=0, rank=virtual) for virtual in range(2)]
        state, _ = simulated(state, [torch.stack(pair)])
    found = t.on_cpu(fzero.simulate(fzero.full_params, world_size=2)(state))
    first = {path: both[0] for path, both in found.items()}
    t.check_close(first, t.by_hand(task, range(2), device))


def quantized(rank: int, size: int, device: str) -> None:
    """int8 blocks on the device: the bound, the residual, and the same bits by both drivers."""
    x = torch.randn(3, 1000, device=device)
    found = wired.INT8.decode(wired.INT8.encode(x), 1000, x.dtype)
    assert (found - x).abs().max() <= x.abs().max() / 253
    for stage, options in wired.CASES:
        wired.check_encoded(rank, size, device, stage, options)


def quantized_on_virtual_ranks(rank: int, size: int, device: str) -> None:
    """The same on two virtual ranks, for one rank alone quantizes nothing."""
    for stage, options in wired.CASES:

        def body(_: Tensor, stage: int = stage, options: Any = options) -> Tensor:
            wired.check_encoded(fzero.axis_index(), 2, device, stage, options)
            return torch.zeros(())

        fzero.simulate(body, world_size=2)(torch.zeros(2))
