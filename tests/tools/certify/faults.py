"""Steps, engines and parts of fzero with one fault each, as people write them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.machine import reduce
from fzero.machine.reduce import LocalGradients
from fzero.state import Setup
from fzero.transforms import update
from tests.descends import descends

PLAIN: dict[str, Any] = {
    "loss_scales": "1",
    "windows": "each",
    "buckets": "64",
    "offload": "none",
    "meshes": "flat",
    "reductions": "mean",
    "wires": "own",
    "rules": "given",
    "ragged": "off",
}
"""One value of what no fault here is about."""

# Steps.

Loop = Callable[[Any, Sequence[Any]], Any]


def _sum(loss_fn: Any, state: Any, batches: Sequence[Any]) -> Any:
    for one in batches:
        state, _ = fzero.grad_and_reduce(loss_fn, state)(one)
    return fzero.apply_gradients(state), None


def good_step(loss_fn: Any, **options: Any) -> Loop:
    return lambda state, batches: _sum(loss_fn, state, batches)


def reordered_step(loss_fn: Any, **options: Any) -> Loop:
    return lambda state, batches: _sum(loss_fn, state, batches[::-1])


def drops_a_micro_batch_on_rank_1(loss_fn: Any, **options: Any) -> Loop:
    def step(state: Any, batches: Sequence[Any]) -> Any:
        mine = [*batches]
        if fzero.axis_index() == 1:
            mine[1] = mine[0]  # and takes another one twice
        return _sum(loss_fn, state, mine)

    return step


def scales_twice(loss_fn: Any, **options: Any) -> Loop:
    return lambda state, batches: _sum(lambda p, x: 2 * loss_fn(p, x), state, batches)


def keeps_a_stale_batch(loss_fn: Any, **options: Any) -> Loop:
    kept: list[Any] = []

    def step(state: Any, batches: Sequence[Any]) -> Any:
        kept.extend(batches)
        return _sum(loss_fn, state, kept[: len(batches)])

    return step


def adds_a_parameter_twice(loss_fn: Any, **options: Any) -> Loop:
    def twice(params: Any, one: Any) -> Tensor:
        shift = params["shift"]
        return loss_fn({**params, "shift": 2 * shift - shift.detach()}, one)

    return lambda state, batches: _sum(twice, state, batches)


def forgets_the_last_gradient(loss_fn: Any, **options: Any) -> Loop:
    def step(state: Any, batches: Sequence[Any]) -> Any:
        for one in batches[:-1]:
            state, _ = fzero.grad_and_reduce(loss_fn, state)(one)
        _, _ = fzero.grad_and_reduce(loss_fn, state)(batches[-1])
        return fzero.apply_gradients(state), None

    return step


def clips_each_micro_batch(loss_fn: Any, **options: Any) -> Any:
    """A step with its own transforms: the bound holds for each update, and there are several."""

    def step(state: Any, batches: Sequence[Any]) -> Any:
        for one in batches:
            state, _ = descends(loss_fn)(state, one)
        return state, None

    return fzero.shard(fzero.clip(step, max_norm=options.get("max_norm")), stage=options["stage"])


STEPS = {
    f.__name__: f
    for f in (
        drops_a_micro_batch_on_rank_1,
        scales_twice,
        keeps_a_stale_batch,
        adds_a_parameter_twice,
        forgets_the_last_gradient,
        clips_each_micro_batch,
    )
}


# Engines.


class Forgets(Engine):
    """Rank 1 leaves out every second backward."""

    count = 0

    def backward(self, loss: Any, gradient: Any = None, **options: Any) -> None:
        self.count += 1
        if self.axis.rank != 1 or self.count % 2:
            super().backward(loss, gradient, **options)


class Doubles(Engine):
    """The scale is applied twice."""

    def backward(self, loss: Any, gradient: Any = None, **options: Any) -> None:
        super().backward(2 * loss, gradient, **options)


class Loses(Engine):
    """The gradient of one parameter is lost before the update."""

    def step(self) -> bool:
        self.set_full_gradient("shift", torch.zeros((), dtype=torch.float64))
        return super().step()


class Swaps(Engine):
    """The two halves of a parameter change places in the update."""

    def step(self) -> bool:
        done = super().step()
        value = self.full_parameter("mix.weight")
        self.set_full_parameter("mix.weight", value.flatten().roll(3).view_as(value))
        return done


class Drifts(Engine):
    """The last bit of rank 1's replica changes."""

    def step(self) -> bool:
        done = super().step()
        if self.axis.rank == 1:
            weight = self.module.get_parameter("embed.weight")
            weight.data.copy_(torch.nextafter(weight.data, torch.tensor(1e9).double()))
        return done


