"""Run a step on one abstract rank without values, and measure what it holds, sends and computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fzero.checkpoint.mirror import part_bytes
from fzero.collectives import CollectiveLog, count_collectives
from fzero.context.here import abstract_rank
from fzero.errors import FzeroError, LayoutError
from fzero.errors.check import require
from fzero.optim.precision import masters_of
from fzero.state import NAMESPACE, Setup, TrainState, state_bytes
from fzero.tools.plan._checks import check_rank
from fzero.tools.plan._meta import AsOn
from fzero.tools.plan._record import Plan, Traffic
from fzero.tools.plan._subject import PlannedStep
from fzero.tools.plan._time import Rates, time_of
from fzero.tools.plan._values import ASKED_OF_FAKE, NoValues
from fzero.tools.plan._watch import REST, MemoryWatch
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.program import reads_values
from fzero.tools.trace.recurrent import unfused_recurrence
from fzero.transforms.states import flatten_states

_PLACES = ("on device", "in host memory", "on disk")


def plan_step(
    subject: PlannedStep, optimizer: Any, *, world: int, rank: int, device: str, rates: Rates | None
) -> Plan:
    """Return the plan of a subject, whose parameters and arguments have no values.

    The second step is measured: at stage 3 the first one records the schedule, and some optimizers
    create their states in it.
    """
    check_rank(rank, world)
    wanted = '"cpu" (with gloo) or "cuda" (with nccl)'
    require("device", device, lambda device: device in ("cpu", "cuda"), wanted)
    try:
        with (
            AsFound("plan", subject.step, optimizer, subject.args) as found,
            found.record(),
            abstract_rank(rank, world, device=device),
            unfused_recurrence(),
        ):
            state = subject.step.init(
                subject.params, optimizer, initializer=lambda _, leaf: torch.empty_like(leaf)
            )
            watch, log = MemoryWatch(device), CollectiveLog()
            # Tensors that the step creates without a device go to that of its arguments, too.
            fake = optree.tree_leaves(subject.params, namespace=NAMESPACE)[0]
            on = found.ends(fake.fake_mode if isinstance(fake, FakeTensor) else AsOn(device))
            with nullcontext() if isinstance(fake, FakeTensor) else on:
                with NoValues():
                    state, aux = subject.step(state, *subject.args)
                watch.mark(
                    REST, (state, aux)
                )  # counters; a loss is held to the end of the next step
                watch.mark("batch", subject.args)
                _mark(watch, state)
                with count_collectives() as log, watch:
                    state, aux = subject.step(state, *subject.args)
            return _plan(
                subject.name, state, watch, log, rank=rank, device=device, rates=rates or Rates()
            )
    except ASKED_OF_FAKE as error:
        raise reads_values("planned", error) from error
    except FzeroError:
        raise
    except Exception as error:
        error.add_note(f"(while {subject.name} was planned: its tensors have shapes and no values)")
        raise


def _mark(watch: MemoryWatch, tree: Any) -> None:
    for state in flatten_states("plan", tree)[0]:
        watch.mark("parameters", state.params)
        watch.mark("optimizer", state.optimizer)
        watch.mark("masters", list(masters_of(state)))
        watch.mark("window", state.window)
        for slot in state.slots.values():
            if slot.form.kind != "numbers":
                watch.mark(slot.form.kind, slot)
        watch.mark("gradients", state.gradients)


def _plan(
    name: str,
    tree: Any,
    watch: MemoryWatch,
    log: CollectiveLog,
    *,
    rank: int,
    device: str,
    rates: Rates,
) -> Plan:
    states = flatten_states("plan", tree)[0]
    held: Counter[str] = Counter()
    for state in states:
        held.update(_bytes(state))
    traffic = _traffic(log, rank)
    calls = [(one.count, one.wire_bytes) for one in traffic]
    peak = watch.peak
    peak.pop("batch", None)
    return Plan(
        name=name,
        setups=tuple(state.setup for state in states),
        device=device,
        bytes=dict(held),
        peak=peak,
        traffic=traffic,
        time=time_of(watch.work, calls, rates),
        part_bytes=sum(_part_bytes(state, rank) for state in states),
    )


def _part_bytes(state: TrainState, rank: int) -> int:
    try:
        return part_bytes(state, rank)
    except LayoutError:  # an optimizer whose state has no place in a checkpoint
        return 0


def _bytes(state: TrainState) -> dict[str, int]:
    """Return a rank's bytes by kind; gradients, which the update frees, by size from the setup."""
    sizes = state_bytes(state)
    masters = _tensor_bytes(list(masters_of(state)))
    places = {place: sizes[place] for place in _PLACES if place in sizes}
    gradients = gradient_bytes(state.setup)
    home = state.setup.offload.gradients
    if places:
        places[{None: _PLACES[0], "cpu": _PLACES[1], "disk": _PLACES[2]}[home]] += gradients
    return {
        "parameters": sizes["parameters"],
        "gradients": gradients,
        "optimizer": sizes["optimizer"] - masters,
        "masters": masters,
        "window": sizes["window"],
        **({"slots": sizes["slots"]} if "slots" in sizes else {}),
        **places,
    }


def gradient_bytes(setup: Setup) -> int:
    """Bytes of the reduced gradients that each rank holds until an update."""
    placed = ((i, setup.numel(i, setup.gradients)) for i in setup.layout.trainable)
    return sum(numel * setup.accumulate_dtype(i).itemsize for i, numel in placed)


def _tensor_bytes(tree: Any) -> int:
    leaves: Sequence[Any] = optree.tree_leaves(tree, namespace=NAMESPACE)
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))


def _traffic(log: CollectiveLog, rank: int) -> tuple[Traffic, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for event in log.of(rank):
        counts[event.op, event.axis] += 1
        sent[event.op, event.axis] += event.wire_bytes
    return tuple(Traffic(*key, counts[key], sent[key]) for key in counts)
