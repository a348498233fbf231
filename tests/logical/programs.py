"""A training of logical ranks by each driver, on any number of virtual ranks: what must be equal.

A program says all that a run may depend on; where it runs (ranks, stage, mesh) says the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.state import NAMESPACE

FEATURES = 6


@dataclass(frozen=True)
class Program:
    """What is trained, and how."""

    logical: int = 4
    updates: int = 2
    calls: int = 1  # gradient calls of an update
    sizes: tuple[int, ...] = ()  # rows of each logical rank; () two each
    coalesce: int | None = None  # 0: a window; n: of n backwards
    micro_batches: int = 1
    weighted: bool = False
    clip: float | None = None
    dropout: float = 0.0
    scale: Any = None
    overflows: tuple[int, int] | None = None  # (update, logical rank) whose loss is infinite
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    cast: torch.dtype | None = None
    rule: str = "adamw"
    donate: bool = False
    offload: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def rows(self, logical: int) -> int:
        """How many rows a logical rank has."""
        return self.sizes[logical] if self.sizes else 2 * self.micro_batches


@dataclass(frozen=True)
class Place:
    """Where a program runs."""

    ranks: int = 1
    stage: int = 0
    mesh: tuple[int, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)


RULES = {
    "sgd": lambda: fzero.optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: fzero.optim.adamw(1e-2),
}


def model_of(program: Program) -> nn.Module:
    """The module of a program, with leaves of odd sizes."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 11), nn.Dropout(program.dropout), nn.Tanh(), nn.Linear(11, 5)]
    return nn.Sequential(*layers, nn.LayerNorm(5)).to(program.dtype)


def data_of(program: Program) -> Tensor:
    """Rows of all logical ranks for each call of each update."""
    rows = sum(program.rows(r) for r in range(program.logical))
    generator = torch.Generator().manual_seed(1)
    size = program.updates, program.calls, rows, FEATURES
    return torch.randn(size, generator=generator)


def here(program: Program, data: Tensor, ranks: Sequence[int]) -> Tensor:
    """The rows of some logical ranks."""
    starts = [0]
    for r in range(program.logical):
        starts.append(starts[-1] + program.rows(r))
    return data[..., starts[ranks[0]] : starts[ranks[-1] + 1], :]


def loss_of(program: Program, y: Tensor, update: int) -> Tensor:
    """The loss of a logical rank."""
    rank = fzero.axis_index()
    assert fzero.axis_size() == program.logical
    assert fzero.logical_ranks() == range(rank, rank + 1)
    loss = (y.float() * (1 + rank)).sin().square().mean()
    return loss * torch.inf if program.overflows == (update, rank) else loss


def step_of(program: Program, place: Place, apply: Any) -> Any:
    """The step of a program: (state, rows of an update, which one) -> (state, losses)."""

    def loss_fn(params: Any, x: Tensor, update: int) -> Tensor:
        return loss_of(program, apply(params, x.to(program.dtype)), update)

    def step_fn(state: Any, x: Tensor, update: int) -> Any:
        ranks, losses = fzero.logical_ranks(), []
        options: dict[str, Any] = {"in_axes": (0, None)}
        if program.sizes:
            options["sizes"] = [program.rows(r) for r in ranks]
        for call in range(program.calls):
            options["weight"] = weights_of(program, call, ranks)
            state, loss = fzero.grad_and_reduce(loss_fn, state, **options)(x[call], update)
            losses.append(loss)
        return fzero.apply_gradients(state), torch.stack(losses)

    step: Any = step_fn
    if program.micro_batches > 1:
        step = fzero.accumulate(step_fn, micro_batches=program.micro_batches, in_axes=(1, None))
    if program.coalesce is not None:
        step = fzero.coalesce(step, backwards=program.coalesce or None)
    if program.clip is not None:
        step = fzero.clip(step, max_norm=program.clip)
    if program.scale is not None:
        step = fzero.scale_loss(step, program.scale)
    if program.autocast is not None:
        step = fzero.autocast(step, dtype=program.autocast)
    if program.cast is not None:
        step = fzero.compress(step, gradients=fzero.codecs.cast(program.cast))
    if program.offload:
        step = fzero.offload(step, gradients="cpu", optimizer="cpu")
    return fzero.shard(
        step,
        stage=place.stage,
        mesh=place.mesh,
        logical_ranks=program.logical,
        seed=5,
        donate=program.donate,
        **program.options,
        **place.options,
    )


