"""Checkpoints of local updates while fragments are on their way."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
from fzero.checkpoint import load, save
from fzero.errors import LayoutError
from fzero.state import NAMESPACE
from tests.strategies import integers
from tests.transforms.test_local import PARAMS, linear


def bits(state: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(state, namespace=NAMESPACE) if isinstance(x, Tensor)]


class Training:
    """Steps on virtual ranks, on whole numbers."""

    def __init__(self, mesh: tuple[int, int], stage: int, delay: int = 2, every: int = 4) -> None:
        self.shards, self.ranks = mesh[1], mesh[0] * mesh[1]

        def step_fn(state: Any, x: Tensor) -> Any:
            state, _ = fzero.grad_and_reduce(linear, state)(x)
            return fzero.apply_gradients(state), None

        fn = fzero.local(step_fn, every=every, fragments=2, delay=delay, mixing=0.5)
        step = fzero.shard(fn, stage=stage, mesh=mesh)
        self.run = fzero.simulate(step, world_size=self.ranks)
        self.state = self.new()

    def new(self) -> Any:
        return self.run.init(PARAMS, fzero.optim.adamw(0.25))

    def train(self, first: int, steps: int) -> None:
        for number in range(first, first + steps):
            x = integers((self.ranks // self.shards, 3), number).float() * 4
            self.state, _ = self.run(self.state, x.repeat_interleave(self.shards, 0))


@pytest.mark.parametrize(("stage", "then"), [(0, 0), (2, 2), (3, 1)])
def test_goes_on_bit_for_bit_while_fragments_are_on_their_way(
    stage: int, then: int, tmp_path: Path
) -> None:
    whole, cut, again = Training((2, 2), stage), Training((2, 2), stage), Training((2, 2), then)
    whole.train(0, 11)
    for step in range(1, 8):
        cut.train(step - 1, 1)
        coming = [one.held for one in cut.state.outer.coming]
        assert coming == [step in (2, 3, 6, 7), step in (4, 5)]
        save(tmp_path, cut.state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again.state = load(tmp_path, again.new())
        if step in (3, 5):
            again.train(step, 11 - step)
            if stage == then:
                for found, wanted in zip(bits(again.state), bits(whole.state), strict=True):
                    assert torch.equal(found, wanted)


def test_on_other_shards_values_go_on_and_on_other_replicas_they_start_at_the_anchors(
    tmp_path: Path,
) -> None:
    first, second = Training((2, 2), 3), Training((2, 3), 0)
    first.train(0, 3)
    save(tmp_path, first.state)
    second.state = load(tmp_path, second.new())
    first.train(3, 4)
    second.train(3, 4)

    def read(state: Any) -> Any:
        return fzero.full_params(state, replica=True)

    found = fzero.simulate(read, world_size=6)(second.state)
    for name, wanted in fzero.simulate(read, world_size=4)(first.state).items():
        assert torch.equal(found[name][::3], wanted[::2]), name
    other = Training((3, 1), 1)
    with pytest.warns(UserWarning, match="training starts at the anchors"):
        other.state = load(tmp_path, other.new())
    assert not any(one.held for one in other.state.outer.coming)
    other.train(3, 4)


def test_what_would_arrive_at_another_update_is_not_loaded(tmp_path: Path) -> None:
    first = Training((2, 1), 1)
    first.train(0, 3)
    save(tmp_path, first.state)
    for delay, every in ((1, 4), (2, 5)):
        with pytest.raises(LayoutError, match=r"fragments \[0\] are to arrive, with every=4"):
            load(tmp_path, Training((2, 1), 1, delay, every).new())
    first.train(3, 3)
    first.state = load(tmp_path, first.state)  # into a state with another one on its way
