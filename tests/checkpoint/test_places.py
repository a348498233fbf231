"""Checkpoints of states on a part of a mesh: each place along its other axes by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import CheckpointError, load, read_extra, save
from fzero.errors import AxisError
from tests.experts_on_axes import PARAMS, batches, loss, meshes, mine_of, optimizers
from tests.ranks import run_ranks
from tests.strategies import same

FOUR = fzero.Mesh({"data": 1, "expert": 4})
PAIRS = fzero.Mesh({"data": 2, "expert": 2})
WIDE = fzero.Mesh({"data": 4, "expert": 2})


def step_of(mesh: fzero.Mesh, stage: int) -> Any:
    def step_fn(states: Any, x: Any) -> Any:
        states, value = fzero.grad_and_reduce(loss, states)(x)
        return fzero.apply_gradients(states), value

    return fzero.shard(step_fn, stage=stage, mesh=meshes(mesh))


def begun(mesh: fzero.Mesh, stage: int, params: Any = PARAMS) -> Any:
    rules = {**optimizers(), "experts": fzero.optim.adam(0.25)}
    return step_of(mesh, stage).init(mine_of(params, mesh), rules)


def on_virtual_ranks(mesh: fzero.Mesh, stage: int, params: Any = PARAMS) -> Any:
    ranks = torch.Size(n for _, n in mesh.axes).numel()
    return fzero.simulate(lambda: begun(mesh, stage, params), world_size=ranks)()


def trained(mesh: fzero.Mesh, stage: int) -> Any:
    ranks = torch.Size(n for _, n in mesh.axes).numel()
    step = fzero.simulate(step_of(mesh, stage), world_size=ranks)
    return step(on_virtual_ranks(mesh, stage), batches(ranks)[0])[0]


@pytest.mark.parametrize(
    ("before", "after"), [((PAIRS, 2), (PAIRS, 0)), ((PAIRS, 1), (WIDE, 2)), ((FOUR, 2), (FOUR, 0))]
)
def test_each_place_reads_its_own_folder_at_another_stage_and_number_of_shards(
    before: Any, after: Any, tmp_path: Path
) -> None:
    zeros: Any = {
        name: {key: torch.zeros_like(x) for key, x in tree.items()} for name, tree in PARAMS.items()
    }
    states, like = trained(*before), on_virtual_ranks(after[0], after[1], zeros)
    save(tmp_path, states["experts"], extra={"epoch": 3})
    save(tmp_path, states["dense"])  # beside them
    size = dict(before[0].axes)["expert"]
    places = [f"expert={e}of{size}" for e in range(size)]
    assert sorted(one.name for one in tmp_path.glob("expert*")) == places
    assert all(read_extra(tmp_path / one) == {"epoch": 3} for one in places)
    found: Any = {name: load(tmp_path, one) for name, one in like.items()}
    ranks = [len(states["experts"].step), len(found["experts"].step)]
    saved, read = (
        fzero.simulate(fzero.full_params, world_size=n)(tree)["experts"]["up"]
        for n, tree in zip(ranks, (states, found), strict=True)
    )
    for rank in range(ranks[1]):  # the last axis is the fastest
        same(read[rank], saved[rank % size])
    assert found["experts"].step.tolist() == [1] * ranks[1]
    if before[0] is after[0]:  # moments of Adam are there too: the next update is the same
        again = [
            fzero.simulate(step_of(mesh, stage), world_size=ranks[0])(x, batches(ranks[0])[1])[0]
            for (mesh, stage), x in ((before, states), (after, found))
        ]
        one, other = (
            fzero.simulate(fzero.full_params, world_size=ranks[0])(x)["experts"]["up"]
            for x in again
        )
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_place_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    save(tmp_path, trained(FOUR, 2)["experts"])
    with pytest.raises(
        CheckpointError,
        match=r"no expert=0of2[\s\S]*expert=3of4[\s\S]*path of a place",
    ):
        load(tmp_path, on_virtual_ranks(PAIRS, 2)["experts"])


def test_a_save_on_fewer_places_leaves_none_of_an_earlier_save(tmp_path: Path) -> None:
    four, two = trained(FOUR, 2)["experts"], trained(PAIRS, 2)["experts"]
    save(tmp_path, four)
    (tmp_path / "notes=1of2").mkdir()  # no checkpoint
    shutil.copytree(tmp_path / "expert=3of4", tmp_path / "kept")
    save(tmp_path, two)
    there = sorted(one.name for one in tmp_path.iterdir())
    own = [".lock", "checkpoint-expert.json", "expert=0of2", "expert=1of2"]
    assert there == [*own, "kept", "notes=1of2"]
    with pytest.raises(CheckpointError, match="there is no expert=0of4"):
        load(tmp_path, four)
    shutil.copytree(tmp_path / "kept", tmp_path / "expert=3of4")  # of somebody else
    save(tmp_path, two)
    assert (tmp_path / "expert=3of4" / "checkpoint.json").is_file()
    load(tmp_path, two)
    saved_one_by_one(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"\['expert=3of4'\][\s\S]*which of them was saved last"
    ):
        load(tmp_path, two)


def saved_one_by_one(folder: Path) -> None:
    """Make a folder as versions of fzero have written it that committed each place alone."""
    (folder / "checkpoint-expert.json").unlink()


def test_places_of_two_saves_are_no_checkpoint(tmp_path: Path) -> None:
    """Also after as many updates."""
    states = trained(PAIRS, 2)["experts"]
    save(tmp_path / "other", states)
    save(tmp_path, states)
    shutil.rmtree(tmp_path / "expert=1of2")
    shutil.move(tmp_path / "other" / "expert=1of2", tmp_path)
    with pytest.raises(CheckpointError, match=r"is missing, and .*expert.json names it"):
        load(tmp_path, states)


def test_places_that_were_saved_one_by_one_are_read(tmp_path: Path) -> None:
    states = trained(PAIRS, 2)["experts"]
    save(tmp_path, states)
    saved_one_by_one(tmp_path)
    same(load(tmp_path, on_virtual_ranks(PAIRS, 2)["experts"]), states)


def test_places_after_other_numbers_of_updates_are_no_checkpoint(tmp_path: Path) -> None:
    later = trained(PAIRS, 2)["experts"]
    save(tmp_path / "begun", on_virtual_ranks(PAIRS, 2)["experts"])
    save(tmp_path, later)
    saved_one_by_one(tmp_path)
    shutil.rmtree(tmp_path / "expert=1of2")
    shutil.move(tmp_path / "begun" / "expert=1of2", tmp_path)
    with pytest.raises(CheckpointError, match=r"expert=0of2 after 1 updates and expert=1of2 after"):
        load(tmp_path, later)


def test_what_knows_one_place_refuses_a_part_of_a_mesh(tmp_path: Path) -> None:
    experts = on_virtual_ranks(PAIRS, 2)["experts"]
    with pytest.raises(AxisError, match=r"save: [\s\S]*is a part of a mesh"):
        fzero.checkpoint.save_async(tmp_path, experts)
    with pytest.raises(AxisError, match=r"reshard: .* is a part of a mesh"):
        fzero.reshard(experts, stage=0)
    with pytest.raises(AxisError, match=r"Mirror.update: .* is a part of a mesh"):
        fzero.checkpoint.Mirror(every=1).update(experts)


def moved(rank: int, world_size: int, folder: str) -> Any:
    """Saved on four places; then each rank of two places loads two of them, by path."""
    step, xs = step_of(FOUR, 2), batches(world_size)
    states, _ = step(begun(FOUR, 2), xs[0][rank])
    save(folder, states["experts"])
    place = PAIRS.axis.along("expert").rank
    found = []
    for mine in (2 * place, 2 * place + 1):
        quarter = {"up": torch.zeros_like(PARAMS["experts"]["up"].chunk(4)[0])}
        like = fzero.init(quarter, fzero.optim.adam(0.25), stage=2, mesh=PAIRS["data"])
        found.append(load(Path(folder) / f"expert={mine}of4", like, rng=False))
    same_place = load(folder, begun(FOUR, 0)["experts"])
    try:
        load(folder, begun(PAIRS, 2)["experts"])
        said = "nothing was raised"
    except CheckpointError as error:
        said = str(error)
    own, *pair = (fzero.full_params(one)["up"] for one in (states["experts"], *found))
    same(fzero.full_params(same_place)["up"], own)
    return own, pair, place, [int(one.step) for one in found], said


@pytest.mark.xdist_group("gloo")
def test_of_four_places_a_rank_of_two_loads_two_by_path(tmp_path: Path) -> None:
    results = run_ranks(moved, 4, str(tmp_path))
    saved = [own for own, *_ in results]
    for _, pair, place, steps, said in results:
        same(pair[0], saved[2 * place])
        same(pair[1], saved[2 * place + 1])
        assert steps == [1, 1]
        assert "there is no expert=" in said and "expert=3of4" in said, said