def run(program: Program, place: Place) -> dict[str, Any]:
    """What a run of a program on this rank leaves, whole: parameters, optimizer, losses."""
    apply, params = fzero.functionalize(model_of(program))
    step = step_of(program, place, apply)
    state = step.init(params, RULES[program.rule]())
    ranks = state.setup.carried(state.setup.axis.rank)
    losses = []
    for update, x in enumerate(here(program, data_of(program), ranks)):
        state, loss = step(state, x, update)
        losses.append(loss)
    found = {
        "params": fzero.full_params(state),
        "optimizer": fzero.slots(state, "optimizer"),
        "losses": torch.stack(losses),
        "step": state.step,
    }
    if state.scale is not None:
        found["scale"] = state.scale.scale
    return found


def run_engine(program: Program, place: Place) -> dict[str, Any]:
    """The same by an engine, of a program without micro-batches."""
    compress = program.cast and fzero.Compress(gradients=fzero.codecs.cast(program.cast))
    engine = Engine(
        model_of(program),
        RULES[program.rule](),
        stage=place.stage,
        mesh=place.mesh,
        logical_ranks=program.logical,
        seed=5,
        max_norm=program.clip,
        loss_scale=program.scale,
        autocast=program.autocast,
        compress=compress,
        offload=fzero.Offload(gradients="cpu", optimizer="cpu") if program.offload else None,
        **program.options,
        **place.options,
    )
    ranks = engine.state.setup.carried(engine.axis.rank)
    sizes = [program.rows(r) for r in ranks] if program.sizes else None
    every = []
    for update, x in enumerate(here(program, data_of(program), ranks)):
        losses: list[list[Tensor]] = [[] for _ in range(program.calls)]
        with engine.coalesce() if program.coalesce == 0 else nullcontext():
            for part in engine.parts(x, in_axes=1, sizes=sizes):
                rank = fzero.axis_index()
                for call in range(program.calls):
                    loss = loss_of(program, engine(part[call].to(program.dtype)), update)
                    weight = 0.1 * (1 + rank) + call if program.weighted else None
                    engine.backward(loss, weight=weight)
                    losses[call].append(loss.detach())
        means = [
            fzero.logical_mean(
                torch.stack(one), engine.state, weight=weights_of(program, call, ranks)
            )
            for call, one in enumerate(losses)
        ]
        every.append(torch.stack(means))
        engine.step()
    found = {
        "params": fzero.full_params(engine.state),
        "optimizer": fzero.slots(engine.state, "optimizer"),
        "losses": torch.stack(every),
        "step": engine.state.step,
    }
    if engine.state.scale is not None:
        found["scale"] = engine.state.scale.scale
    engine.close()
    return found


def weights_of(program: Program, call: int, ranks: Sequence[int]) -> list[float] | None:
    """The weights of a call of some logical ranks."""
    return [0.1 * (1 + rank) + call for rank in ranks] if program.weighted else None


def trained(program: Program, place: Place, run: Any = run) -> dict[str, Any]:
    """What a run of a program on virtual ranks leaves on rank 0; all ranks have the same."""
    if place.ranks == 1:
        return run(program, place)
    every: Any = fzero.simulate(lambda: run(program, place), world_size=place.ranks)()
    first: Any
    first, *others = (
        optree.tree_map(lambda x, rank=rank: x[rank], every, namespace=NAMESPACE)
        for rank in range(place.ranks)
    )
    for other in others:
        assert differs(first, other) == []
    return first


def differs(one: Any, other: Any) -> list[str]:
    """The paths at which two results have other bits."""
    pairs = zip(flat(one), flat(other), strict=True)
    return [
        f"{path} {other}: {x} and {y}"[:1000]
        for (path, x), (other, y) in pairs
        if path != other or not _same(x, y)
    ]


def flat(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a result by their paths."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
    pairs = zip(accessors, leaves, strict=True)
    return sorted(((accessor.codify("x"), leaf) for accessor, leaf in pairs), key=lambda x: x[0])


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return x == y
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(x.nan_to_num(nan=123.0), y.nan_to_num(nan=123.0))
