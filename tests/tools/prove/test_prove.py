"""Sound steps are proved, for every stage and world; what is not sound, or not known, is named."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from benchmarks.step.models import make_task
from fzero.state.setup import Setup
from fzero.tools.prove.terms import Stretch, Symbolic, Terms, aligned, cut, exact, joined, whole
from tests.descends import descends
from tests.tools.prove.programs import ADAM, CASES, SGD, once, params, recorded

EVERY = [(name, stage, world) for name in CASES for stage in range(4) for world in (1, 2, 3, 8)]
SOME = [(name, i % 4, 2 + i % 3) for i, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "stage", "world"), SOME)
def test_sound_programs_are_proved(name: str, stage: int, world: int) -> None:
    proof = recorded(name, stage, world).proof()
    assert proof.proved, proof
    buffers = {claim.tensor for claim in proof.claims if claim.leaf}
    assert buffers >= {"state.params.flats", "state.optimizer.moments[0]"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage", "world"), EVERY)
def test_every_case_at_every_stage(name: str, stage: int, world: int) -> None:
    test_sound_programs_are_proved(name, stage, world)


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 6), (3, 1024)])
def test_the_text_is_a_theorem_that_says_what_it_looked_at(stage: int, world: int) -> None:
    step = fzero.shard(fzero.clip(once, max_norm=1.0), stage=stage)
    proof = fzero.prove(step, step.init(params, ADAM), torch.zeros(3, 5), world=world)
    text = str(proof)
    assert text.startswith(f"Theorem, over the reals. shard(stage={stage}) . clip(max_norm=1.0)")
    assert ("ranks that were not read are assumed" in text) == (world > 64)
    assert "fzero.certify" in text and len(proof.ranks) == (world if world <= 64 else 16)
    counters = {claim.tensor for claim in proof.claims if not claim.leaf}
    assert counters == {"state.step", "state.optimizer.count"}


def test_what_is_shown_of_the_loss_is_said_beside_the_theorem() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        state, own = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        of_all = fzero.pmean(own), fzero.psum(own), own * fzero.axis_size(), state.step
        return fzero.apply_gradients(state), (own, *of_all)

    step = fzero.shard(step_fn, stage=1)
    proof = fzero.prove(step, step.init({"w": torch.ones(5)}, SGD), torch.ones(5), world=2)
    shown = "as on one rank", "its mean over ranks", "its sum over ranks", "not shown"
    wanted = [f"aux[{i}] ({what})" for i, what in enumerate((*shown, shown[0]))]
    assert proof and [*proof.beside] == wanted
    assert f"Returned beside it: {', '.join(wanted)}." in str(proof)


def test_a_simulated_step_is_proved_for_its_own_ranks() -> None:
    step = fzero.simulate(fzero.shard(once, stage=2), world_size=3)
    proof = fzero.prove(step, step.init(params, SGD), torch.zeros(3, 2, 5))
    assert proof and proof.world == 3 == len(proof.ranks)


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    frozen=st.integers(0, 3),
    stage=st.integers(0, 3),
    world=st.integers(1, 9),
)
def test_models_of_any_shapes(sizes: list[int], frozen: int, stage: int, world: int) -> None:
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    model[0].weight.requires_grad_(frozen != 0)
    apply, given_params = fzero.functionalize(model)
    step = fzero.shard(descends(lambda p, x: apply(p, x).pow(2).mean()), stage=stage)
    state = step.init(given_params, fzero.optim.lion(0.1))
    assert fzero.prove(step, state, torch.zeros(2, sizes[0]), world=world)


class Everyday(nn.Module):
    """Dropout, a checkpoint, an embedding, convolution, attention, a tied head, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(7, 6)
        self.norm, self.conv = nn.LayerNorm(6), nn.Conv1d(6, 6, 1)
        self.qkv = nn.Linear(6, 18)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return F.dropout(mixed * torch.tensor([1.0, 2, 3, 4, 5, 6]), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.symbols(x))
        h = h + checkpoint(self.attend, h, use_reentrant=False)
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(F.linear(h, self.symbols.weight).flatten(0, 1), x.flatten())


@pytest.mark.parametrize("stage", [2, 3])
def test_everyday_modules(stage: int) -> None:
    apply, given_params = fzero.functionalize(Everyday())
    step = fzero.shard(fzero.clip(descends(apply), max_norm=1.0), stage=stage)
    proof = fzero.prove(step, step.init(given_params, ADAM), torch.zeros(2, 3).long(), world=2)
    assert proof, proof


