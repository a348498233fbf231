"""Law 18 for losses that call collectives between logical ranks: contrastive ones, and shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import PhaseError
from tests.logical import programs
from tests.logical.programs import FEATURES, Place, Program, differs, trained
from tests.ranks import run_ranks

ROWS, UPDATES = 2, 3


def contrastive(z: Tensor) -> Tensor:
    """InfoNCE: the views of a row are each other's, against those of all logical ranks."""
    one, other = nn.functional.normalize(z, dim=-1).chunk(2, dim=-1)
    scores = one @ fzero.all_gather(other).T / 0.5
    return nn.functional.cross_entropy(scores, torch.arange(len(z)) + len(z) * fzero.axis_index())


def shared(z: Tensor) -> Tensor:
    """A loss of shares of a sum over all logical ranks, and of the distance to their mean."""
    weights = z.exp()
    share = weights / fzero.psum(weights.sum(0))
    return (share.log() * share).sum() + (z - fzero.pmean(z.mean(0))).square().mean()


def others(z: Tensor) -> Tensor:
    """A loss of the rest of the collectives."""
    size, rank = fzero.axis_size(), fzero.axis_index()
    top = fzero.pmax(z.detach().amax(0))
    part = fzero.psum_scatter((z - top).square().sum(0).repeat(size))
    came = fzero.ppermute(z, [(r, (r + 1) % size) for r in range(size)])
    sent = fzero.all_to_all(z.sum(0).repeat(size, 1) * (1 + rank))
    return part.sum() + (came * z).mean() + sent.sin().sum()


LOSSES = {"contrastive": contrastive, "shared": shared, "others": others}


