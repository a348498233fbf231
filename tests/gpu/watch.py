"""What a test does to a step from outside: delay its collectives, trace it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist

SLEEP_CYCLES = 20_000_000  # about 10 ms: longer than any kernel of these tests
Where = Literal["before", "after", "rank 0"]

COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
)


def pause(device: str) -> None:
    """Put a long kernel on the current stream; without a GPU, sleep for 1 ms."""
    if device == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    else:
        time.sleep(1e-3)


@contextmanager
def delayed(where: Where, rank: int, device: str) -> Iterator[list[str]]:
    """Delay each collective of torch.distributed; give the names of those that were delayed.

    Before: what starts a collective without waiting for its input sends old values. After: the
    consumers come late, so that memory which was freed too early has been written by others.
    Rank 0: the collective ends late on the other ranks, so that who does not wait reads old values.
    """
    seen: list[str] = []
    begin = where == "before" or (where == "rank 0" and rank == 0)

    def slow(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if begin:
                pause(device)
            result = original(*args, **kwargs)
            if where == "after":
                pause(device)
            return result

        return call

    original_manager = dist._coalescing_manager

    @contextmanager
    def manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with original_manager(*args, **kwargs) as inner:
            yield inner
        if where == "after":  # nccl launches what was coalesced when the manager ends
            pause(device)

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            if name in vars(dist):  # 2.13 renamed two of them
                patch.setattr(dist, name, slow(name))
        patch.setattr(dist, "_coalescing_manager", manager)
        yield seen


class Span(NamedTuple):
    """When something ran, in microseconds of the trace's clock."""

    name: str
    start: float
    end: float


class Trace(NamedTuple):
    """The collectives and the long computations of one step on this rank."""

    collectives: list[Span]
    compute: list[Span]

    def shared_us(self) -> float:
        """For how long a collective and a computation ran at the same time."""
        one = _union(self.collectives)
        other = _union(self.compute)
        return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in one for b in other)

    def hidden(self) -> float:
        """`shared_us` over the shorter of both: 1.0 where all that can overlap does, else less."""
        busy = [sum(s.end - s.start for s in _union(spans)) for spans in self]
        return self.shared_us() / min(busy) if min(busy) else 0.0


def _union(spans: Sequence[Span]) -> list[Span]:
    """The same time without double counting: spans that touch become one."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start <= merged[-1].end:
            last = merged.pop()
            merged.append(last._replace(end=max(last.end, span.end)))
        else:
            merged.append(span)
    return merged


def trace(step: Callable[[], object], device: str, folder: Path) -> Trace:
    """Profile one call of `step` and sort what ran; the trace stays in `folder` for a viewer."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    # With torch 2.11 a profile that clears its events warns, also before there are any.
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    path = folder / f"trace{dist.get_rank()}.json"
    profile.export_chrome_trace(str(path))
    return sort_events(json.loads(path.read_text())["traceEvents"], device)


def sort_events(events: Sequence[dict[str, Any]], device: str) -> Trace:
    """Collectives and matrix products of a trace in Chrome's format.

    On a GPU: nccl's kernels, and all other kernels of 100 us or more. On a CPU: what gloo reports,
    and matrix products.
    """
    collectives, compute = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        name, length = event["name"], event["dur"]
        span = Span(name, event["ts"], event["ts"] + length)
        if device == "cuda":
            if event.get("cat") == "kernel" and "nccl" in name.lower():
                collectives.append(span)
            elif event.get("cat") == "kernel" and length >= 100.0:
                compute.append(span)
        elif name.startswith("gloo:"):
            collectives.append(span)
        elif re.fullmatch(r"aten::(mm|addmm)", name):
            compute.append(span)
    return Trace(collectives, compute)
