"""Step timelines: planned by hand and by laws, measured on ranks, drawn so that all is named."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

import fzero
from fzero.tools.plot import (
    StepEvent,
    StepTimeline,
    draw_timelines,
    measured_timeline,
    step_timeline,
)
from fzero.tools.plot._measured import MARK, profiled
from fzero.tools.trace import Op
from tests.adapter.on_ranks import on_ranks
from tests.descends import descends
from tests.tools.plot.traces import assert_legible, by_hand, traced, value

RATES: dict[str, Any] = {
    "link_bytes_per_s": 2.0**20,
    "flops_per_s": 2.0**30,
    "memory_bytes_per_s": 2.0**24,
    "latency_s": 2.0**-10,
}


def op(name: str, gives: str, *reads: str, numel: int = 4, **more: Any) -> Op:
    given = (value(gives, numel),)
    return Op(name=name, phase="forward", reads=reads, gives=given, **more)


def gather(gives: str, reads: str, wire_bytes: int) -> Op:
    told: dict[str, Any] = {"kind": "collective", "detail": f"dp: {gives}"}
    return op("all_gather", gives, reads, wire_bytes=wire_bytes, **told)


def test_a_collective_starts_where_it_is_issued_and_is_waited_for_where_it_is_read() -> None:
    ops = [
        gather("b", "a", 8),  # 1 + 8 / 2 = 5 s
        gather("c", "a", 2),  # behind it: 1 + 2 / 2 = 2 s
        op("mm", "d", "x", flops=24),  # beside them: 24 / 8 = 3 s
        op("t", "e", "b", kind="view"),  # no time
        op("mm", "f", "e", "d", flops=16),  # waits for b, by its view
        op("sum", "g", "f", numel=1),  # 4 x 4 + 4 bytes, 20 / 10 = 2 s
        op("mm", "h", "c", flops=8),  # c is there
    ]
    inputs = [value("a", 2), value("x", 4)]
    rates = {"link_bytes_per_s": 2, "flops_per_s": 8, "memory_bytes_per_s": 10}
    # No multiplication takes as long as its bytes unless it has the FLOPs: 3 x 16 bytes are 4.8 s.
    rates["memory_bytes_per_s"] = 1000
    timeline = step_timeline(by_hand(ops, inputs), latency_s=1, **rates)
    found = [(e.name, e.lane[0:4], e.start_s, e.duration_s) for e in timeline.events]
    assert found == [
        ("all_gather", "coll", 0, 5),
        ("all_gather", "coll", 5, 2),
        ("mm", "comp", 0, 3),
        ("mm", "comp", 5, 2),
        ("sum", "comp", 7, 0.02),
        ("mm", "comp", pytest.approx(7.02), 1),
    ]
    assert timeline.total_s == pytest.approx(8.02)
    assert timeline.communication_s == 7
    assert timeline.exposed_s == pytest.approx(2)  # from 3 to 5


def test_an_expanded_view_is_read_once_and_a_run_of_pointwise_ops_moves_what_others_need() -> None:
    ops = [
        op("expand", "b", "a", numel=100, kind="view"),
        op("mm", "c", "b", numel=4),  # a is 2 numbers, c is 4
        *(op("mul", "defg"[i], "cdef"[i], kind="pointwise") for i in range(4)),
        op("sum", "h", "g", numel=1),
    ]
    kernels = by_hand(ops, [value("a", 2)]).kernels
    assert [(k.name, k.reads, k.nbytes) for k in kernels] == [
        ("mm", ("a",), 4 * (2 + 4)),
        ("4 pointwise ops", ("c",), 4 * (4 + 4)),
        ("sum", ("g",), 4 * (4 + 1)),
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_laws_of_a_planned_step(stage: int) -> None:
    trace = traced(stage, layers=4)
    timeline = step_timeline(trace, **RATES)
    # One lane computes or waits, so the step is what is computed and what is exposed.
    assert timeline.total_s == pytest.approx(timeline.compute_s + timeline.exposed_s)
    count = sum(op.is_collective for op in trace.ops)
    seconds = count * RATES["latency_s"] + trace.wire_bytes / RATES["link_bytes_per_s"]
    assert timeline.communication_s == pytest.approx(seconds)
    assert 0 < timeline.exposed_s <= timeline.communication_s
    flops = sum(kernel.flops for kernel in trace.kernels)
    assert flops == trace.flops
    assert [event.name for event in timeline.events] == [kernel.name for kernel in trace.kernels]
    # At stage 3 gathers are issued early: some of the communication is beside the compute.
    hidden = timeline.communication_s - timeline.exposed_s
    assert (hidden > 0.05 * timeline.communication_s) == (stage == 3)
    fast = step_timeline(trace, **{**RATES, "link_bytes_per_s": 2.0**60, "latency_s": 0})
    assert fast.exposed_s == pytest.approx(0, abs=1e-12)
    assert fast.compute_s == pytest.approx(timeline.compute_s)


def test_a_trace_file_has_the_events_of_all_timelines(tmp_path: Path) -> None:
    one, two = (step_timeline(traced(stage), **RATES) for stage in (2, 3))
    one.to_perfetto(tmp_path / "step.json", two)
    entries = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in entries if e["name"] == "process_name"}
    assert names == {(1, one.title), (2, two.title)}
    threads = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    for pid, timeline in ((1, one), (2, two)):
        wanted = {(e.name, e.lane, e.start_s * 1e6, e.duration_s * 1e6) for e in timeline.events}
        mine = [e for e in entries if e["ph"] == "X" and e["pid"] == pid]
        assert {(e["name"], threads[e["tid"]], e["ts"], e["dur"]) for e in mine} == wanted
        assert len(mine) == len(timeline.events)
        assert {e["args"]["about"] for e in mine} == {e.detail for e in timeline.events}


@pytest.mark.parametrize(
    "wrong", [{"flops_per_s": 0}, {"link_bytes_per_s": "fast"}, {"latency_s": -1}]
)
def test_rates_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        fzero.LayoutError, match=f"^{next(iter(wrong))}=.*\n.*\nFix: give (a number|seconds)"
    ):
        step_timeline(by_hand([op("mm", "b", "a")]), **{**RATES, **wrong})
    with pytest.raises(fzero.LayoutError, match=r"Fix: fzero.plot.measured_timeline\(step"):
        measured_timeline(lambda state: state, warmup=-1)
    with pytest.raises(fzero.LayoutError, match="draw_timelines: no timelines"):
        draw_timelines([])


def test_on_a_gpu_the_events_are_its_kernels() -> None:
    def made(name: str, start: float, stop: float, device: DeviceType, **more: Any) -> Any:
        told = {"id": 0, "name": name, "thread": 1, "device_type": device, **more}
        return FunctionEvent(start_us=start, end_us=stop, **told)

    host, gpu = DeviceType.CPU, DeviceType.CUDA
    node = made("autograd::engine::evaluate_function: MmBackward0", 1025.0, 1035.0, host, id=2)
    launch = made("cudaLaunchKernel", 1026.0, 1027.0, host, id=7)
    launch.set_cpu_parent(node)
    events = [
        made(MARK, 1000.0, 1100.0, host),
        made("aten::mm", 1010.0, 1020.0, host, id=5),
        node,
        launch,
        made("void at::native::add<4, at::native::F>(int, at::Tensor)", 1050.0, 1080.0, gpu, id=7),
        made("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 1060.0, 1120.0, gpu),
        made("nccl:all_gather", 1060.0, 1120.0, gpu, is_user_annotation=True),
    ]
    timeline = profiled(events, "a step")
    found = [
        (e.lane, e.name, round(1e6 * e.start_s), round(1e6 * e.duration_s), e.phase)
        for e in timeline.events
    ]
    assert found == [
        ("compute", "add", 50, 30, "backward"),  # what autograd launched
        ("collectives", "ncclDevKernel_AllGather_RING_LL", 60, 60, ""),
    ]
    assert timeline.total_s == pytest.approx(120e-6)
    assert timeline.exposed_s == pytest.approx(40e-6)


@on_ranks(2)
def test_what_is_measured_on_ranks_has_collectives_and_no_waits_in_compute(rank: int) -> None:
    late, runs = 0.3, []

    def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ p["w"]).relu()
        runs.append(1)
        if rank == 1 and len(runs) == 3:  # the run that is measured: rank 0 waits for this one
            time.sleep(late)
        return (hidden @ p["v"]).sum()

    step_fn = descends(loss_fn)
    step = fzero.shard(step_fn, stage=3)
    params = {"w": torch.ones(32, 32), "v": torch.ones(32, 4)}
    timeline = measured_timeline(step)(step.init(params, fzero.optim.sgd(0.5)), torch.ones(8, 32))
    assert len(runs) == 3
    computed = [event.name for event in timeline.events if event.lane == "compute"]
    collectives = [event.name for event in timeline.events if event.lane == "collectives"]
    assert set(collectives) == {"all_to_all", "broadcast", "send", "recv"}  # of gloo
    assert collectives.count("all_to_all") >= 2  # the exchanges
    assert "relu" in computed and computed.count("mm") >= 3
    assert not {"t", "view", "empty", "detach"} & set(computed)
    assert all(0 <= e.start_s <= e.end_s <= timeline.total_s for e in timeline.events)
    assert timeline.total_s > late
    if rank == 0:
        assert timeline.compute_s < timeline.total_s - 0.8 * late
        assert timeline.exposed_s > 0.8 * late


@pytest.mark.parametrize(("copies", "ratio"), [(1, 2.0), (12, 100.0)])
def test_pictures_are_legible(copies: int, ratio: float) -> None:
    once = step_timeline(traced(3), **RATES)
    starts = [(i * once.total_s, event) for i in range(copies) for event in once.events]
    events = tuple(dataclasses.replace(e, start_s=start + e.start_s) for start, e in starts)
    planned = dataclasses.replace(once, events=events, total_s=copies * once.total_s)
    other = StepTimeline(title="x_{$", events=events[:4], total_s=ratio * planned.total_s)
    figure = draw_timelines([planned, other])
    assert_legible(figure)
    first, second = (ax.get_xlim()[1] for ax in figure.axes)
    assert first == second == pytest.approx(max(planned.total_s, other.total_s))
    written = " ".join(text.get_text() for text in figure.axes[0].texts)
    collectives = {event.name for event in once.events if event.lane == "collectives"}
    assert len(collectives) == 2
    assert all(name in written for name in collectives) or copies > 1  # where there is room


def test_a_planned_step_and_a_much_longer_measured_one_have_each_an_axis() -> None:
    planned = step_timeline(traced(3), **RATES)
    for ratio, axes in ((8.0, 1), (90.0, 2)):
        measured = dataclasses.replace(
            planned, total_s=ratio * planned.total_s, source="measured", title="measured: a step"
        )
        figure = draw_timelines([planned, measured])
        assert_legible(figure)
        spans = [ax.get_xlim()[1] for ax in figure.axes]
        assert len(set(spans)) == axes and spans[1] == measured.total_s
        assert [("the axes differ" in ax.get_xlabel()) for ax in figure.axes] == [axes == 2] * 2


def test_a_narrow_bar_is_seen_beside_wide_ones() -> None:
    told: dict[str, Any] = {"lane": "compute", "phase": "forward"}
    wide = [StepEvent(name="mm", start_s=float(i), duration_s=0.999, **told) for i in range(2)]
    narrow = StepEvent(name="add", start_s=0.999, duration_s=1e-3, lane="compute", phase="update")
    figure = draw_timelines([StepTimeline(title="x", events=(*wide, narrow), total_s=2.0)])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
    green = np.array([0x00, 0x9E, 0x73])  # of the update, which is 0.4 points wide
    near = np.abs(pixels - green).sum(-1) < 120
    lane = near[: pixels.shape[0] * 2 // 3]  # above the legend, which has the colour, too
    assert lane.any(), "the bar is hidden"


def test_the_views_say_the_same() -> None:
    timeline = step_timeline(traced(3), **RATES)
    lines = timeline.table().splitlines()
    assert lines[1] == timeline.summary() and len(lines) == len(timeline.events) + 3
    assert max(map(len, lines)) <= 120
    assert timeline.to_dict()["events"][0]["detail"] == "dp: 0.weight, 0.bias"


def test_a_measured_step_has_the_phases_of_a_planned_one() -> None:
    """A phase that is not known is called so."""

    def step_fn(state: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            return (x @ p["v"] @ p["w"]).tanh().sum()

        state, value = fzero.grad_and_reduce(loss, state)(x)
        return fzero.apply_gradients(state), value

    params = {"v": torch.ones(8, 8), "w": torch.ones(8, 8)}
    state = fzero.init(params, fzero.optim.adamw(0.1), stage=0)
    measured = measured_timeline(step_fn)(state, torch.ones(4, 8))
    phases = [event.phase for event in measured.events if event.lane == "compute"]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    of = {phase: {e.name for e in measured.events if e.phase == phase} for phase in phases}
    assert "tanh" in of["forward"] and "tanh_backward" in of["backward"]
    assert "_fused_adamw_" in of["update"] and len(of) == 3
    odd = StepEvent(lane="compute", name="mm", start_s=0.0, duration_s=1.0)
    unknown = StepTimeline(title="a step", events=(odd,), total_s=1.0).draw()
    legend = unknown.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["phase not known"]
