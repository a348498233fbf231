"""What owners keep, saved and loaded: a run goes on with the bits of one that was not cut off."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.checkpoint import load, save
from fzero.optim import from_torch, partition, shampoo, soap

STEPS, SAVED = 5, 3
SHAPES = {"a": (12, 3), "b": (3, 24), "c": (4, 3, 2, 2), "d": (9,), "e": (1, 12)}


class ByColumns(torch.optim.Optimizer):
    """A user's rule of matrices, which keeps tensors by columns, and views of larger ones."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            g, state = p.grad.reshape(len(p), -1), self.state[p]
            if not state:
                wide = torch.zeros(len(g) + 3, len(g) + 1, dtype=g.dtype)
                state.update(factor=wide[3:, 1:], other=torch.zeros_like(g.T))
            state["factor"].add_(g @ g.T)
            basis = torch.linalg.qr(state["factor"] + torch.eye(len(g)).to(g)).Q
            turned = (state.get("basis", basis).T @ (g @ state["other"])) @ g
            state["basis"], state["other"] = basis, 0.9 * state["other"] + (basis @ g).T
            p.sub_(0.05 * (turned / (1 + turned.norm())).view(p.shape) + 0.01 * p.grad)


RULES: dict[str, Any] = {
    "soap": partial(soap, 0.1, refresh_every=2, batch_dims=0),
    "shampoo": partial(shampoo, 0.1, roots_every=2, batch_dims=0),
    "adafactor": partial(fzero.optim.adafactor, 0.1),
    "a user's": partial(from_torch, ByColumns, needs="matrix"),
    "parted": lambda: partition(
        {"matrices": soap(0.1, refresh_every=2, batch_dims=0), "rest": fzero.optim.adamw(0.1)},
        lambda leaf: "matrices" if len(leaf.shape) > 1 else "rest",
    ),
}


def gradients(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{p: torch.randn(s, dtype=dtype) for p, s in SHAPES.items()} for _ in range(STEPS)]


def loss(params: Any, weights: dict[str, Tensor]) -> Tensor:
    return torch.stack([(params[path] * w).sum() for path, w in weights.items()]).sum()


@pytest.mark.parametrize("place", [(0, 1), (2, 3)])
@pytest.mark.parametrize("name", [*RULES])
def test_a_run_goes_on_bit_for_bit(name: str, place: tuple[int, int], tmp_path: Path) -> None:
    stage, ranks = place
    dtype = torch.float64 if stage else torch.float32
    batches = gradients(dtype)
    params = {path: 2 * x for path, x in batches[0].items()}

    @partial(fzero.shard, stage=stage, donate=ranks == 1)
    def step(state: Any, weights: Any) -> Any:
        state, _ = fzero.grad_and_reduce(loss, state)(weights)
        return fzero.apply_gradients(state), None

    def trained(state: Any, some: Any) -> Any:
        """In one call: between several, virtual ranks would have other strides."""

        def of(state: Any) -> Any:
            for weights in some:
                state, _ = step(state, weights)
            return state

        return of(state) if ranks == 1 else fzero.simulate(of, world_size=ranks)(state)

    rule = RULES[name]()
    first: Any = step if ranks == 1 else fzero.simulate(step, world_size=ranks)
    whole = trained(first.init(params, rule), batches)
    save(tmp_path, trained(first.init(params, rule), batches[:SAVED]))
    after = trained(load(tmp_path, first.init(params, rule)), batches[SAVED:])
    for one, other in zip(whole.params.flats, after.params.flats, strict=True):
        assert torch.equal(one, other)
    kept = [x.setup.optimizer.owned(x.optimizer) for x in (whole, after)]
    for key, some in kept[0].items():
        assert all(map(torch.equal, some, kept[1][key])), key


@pytest.mark.parametrize("name", ["soap", "a user's"])
def test_what_is_kept_is_in_the_order_of_its_dims(name: str) -> None:
    params, *batches = gradients(torch.float64)[:3]
    state = fzero.init(params, RULES[name](), stage=0)
    for weights in batches:
        state = fzero.apply_gradients(fzero.grad_and_reduce(loss, state)(weights)[0])
    for some in state.optimizer.owned.values():
        for kept in (x for x in some if x.ndim):
            assert kept.stride() == torch.empty(kept.shape).stride() and not kept.storage_offset()