def test_two_models_whose_updates_follow_each_other_and_buffers() -> None:
    game, other = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)
    g, g_params, buffers = fzero.functionalize(game, buffers=True)
    d, d_params = fzero.functionalize(other)

    def step_fn(states: Any, kept: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Any:
            made, new = g(p["g"], x, buffers=kept)
            return d(p["d"], made).pow(2).mean(), new

        for name in "dg":
            states, (value, new) = fzero.grad_and_reduce(loss, states, wrt=name, has_aux=True)()
            states = {**states, name: fzero.apply_gradients(states[name])}
        return states, (value, new)

    step = fzero.shard(step_fn, stage={"g": 3, "d": 1})
    states = step.init({"g": g_params, "d": d_params}, {"g": ADAM, "d": SGD})
    proof = fzero.prove(step, states, (buffers, torch.zeros(6, 5)), world=2)
    assert proof, proof


def why(proof: fzero.tools.Proof) -> str:
    assert not proof and proof.unshown and str(proof).startswith("Not proved")
    return f"{proof.unshown[0].why} {proof.unshown[0].line}"


def prove(step_fn: Any, stage: int = 2, optimizer: Any = SGD, **options: Any) -> fzero.tools.Proof:
    step = fzero.shard(step_fn, stage=stage, **options)
    return fzero.prove(step, step.init(params, optimizer), torch.zeros(3, 5), world=2)


@pytest.mark.parametrize("stage", range(4))
def test_a_divisor_that_is_wrong_in_the_library_is_named(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Setup, "divisor", property(lambda s: 1.0 if s.axis.size == 1 else 3.0))
    assert " div_" in why(prove(once, stage)) or " = aten.div" in why(prove(once, stage))


def test_a_norm_of_the_own_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fzero.transforms.clip"]  # the name in the package is its function

    def own_norm(state: Any, flats: Any, placement: Any) -> Tensor:
        return torch.stack([torch.linalg.vector_norm(flat) ** 2 for flat in flats]).sum().sqrt()

    monkeypatch.setattr(module, "norm_of", own_norm)
    said = why(prove(fzero.clip(once, max_norm=1.0)))
    assert "sqrt" in said or "total of its part" in said


def reads_its_rank(state: Any, x: Tensor) -> Any:
    return once(state, x * (1 + fzero.axis_index()))


def test_what_is_no_update_of_the_mean_gradient_is_not_proved() -> None:
    assert "1/2 sum over ranks" in why(prove(once, reduce_op="sum"))
    assert "ranks run other programs" in why(prove(reads_its_rank))
    encoded = fzero.compress(once, gradients=fzero.codecs.int8(block=4))
    assert "line" in why(prove(encoded))


def test_what_cannot_be_asked_is_refused() -> None:
    step, x = fzero.shard(once, stage=2), torch.zeros(3, 5)
    state = step.init(params, SGD)
    with pytest.raises(fzero.LayoutError, match=r"no fzero\.shard in once|step_fn"):
        fzero.prove(once, state, x)
    with pytest.raises(fzero.LayoutError, match="world=0"):
        fzero.prove(step, state, x, world=0)
    held = fzero.grad_and_reduce(lambda p, x: p["scalar"] * x.sum(), state)(x)[0]
    with pytest.raises(fzero.PhaseError, match="state that has gradients"):
        fzero.prove(step, held, x)
    simulated = fzero.simulate(step, world_size=2)
    with pytest.raises(fzero.LayoutError, match="dim 0 must be the 2 ranks"):
        fzero.prove(simulated, simulated.init(params, SGD), x)
    mesh = fzero.simulate(fzero.shard(once, stage=2, mesh=(2, 2)), world_size=4)
    with pytest.raises(fzero.AxisError, match="mesh of two dims"):
        fzero.prove(mesh, mesh.init(params, SGD), torch.zeros(4, 3, 5))
    foreign = fzero.optim.from_torch(functools.partial(torch.optim.AdamW, lr=0.1))
    with pytest.raises(fzero.PhaseError, match="from_torch"):
        fzero.prove(step, step.init(params, foreign), x)


def test_pieces_are_cut_joined_and_aligned_exactly() -> None:
    terms = Terms()
    a, b = (whole(terms.term(name, (), 5)) for name in "ab")
    assert terms.term("a", (), 5) is a[0].term and exact(1 / 3).denominator == 3
    row = joined([Stretch(5, a), Stretch(5, b)])
    again = joined([*cut(row, 0, 3), *cut(row, 3, 4), *cut(row, 7, 3)])
    assert again == row == Symbolic((10,), row).pieces
    sizes = [n for n, _ in aligned([row, cut(row, 0, 10), joined([Stretch(10, ())])])]
    assert sizes == [5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8, 64, 1024])
@pytest.mark.parametrize("stage", range(4))
def test_the_gpt_of_the_benchmark(stage: int, world: int) -> None:
    task = make_task("gpt", backwards=2)
    apply, given_params = fzero.functionalize(task.module())

    def step_fn(state: Any, batches: Any) -> Any:
        for x, y in batches:
            state, loss = fzero.grad_and_reduce(apply, state)(x, y)
        return fzero.apply_gradients(state), loss

    step = fzero.shard(fzero.clip(step_fn, max_norm=1.0), stage=stage)
    state, batches = step.init(given_params, ADAM), task.batches(step=0, rank=0)
    before = time.process_time()
    assert fzero.prove(step, state, (batches,), world=world)
    assert time.process_time() - before < 60
