"""The examples do what they print: alone, under torchrun, and by their own functions."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from tests.covering import covered
from tests.ranks import spawn_script

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

ROOT = Path(__file__).parent.parent
SCRIPT = "examples/grad_cache.py"
WIDTH = 8


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the example as a module; beside it lie those that it imports."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("grad_cache")


def small_batch(example: ModuleType, count: int) -> Any:
    texts = torch.randint(1, 256, (2, count, 20), dtype=torch.uint8)
    return example.Pairs(texts[0], texts[1])


def towers(example: ModuleType) -> tuple[Any, dict[str, Tensor]]:
    return fzero.functionalize(example.TwoTowers(WIDTH))


def told(output: str) -> dict[str, Any]:
    """Return the numbers that a run printed."""
    lines = re.findall(r"(coalesced|one by one) +gradient reduced (\d+) x, ([\d,]+) bytes", output)
    sent = {name: int(number.replace(",", "")) for name, _, number in lines}
    found, chance = re.findall(r"retrieval: ([\d.]+)% .* chance ([\d.]+)%", output)[0]
    return {
        "reductions": {name: int(number) for name, number, _ in lines},
        "sent": sent,
        "found": float(found),
        "chance": float(chance),
        "error": [float(e) for e in re.findall(r"is the uncached one to (\S+)", output)],
        "losses": [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)],
    }


def run_alone(*args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110)


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_alone_it_learns_and_counts_on_virtual_ranks() -> None:
    done = run_alone("--stage", "3", "--steps", "30", "--batch", "256", "--chunks", "4", "--check")
    assert done.returncode == 0, done.stderr
    seen = told(done.stdout)
    assert seen["reductions"] == {"coalesced": 1, "one by one": 4}
    assert seen["sent"]["coalesced"] < seen["sent"]["one by one"]
    assert "one step on 4 virtual ranks" in done.stdout
    assert seen["losses"][-1] < 0.6 * seen["losses"][0]
    assert seen["chance"] == 0.4 and seen["found"] > 5 * seen["chance"]
    assert len(seen["error"]) == 1 and seen["error"][0] < 1e-12


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_under_torchrun_it_does_the_same() -> None:
    args = ["--stage", "2", "--steps", "2", "--batch", "64", "--chunks", "4", "--check"]
    done = spawn_script(SCRIPT, 2, args)
    assert done.returncode == 0, done.stderr
    seen = told(done.stdout)
    assert "2 rank(s)" in done.stdout and "one step on 2 ranks" in done.stdout
    assert seen["reductions"] == {"coalesced": 1, "one by one": 4}
    parameters, embeddings = 557_056 * 4, 64 * 2 * 64 * 4
    loss = embeddings + 4  # 2 E (W-1)/W for the gather and its transpose, and the mean loss
    assert seen["sent"] == {
        "coalesced": parameters + loss,
        "one by one": 5 * parameters // 2 + loss,
    }
    assert seen["error"][0] < 1e-12
    assert done.stdout.count("retrieval") == 1  # rank 0 alone speaks


@pytest.mark.parametrize(
    "args", [("--batch", "100"), pytest.param(("--chunks", "0"), marks=pytest.mark.slow)]
)
def test_a_batch_that_cannot_be_split_is_refused(args: tuple[str, ...]) -> None:
    done = run_alone(*args)
    assert done.returncode == 2
    assert "Fix: at least one chunk, and a batch that is a multiple of" in done.stderr


def test_the_pairs_are_real_deterministic_and_held_out_by_file(example: ModuleType) -> None:
    pairs = importlib.import_module("pairs")
    train, pool = pairs.read_pairs(64, held_out=40, count=100)
    again, _ = pairs.read_pairs(64, held_out=40, count=100)
    assert torch.equal(train.docstrings, again.docstrings)
    assert torch.equal(train.codes, again.codes)
    sides = [{bytes(row.tolist()) for row in side.codes} for side in (train, pool)]
    assert len(pool.codes) == 40 and len(train.codes) == 100 and not sides[0] & sides[1]
    assert bytes(train.codes[0].tolist()).lstrip().startswith((b"def ", b"async def "))
    assert doctest.testmod(pairs).failed == 0 and doctest.testmod(pairs).attempted >= 3


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_mean_of_the_ranks_losses_is_that_of_the_whole_batch(
    example: ModuleType, world_size: int
) -> None:
    own = torch.nn.functional.normalize(torch.randn(world_size, 3, 2, 5).double(), dim=-1)
    mean = fzero.simulate(lambda e: fzero.pmean(example.info_nce(e)), world_size=world_size)(own)
    q, c = own.flatten(0, 1).unbind(1)
    target = torch.arange(len(q))
    entropy = torch.nn.functional.cross_entropy
    scores = q @ c.T / example.TEMPERATURE
    whole = (entropy(scores, target) + entropy(scores.T, target)) / 2
    torch.testing.assert_close(mean, whole.expand(world_size))


@covered(stage=[0, 1, 2, 3], world_size=[1, 3])
def test_the_cached_gradient_is_the_uncached_one(
    example: ModuleType, stage: int, world_size: int
) -> None:
    batch, (apply, params) = small_batch(example, 12), towers(example)
    args = Namespace(stage=stage, chunks=2)
    cached = example.make_grad_cache(apply)

    def errors() -> float:
        whole = example.whole_loss(apply, batch)
        return example.gradient_error(cached, whole, params, batch, args)

    assert fzero.simulate(errors, world_size=world_size)().max() < example.TOLERANCE

    def lost(state: Any, chunks: Any) -> Any:  # the cache of the last chunk is never replayed
        return cached(state, chunks[:-1])

    whole = example.whole_loss(apply, batch)
    assert example.gradient_error(lost, whole, params, batch, args) > 0.01  # the check can fail


def sent(
    example: ModuleType, stage: int, chunks: int, wrap: Any, **options: Any
) -> tuple[float, float]:
    """What a step on 2 virtual ranks sends for each padded byte, and reductions of each bucket.

    Without what the loss itself sends: the embeddings there and back, and its mean.
    """
    batch, (apply, params) = small_batch(example, 16), towers(example)
    step = wrap(example.with_update(example.make_grad_cache(apply)))
    logs: list[Any] = []

    def one_step() -> Any:
        state = fzero.init(params, fzero.optim.adamw(0.1), stage=stage, **options)
        with fzero.count_collectives() as log:
            step(state, example.my_chunks(batch, chunks))
        layout = state.setup.layout
        logs.append((log, [layout.full_numel(i) for i in range(len(layout.groups))]))

    fzero.simulate(one_step, world_size=2)()
    log, sizes = logs[0]
    loss = 16 * 2 * WIDTH * 4 + 4
    sent_bytes = log.wire_bytes(ops=("all_gather", "reduce_scatter", "all_reduce")) - loss
    reductions = [e for e in log.of() if e.op != "all_gather" and e.numel in sizes]
    return sent_bytes / (4 * sum(sizes) / 2), len(reductions) / len(sizes)


def plain(step: Any) -> Any:
    return step


@pytest.mark.parametrize("chunks", [1, 4])
def test_reductions_and_bytes_are_those_of_the_readme(example: ModuleType, chunks: int) -> None:
    n = chunks
    table = {0: (2, 2 * n), 1: (2, n + 1), 2: (2, n + 1), 3: (2 * n + 2, 3 * n + 1)}
    for stage, factors in table.items():
        for wrap, factor, reduced in zip((fzero.coalesce, plain), factors, (1, n), strict=True):
            found, reductions = sent(example, stage, n, wrap)
            assert found == factor if stage < 3 else found <= factor
            assert reductions == reduced
    for wrap, factor in ((fzero.coalesce, n + 2), (plain, 3 * n)):
        found, _ = sent(example, 3, n, wrap, reshard_after_forward="window")
        assert found == factor
