"""Run a step on one abstract rank without values, and measure what it holds, sends and computes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.checkpoint.mirror import part_bytes
from fzero.collectives import count_collectives
from fzero.context.current_rank import abstract_rank, has_no_values
from fzero.errors import AxisError, FzeroError, LayoutError
from fzero.errors.check import is_count, require
from fzero.optim.precision import masters_of
from fzero.state import NAMESPACE, TrainState, state_bytes
from fzero.tools.plan.records import Plan, Rates, Traffic, time_of
from fzero.tools.plan.without_values import AsOn, NoValues
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.ops import flops_of
from fzero.tools.trace.program import ASKED_OF_FAKE, reads_values, unfused_recurrence
from fzero.tools.trees import tensors_in
from fzero.transforms.models import flatten_states

REST = "activations and temporaries"
GATHERED = "gathered parameters"
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_GATHER = torch.ops.fzero.all_gather.default


def plan_step(
    name: str,
    step: Any,
    params: Any,
    args: tuple[Any, ...],
    optimizer: Any,
    *,
    world: int,
    rank: int,
    device: str,
    rates: Rates | None,
) -> Plan:
    """Return the plan of a sharded step, whose parameters and arguments have no values.

    The second step is measured: at stage 3 the first one records the schedule, and some optimizers
    create their states in it.
    """
    if not is_count(rank, 0) or rank >= world:
        raise AxisError(
            f"plan: rank={rank!r} of {world}.",
            cause="ranks are counted from 0.",
            fix=f"give a rank in range({world}).",
        )
    known = dist.Backend.default_device_backend_map
    wanted = f"a type of device for which torch has a backend: {', '.join(map(repr, known))}"
    require("device", device, lambda device: device in known, wanted)
    try:
        with (
            AsFound("plan", step, optimizer, args) as found,
            found.record(),
            abstract_rank(rank, world, device=device),
            unfused_recurrence(),
        ):
            state = step.init(params, optimizer, initializer=lambda _, leaf: torch.empty_like(leaf))
            watch = MemoryWatch(device)
            # Tensors that the step creates without a device go to that of its arguments, too.
            fake = optree.tree_leaves(params, namespace=NAMESPACE)[0]
            on = found.ends(fake.fake_mode if isinstance(fake, FakeTensor) else AsOn(device))
            with nullcontext() if isinstance(fake, FakeTensor) else on:
                with NoValues():
                    state, aux = step(state, *args)
                # Counters; a loss is held to the end of the next step.
                watch.mark(REST, (state, aux))
                watch.mark("batch", args)
                for one in flatten_states("plan", state)[0]:
                    watch.mark("parameters", one.params)
                    watch.mark("optimizer", one.optimizer)
                    watch.mark("masters", list(masters_of(one)))
                    watch.mark("window", one.window)
                    for slot in one.slots.values():
                        if slot.form.kind != "numbers":
                            watch.mark(slot.form.kind, slot)
                    watch.mark("gradients", one.gradients)
                with count_collectives() as log, watch:
                    state, aux = step(state, *args)
            states = flatten_states("plan", state)[0]
            held: Counter[str] = Counter()
            for one in states:
                held.update(_bytes(one))
            parts, counts, sent = 0, Counter[tuple[str, str]](), Counter[tuple[str, str]]()
            for one in states:
                with suppress(LayoutError):  # an optimizer whose state has no place in a checkpoint
                    parts += part_bytes(one, rank)
            for event in log.of(rank):
                counts[event.op, event.axis] += 1
                sent[event.op, event.axis] += event.wire_bytes
            traffic = tuple(Traffic(*key, counts[key], sent[key]) for key in counts)
            return Plan(
                name=name,
                setups=tuple(one.setup for one in states),
                device=device,
                bytes=dict(held),
                peak={kind: n for kind, n in watch.peak.items() if kind != "batch"},
                traffic=traffic,
                time=time_of(watch.work, traffic, rates or Rates()),
                part_bytes=parts,
            )
    except ASKED_OF_FAKE as error:
        raise reads_values("planned", error) from error
    except FzeroError:
        raise
    except Exception as error:
        error.add_note(f"(while {name} was planned: its tensors have shapes and no values)")
        raise


def _bytes(state: TrainState) -> dict[str, int]:
    """Return a rank's bytes by kind; gradients, which the update frees, by size from the setup."""
    setup, sizes = state.setup, state_bytes(state)
    masters = sum(x.nbytes for x in masters_of(state))
    gradients = sum(
        setup.numel(i, setup.gradients) * setup.accumulate_dtype(i).itemsize
        for i in setup.layout.trainable
    )
    homes = {None: "on device", "cpu": "in host memory", "disk": "on disk"}
    places = {place: sizes[place] for place in homes.values() if place in sizes}
    if places:
        places[homes[setup.offload.gradients]] += gradients
    return {
        "parameters": sizes["parameters"],
        "gradients": gradients,
        "optimizer": sizes["optimizer"] - masters,
        "masters": masters,
        "window": sizes["window"],
        **({"slots": sizes["slots"]} if "slots" in sizes else {}),
        **places,
    }


