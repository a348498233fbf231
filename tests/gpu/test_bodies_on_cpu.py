"""The bodies of the GPU tests on two gloo ranks, so that they are right before a GPU is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import bodies, costs
from tests.gpu.bodies import DRIVERS
from tests.gpu.reads import HostReadError, MixedDevicesError, on_device
from tests.gpu.test_nccl import CHECKPOINTS, check_killed
from tests.gpu.training import Task
from tests.gpu.watch import Span, Trace, sort_events
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")


def on_cpu(body: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
    return run_ranks(bodies.run, size, "cpu", body, *args)


SLOW = pytest.mark.slow  # stage 3 has what the others have; a machine with a GPU runs all


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), pytest.param(2, marks=SLOW), 3])
def test_numbers(stage: int) -> None:
    for driver in DRIVERS:
        on_cpu(bodies.numbers, Task(stage=stage), driver)
        on_cpu(bodies.numbers, Task(stage=stage, backwards=3, max_norm=0.5), driver)
    for kind, driver in CHECKPOINTS:
        on_cpu(bodies.numbers, Task(stage=stage, checkpoint=kind), driver)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 3])
def test_one_rank_and_meshes(stage: int) -> None:
    for driver in DRIVERS:
        on_cpu(bodies.numbers, Task(stage=stage, backwards=2), driver, size=1)
    on_cpu(bodies.virtual_ranks, stage, size=1)
    on_cpu(bodies.numbers_on_a_mesh, stage, "user's group")
    on_cpu(bodies.numbers_on_a_mesh, stage, "sub-mesh of this rank")


def test_quantized() -> None:
    on_cpu(bodies.quantized)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=SLOW), 3])
def test_bf16_with_masters(stage: int) -> None:
    on_cpu(bodies.bf16_with_masters, stage)


@pytest.mark.parametrize(("stage", "kinds"), [pytest.param(2, "o", marks=SLOW), (3, "ogp")])
def test_offload(stage: int, kinds: str, tmp_path: Path) -> None:
    on_cpu(bodies.offloaded, Task(stage=stage, backwards=2, max_norm=0.5), kinds, tmp_path)
    if stage == 3:
        for driver in DRIVERS:
            on_cpu(costs.offloaded_peak, costs.Stack(layers=3, width=8, samples=2), driver)


@pytest.mark.parametrize("where", ["before", "after", "rank 0"])
def test_delays(where: str) -> None:
    on_cpu(bodies.numbers_with_delays, Task(stage=3, steps=1), where)


# Below stage 3 an engine compares parameters that are on the CPU, as writes to them are seen in no
# other way; tests/gpu/test_nccl.py has its rows on the simulated device.
@pytest.mark.parametrize(
    ("driver", "stage", "dtype"),
    [
        pytest.param("functional step", 0, torch.float32, marks=SLOW),
        pytest.param("functional step", 1, torch.bfloat16, marks=SLOW),
        pytest.param("functional step", 2, torch.float32, marks=SLOW),
        ("functional step", 3, torch.bfloat16),
        ("engine", 3, torch.bfloat16),
    ],
    ids=str,
)
def test_a_steady_step_never_waits_for_the_device(
    driver: str, stage: int, dtype: torch.dtype
) -> None:
    on_cpu(bodies.no_waits_in_a_steady_step, stage, driver, dtype)


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda x: x.sum().item(),
    "a branch": lambda x: bool(x.sum() > 0),
    "a list": lambda x: x.tolist(),
    "a copy": lambda x: x.cpu(),
    "a copy into memory of the host": lambda x: torch.zeros(2).copy_(x),
    "a copy from memory of the host": lambda x: x.copy_(torch.zeros(2)),
    "a new tensor of numbers": lambda x: torch.tensor([1.0], device=x.device),
    "a mask": lambda x: x[x > 0],
    "equality": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_for_the_device_is_seen_and_what_is_the_host_s_is_not(name: str) -> None:
    with on_device("cpu") as watched:
        x = watched.put(torch.ones(2)) * 2
        WAITS[name](x)
        with watched.no_waits():
            torch.ones(2).sum().item()
            assert (x + torch.full((2,), 1.0, device=x.device)).shape == (2,)
            with pytest.raises(HostReadError, match="waits for the device"):
                WAITS[name](x)


MIXES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a sum": lambda x, host: x + host,
    "in place": lambda x, host: x.mul_(host),
    "many at once": lambda x, host: torch._foreach_add_([x], [host]),
    "many by a number of the host": lambda x, host: torch._foreach_mul_([x], host.sum()),
    "a gradient": lambda x, host: torch.autograd.grad((x.requires_grad_() * x).sum(), x)[0] + host,
}


@pytest.mark.parametrize("name", MIXES)
def test_a_kernel_that_is_given_memory_of_the_host_is_seen(name: str) -> None:
    with on_device("cpu") as watched:
        x = watched.put(torch.ones(2))
        assert (x * torch.tensor(2.0) + torch.ones(2).to(x.device)).tolist() == [3.0, 3.0]
        with pytest.raises(MixedDevicesError, match="given tensors of the host"):
            MIXES[name](x * 2, torch.ones(2))


@pytest.mark.parametrize("size", [1, 2])
def test_a_kernel_that_takes_the_address_of_a_placeholder(size: int) -> None:
    on_cpu(costs.placeholder_by_pointer, size=size)


def test_errors_of_one_rank() -> None:
    first, last = on_cpu(bodies.one_rank_raises, 3)
    assert any("raised on rank [1]" in error for error in first)
    assert "ZeroDivisionError: on purpose" in last


@SLOW
def test_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_killed(3, "cpu", tmp_path, monkeypatch)


def test_derivatives_counts_and_checkpoints(tmp_path: Path) -> None:
    on_cpu(bodies.derivatives)
    assert on_cpu(bodies.counted, 0)[0] == {"all_reduce": 1}
    on_cpu(bodies.saved_and_loaded, str(tmp_path))


@pytest.mark.parametrize("driver", DRIVERS)
def test_peak_runs_and_bounds_are_zero_s_table(driver: str) -> None:
    stack = costs.Stack(layers=4, width=16, samples=2)
    found = on_cpu(costs.peak_of, stack, 2, driver, {})
    # P = 4 layers of 1 KiB: P + 2 P / 2 resident, P / 2 of gradients, three buckets of a layer.
    assert [one["bound"] for one in found] == [4096 + 4096 + 2048 + 3 * 1024] * 2
    bounds = [costs.peak_bound(stack, stage, 2) // 1024 for stage in range(4)]
    assert bounds == [4 + 8 + 4 + 3, 4 + 4 + 4 + 3, 4 + 4 + 2 + 3, 2 + 4 + 2 + 6]


def test_a_trace_shows_the_engine_s_gathers_beside_its_products(tmp_path: Path) -> None:
    stack = costs.Stack(layers=4, width=256, samples=256)
    found = on_cpu(costs.overlap, stack, 3, "engine", str(tmp_path))
    assert all(count >= stack.layers for count, _ in found)
    assert max(hidden for _, hidden in found) > 0.0


def test_a_trace_tells_collectives_from_products_and_adds_up_what_they_share() -> None:
    def event(name: str, start: float, length: float, cat: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length}

    events = [
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 0.0, 300.0),
        event("ncclDevKernel_ReduceScatter_Sum_f32", 200.0, 200.0),  # 100 us of it beside the first
        event("sm90_xmma_gemm_f32", 350.0, 150.0),
        event("a kernel of 5 us", 100.0, 5.0),
        event("cudaLaunchKernel", 0.0, 900.0, cat="cuda_runtime"),
    ]
    trace = sort_events(events, "cuda")
    assert [span.name[:5] for span in trace.collectives] == ["ncclD", "ncclD"]
    assert trace.compute == [Span("sm90_xmma_gemm_f32", 350.0, 500.0)]
    assert trace.shared_us() == 50.0
    assert trace.hidden() == 50.0 / 150.0
    assert Trace([], trace.compute).hidden() == 0.0
