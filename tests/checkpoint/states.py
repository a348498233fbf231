"""States to save, and all that a state holds as full tensors, read without fzero.checkpoint."""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import Parameter

import fzero
from fzero.machine.packing import gather_parts, unpack
from fzero.state import NAMESPACE, OptimizerOver, Placement, TrainState
from tests.descends import descends
from tests.oracle import parts
from tests.strategies import learns, on_rank, same, tensors

ADAM = fzero.optim.adam(2.0**-4)


def mixed(seed: int = 0) -> dict[str, Any]:
    """Every kind of leaf: uneven, tied, frozen, int, bool, empty, scalar, 16-bit with masters."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    shared = draw(7, 3)
    return {
        "embed": shared,
        "layers": [{"w": draw(5, 3), "b": draw(5)}, {"w": draw(3, 5), "b": draw(3)}],
        "half": draw(11, dtype=torch.bfloat16),
        "double": draw(2, 2, dtype=torch.float64),
        "frozen": Parameter(draw(4), requires_grad=False),
        "steps": torch.randint(0, 99, (3,), generator=g),
        "mask": torch.rand(5, generator=g) > 0.5,
        "empty": draw(0, 3),
        "scale": draw(),
        "head": shared,
    }


def blank(params: Any) -> Any:
    """Zeros in the structure of `params`: tied and frozen as they are there."""

    def zeros(value: Tensor) -> Tensor:
        zero = torch.zeros_like(value).detach()
        return Parameter(zero, learns(value)) if isinstance(value, Parameter) else zero

    values, build = parts(params)
    return build([zeros(value) for value in values])


def train(state: Any, steps: int) -> Any:
    """Return the state after `steps` updates; every rank has other data, every leaf moves."""

    def loss(params: Any, x: Tensor) -> Tensor:
        learned = [p.double() for p in tensors(params) if p.is_floating_point()]
        return sum(((p * x).sin().sum() for p in learned), torch.zeros((), dtype=torch.float64))

    for _ in range(steps):
        x = torch.tensor(1.0 + fzero.axis_index(), dtype=torch.float64)
        state, _ = descends(loss)(state, x)
    return state


def contents(state: TrainState) -> dict[str, Tensor]:
    """Everything that training depends on, whole, by name: parameters, slots, counters. Collective.

    For fzero's own optimizers and those of `from_torch`, whose records it knows.
    """
    found = {f"p{i}": p for i, p in enumerate(tensors(fzero.full_params(state)))}
    setup, layout, optimizer = state.setup, state.setup.layout, state.optimizer
    if isinstance(optimizer, fzero.optim.TorchState):
        slots = list(optimizer.slots.values())
        found |= {name: values[0] for name, values in optimizer.counters.items()}
    else:
        slots = list(optimizer.moments)
    for number, slot in enumerate([*slots, optimizer.masters]):
        for index, flat in zip(layout.trainable, slot, strict=True):
            if not flat.numel():
                continue
            full = gather_parts(setup, [flat], setup.optimizer_state, Placement.REPLICATED)[0]
            leaves = zip(layout.groups[index].leaves, unpack(layout, index, full), strict=True)
            found |= {
                f"{number} {layout.leaves[i].path} {i}": leaf.clone()
                for i, leaf in leaves
                if leaf.numel()
            }
    return {**found, "count": optimizer.count, "step": state.step}


def make(
    params: Any,
    *,
    stage: int,
    ranks: int = 0,
    optimizer: Any = ADAM,
    replicas: int = 1,
    over: OptimizerOver = "shard",
) -> Any:
    """A new state: of this process if `ranks` is 0, else the stack of that many virtual ranks.

    On a mesh of two dims, if there are several `replicas` and they divide the ranks.
    """
    size = ranks or fzero.axis_size()
    replicas = math.gcd(replicas, size)
    options: Any = {"mesh": (replicas, size // replicas), "optimizer_over": over}
    options |= {"stage": stage, "bucket_bytes": 64}
    if not ranks:
        return fzero.init(params, optimizer, **options)
    step = fzero.shard(lambda state: (state, None), **options)
    return fzero.simulate(step, world_size=ranks).init(params, optimizer)


def on_ranks(fn: Any, state: TrainState, *args: Any) -> Any:
    """Call `fn(state, *args)` on the ranks of `state`."""
    if state.step.ndim:  # a stack of virtual ranks
        return fzero.simulate(lambda s: fn(s, *args), world_size=len(state.step))(state)
    return fn(state, *args)


def first_rank(state: TrainState) -> dict[str, Tensor]:
    """`contents` on rank 0, after a check that the other virtual ranks have the same."""
    found = on_ranks(contents, state)
    if not state.step.ndim:
        return found
    for rank in range(len(state.step)):
        same(on_rank(found, rank), on_rank(found, 0))
    return on_rank(found, 0)


def snapshot(state: Any) -> Any:
    """A copy of every tensor, to show later that the state was left alone."""
    return optree.tree_map(torch.clone, state, namespace=NAMESPACE)


def slot_of(found: dict[str, Tensor], slot: int, name: str) -> Tensor:
    """One of `contents`, whatever the number of its leaf is: moments first, then masters."""
    (value,) = (x for key, x in found.items() if key.startswith(f"{slot} {name} "))
    return value


def whole(state: Any) -> dict[str, Tensor]:
    """Full parameters by name, those of virtual rank 0."""
    found = on_ranks(fzero.full_params, state)
    return {name: x[0] for name, x in found.items()} if state.step.ndim else found
