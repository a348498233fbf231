"""What codecs keep, in a checkpoint: each rank's own residual, or its shard of the sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import codecs
from fzero.checkpoint import Mirror, load, save, save_async
from fzero.checkpoint.elements import state_of_rank
from fzero.machine.compress import RESIDUAL, memory_flats, start_slots
from fzero.machine.packing import unpack
from fzero.state import TrainState
from tests.adapter.on_ranks import on_ranks
from tests.checkpoint.forge import edit
from tests.transforms.wired import INT8, LR, Batch, Odd, noise

UPDATES, POWER = 2, codecs.powersgd(rank=2)


def step_of(stage: int, codec: Any = INT8, over: Any = "all", **options: Any) -> Any:
    apply, _ = fzero.functionalize(Odd())

    def step_fn(state: Any, number: Tensor) -> Any:
        x = noise(fzero.axis_index(), int(number))
        state, loss = fzero.grad_and_reduce(lambda p: apply(p, x), state)()
        return fzero.apply_gradients(state), loss

    encoded = fzero.compress(step_fn, gradients=codec, over=over)
    return fzero.shard(encoded, stage=stage, **options)


def begun(step: Any) -> Any:
    return step.init(fzero.functionalize(Odd())[1], fzero.optim.sgd(LR))


def trained(step: Any, state: Any, ranks: int, first: int = 0) -> Any:
    for number in range(first, first + UPDATES):
        state, _ = step(state, torch.full((ranks,), float(number)))
    return state


def whole(state: TrainState) -> dict[str, Tensor]:
    """{path: sum_r e_r} of a stacked state; and where the factors of PowerSGD start."""
    layout, found = state.setup.layout, {}
    for index, flat in zip(layout.trainable, memory_flats(state), strict=False):
        paths = [layout.leaves[i].path for i in layout.groups[index].leaves]
        found.update(zip(paths, unpack(layout, index, flat.sum(0)), strict=True))
    first: TrainState = state_of_rank(state, 0)
    return found | {f"start {layout.leaves[leaf].path}": q for leaf, q in start_slots(first)}


def same_bits(found: TrainState, wanted: TrainState) -> None:
    for one, other in (
        (found.params.flats, wanted.params.flats),
        (memory_flats(found), memory_flats(wanted)),
    ):
        for x, y in zip(one, other, strict=True):
            assert torch.equal(x, y)


def by_mirror(path: Path, state: Any, like: Any) -> Any:
    Mirror(path, every=1).update(state)
    return Mirror(path, every=1).restore(like)[0]


def by(saving: Any) -> Any:
    def moved(path: Path, state: Any, like: Any) -> Any:
        saving(path, state)
        return load(path, like)

    return moved


@pytest.mark.parametrize(
    ("stage", "codec", "moved"),
    [
        (1, INT8, by(save)),
        (3, INT8, by(save)),
        (2, INT8, by(save_async)),
        (0, POWER, by(save)),
        (3, POWER, by(save)),
        (0, POWER, by_mirror),
        (3, POWER, by_mirror),
    ],
)
def test_on_as_many_ranks_training_goes_on_with_the_same_bits(
    stage: int, codec: Any, moved: Any, tmp_path: Path
) -> None:
    step = fzero.simulate(step_of(stage, codec), world_size=3)
    state = trained(step, begun(step), 3)
    loaded = moved(tmp_path, state, begun(step))
    same_bits(trained(step, loaded, 3, UPDATES), trained(step, state, 3, UPDATES))


def test_factors_start_anew_where_they_have_another_rank(tmp_path: Path) -> None:
    step = fzero.simulate(step_of(2, POWER), world_size=3)
    save(tmp_path, trained(step, begun(step), 3))
    other = fzero.simulate(step_of(3, codecs.powersgd(rank=1)), world_size=2)
    with pytest.warns(UserWarning, match="start has other shapes there than here"):
        loaded = load(tmp_path, begun(other))
    trained(other, loaded, 2, UPDATES)


@pytest.mark.parametrize(("ranks", "stage", "codec"), [(2, 3, INT8), (4, 1, INT8), (2, 3, POWER)])
def test_on_other_ranks_and_stages_sums_are_what_they_were_and_factors_start_where_they_did(
    ranks: int, stage: int, codec: Any, tmp_path: Path
) -> None:
    step = fzero.simulate(step_of(2, codec), world_size=3)
    state = trained(step, begun(step), 3)
    save(tmp_path, state)
    other = fzero.simulate(step_of(stage, codec), world_size=ranks)
    found, wanted = whole(load(tmp_path, begun(other))), whole(state)
    assert any(value.any() for value in wanted.values())
    for path, value in wanted.items():
        torch.testing.assert_close(found[path], value, rtol=0, atol=1e-6)


def test_what_one_side_does_not_have_is_left_out_or_zero(tmp_path: Path) -> None:
    step = fzero.simulate(step_of(2), world_size=2)
    plain = fzero.simulate(step_of(2, None), world_size=2)
    save(tmp_path / "with", trained(step, begun(step), 2))
    save(tmp_path / "without", trained(plain, begun(plain), 2))
    assert RESIDUAL not in load(tmp_path / "with", begun(plain)).slots
    loaded = load(tmp_path / "without", trained(step, begun(step), 2))
    assert RESIDUAL in loaded.slots
    assert not any(flat.any() for flat in memory_flats(loaded))


@on_ranks(2)
def test_an_engine_on_gloo_goes_on_with_the_same_bits(rank: int, tmp_path: Path) -> None:
    first, second = engine_of_odd(), engine_of_odd()
    for number in range(UPDATES):
        train(first, noise(rank, number))
    save(tmp_path, first)
    load(tmp_path, second)
    for engine in (first, second):
        train(engine, noise(rank, UPDATES))
    mine, theirs = (torch.cat(memory_flats(e.state)) for e in (first, second))
    assert torch.equal(mine, theirs) and mine.any()
    found, wanted = first.full_parameters(), second.full_parameters()
    assert all(torch.equal(found[path], wanted[path]) for path in wanted)


def engine_of_odd() -> fzero.adapter.Engine:
    module = Odd()
    learns = [p for p in module.parameters() if p.requires_grad]
    return fzero.adapter.Engine(
        module, torch.optim.SGD(learns, LR), stage=3, compress=fzero.Compress(gradients=INT8)
    )


def train(engine: fzero.adapter.Engine, x: Batch) -> None:
    engine(x).backward()
    engine.step()


MESH: dict[str, Any] = {"mesh": (2, 2)}
PLACES: list[tuple[int, int, Any, dict[str, Any]]] = [
    (3, 0, "all", {}),  # the sum has a memory, too
    (4, 2, "all", MESH),
    (4, 3, "replicas", MESH),
    (4, 1, "replicas", {**MESH, "optimizer_over": "all"}),
    (4, 0, "all", MESH),
]


@pytest.mark.parametrize(("ranks", "stage", "over", "options"), PLACES)
def test_every_memory_is_saved_and_goes_on_with_the_same_bits(
    ranks: int, stage: int, over: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    step = fzero.simulate(step_of(stage, INT8, over, **options), world_size=ranks)
    state = trained(step, begun(step), ranks)
    save(tmp_path, state)
    loaded = load(tmp_path, begun(step))
    lost = memory_flats(state)
    assert lost[0].any() and sum(bool(flat[0].any()) for flat in lost[len(lost) // 2 :])
    for x, y in zip(lost, memory_flats(loaded), strict=True):
        assert torch.equal(x, y)


def test_a_memory_of_8_bits_goes_on_as_it_was_saved(tmp_path: Path) -> None:
    for kept in (torch.int8, torch.bfloat16):
        step = fzero.simulate(step_of(0, fzero.codecs.int8(memory=kept)), world_size=2)
        state = trained(step, begun(step), 2)
        save(tmp_path / str(kept), state)
        loaded = load(tmp_path / str(kept), begun(step))
        wanted, found = trained(step, state, 2, UPDATES), trained(step, loaded, 2, UPDATES)
        assert {flat.dtype for flat in memory_flats(found)} == {kept}
        same_bits(found, wanted)
        other = fzero.simulate(step_of(2, fzero.codecs.int4()), world_size=3)
        loaded = load(tmp_path / str(kept), begun(other))
        assert memory_flats(loaded)[0].dtype is torch.float32


def test_what_sums_have_lost_is_added_where_they_have_no_memory(tmp_path: Path) -> None:
    def lost(state: TrainState) -> float:
        return float(sum(flat.double().sum() for flat in memory_flats(state)))

    step = fzero.simulate(step_of(0), world_size=2)
    state = trained(step, begun(step), 2)
    save(tmp_path, state)
    for ranks, stage, over, options in ((2, 2, "all", {}), (3, 0, "all", {}), *PLACES[1:]):
        other = fzero.simulate(step_of(stage, INT8, over, **options), world_size=ranks)
        loaded = load(tmp_path, begun(other))
        assert abs(lost(loaded) - lost(state)) < 1e-4 and abs(lost(state)) > 1e-3


@pytest.mark.parametrize(("ranks", "stage", "options"), [(2, 0, {}), (3, 1, {}), (4, 2, MESH)])
def test_a_checkpoint_of_before_that_says_no_forms_is_read(
    ranks: int, stage: int, options: dict[str, Any], tmp_path: Path
) -> None:
    step = fzero.simulate(step_of(0), world_size=2)  # with a memory of sums, too
    save(tmp_path, trained(step, begun(step), 2))
    other = fzero.simulate(step_of(stage, **options), world_size=ranks)
    wanted = load(tmp_path, begun(other))
    edit(tmp_path, lambda body: body.pop("kept"))
    found = load(tmp_path, begun(other))
    for x, y in zip(memory_flats(found), memory_flats(wanted), strict=True):
        assert torch.equal(x, y)
    assert any(flat.any() for flat in memory_flats(wanted))
