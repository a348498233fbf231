"""Measure the timeline of a step by torch's profiler."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType

# What torch.profiler is made of: starting that one imports all of torch._inductor first.
from torch.autograd.profiler import profile, record_function

from fzero.errors import LayoutError
from fzero.tools.plot._lanes import Lane, StepEvent
from fzero.tools.plot._step import StepTimeline

MARK = "fzero step"
_BACKEND = re.compile(r"(gloo|mpi|ucc):(\w+)")
_AUTOGRAD = "autograd::engine::"
_SUBCLASS = "PythonSubclass"  # of torch: Python runs inside, which may wait for a collective
_COMPUTES_NOTHING = re.compile(
    r"aten::(empty\w*|new_empty\w*|result_type|is_pinned|detach_|resize_|set_)"
)


def measured_timeline(step: Callable[..., Any], *, warmup: int = 2) -> Callable[..., StepTimeline]:
    """Return m: m(state, *args) runs a step under torch's profiler, and returns what ran when.

    On a GPU the events are its kernels, those of NCCL in the lane of collectives. On CPUs they are
    ATen ops, without views and allocations, and the collectives of gloo from their issue to their
    end; the exchanges in which ranks agree are among them. Backward is what autograd runs, the
    update what runs behind the last op of it. The virtual ranks of `fzero.simulate`
    run in one process: its timeline has the ops of all ranks, and no collectives. Profiling takes
    time itself, a few microseconds for each op.

    Args:
        step: (state, *args) -> (state, aux).
        warmup: how often the step runs before, so that its schedule is there. Each run has the
            state of the one before, and the same further arguments.

    Returns:
        A function of the arguments of `step`. With a step among several processes, every rank calls
        it, and gets its own timeline.

    Raises:
        LayoutError: for a `step` that is no function, and a `warmup` that is no count.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (x @ p["w"]).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> state = fzero.init({"w": torch.ones(64, 4)}, fzero.optim.sgd(0.5), stage=0)
        >>> timeline = measured_timeline(step_fn)(state, torch.ones(2, 64))
        >>> "matmul" in {event.name for event in timeline.events}
        True
    """
    if not callable(step) or type(warmup) is not int or warmup < 0:
        raise LayoutError(
            f"measured_timeline: step={type(step).__name__}, warmup={warmup!r}.",
            cause="a step that was called already, or a count that is none.",
            fix="fzero.plot.measured_timeline(step, warmup=2)(state, batch).",
        )

    def measured(state: Any, *args: Any) -> StepTimeline:
        for _ in range(warmup):
            state, _ = step(state, *args)
        on_gpu = torch.cuda.is_available()
        _finish(on_gpu)
        with profile(use_device="cuda" if on_gpu else None) as profiler, record_function(MARK):
            step(state, *args)
            _finish(on_gpu)
        assert profiler is not None  # it is enabled
        return profiled(list(profiler.function_events or ()), f"measured: {_named(step)}")

    return measured


def _finish(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _named(step: Any) -> str:
    return step.__name__ if inspect.isroutine(step) else repr(step)


def profiled(events: list[Any], title: str) -> StepTimeline:
    """Return the timeline of the events of torch's profiler."""
    mark = next(e for e in events if e.name == MARK and e.device_type == DeviceType.CPU)
    found = list(_on_device(events)) or list(_on_host(events, mark.thread))
    found += list(_of_backend(events))
    start, phases = mark.time_range.start, _phases(events, mark.thread)
    shown = [
        StepEvent(
            lane=lane,
            name=name,
            start_s=(event.time_range.start - start) * 1e-6,
            duration_s=event.time_range.elapsed_us() * 1e-6,
            phase=phases.get(event.id, "") if lane == "compute" else "",
        )
        for lane, name, event in found
        if event.time_range.start >= start
    ]
    shown.sort(key=lambda event: event.start_s)
    total = mark.time_range.elapsed_us() * 1e-6
    last = max((event.end_s for event in shown), default=0.0)
    total = max(total, last)
    return StepTimeline(title=title, events=tuple(shown), total_s=total)


def _phases(events: Iterable[Any], main: int) -> dict[int, str]:
    """Return {event id: phase} of host events; a kernel has the phase of the op that launched it.

    Ops that autograd runs are backward, those after the last of them update, all others forward.
    """
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    run_by_autograd = {event.id for event in on_host if _is_in_autograd(event)}
    ends = [event.time_range.end for event in on_host if event.id in run_by_autograd]
    if not ends:
        return {}
    threads = {main} | {event.thread for event in on_host if event.name.startswith(_AUTOGRAD)}
    found: dict[int, str] = {}
    for event in on_host:
        if event.id in run_by_autograd:
            found[event.id] = "backward"
        elif event.thread in threads:
            behind = event.time_range.start >= max(ends)
            found[event.id] = "update" if behind else "forward"
    return found


def _is_in_autograd(event: Any) -> bool:
    return event is not None and (
        event.name.startswith(_AUTOGRAD) or _is_in_autograd(event.cpu_parent)
    )


def _of_backend(events: Iterable[Any]) -> Iterator[tuple[Lane, str, Any]]:
    """Return the collectives of a backend on the host, such as gloo."""
    for event in events:
        if found := _BACKEND.fullmatch(event.name):
            yield "collectives", found[2], event


def _on_device(events: Iterable[Any]) -> Iterator[tuple[Lane, str, Any]]:
    """Return the kernels of a GPU."""
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            name = event.name
            lane: Lane = "collectives" if name.startswith("nccl") else "compute"
            yield lane, _short(name), event


def _short(kernel: str) -> str:
    """Return the bare name of a C++ function: no type, namespace, template or arguments.

    Example:
        >>> _short("void at::native::elementwise_kernel<4, at::native::Add>(int)")
        'elementwise_kernel'
    """
    head = re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0]
    return head.split("::")[-1] or kernel


def _on_host(events: Iterable[Any], main: int) -> Iterator[tuple[Lane, str, Any]]:
    """Return the outermost ATen ops of this thread and autograd's, without those that wait."""
    every = list(events)
    threads = {main} | {event.thread for event in every if event.name.startswith(_AUTOGRAD)}
    left = [event for event in every if event.cpu_parent is None and event.thread in threads]
    while left:
        event = left.pop()
        if event.name.startswith("c10d::") or event.is_async:
            continue
        if event.name.startswith("aten::") and not _has_python(event):
            if not _COMPUTES_NOTHING.fullmatch(event.name) and not _is_view(event.name):
                yield "compute", event.name.removeprefix("aten::"), event
        else:
            left += event.cpu_children


def _has_python(event: Any) -> bool:
    return any(child.name == _SUBCLASS or _has_python(child) for child in event.cpu_children)


def _is_view(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    return packet is not None and any(
        getattr(packet, overload).is_view for overload in packet.overloads()
    )