class Stale(Engine):
    """What was left of the first update is added to the next one."""

    kept: Tensor | None = None

    def step(self) -> bool:
        if self.kept is not None:
            self.set_full_gradient("mix.bias", self.full_gradient("mix.bias") + self.kept)
        self.kept = self.full_gradient("mix.bias")
        return super().step()


class Misreports(Engine):
    """The norm is told squared; the update is right."""

    @property
    def global_grad_norm(self) -> Tensor | None:
        norm = super().global_grad_norm
        return None if norm is None else norm.square()


class Misrounds(Engine):
    """The norm is told with an error that fp32 has no room for; the update is right."""

    @property
    def global_grad_norm(self) -> Tensor | None:
        norm = super().global_grad_norm
        return None if norm is None else norm * (1 + 1e-10)


class Unwindowed(Engine):
    """The window is lost, and with it what it would have reduced."""

    def coalesce(self) -> Any:
        self.zero_grad()
        return nullcontext()

    def backward(self, loss: Any, gradient: Any = None, **options: Any) -> None:
        self.zero_grad()
        super().backward(loss, gradient, **options)


def _unclipped(module: nn.Module, optimizer: Any, **options: Any) -> Engine:
    options["max_norm"] = None
    return Engine(module, optimizer, **options)


def _raising(module: nn.Module, optimizer: Any, **options: Any) -> Engine:
    raise RuntimeError("no such device")


ENGINES: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (Forgets, Doubles, Loses, Swaps, Stale, Unwindowed)},
    "Drifts": Drifts,
    "Misreports": Misreports,
    "Misrounds": Misrounds,
    "unclipped": _unclipped,
    "raising": _raising,
}


# Parts of fzero, which both drivers run.


def _norm_is_local(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        sys.modules["fzero.transforms.clip"], "reduce_many", lambda totals, axis, **options: totals
    )


def _mean_is_a_sum(patch: pytest.MonkeyPatch) -> None:
    pop = LocalGradients.pop_means

    def sums(self: LocalGradients) -> list[Tensor]:
        return [mean * self.axis.size for mean in pop(self)]

    patch.setattr(LocalGradients, "pop_means", sums)


def _nothing_is_reduced(patch: pytest.MonkeyPatch) -> None:
    def start(local: Sequence[Tensor], axis: Any, *, ordered: bool) -> Any:
        shards = [x.view(axis.size, -1)[axis.rank] * axis.size for x in local]
        return SimpleNamespace(wait=lambda: shards)

    patch.setattr(reduce, "start_scatter", start)


def _shards_are_swapped(patch: pytest.MonkeyPatch) -> None:
    gather, in_place = update.gather_parts, update.gather_parts_in_place

    def swap(setup: Setup, flat: Tensor) -> Tensor:
        return flat.view(setup.layout.ranks, -1).flip(0).flatten()

    def swapped(setup: Setup, flats: Any, *places: Any) -> Any:
        return [swap(setup, flat) for flat in gather(setup, flats, *places)]

    def swapped_in_place(setup: Setup, flats: Any, *places: Any) -> None:
        in_place(setup, flats, *places)
        for flat in flats:
            flat.copy_(swap(setup, flat))

    patch.setattr(update, "gather_parts", swapped)
    patch.setattr(update, "gather_parts_in_place", swapped_in_place)


def _replicas_are_not_reduced(patch: pytest.MonkeyPatch) -> None:
    def start(local: Sequence[Tensor], axis: Any, *, ordered: bool) -> Any:
        return SimpleNamespace(wait=lambda: [*local])

    patch.setattr(reduce, "start_reduce", start)


def _divides_always_by_the_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Setup, "divisor", property(lambda setup: setup.axis.size))


PATCHES = {
    f.__name__.strip("_"): f
    for f in (
        _norm_is_local,
        _mean_is_a_sum,
        _nothing_is_reduced,
        _shards_are_swapped,
        _replicas_are_not_reduced,
        _divides_always_by_the_ranks,
    )
}
