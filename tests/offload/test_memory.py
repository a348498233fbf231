"""What is said to live on disk does: counted bytes, files that leave nothing behind, pages."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.state import NAMESPACE
from fzero.state.setup import is_on_disk
from tests.adapter.on_ranks import on_ranks
from tests.live_bytes import LiveBytes

LAYERS, WIDTH = 16, 128
UNIT = 4 * WIDTH * WIDTH
P = LAYERS * UNIT
SMALL = 4096  # activations, norms, the loss


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _away(kinds: str, folder: Path) -> fzero.Offload:
    names = {"o": "optimizer", "g": "gradients", "p": "params"}
    homes: dict[str, Any] = {names[kind]: "disk" for kind in kinds}
    return fzero.Offload(**homes, folder=folder)


def _train(engine: Engine, steps: int = 2) -> None:
    for _ in range(steps):
        for _ in range(2):
            engine(torch.ones(2, WIDTH)).square().mean().backward()
        engine.step()


@on_ranks(2)
@pytest.mark.parametrize(("stage", "kinds"), [(0, "o"), (2, "og"), (3, "ogp")])
def test_state_bytes_say_what_is_on_the_device_and_what_on_disk(
    rank: int, world_size: int, stage: int, kinds: str, tmp_path: Path
) -> None:
    own = tmp_path / str(rank)
    own.mkdir()
    engine = Engine(_net(), torch.optim.AdamW, stage=stage, offload=_away(kinds, own))
    _train(engine)
    engine(torch.ones(2, WIDTH)).square().mean().backward()
    w = world_size if stage else 1
    held = fzero.state_bytes(engine.state)
    sizes = {"o": 2 * P // w, "g": P // w, "p": P // (w if stage == 3 else 1)}
    counters = held["total"] - sum(sizes.values())
    assert held["on disk"] == sum(sizes[kind] for kind in kinds)
    assert held["on device"] == sum(sizes[kind] for kind in set("ogp") - set(kinds)) + counters
    assert 0 < counters < 100
    flats = {"o": engine.state.optimizer, "g": engine.state.gradients, "p": engine.state.params}
    for kind, tree in flats.items():
        leaves: list[Any] = optree.tree_leaves(tree, namespace=NAMESPACE)
        every = [x for x in leaves if x.ndim and x.numel()]
        assert every
        assert all(is_on_disk(x) == (kind in kinds) for x in every)
    assert not list(own.iterdir())  # files have no name there: nothing can be left behind


@on_ranks(1, 2)
def test_with_everything_on_disk_a_step_holds_few_units_in_memory(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    own = tmp_path / str(rank)  # of this machine
    own.mkdir()
    with LiveBytes() as live:
        engine = Engine(_net(), torch.optim.AdamW, stage=3, offload=_away("ogp", own))
        _train(engine)  # the schedule is recorded
        # Two gathered, the gradients of two, and of one what the other rank has sent.
        with live.at_most(5.5 * UNIT + 8 * SMALL, "a step with everything on disk"):
            _train(engine)
        assert live.settled(SMALL - 1) < SMALL


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_a_step_the_pages_of_what_lives_on_disk_are_not_in_memory(tmp_path: Path) -> None:
    def mapped_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) * 1024

    away = partial(fzero.offload, optimizer="disk", folder=tmp_path)

    @partial(fzero.shard, stage=2, donate=True)
    @away
    def step(state: fzero.TrainState, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).sum(), state)(x)
        return fzero.apply_gradients(state), loss

    for numel in (1, 4 * 2**20):  # the first one maps the code that runs
        before = mapped_bytes()
        state = step.init({"w": torch.zeros(numel)}, fzero.optim.adamw(0.1))
        for _ in range(2):
            state, _ = step(state, torch.tensor(1.0))
    assert fzero.state_bytes(state)["on disk"] == 8 * numel
    assert mapped_bytes() - before < numel  # of 8 numel bytes
