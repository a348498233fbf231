"""Behaviours 26 and 31: stage 3 gathers a unit before its use and lets it go after the last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.partition import plan_layout
from tests.behaviours.costs import Probe, probe_gathers
from tests.behaviours.networks import (
    KEEPS,
    PLACES,
    Gpt,
    assert_every_rank,
    gradient_on,
    mean_gradient,
    mlp,
    next_token_loss,
    per_rank,
    regression,
    squared_loss,
    tokens,
    virtual,
)


def unit_bytes(params: Any, units: Callable[[str], str], ranks: int) -> list[int]:
    """Bytes of each unit, with its padding, largest first."""
    layout = plan_layout(params, ranks=ranks, unit=units)
    numels = (sum(layout.full_numel(i) for i in groups) for groups in layout.units)
    return sorted((8 * numel for numel in numels), reverse=True)


def probe_one_step(
    loss: Callable[..., Tensor], apply: Any, params: Any, ranks: int, *args: Tensor, n: int = 1
) -> tuple[Probe, list[int]]:
    """Run a coalesced step of n backward passes at stage 3; what is alive when it is over?"""

    def step(state: Any, *batch: Tensor) -> tuple[Any, Tensor]:
        value = torch.zeros(())
        for _ in range(n):
            state, value = fzero.grad_and_reduce(loss, state)(*batch)
        assert probe.alive(fzero.axis_index()) == 0, "after the call"
        return fzero.apply_gradients(state), value

    sharded = fzero.simulate(
        fzero.shard(fzero.coalesce(step), stage=3, units=apply.units), world_size=ranks
    )
    state = sharded.init(params, fzero.optim.sgd(0.1))
    with probe_gathers() as probe:
        state, value = sharded(state, *args)
        del state, value
    return probe, unit_bytes(params, apply.units, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_26_an_mlp_never_holds_more_than_its_two_largest_units(ranks: int) -> None:
    apply, params = fzero.functionalize(mlp(4, 16, 16, 16, 16, 16, 2))
    x, y = regression(ranks, 3, 4, 2)
    probe, units = probe_one_step(squared_loss(apply), apply, params, ranks, x, y, n=2)
    for rank in range(ranks):
        assert 0 < probe.peak(rank) <= units[0] + units[1]
        assert probe.peak(rank) < sum(units) / 2  # not the model: the bound means something
        assert probe.alive(rank) == 0


def test_26_a_transformer_never_holds_more_than_its_two_largest_units() -> None:
    apply, params = fzero.functionalize(Gpt(depth=6))
    loss = next_token_loss(apply)
    probe, units = probe_one_step(loss, apply, params, 2, tokens(2))
    assert len(units) == 8  # six blocks, the embedding that is the head too, the last norm
    for rank in range(2):
        assert 0 < probe.peak(rank) <= units[0] + units[1]
        assert probe.alive(rank) == 0


def test_26_chosen_units_bound_the_peak_too() -> None:
    """Halves of the model as units: the bound follows the choice."""
    module = nn.ModuleDict({"a": mlp(4, 16, 16), "b": mlp(16, 16, 16), "c": mlp(16, 16, 2)})
    apply, params = fzero.functionalize(
        _InTurn(module), units=lambda name, m: isinstance(m, nn.Sequential)
    )
    x, y = regression(2, 3, 4, 2)
    probe, units = probe_one_step(squared_loss(apply), apply, params, 2, x, y)
    assert len(units) == 3
    assert units[0] < probe.peak(0) <= units[0] + units[1]


class _InTurn(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


@pytest.mark.parametrize("reshard", KEEPS)
def test_26_every_gather_is_matched_by_a_release_whatever_is_kept(reshard: Any) -> None:
    """After the update nothing full is left: resident bytes are those of the shards."""
    apply, params = fzero.functionalize(mlp(4, 16, 16, 2))
    x, y = regression(2, 3, 4, 2)

    def step(state: Any, *batch: Tensor) -> tuple[Any, None]:
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(squared_loss(apply), state)(*batch)
        assert bool(state.window.gathered) == (reshard == "window")
        return fzero.apply_gradients(state), None

    sharded = fzero.simulate(
        fzero.shard(
            fzero.coalesce(step), stage=3, reshard_after_forward=reshard, units=apply.units
        ),
        world_size=2,
    )
    state, _ = sharded(sharded.init(params, fzero.optim.sgd(0.1)), x, y)
    assert fzero.state_bytes(state)["window"] == fzero.state_bytes(state)["gradients"] == 0
    numel = sum(p.numel() for p in params.values())
    assert 0 <= fzero.state_bytes(state)["parameters"] - 8 * numel <= 8 * 3  # both ranks: padding


@pytest.mark.parametrize("reshard", KEEPS)
def test_26_a_window_never_reads_parameters_from_before_an_update(reshard: Any) -> None:
    """reshard_after_forward="window" gathers anew after an update inside the window."""

    def step(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        values = []
        for _ in range(2):
            state, value = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
            state = fzero.apply_gradients(state)
            values.append(value)
        return state, torch.stack(values)

    sharded = fzero.simulate(
        fzero.shard(fzero.coalesce(step), stage=3, reshard_after_forward=reshard), world_size=2
    )
    state = sharded.init({"w": torch.zeros(3)}, fzero.optim.sgd(1.0))
    _, values = sharded(state, torch.ones(2))
    assert values[:, 1].tolist() == [-3.0, -3.0]


def shared_loss(params: Any, x: Tensor) -> Tensor:
    """One layer three times, one that is never used, a relu without parameters between them."""
    for _ in range(3):
        x = F.relu(x @ params["twice"].T + params["bias"])
    return x.square().mean()


def expert_loss(params: Any, x: Tensor) -> Tensor:
    """The weight's input needs no gradient, and each rank takes another one."""
    return torch.tanh(x @ params[f"expert{fzero.axis_index()}"]).sum() + 0 * params["bias"].sum()


