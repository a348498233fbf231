"""The examples of the engine do what they print, under torchrun."""

from __future__ import annotations

import importlib.util
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import fzero
from tests.ranks import run_ranks, spawn_script

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

pytestmark = [pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]

HAS_LIBRARIES = all(map(importlib.util.find_spec, ("transformers", "sentence_transformers")))
needs_libraries = pytest.mark.skipif(not HAS_LIBRARIES, reason="needs the extra `examples`")
slow = pytest.mark.slow

ROOT = Path(__file__).parent.parent

# What the libraries and torchrun write to stderr when nothing is wrong.
USUAL = ("OMP_NUM_THREADS", "*" * 20, "kernels-community")  # the last: bitsandbytes


def run(script: str, *args: str) -> tuple[str, str]:
    """Run an example on two ranks; return what it printed, and what was not foreseen on stderr."""
    done = spawn_script(f"examples/{script}", 2, args, timeout_s=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = [x for x in done.stderr.splitlines() if x and not any(word in x for word in USUAL)]
    return done.stdout, "\n".join(lines)


def numbers(pattern: str, text: str) -> list[float]:
    """Return the numbers of the one place where `pattern` is, thousands without commas."""
    found: list[Any] = re.findall(pattern, text)
    assert len(found) == 1, (pattern, text)
    groups = found[0] if isinstance(found[0], tuple) else (found[0],)
    return [float(group.replace(",", "")) for group in groups]


@needs_libraries
@pytest.mark.parametrize(
    ("stage", "model", "checkpointing"),
    [
        pytest.param(3, "gpt2", "reentrant", marks=slow),
        pytest.param(0, "gpt2", "none", marks=slow),
        pytest.param(1, "gpt2", "nonreentrant", marks=slow),
        pytest.param(2, "llama", "reentrant", marks=slow),
        pytest.param(3, "llama", "none", marks=slow),
        pytest.param(3, "gpt2", "nonreentrant", marks=slow),
    ],
)
def test_a_hugging_face_model_learns_as_in_plain_pytorch_with_a_share_of_the_bytes(
    stage: int, model: str, checkpointing: str
) -> None:
    args = ["--stage", str(stage), "--model", model, "--checkpointing", checkpointing]
    said, unforeseen = run("hf_causal_lm.py", *args, "--steps", "20", "--check")
    assert not unforeseen
    kinds = "parameters ([\\d,]+), gradients ([\\d,]+), optimizer ([\\d,]+)"
    held = numbers(f"bytes on each rank: {kinds}", said)
    whole = numbers(f"without ZeRO: +{kinds}", said)
    shares = [n / all_of_it for n, all_of_it in zip(held, whole, strict=True)]
    parameters, states = (0.5 if stage == 3 else 1.0), (0.5 if stage else 1.0)
    assert shares == pytest.approx([parameters, states, states], rel=0.02)
    first, last = (numbers(rf"step {n}: loss ([\d.]+)", said)[0] for n in (10, 20))
    found, unigram = numbers(r"held-out text: loss ([\d.]+); bytes alone ([\d.]+)", said)
    assert last < first and found < unigram
    assert numbers(r"plain PyTorch to (\S+) \(float64\)", said)[0] < 1e-10


@pytest.mark.parametrize(
    ("stages", "discard"),
    [
        pytest.param((3, 1), "cut", marks=slow),
        pytest.param((3, 1), "freeze", marks=slow),
        pytest.param((0, 2), "zero_grad", marks=slow),
        pytest.param((2, 3), "cut", marks=slow),
        pytest.param((1, 3), "freeze", marks=slow),
        pytest.param((3, 3), "freeze", marks=slow),
        pytest.param((3, 0), "zero_grad", marks=slow),
    ],
)
def test_two_engines_of_a_gan_at_two_stages_train_as_in_plain_pytorch(
    stages: tuple[int, int], discard: str
) -> None:
    args = ["--generator-stage", str(stages[0]), "--discriminator-stage", str(stages[1])]
    said, unforeseen = run("gan.py", *args, "--discard", discard, "--steps", "400", "--check")
    assert not unforeseen
    before, after, modes = numbers(r"mode: ([\d.]+) before, ([\d.]+) after; (\d) of 8", said)
    assert 3 * after < before and modes >= 6
    assert numbers(r"plain PyTorch to (\S+) \(float64\)", said)[0] < 1e-10


def reduced_numels(rank: int, world_size: int, stages: tuple[int, int]) -> dict[str, float]:
    """Return the gradient elements that cross ranks in a step of the GAN, by way of discarding.

    In units of the discriminator's parameters, after those of the generator.
    """
    gan = load_gan()
    networks = gan.make_generator(), gan.make_discriminator()
    sizes = [sum(p.numel() for p in network.parameters()) for network in networks]
    args = Namespace(generator_stage=stages[0], discriminator_stage=stages[1])
    engines = gan.make_engines(args, *networks)
    batch = [gan.mine(x) for x in gan.Batches(8, seed=0).next()]
    found = {}
    for discard in ("zero_grad", "cut"):
        with fzero.count_collectives() as log:
            gan.make_step(discard)(*engines, *batch)
        numels = [e.numel for e in log.of() if e.op in ("all_reduce", "reduce_scatter")]
        found[discard] = (sum(numels) - sizes[0]) / sizes[1]
    return found


def load_gan() -> Any:
    spec = importlib.util.spec_from_file_location("gan", ROOT / "examples/gan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("stages", [(3, 0), (0, 1), (1, 2)])
def test_cut_off_from_its_parameters_a_discriminator_sends_no_gradient_for_the_generator(
    stages: tuple[int, int],
) -> None:
    for found in run_ranks(reduced_numels, 2, stages):
        assert found == pytest.approx({"zero_grad": 2, "cut": 1}, rel=0.01)


@slow  # tests/integrations has the cached loss under a trainer
@needs_libraries
@pytest.mark.parametrize("stage", range(4))
def test_the_cached_loss_of_sentence_transformers_has_one_reduction_and_the_uncached_gradient(
    stage: int,
) -> None:
    said, unforeseen = run("cached_mnrl.py", "--stage", str(stage), "--steps", "20")
    assert not unforeseen
    once, many = numbers(r"reduced ([\d.]+) x coalesced, ([\d.]+) x one by one", said)
    assert once == pytest.approx(1, abs=0.01) and many == pytest.approx(8, abs=0.08)
    found, chance = numbers(r"retrieval: ([\d.]+)% .* chance ([\d.]+)%", said)
    assert found > 5 * chance
    assert numbers(r"uncached loss to (\S+) \(relative, float64\)", said)[0] < 1e-10
