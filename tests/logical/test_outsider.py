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
from fzero.adapter import Engine
from fzero.errors import AxisError, LayoutError, MismatchError


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("wrong", ["rows", "sizes", "weight", "weight of a part", "loss"])
def test_an_error_of_one_rank_is_everybodys_each_time(stage: int, wrong: str, window: bool) -> None:
    """The others do not wait for a rank that refused its arguments, and the state is good."""

    def loss_fn(p: Any, x: Tensor, bad: bool) -> Tensor:
        if bad and wrong == "loss" and fzero.axis_index() == 2:
            raise LayoutError("grad_and_reduce: no such row")
        return (p["w"] * x).sum()

    def step_fn(state: Any, x: Tensor, bad: bool, given: Any) -> Any:
        state, loss = fzero.grad_and_reduce(loss_fn, state, in_axes=(0, None), **given)(x, bad)
        return fzero.apply_gradients(state), loss

    step: Any = fzero.coalesce(step_fn) if window else step_fn
    step = fzero.shard(step, stage=stage, logical_ranks=5)

    def run() -> Tensor:
        state = step.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1))
        here, given = state.setup.carried(state.setup.axis.rank), {}
        if 2 in here:
            given = {
                "rows": {},
                "loss": {},
                "sizes": {"sizes": [1]},
                "weight": {"weight": 1.0},
                "weight of a part": {"weight": lambda x, bad: -1.0},
            }[wrong]
        rows = 3 if 2 in here and wrong == "rows" else len(here)
        seen = "grad_and_reduce: " if 2 in here else r"the step raised on rank \[1\]"
        for _ in range(2):
            with pytest.raises(LayoutError if 2 in here else AxisError, match=seen):
                step(state, torch.ones(rows, 4), True, given)
        return fzero.full_params(step(state, torch.ones(len(here), 4), False, {})[0])["w"]

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


@pytest.mark.parametrize("options", [{"gradient_predivide_factor": 3.0}, {"cast": torch.bfloat16}])
def test_one_logical_rank_has_the_bits_of_its_reduction(options: dict[str, Any]) -> None:
    """Where gradients are offloaded, or the rank is a virtual one, they come through a bucket."""

    def run(how: str) -> Tensor:
        def step_fn(state: Any, x: Tensor) -> Any:
            state, loss = fzero.grad_and_reduce(lambda p, x: (p * x).sin().sum(), state)(x)
            return fzero.apply_gradients(state), loss

        given, step = dict(options), step_fn
        if cast := given.pop("cast", None):
            step = fzero.compress(step, gradients=fzero.codecs.cast(cast))
        if how == "offloaded":
            step = fzero.offload(step, gradients="cpu")
        step = fzero.shard(step, stage=2, logical_ranks=1, **given)
        x = torch.linspace(0.1, 2.0, 40).unsqueeze(0)
        if how == "virtual":
            step, x = fzero.simulate(step, world_size=1), x.unsqueeze(0)
        state, _ = step(step.init(torch.ones(40), fzero.optim.sgd(1.0)), x)
        whole: Any = fzero.full_params
        if how == "virtual":
            return fzero.simulate(whole, world_size=1)(state)[0]
        return whole(state)

    plain = run("plain")
    assert torch.equal(plain, run("offloaded"))
    assert torch.equal(plain, run("virtual"))


@pytest.mark.parametrize("skips", [{0}, {3}, {0, 1}])
def test_logical_ranks_without_a_backward_in_an_engine(skips: set[int]) -> None:
    """Of a rank, all or the last may have none: the others' weights hold. Draws are its own."""
    losses: dict[tuple[int, int], float] = {}

    def run(stage: int, weighted: bool) -> Tensor:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        engine = Engine(module, fzero.optim.sgd(0.1), stage=stage, logical_ranks=4)
        here = engine.state.setup.carried(engine.state.setup.axis.rank)
        for loop in range(2):
            for part in engine.parts(torch.ones(len(here), 3)):
                rank = fzero.axis_index()
                if rank in skips and (weighted or loop == 0):
                    continue
                loss = engine(part).square().sum()
                engine.backward(loss, weight=1.0 + rank if weighted else None)
                drawn = losses.setdefault((loop, rank), loss.item())
                assert drawn == loss.item()
        engine.step()
        found = torch.cat([x.flatten() for x in fzero.full_params(engine.state).values()])
        engine.close()
        return found

    for weighted in (True, False):
        alone = run(0, weighted)
        for ranks, stage in ((2, 2), (3, 3)):
            moved = fzero.simulate(lambda s=stage, w=weighted: run(s, w), world_size=ranks)()
            assert all(torch.equal(alone, one) for one in moved)
    fzero.simulate(lambda: run(2, False), world_size=4)()  # draws the same losses
    with pytest.raises(MismatchError, match=r"0 is one"):  # served without one, by another divisor
        fzero.simulate(lambda: run(2, True), world_size=4)()


def test_logical_ranks_with_and_without_a_weight() -> None:
    module = nn.Linear(2, 1)
    engine = Engine(module, fzero.optim.sgd(0.1), stage=2, logical_ranks=2)
    with pytest.raises(MismatchError, match="a logical rank holds gradients with weights"):
        for part in engine.parts(torch.ones(2, 2)):
            weight = 2.0 if fzero.axis_index() else None
            engine.backward(engine(part).sum(), weight=weight)
    engine.zero_grad()
    engine.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_batch_that_one_engine_refuses_is_an_error_of_all(stage: int) -> None:
    def run() -> Tensor:
        module = nn.Linear(3, 1, bias=False)
        nn.init.ones_(module.weight)
        engine = Engine(module, fzero.optim.sgd(0.1), stage=stage, logical_ranks=5)
        here = engine.state.setup.carried(engine.state.setup.axis.rank)
        bad = 0 in here
        for _ in range(2):
            with pytest.raises(LayoutError if bad else AxisError):
                for part in engine.parts(torch.ones(len(here) + bad, 3)):
                    engine.backward(engine(part).sum())
            engine.zero_grad()
        for part in engine.parts(torch.ones(len(here), 3)):
            engine.backward(engine(part).sum())
        engine.step()
        whole = fzero.full_params(engine.state)["weight"].clone()
        engine.close()
        return whole

    assert fzero.simulate(run, world_size=3)().flatten().tolist() == [pytest.approx(0.9)] * 9


@pytest.mark.parametrize("logical", [None, 2])
def test_weights_of_zero_beside_a_loss_scale_and_a_transform(logical: int | None) -> None:
    """The update is skipped, and nothing changes: also not what the transform keeps."""
    mean = fzero.transform(
        name="mean",
        init=lambda params, ctx: {"of": {path: p.clone() for path, p in params.items()}},
        updated=lambda slots, params, ctx: ({"of": {k: p + 1 for k, p in params.items()}}, params),
    )
    module = nn.Linear(8, 8)
    options: Any = {} if logical is None else {"logical_ranks": logical}
    engine = Engine(
        module, fzero.optim.sgd(0.1), stage=2, loss_scale=512.0, transforms=[mean], **options
    )
    before = {path: x.clone() for path, x in engine.full_state_dict().items()}
    for part in engine.parts(torch.ones(2, 8)):
        engine.backward(engine(part).sum() * torch.nan, weight=0.0)
    with pytest.warns(UserWarning, match="the update is skipped"):
        engine.step()
    assert engine.step_was_skipped
    assert all(torch.equal(before[path], x) for path, x in engine.full_state_dict().items())
    kept = fzero.slots(engine.state, "mean")["of"]
    assert all(torch.equal(before[path], x) for path, x in kept.items())
    engine.close()