def checkpointed_loss(params: Any, x: Tensor, *, reentrant: bool = False) -> Tensor:
    """Random numbers inside, and one block twice."""

    def block(h: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(F.dropout(h, 0.5) @ w)

    for name in ("twice", "expert0", "twice"):
        x = checkpoint(block, x, params[name], use_reentrant=reentrant)
    return (x + params["bias"]).square().mean()


def remat_loss(params: Any, x: Tensor) -> Tensor:
    block = fzero.remat(lambda p, h: torch.tanh(F.dropout(h, 0.5) @ p["twice"] + p["bias"]))
    for _ in range(2):
        x = block(params, x)
    return x.square().mean()


REUSE: dict[str, Callable[..., Tensor]] = {
    "used three times": shared_loss,
    "inputs without gradient, another expert on each rank": expert_loss,
    "torch checkpoint": checkpointed_loss,
    "reentrant torch checkpoint": partial(checkpointed_loss, reentrant=True),
    "fzero.remat": remat_loss,
}


@pytest.mark.parametrize(("stage", "reshard"), PLACES)
@pytest.mark.parametrize("name", REUSE)
def test_31_modules_that_are_used_again_are_right_and_released(
    name: str, stage: int, reshard: Any
) -> None:
    loss, params, ranks = REUSE[name], reuse_params(), 2
    x = regression(ranks, 3, 5, 1)[0]
    torch.manual_seed(5)
    # torch takes no gradient by chosen inputs through a reentrant one, as the reference does.
    reference = checkpointed_loss if name.startswith("reentrant") else loss
    want = unsharded(reference, params, x)
    torch.manual_seed(5)
    with probe_gathers() as probe:
        got = gradient_on(loss, params, x, stage=stage, reshard_after_forward=reshard, ranks=ranks)
    assert probe.alive(0) == probe.alive(1) == 0
    assert_every_rank(got, want)


def reuse_params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    names = ("twice", "expert0", "expert1", "unused")
    return {name: normal(5, 5) for name in names} | {"bias": normal(5)}


def unsharded(loss: Callable[..., Tensor], params: Any, x: Tensor) -> Any:
    """By torch.autograd on whole parameters, all ranks in one process, each with one seed."""

    def whole(*batch: Tensor) -> dict[str, Tensor]:
        leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
        found = torch.autograd.grad(loss(leaves, *batch), [*leaves.values()], allow_unused=True)
        pairs = zip(leaves.items(), found, strict=True)
        return {k: torch.zeros_like(p) if g is None else g for (k, p), g in pairs}

    per_rank_found = virtual(whole, len(x), x)  # for the rank's index and its random state
    return {k: g.mean(0) for k, g in per_rank_found.items()}


def test_31_a_whole_model_equals_the_unsharded_one_at_every_place() -> None:
    module = Gpt(depth=2)
    apply, params = fzero.functionalize(module)
    loss, batch = next_token_loss(apply), tokens(3)
    want = mean_gradient(loss, params, per_rank(batch))
    for stage, reshard in PLACES:
        got = gradient_on(loss, params, batch, stage=stage, reshard_after_forward=reshard, ranks=3)
        assert_every_rank(got, want)
