"""Law 18 as users write programs, and their mistakes: all ranks raise, and the state is good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.errors import AxisError, LayoutError


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("wrong", ["rows", "sizes", "weight", "weight of a part"])
def test_wrong_arguments_of_one_rank_raise_on_all(stage: int, wrong: str) -> None:
    """The others do not wait for a rank that refused its arguments, and the state is good."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * x).sum()

    def run() -> Tensor:
        options = {"stage": stage, "logical_ranks": 5}
        state = fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), **options)  # type: ignore
        here, given = state.setup.carried(state.setup.axis.rank), {}
        if 2 in here:
            given = {
                "rows": {},
                "sizes": {"sizes": [1]},
                "weight": {"weight": 1.0},
                "weight of a part": {"weight": lambda x: -1.0},
            }[wrong]
        rows = 3 if 2 in here and wrong == "rows" else len(here)
        seen = "grad_and_reduce: " if 2 in here else r"the step raised on rank \[1\]"
        with pytest.raises(LayoutError if 2 in here else AxisError, match=seen):
            fzero.grad_and_reduce(loss_fn, state, **given)(torch.ones(rows, 4))
        state, _ = fzero.grad_and_reduce(loss_fn, state)(torch.ones(len(here), 4))
        return fzero.full_params(fzero.apply_gradients(state))["w"]

    assert fzero.simulate(run, world_size=3)().tolist() == [[pytest.approx(0.9)] * 4] * 3


class Net(nn.Module):
    """A small transformer: a tied, a frozen, an unused, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(17, 12), nn.Linear(12, 17, bias=False)
        self.head.weight = self.embed.weight
        self.position = nn.Parameter(torch.randn(5, 12), requires_grad=False)
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 25), nn.Linear(25, 12)
        self.heat = nn.Parameter(torch.tensor(1.3))
        self.empty, self.unused = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(7))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        a = F.scaled_dot_product_attention(*[self.norm(x)] * 3, is_causal=True, dropout_p=0.1)
        x = x + F.dropout(fzero.remat(self.down)(F.gelu(self.up(a))), 0.2)
        return self.head(x) * self.heat


CALLS = 2


def rows_of(update: int, call: int, ranks: range) -> Tensor:
    """Logical rank r has 1 + r % 3 rows, of ids of its own."""
    made = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * update + 10 * call + rank)
        made.append(torch.randint(17, (1 + rank % 3, 5), generator=generator))
    return torch.cat(made)


def make_step(stage: int, logical: int, **options: Any) -> tuple[Any, Any]:
    """A step with dropout, weights, a clip and two calls, and the parameters of its model."""
    apply, params = fzero.functionalize(Net())

    def loss_fn(p: Any, ids: Tensor) -> Tensor:
        found = apply(p, ids)[:, :-1].flatten(0, 1)
        return F.cross_entropy(found, ids[:, 1:].flatten()) * (1 + fzero.axis_index())

    def step_fn(state: Any, update: int) -> Any:
        here, losses = fzero.logical_ranks(), []
        sizes = [1 + rank % 3 for rank in here]
        for call in range(CALLS):
            reduced = fzero.grad_and_reduce(loss_fn, state, sizes=sizes, weight=sizes)
            state, loss = reduced(rows_of(update, call, here))
            losses.append(loss)
        return fzero.apply_gradients(state), torch.stack(losses)

    step = fzero.clip(step_fn, max_norm=0.5)
    return fzero.shard(step, stage=stage, logical_ranks=logical, seed=3, **options), params


def trained(places: Sequence[tuple[int, int]], logical: int, folder: Any) -> list[Tensor]:
    """The run over some (ranks, stage), an update at each, from one to the next by a file."""
    state, found = None, []
    for update, (ranks, stage) in enumerate(places):
        step, params = make_step(stage, logical, donate=stage == 2)
        many = step if ranks == 1 else fzero.simulate(step, world_size=ranks)
        begun = many.init(params, fzero.optim.adamw(1e-2, weight_decay=0.1))
        if state is not None:
            fzero.checkpoint.save(folder, state)
            begun = fzero.checkpoint.load(folder, begun)
        state, losses = many(begun, update)
        found.append(losses if ranks == 1 else losses[0])

    def whole(state: Any) -> list[Tensor]:
        kept: Any = fzero.slots(state, "optimizer")
        return [*fzero.full_params(state).values(), *optree.tree_leaves(kept, namespace="fzero")]

    ranks = places[-1][0]
    if ranks == 1:
        return [*found, *whole(state)]
    return [*found, *(x[0] for x in fzero.simulate(whole, world_size=ranks)(state))]


@pytest.mark.parametrize(
    ("logical", "places"),
    [
        (3, [(2, 3), (2, 3), (2, 3)]),  # ranks learn other schedules where they carry unequally
        (7, [(3, 3), (1, 2), (4, 3)]),
        (5, [(4, 2), (5, 3), (2, 0)]),
    ],
)
def test_a_run_from_place_to_place(logical: int, places: Any, tmp_path: Any) -> None:
    alone = trained([(1, 0)] * 3, logical, tmp_path / "alone")
    moved = trained(places, logical, tmp_path / "moved")
    assert all(torch.equal(x, y) for x, y in zip(alone, moved, strict=True))
