"""The example of DP-SGD does what it prints, and what differential privacy asks of a step."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.covering import covered
from tests.ranks import run_ranks
from tests.test_examples_small import FLOAT64, FOLDER, on_a_rank, run

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

SCRIPT = "dp_lora.py"
needs_opacus = pytest.mark.skipif(
    importlib.util.find_spec("opacus") is None, reason="needs opacus, an option of the example"
)
pytestmark = [  # torch's own, of a hook of opacus on the first layer
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:opacus"),
]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    yield importlib.import_module("dp_lora")
    torch.set_num_threads(threads)


def digest_of(said: str) -> str:
    """Return which adapters a run ended with; its check must have held."""
    check = re.findall(r"^check: .* to (\S+)$", said, re.MULTILINE)
    assert len(check) == 1 and float(check[0]) < FLOAT64, said
    right, digest = re.findall(r"^([\d.]+)% .* the adapters are (\w{16})$", said, re.MULTILINE)[0]
    assert float(right) > 80, said
    return digest


@pytest.mark.xdist_group("gloo")
def test_alone_and_on_ranks_it_ends_with_the_same_adapters() -> None:
    alone = digest_of(run(f"{SCRIPT} --stage 1"))
    assert digest_of(run_ranks(on_a_rank, 2, SCRIPT)[0]) == alone


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_on_four_ranks_it_ends_with_those_too() -> None:
    assert digest_of(run_ranks(on_a_rank, 4, SCRIPT)[0]) == digest_of(run(SCRIPT))


@covered(stage=range(4), ranks=[1, 2, 3, 4])
def test_bits_do_not_depend_on_ranks_or_stage(example: ModuleType, stage: int, ranks: int) -> None:
    alone = example.train(0, 2)
    found = fzero.simulate(lambda: example.train(stage, 2), world_size=ranks)()
    for name, x in alone.items():
        assert (x - example.params[name]).norm() > 0.01  # it has learned
        assert all(torch.equal(x, one) for one in found[name])


def summed(example: ModuleType, rows: Tensor) -> Tensor:
    """Return what the loss of the example gives the state as a gradient, flat."""
    state = fzero.init(example.params, fzero.optim.sgd(1.0), stage=3)
    call = fzero.grad_and_reduce(example.clipped, state, has_aux=True)
    state, _ = call(rows)
    whole = fzero.full_gradients(state)
    return torch.cat([whole[name].flatten() for name in example.LEARNS])


def test_no_sample_moves_the_sum_by_more_than_the_clip(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = example.samples[:20]
    each, _ = example.of_each(dict(example.params), rows)
    norms = torch.cat([g.flatten(1) for g in each.values()], 1).norm(dim=1)
    clip = norms.median().item()
    monkeypatch.setattr(example, "CLIP", clip)
    whole = summed(example, rows)
    for number, norm in enumerate(norms):
        others = torch.cat([rows[:number], rows[number + 1 :]])
        moved = (whole - summed(example, others)).norm()
        wanted = norm * (clip / (norm + 1e-6)).clamp(max=1)
        torch.testing.assert_close(moved, wanted, rtol=1e-9, atol=1e-12)
        assert moved <= clip + 1e-12
    assert (norms > clip).any() and (norms < clip).any()


def test_an_empty_batch_is_a_step_by_noise_alone(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = [example.samples[:0]] * example.LOGICAL
    monkeypatch.setattr(example, "drawn", lambda step: nothing)
    found, (added,) = example.train(3, 1), example.noise_alone(1)
    for name, x in found.items():
        assert torch.equal(x, example.params[name] - example.LR * added[name])


def test_noise_has_its_deviation_and_is_new_in_each_step(example: ModuleType) -> None:
    flat = [torch.cat([x.flatten() for x in one.values()]) for one in example.noise_alone(2)]
    for one in flat:
        deviation = one.std().item() * example.BATCH / (example.NOISE * example.CLIP)
        assert abs(deviation - 1) < 5 / (2 * one.numel()) ** 0.5
        assert abs(one.mean() / one.std()) < 5 / one.numel() ** 0.5
    assert abs(torch.corrcoef(torch.stack(flat))[0, 1]) < 5 / flat[0].numel() ** 0.5


def test_batches_are_poisson_samples(example: ModuleType) -> None:
    counts = torch.tensor([float(sum(map(len, example.drawn(step)))) for step in range(200)])
    chance = example.BATCH / example.SAMPLES
    deviation = (example.SAMPLES * chance * (1 - chance)) ** 0.5
    assert abs(counts.mean() - example.BATCH) < 5 * deviation / 200**0.5
    assert 0.75 < counts.std() / deviation < 1.25  # the size of a batch is random, too


@pytest.mark.parametrize("broken", ["clip", "noise", "batch"])
def test_its_check_can_fail(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    steps, added = 2, example.noise_alone(2)
    exact: Any = example.loop_over_samples(added)
    assert example.apart(example.train(3, steps), exact) < example.TOLERANCE
    changed = {"clip": ("CLIP", 0.3), "noise": ("SEED", 1), "batch": ("BATCH", 63)}
    monkeypatch.setattr(example, *changed[broken])
    assert example.apart(example.train(3, steps), exact) > 1e-4


@needs_opacus
def test_gradients_of_samples_and_steps_are_those_of_opacus(example: ModuleType) -> None:
    theirs, off = example.opacus_steps(example.noise_alone(3))
    assert off < 1e-14 and example.apart(example.train(3, 3), theirs) < 1e-14
    assert 2.5 < example.epsilon() < 3.5


@pytest.mark.parametrize("script", [SCRIPT, "lora_words.py"])
def test_each_has_at_most_200_lines(script: str) -> None:
    assert len((FOLDER / script).read_text(encoding="utf-8").splitlines()) <= 200
