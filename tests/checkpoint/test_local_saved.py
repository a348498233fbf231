"""Local updates in checkpoints: each replica's own values, anchors and outer momentum."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import export_safetensors, load, save
from fzero.errors import LayoutError
from fzero.state import NAMESPACE
from tests.strategies import integers
from tests.transforms.test_local import PARAMS, data, error, linear, model

EVERY = 3


def step_fn(state: Any, x: Tensor) -> Any:
    state, _ = fzero.grad_and_reduce(linear, state)(x)
    return fzero.apply_gradients(state), None


class Training:
    """Steps on virtual ranks, on whole numbers: sums are exact, whatever the shards."""

    def __init__(self, mesh: tuple[int, int], stage: int, wrap: Any = None, **local: Any) -> None:
        """local: options of `fzero.local`; every=0: no local updates."""
        self.replicas, self.shards = mesh
        self.ranks = mesh[0] * mesh[1]
        fn = step_fn if wrap is None else wrap(step_fn)
        if local.setdefault("every", EVERY):
            fn = fzero.local(fn, **local)
        step = fzero.shard(fn, stage=stage, mesh=mesh)
        self.run = fzero.simulate(step, world_size=self.ranks)
        self.state = self.new()

    def new(self) -> Any:
        return self.run.init(PARAMS, fzero.optim.adamw(0.25))

    def train(self, first: int, steps: int) -> None:
        for number in range(first, first + steps):
            x = integers((self.replicas, 3), number).float() * 4
            self.state, _ = self.run(self.state, x.repeat_interleave(self.shards, 0))

    def params(self, replica: bool) -> Any:
        def read(state: Any) -> Any:
            return fzero.full_params(state, replica=replica)

        return fzero.simulate(read, world_size=self.ranks)(self.state)


def late(mesh: tuple[int, int], stage: int, delay: int = 2, every: int = 4) -> Training:
    """One whose fragments are on their way for some updates."""
    return Training(mesh, stage, every=every, fragments=2, delay=delay, mixing=0.5)


def bits(state: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(state, namespace=NAMESPACE) if isinstance(x, Tensor)]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_goes_on_between_two_outer_updates_bit_for_bit(
    mesh: tuple[int, int], stage: int, tmp_path: Path
) -> None:
    whole, cut = Training(mesh, stage), Training(mesh, stage)
    whole.train(0, 8)
    cut.train(0, 4)
    save(tmp_path, cut.state)
    again = Training(mesh, stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.state = load(tmp_path, again.new())
    again.train(4, 4)
    for found, wanted in zip(bits(again.state), bits(whole.state), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("stage", "then"), [(3, 0), (0, 2)])
def test_another_number_of_shards_holds_the_same_values(
    stage: int, then: int, tmp_path: Path
) -> None:
    first = Training((2, 2), stage)
    first.train(0, 5)
    save(tmp_path, first.state)
    second = Training((2, 3), then)
    second.state = load(tmp_path, second.new())
    for _ in range(2):
        for replica in (False, True):
            before, after = first.params(replica), second.params(replica)
            for name in PARAMS:
                for one in range(2):
                    assert torch.equal(after[name][3 * one], before[name][2 * one]), name
        first.train(5, 1)  # with the outer update, of the same momentum
        second.train(5, 1)


@pytest.mark.parametrize("stage", [0, 2])
def test_another_number_of_replicas_starts_at_the_anchors_and_says_so(
    stage: int, tmp_path: Path
) -> None:
    first = Training((2, 2), stage)
    first.train(0, 5)
    save(tmp_path, first.state)
    anchors = first.params(replica=False)
    assert not torch.equal(anchors["w"], first.params(replica=True)["w"])
    for mesh, local in (((3, 1), True), ((2, 2), False)):
        second = Training(mesh, stage, every=EVERY if local else 0)
        with pytest.warns(UserWarning, match="has 2 replicas, 2 updates after"):
            second.state = load(tmp_path, second.new())
        for replica in (False, True):
            for name, wanted in anchors.items():
                for found in second.params(replica)[name]:
                    assert torch.equal(found, wanted[0]), name
        second.train(5, 4)


def test_a_state_without_local_updates_is_where_replicas_start(tmp_path: Path) -> None:
    first = Training((1, 2), 1, every=0)
    first.train(0, 3)
    save(tmp_path, first.state)
    second = Training((2, 2), 2)
    second.state = load(tmp_path, second.new())
    for replica in (False, True):
        found = second.params(replica)
        assert all(torch.equal(found[name][3], x[0]) for name, x in first.params(True).items())
    second.train(3, 4)


def test_replicas_that_skipped_other_updates_keep_their_counts_and_scales(tmp_path: Path) -> None:
    def once_too_large(fn: Any) -> Any:
        def step(state: Any, x: Tensor) -> Any:
            return fn(state, x * torch.where(x[0] == 8, float("inf"), 1.0))

        return fzero.scale_loss(step, scale="dynamic")

    training = Training((2, 1), 2, once_too_large)
    for row in ([8.0, 4.0], [4.0, 4.0]):
        x = torch.tensor(row)[:, None].expand(2, 3)
        training.state, _ = training.run(training.state, x.contiguous())
    assert training.state.step.tolist() == [1, 2]
    save(tmp_path, training.state)
    found = load(tmp_path, training.new())
    for one, other in zip(bits(found), bits(training.state), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_goes_on(stage: int, tmp_path: Path) -> None:
    def body(batches: Tensor) -> Any:
        def engine() -> Engine:
            module = model()
            optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
            return Engine(module, optimizer, stage=stage, mesh=(2, 2), local=local)

        def train(one: Engine, some: Tensor) -> None:
            for batch in some:
                error(one, batch).backward()
                one.step()

        whole, cut, again = engine(), engine(), engine()
        train(whole, batches)
        train(cut, batches[:3])
        now: Any = cut.state
        again.state = optree.tree_map(torch.clone, now, namespace=NAMESPACE)
        train(again, batches[3:])
        return [list(one.full_parameters().values()) for one in (whole, again)]

    local = fzero.Local(every=2)
    whole, again = fzero.simulate(body, world_size=4)(data(4).transpose(0, 1))
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


def test_what_files_of_others_cannot_hold_is_refused(tmp_path: Path) -> None:
    training = Training((2, 1), 1)
    with pytest.raises(LayoutError, match="a state with local updates"):
        export_safetensors(tmp_path / "x", training.state)
    save(tmp_path, training.state)
    step = fzero.local(step_fn, every=2, outer=fzero.optim.sgd(1.0))
    run = fzero.simulate(fzero.shard(step, stage=1), world_size=2)
    with pytest.raises(LayoutError, match="outer rule"):
        load(tmp_path, run.init(PARAMS, fzero.optim.adamw(0.25)))


# While fragments are on their way.


@pytest.mark.parametrize(("stage", "then"), [(0, 0), (2, 2), (3, 1)])
def test_goes_on_bit_for_bit_while_fragments_are_on_their_way(
    stage: int, then: int, tmp_path: Path
) -> None:
    whole, cut, again = late((2, 2), stage), late((2, 2), stage), late((2, 2), then)
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
    first, second = late((2, 2), 3), late((2, 3), 0)
    first.train(0, 3)
    save(tmp_path, first.state)
    second.state = load(tmp_path, second.new())
    first.train(3, 4)
    second.train(3, 4)

    found = second.params(replica=True)
    for name, wanted in first.params(replica=True).items():
        assert torch.equal(found[name][::3], wanted[::2]), name
    other = late((3, 1), 1)
    with pytest.warns(UserWarning, match="training starts at the anchors"):
        other.state = load(tmp_path, other.new())
    assert not any(one.held for one in other.state.outer.coming)
    other.train(3, 4)


def test_what_would_arrive_at_another_update_is_not_loaded(tmp_path: Path) -> None:
    first = late((2, 1), 1)
    first.train(0, 3)
    save(tmp_path, first.state)
    for delay, every in ((1, 4), (2, 5)):
        with pytest.raises(LayoutError, match=r"fragments \[0\] are to arrive, with every=4"):
            load(tmp_path, late((2, 1), 1, delay, every).new())
    first.train(3, 3)
    first.state = load(tmp_path, first.state)  # into a state with another one on its way