class Memory:
    """The kind of what a storage holds."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def rename(self, kind: str) -> None:
        """Set the kind of the storage."""
        self.kind = kind


class MemoryWatch(TorchDispatchMode):
    """Context that tracks the storages of meta tensors, and counts FLOPs and bytes of operations.

    A storage is tracked by a weak reference until it is freed, so that tensors that only autograd
    holds count, too. `mark` adds storages from before the context.
    """

    def __init__(self, device: str) -> None:
        """Track nothing yet; `device` is the device type that meta tensors imitate."""
        super().__init__()
        self._here = (None, "cpu") if device == "cpu" else (None,)  # homes that are on the device
        # Counters have values in a plan, too. On a GPU they are on the host, or a few bytes.
        self._sees: Any = has_no_values if device != "cpu" else lambda _: True
        self._refs: dict[int, Any] = {}
        self._tape: list[tuple[Memory, int]] = []  # (storage, + or - its bytes), in order
        self._live = self._peak = self._peak_at = 0
        self.work: Counter[tuple[float, float]] = Counter()  # (FLOPs, bytes) of an operation

    @property
    def peak(self) -> dict[str, int]:
        """Bytes on the device by kind, at the moment of the largest sum."""
        sizes: Counter[str] = Counter()
        for memory, change in self._tape[: self._peak_at]:
            sizes[memory.kind] += change
        return {kind: nbytes for kind, nbytes in sizes.items() if nbytes}

    def mark(self, kind: str, tree: Any) -> None:
        """Track the tensors of a pytree that exist already, as of this kind."""
        for x in tensors_in(tree):
            if self._sees(x):
                self._memory(x.untyped_storage(), kind).rename(kind)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, then track its new storages and count its work."""
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a placeholder handles it first; the ops it calls come back
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        outputs = list(_tensors(out))
        inputs = list(_tensors((args, kwargs)))
        self._follow(func, inputs, outputs)
        if not (func.is_view or func.namespace == "prim"):  # prim.device of fake tensors
            nbytes = sum(x.numel() * x.element_size() for x in (*inputs, *outputs))
            self.work[flops_of(func, args, kwargs, out), nbytes] += 1
        return out

    def _follow(self, func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        fresh = [x.untyped_storage() for x in outputs if self._sees(x)]
        fresh = [storage for storage in fresh if not hasattr(storage, "memory")]
        if not fresh:
            return
        before = {x.untyped_storage()._cdata for x in inputs}
        for storage in fresh:
            if storage._cdata not in before:  # an unmarked input is a constant
                self._memory(storage, GATHERED if func is _GATHER else REST)

    def _memory(self, storage: Any, kind: str) -> Memory:
        known = getattr(storage, "memory", None)
        if known is not None:
            return known
        memory = storage.memory = Memory(kind)
        if getattr(storage, "home", None) in self._here:
            key, nbytes = id(memory), storage.nbytes()

            def gone(_: Any) -> None:
                del self._refs[key]
                self._change(memory, -nbytes)

            self._refs[key] = weakref.ref(storage, gone)
            self._change(memory, nbytes)
        return memory

    def _change(self, memory: Memory, nbytes: int) -> None:
        self._tape.append((memory, nbytes))
        self._live += nbytes
        if self._live > self._peak:
            self._peak, self._peak_at = self._live, len(self._tape)


def rename(kind: str, tree: Any) -> None:
    """Set the kind of those tensors of a pytree that a `MemoryWatch` tracks."""
    for x in tensors_in(tree):
        if (memory := getattr(x.untyped_storage(), "memory", None)) is not None:
            memory.rename(kind)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and dicts: faster than a general walk of a pytree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