def run(loss: str, logical: int, place: Place, calls: int = 1) -> dict[str, Any]:
    """Three updates of AdamW on the logical ranks of this rank, with dropout."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 9), nn.Dropout(0.4), nn.Tanh(), nn.Linear(9, 4)]
    apply, params = fzero.functionalize(nn.Sequential(*layers))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        rank = fzero.axis_index()
        assert fzero.axis_size() == logical
        assert fzero.logical_ranks() == range(rank, rank + 1)
        return LOSSES[loss](apply(p, x))

    def step_fn(state: Any, x: Tensor) -> Any:
        for _ in range(calls):
            state, value = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), value

    whole: Any = fzero.coalesce(step_fn) if calls > 1 else step_fn
    step: Any = fzero.shard(
        whole, stage=place.stage, logical_ranks=logical, seed=5, donate=calls > 1, **place.options
    )
    state, losses = step.init(params, fzero.optim.adamw(1e-2)), []
    generator = torch.Generator().manual_seed(1)
    ranks = state.setup.carried(state.setup.axis.rank)
    for _ in range(UPDATES):
        rows = torch.randn(logical, ROWS, FEATURES, generator=generator)
        state, value = step(state, rows[ranks[0] : ranks[-1] + 1].flatten(0, 1))
        losses.append(value)
    return {
        "params": fzero.full_params(state),
        "optimizer": fzero.slots(state, "optimizer"),
        "losses": torch.stack(losses),
    }


def at(loss: str, logical: int, place: Place, calls: int = 1) -> dict[str, Any]:
    """What a run on virtual ranks leaves."""
    return trained(None, place, lambda _, place: run(loss, logical, place, calls))  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("logical", [4, 5])
@pytest.mark.parametrize("loss", LOSSES)
def test_bits_are_those_of_a_rank_for_each_logical_rank(
    loss: str, logical: int, stage: int
) -> None:
    wide = at(loss, logical, Place(logical, stage))
    for ranks in (1, 2, 3):
        assert differs(wide, at(loss, logical, Place(ranks, stage))) == [], f"{ranks} ranks"


PROGRAMS = {
    "weighted": Program(
        logical=5, sizes=(1, 3, 2, 1, 2), weighted=True, calls=2, scale="dynamic", overflows=(0, 3)
    ),
    "window": Program(calls=2, coalesce=0, weighted=True, dropout=0.4, donate=True, clip=0.5),
    "low": Program(dtype=torch.bfloat16, cast=torch.bfloat16, rule="sgd", micro_batches=2),
    "autocast": Program(logical=3, autocast=torch.bfloat16, dropout=0.4, offload=True),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_beside_transforms(name: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_of(program: Program, y: Tensor, update: int) -> Tensor:
        z = y.float() * (1 + fzero.axis_index())
        loss = (z - fzero.pmean(z.mean(0))).square().mean() * fzero.psum(z.sum()).sin()
        return loss * torch.inf if program.overflows == (update, fzero.axis_index()) else loss

    monkeypatch.setattr(programs, "loss_of", loss_of)
    program = PROGRAMS[name]
    wide = trained(program, Place(program.logical))
    for ranks in (1, 2):
        assert differs(wide, trained(program, Place(ranks, stage))) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_calls_in_a_window_of_a_state_that_donates(stage: int) -> None:
    options = {"reshard_after_forward": "window"} if stage == 3 else {}
    wide = at("contrastive", 4, Place(4, stage), 2)
    for ranks in (1, 3):
        assert differs(wide, at("contrastive", 4, Place(ranks, stage, None, options), 2)) == []


def body(rank: int, world_size: int, loss: str, logical: int) -> list[Any]:
    return [run(loss, logical, Place(world_size, stage)) for stage in (0, 2, 3)]


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("loss", "logical"), [("contrastive", 5), ("shared", 4), ("others", 5)])
def test_processes(loss: str, logical: int, ranks: int) -> None:
    wide = at(loss, logical, Place(logical))
    for found in run_ranks(body, ranks, loss, logical):
        for one in found:
            assert differs(wide, one) == []


def wide_body(rank: int, world_size: int, loss: str) -> list[Any]:
    return [run(loss, world_size, Place(world_size, stage)) for stage in (0, 3)]


@pytest.mark.xdist_group("gloo")
def test_a_process_for_each_logical_rank() -> None:
    alone = at("shared", 3, Place())
    for found in run_ranks(wide_body, 3, "shared"):
        for one in found:
            assert differs(alone, one) == []


def fails(loss: Any, stage: int, message: str = "no such row|raised on rank") -> str:
    """A state after a loss that raises, on this rank."""
    state = fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), stage=stage, logical_ranks=5)
    count = len(state.setup.carried(state.setup.axis.rank))
    call = fzero.grad_and_reduce(loss, state)

    def good(p: Any, x: Tensor) -> Tensor:
        return fzero.psum((p["w"] * x).sum())

    with pytest.raises(Exception, match=message) as caught:
        call(torch.ones(count, 4))
    after, value = fzero.grad_and_reduce(good, state)(torch.ones(count, 4))
    assert value.tolist() == 20.0
    assert fzero.gradients(after)["w"].tolist() == [5.0] * 4
    return type(caught.value).__name__


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_error_of_one_logical_rank_ends_all(ranks: int, stage: int, before: bool) -> None:
    def loss_of(where: int) -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            total = (p["w"] * x).sum()
            total = total if before else fzero.psum(total)
            if fzero.axis_index() == where:
                raise RuntimeError("no such row")
            return fzero.pmean(total)

        return loss

    for where in range(5):
        names: list[str] = []

        def body(where: int = where, names: list[str] = names) -> None:
            names.append(fails(loss_of(where), stage))

        body() if ranks == 1 else fzero.simulate(body, world_size=ranks)()
        assert sorted(names) == ["PeerFailedError"] * (ranks - 1) + ["RuntimeError"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("others", [[4], [3, 4]])
def test_other_collectives_of_some_logical_ranks(others: list[int], ranks: int) -> None:
    """Also where those of a rank go together, as [3, 4] of two ranks."""

    def more(p: Any, x: Tensor) -> Tensor:
        y = fzero.psum((p["w"] * x).sum())
        return fzero.pmean(y) if fzero.axis_index() in others else y

    def other(p: Any, x: Tensor) -> Tensor:
        y = (p["w"] * x).sum()
        there = fzero.axis_index() in others
        return fzero.all_gather(y[None]).sum() if there else fzero.psum(y)

    for loss in (more, other):

        def body(loss: Any = loss) -> None:
            names = r"waits in|different c|other c|raised on rank|make different|call"
            fails(loss, 3, names)

        body() if ranks == 1 else fzero.simulate(body, world_size=ranks)()


def test_a_module_that_all_logical_ranks_change_is_refused() -> None:
    """functional_call puts a logical rank's parameters into it while another one waits inside."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.one(x)
            z: Tensor = self.other(y - fzero.pmean(y.mean(0)))
            return z.square().mean()

    module = Centered()
    params = {name: x.detach().clone() for name, x in module.named_parameters()}
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=2, logical_ranks=2)

    def loss(p: Any, x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(module, p, (x,))
        return found

    with pytest.raises(PhaseError, match=r"'other[.]bias' of logical rank 1 is read on"):
        fzero.grad_and_reduce(loss, state)(torch.ones(2, 4))


def test_what_is_refused() -> None:
    def by_sizes(p: Any, x: Tensor) -> Tensor:
        return fzero.all_to_all((p["w"] * x), sizes=[1, 0, 0, 0])[0].sum()

    state = fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), stage=2, logical_ranks=4)
    with pytest.raises(PhaseError, match="all_to_all: sizes, in a loss where ranks carry several"):
        fzero.grad_and_reduce(by_sizes, state)(torch.ones(4, 4))

    engine = Engine(nn.Linear(4, 1), fzero.optim.sgd(0.1), stage=2, logical_ranks=4)
    with pytest.raises(PhaseError, match="all_reduce in a loss of logical rank 0"):
        for part in engine.parts(torch.ones(4, 4)):
            engine.backward(fzero.psum(engine(part).sum()))
    engine.close()


def test_a_collective_in_a_backward_alone_is_refused() -> None:
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return fzero.psum(grads[0])

    def loss(p: Any, x: Tensor) -> Tensor:
        return Summed.apply((p["w"] * x).sum())

    state = fzero.init({"w": torch.ones(4)}, fzero.optim.sgd(0.1), stage=2, logical_ranks=4)
    with pytest.raises(PhaseError, match="in a backward alone"):
        fzero.grad_and_reduce(loss, state)(torch.ones(4, 4))
