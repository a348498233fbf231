"""Compute a timeline from the ops of a trace and stated rates."""

from __future__ import annotations

from fzero.errors.check import is_positive, require
from fzero.tools.plot._lanes import Lane, StepEvent
from fzero.tools.plot._memory import ops_of_trace
from fzero.tools.plot._step import StepTimeline
from fzero.tools.trace import Trace


def step_timeline(
    trace: Trace,
    *,
    link_bytes_per_s: float,
    flops_per_s: float,
    memory_bytes_per_s: float,
    latency_s: float = 0.0,
) -> StepTimeline:
    """Return when each kernel and each collective of a step runs, on a machine of these rates.

        kernel      max(FLOPs / flops_per_s, bytes read and written / memory_bytes_per_s)
        collective  latency_s + wire_bytes / link_bytes_per_s

    Kernels run one after the other, in the order of the trace. A collective starts where it is
    issued, once the one before it is over, and a kernel that reads its result waits for it. Many
    pointwise ops in a row are one kernel (see `fzero.trace.Kernel`); a view takes no time. The
    host's own time is not counted.

    Args:
        trace: what `fzero.trace(step)(state, *args)` gives.
        link_bytes_per_s: that one rank sends, in bytes per second.
        flops_per_s: of matrix products, convolutions and attention.
        memory_bytes_per_s: that one device reads and writes.
        latency_s: of each collective, in seconds, before its first byte.

    Raises:
        LayoutError: for what is no trace, and a rate that is no positive number (`latency_s` may
            be 0).

    Source: Williams et al., "Roofline", CACM 52(4), 2009: time is the larger of the two bounds.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     state, loss = fzero.grad_and_reduce(lambda p, x: (x @ p["w"]).sum(), state)(x)
        ...     return fzero.apply_gradients(state), loss
        >>> step = fzero.simulate(fzero.shard(step_fn, stage=3), world_size=4)
        >>> state = step.init({"w": torch.ones(64, 4)}, fzero.optim.sgd(0.5))
        >>> trace = fzero.trace(step)(state, torch.ones(4, 2, 64))
        >>> rates = dict(flops_per_s=1e12, memory_bytes_per_s=1e12)
        >>> timeline = step_timeline(trace, link_bytes_per_s=1e9, latency_s=1e-6, **rates)
        >>> [event.name for event in timeline.events if event.lane == "collectives"]
        ['all_gather', 'reduce_scatter']
        >>> timeline.summary()
        'step 3.54 us; compute 4.47 ns, collectives 3.54 us, of them exposed 3.54 us'
    """
    ops_of_trace(trace, "step_timeline")
    rates = {
        "link_bytes_per_s": link_bytes_per_s,
        "flops_per_s": flops_per_s,
        "memory_bytes_per_s": memory_bytes_per_s,
    }
    for name, rate in rates.items():
        require(name, rate, is_positive, "a number: 50e9")
    require("latency_s", latency_s, lambda s: s == 0 or is_positive(s), "seconds: 20e-6, or 0")
    free: dict[Lane, float] = {"compute": 0.0, "collectives": 0.0}
    ready: dict[str, float] = {}  # when a value is there
    events = []
    for kernel in trace.kernels:
        op = kernel.ops[0]
        lane: Lane = "collectives" if op.is_collective else "compute"
        if op.is_collective:
            seconds = latency_s + op.wire_bytes / link_bytes_per_s
        else:
            seconds = max(kernel.flops / flops_per_s, kernel.nbytes / memory_bytes_per_s)
        read = (ready.get(name, 0.0) for name in kernel.reads)
        # A collective is issued after the kernels before it.
        start = max(free[lane], free["compute"], *read)
        free[lane] = start + seconds
        ready.update((value.name, free[lane]) for value in kernel.gives)
        events.append(
            StepEvent(
                lane=lane,
                name=kernel.name,
                start_s=start,
                duration_s=seconds,
                phase=op.phase,
                detail=op.detail,
            )
        )
    title, total = f"planned: {trace.title}", max(free.values())
    return StepTimeline(title=title, events=tuple(events), total_s=total, source="planned")
