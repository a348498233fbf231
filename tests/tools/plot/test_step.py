"""Step timelines: measured on ranks, and drawn so that all is named."""

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
)
from fzero.tools.plot._measured import MARK, profiled
from fzero.tools.trace import Trace
from tests.adapter.on_ranks import on_ranks
from tests.descends import descends
from tests.tools.plot.traces import assert_legible, traced


def laid_out(trace: Trace, **more: Any) -> StepTimeline:
    """A timeline of the ops of a trace: a microsecond each, collectives beside what follows."""
    ops = [op for op in trace.ops if op.kind != "view"]
    events = [
        StepEvent(
            lane="collectives" if op.is_collective else "compute",
            name=op.name,
            start_s=1e-6 * i,
            duration_s=1e-6,
            phase=op.phase,
            detail=op.detail if op.is_collective else "",
        )
        for i, op in enumerate(ops)
    ]
    told: dict[str, Any] = {"title": trace.title, "total_s": 1e-6 * len(ops)}
    return StepTimeline(**{**told, "events": tuple(events), **more})


def test_exposed_is_what_no_computation_hides() -> None:
    """Collectives from 0 to 4 and 6 to 8, compute from 1 to 3, 2 to 3.5 and 7 to 9."""
    told: dict[str, Any] = {"name": "x"}
    events = [
        *(
            StepEvent(lane="collectives", start_s=a, duration_s=d, **told)
            for a, d in ((0, 4), (6, 2))
        ),
        *(
            StepEvent(lane="compute", start_s=a, duration_s=d, **told)
            for a, d in ((1, 2), (2, 1.5), (7, 2))
        ),
    ]
    timeline = StepTimeline(title="by hand", events=tuple(events), total_s=9)
    assert (timeline.communication_s, timeline.compute_s) == (6, 4.5)
    assert timeline.exposed_s == 2.5  # from 0 to 1, from 3.5 to 4, from 6 to 7
    said = "step 9 s; compute 4.5 s, collectives 6 s, of them exposed 2.5 s"
    assert timeline.summary() == said


def test_a_trace_file_has_the_events_of_all_timelines(tmp_path: Path) -> None:
    one, two = (laid_out(traced(stage)) for stage in (2, 3))
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


def test_what_is_no_step_and_no_timeline_is_refused() -> None:
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
    once = laid_out(traced(3))
    starts = [(i * once.total_s, event) for i in range(copies) for event in once.events]
    events = tuple(dataclasses.replace(e, start_s=start + e.start_s) for start, e in starts)
    one = dataclasses.replace(once, events=events, total_s=copies * once.total_s)
    other = StepTimeline(title="x_{$", events=events[:4], total_s=ratio * one.total_s)
    figure = draw_timelines([one, other])
    assert_legible(figure)
    first, second = (ax.get_xlim()[1] for ax in figure.axes)
    assert first == second == pytest.approx(max(one.total_s, other.total_s))


def test_a_bar_has_its_name_where_it_fits() -> None:
    told: dict[str, Any] = {"lane": "collectives", "duration_s": 1.0, "phase": ""}
    about = "dp: layer.0.weight, layer.1.weight"
    wide = StepEvent(name="all_gather", start_s=0.0, detail=about, **told)
    less = StepEvent(name="reduce_scatter", start_s=1.0, **{**told, "duration_s": 0.1})
    narrow = StepEvent(name="add", start_s=0.5, lane="compute", duration_s=1e-3)
    ax = StepTimeline(title="x_{$", events=(wide, less, narrow), total_s=8.0).draw()
    assert_legible(ax.figure)
    assert [text.get_text() for text in ax.texts if text.get_text()] == ["all_gather"]
    ax = StepTimeline(title="x", events=(wide,), total_s=1.0).draw()
    assert [text.get_text() for text in ax.texts] == ["all_gather layer.0.weight +1"]


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
    timeline = laid_out(traced(3))
    lines = timeline.table().splitlines()
    assert lines[1] == timeline.summary() and len(lines) == len(timeline.events) + 3
    assert max(map(len, lines)) <= 120
    details = [event["detail"] for event in timeline.to_dict()["events"]]
    assert details[0] == "dp: 0.weight, 0.bias"


def test_a_measured_step_has_phases() -> None:
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
