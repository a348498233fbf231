"""NCCL: one rank, and two ranks that share a GPU; worlds of fzero's and of the user's making.

The same on the simulated device (tests/device), of two ranks, but what has to do with time. The
bodies are in bodies.py and costs.py; test_bodies_on_cpu.py runs them on CPUs. A world that cannot
be started fails once and is not tried again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.device import BACKEND
from tests.device.sim import built, missing
from tests.gpu import bodies, costs
from tests.gpu.bodies import DRIVERS, STAGES
from tests.gpu.training import Task
from tests.ranks import run_ranks, spawn_script

pytestmark = pytest.mark.timeout(300)


class World(NamedTuple):
    """`size` ranks on one GPU. fzero makes "cpu:gloo,cuda:nccl"; "nccl" has no CPU backend."""

    size: int
    backend: str
    device: str = "cuda"

    def __call__(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        options: Any = {"timeout_s": 120.0, "backend": self.backend}
        return run_ranks(bodies.run, self.size, self.device, body, *args, **options)

    def started(self) -> World:
        if self.device == "sim":
            built()
        self(bodies.start_of_world)
        return self


GPU = (pytest.mark.gpu, pytest.mark.xdist_group("gpu"))
# What takes long on a CPU: a night has all of it, a push what tests/device has.
SIMULATED = (
    pytest.mark.slow,
    pytest.mark.xdist_group("sim"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
)


def on(*worlds: World) -> list[Any]:
    """Worlds as parameters of a test."""
    return [
        pytest.param(
            world,
            id=f"{world.size} on {world.backend}",
            marks=GPU if world.device == "cuda" else SIMULATED,
        )
        for world in worlds
    ]


SIM = World(2, BACKEND, "sim")
NCCL = World(1, "nccl"), World(2, "nccl")
OTHERS = World(1, "cpu:gloo,cuda:nccl"), World(2, "cpu:gloo,cuda:nccl"), World(2, "gloo")


@pytest.fixture(scope="module", params=on(*NCCL, *OTHERS, SIM))
def world(request: pytest.FixtureRequest) -> World:
    """Every kind of world, started; pytest runs the tests of one after the other."""
    return request.param.started()


@pytest.fixture(scope="module", params=on(*NCCL, SIM))
def nccl(request: pytest.FixtureRequest) -> World:
    """A world that the user made with "nccl", and that of the simulated device."""
    return request.param.started()


@pytest.fixture(scope="module", params=on(NCCL[0], World(1, BACKEND, "sim")))
def alone(request: pytest.FixtureRequest) -> World:
    """A world of one rank."""
    return request.param.started()


CHECKPOINTS = [
    ("reentrant", "engine"),
    ("nonreentrant", "engine"),
    ("nonreentrant", "functional step"),
    ("remat", "functional step"),
]
every_stage = pytest.mark.parametrize("stage", STAGES)
every_driver = pytest.mark.parametrize("driver", DRIVERS)


@every_stage
@every_driver
@pytest.mark.parametrize("options", [{}, {"backwards": 3, "max_norm": 0.5}], ids=["", "window"])
def test_the_numbers_are_those_of_one_process(
    world: World, stage: int, driver: str, options: dict[str, Any]
) -> None:
    world(bodies.numbers, Task(stage=stage, **options), driver)


@every_stage
@pytest.mark.parametrize(("kind", "driver"), CHECKPOINTS)
def test_activation_checkpointing_changes_nothing(
    nccl: World, stage: int, kind: str, driver: str
) -> None:
    nccl(bodies.numbers, Task(stage=stage, checkpoint=kind), driver)


@every_stage
@pytest.mark.parametrize("kind", ["user's group", "sub-mesh of this rank"])
def test_meshes_and_groups_that_the_user_made(nccl: World, stage: int, kind: str) -> None:
    nccl(bodies.numbers_on_a_mesh, stage, kind)


@every_stage
def test_bf16_with_masters_and_clipping(world: World, stage: int) -> None:
    world(bodies.bf16_with_masters, stage)


@every_stage
def test_fp16_skips_overflows_without_a_wait_as_grad_scaler_skips_them(
    nccl: World, stage: int
) -> None:
    nccl(bodies.fp16_with_overflows, stage)


@pytest.mark.parametrize(("stage", "kinds"), [(0, "o"), (2, "o"), (2, "og"), (3, "ogp")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offload_changes_no_bit(
    world: World, stage: int, kinds: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    task = Task(stage=stage, dtype=dtype, backwards=2, max_norm=0.5)
    world(bodies.offloaded, task, kinds, tmp_path)
    world(bodies.offloaded, replace(task, accumulates=True), kinds, tmp_path)


@every_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_engine_and_the_functional_step_give_the_same_bits(
    nccl: World, stage: int, dtype: torch.dtype
) -> None:
    nccl(bodies.drivers_agree, stage, dtype)


@every_stage
@pytest.mark.parametrize("where", ["before", "after", "rank 0"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_delays_around_every_collective_change_nothing(
    nccl: World, stage: int, where: str, backwards: int
) -> None:
    nccl(bodies.numbers_with_delays, Task(stage=stage, backwards=backwards, steps=2), where)


@every_stage
@every_driver
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_steady_step_never_waits_for_the_gpu(
    nccl: World, stage: int, driver: str, dtype: torch.dtype
) -> None:
    nccl(bodies.no_waits_in_a_steady_step, stage, driver, dtype)


@every_stage
@every_driver
def test_peak_bytes_are_within_the_bound(nccl: World, stage: int, driver: str) -> None:
    stack = costs.Stack(layers=8, width=_width(nccl), samples=4)
    options = {"reshard_after_forward": True} if stage == 3 else {}
    nccl(costs.peak_of, stack, stage, driver, options)


@every_driver
def test_with_everything_in_host_memory_the_device_holds_a_few_units(
    nccl: World, driver: str
) -> None:
    nccl(costs.offloaded_peak, costs.Stack(layers=24, width=_width(nccl), samples=4), driver)


def _width(world: World) -> int:
    return 2048 if world.device == "cuda" else 256


@pytest.mark.gpu  # the simulated device does one thing after the other
@pytest.mark.xdist_group("gpu")
@every_stage
@every_driver
def test_collectives_run_beside_computation(stage: int, driver: str, tmp_path: Path) -> None:
    """Of what can overlap in two ranks on one GPU, a fifth does; nothing does without a stream."""
    stack = costs.Stack(layers=6, width=2048, samples=32_768)
    found = World(2, "nccl")(costs.overlap, stack, stage, driver, str(tmp_path))
    for collectives, hidden in found:
        assert collectives >= stack.layers
        assert hidden >= 0.2, f"{hidden:.3f} of {collectives} collectives is hidden"


def test_collectives_have_derivatives_on_the_threads_of_autograd(world: World) -> None:
    world(bodies.derivatives)


@every_stage
def test_collectives_that_backward_starts_are_counted(nccl: World, stage: int) -> None:
    """As many as on as many gloo ranks, where backward runs on the thread that calls it."""
    found = nccl(bodies.counted, stage)
    assert found == run_ranks(bodies.run, nccl.size, "cpu", bodies.counted, stage)


def test_a_checkpoint_of_stage_3_is_loaded_at_stage_0(world: World, tmp_path: Path) -> None:
    world(bodies.saved_and_loaded, str(tmp_path))


@every_stage
def test_virtual_ranks_on_tensors_of_a_device(alone: World, stage: int) -> None:
    alone(bodies.virtual_ranks, stage)


def test_quantized_gathers_and_reductions(world: World) -> None:
    world(bodies.quantized)


def test_quantized_gathers_and_reductions_on_virtual_ranks(alone: World) -> None:
    alone(bodies.quantized_on_virtual_ranks)


def test_a_kernel_that_takes_the_address_of_a_placeholder(nccl: World) -> None:
    if nccl.device == "cuda":
        pytest.importorskip("triton")
    nccl(costs.placeholder_by_pointer)


@every_stage
@pytest.mark.parametrize("pair", on(NCCL[1], OTHERS[1], SIM))
def test_a_rank_that_raises_ends_the_step_of_the_others(pair: World, stage: int) -> None:
    first, last = pair.started()(bodies.one_rank_raises, stage)
    assert any("raised on rank [1]" in error for error in first), first
    assert "ZeroDivisionError: on purpose" in last


@every_stage
@pytest.mark.parametrize("pair", on(NCCL[1], SIM))
def test_a_rank_that_is_killed_ends_the_others(
    pair: World, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_killed(stage, pair.device, tmp_path, monkeypatch)


def check_killed(stage: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FZERO_TIMEOUT_S", "15")
    script = ["tests.gpu.killed", str(stage), device, str(tmp_path / "died")]
    done = spawn_script("-m", 2, script, timeout_s=100.0)
    line = re.search(r"^rank 0 after ([\d.]+) s: \w+Error: .*$", done.stdout, re.MULTILINE)
    assert line is not None, done.stdout + done.stderr
    assert float(line[1]) < 10.0, line[0]
