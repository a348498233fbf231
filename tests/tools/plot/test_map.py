"""The partition map: it covers every element once, and says where the values really are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given

import fzero
from fzero.state import TrainState
from fzero.tools.plot import PartitionMap, partition_map
from tests.ranks import run_ranks
from tests.tools.plot.states import Case, cases, loss_fn, stacked_states

KINDS = {"parameters", "gathered", "window", "gradients", "optimizer"}


def covered(found: PartitionMap, kind: str, rank: int) -> list[int]:
    return [i for s in found.of(rank, kind) for i in range(s.start, s.stop)]


@given(case=cases())
def test_segments_cover_every_element_exactly_once_over_ranks(case: Case) -> None:
    for state in stacked_states(case):
        found = partition_map(state)
        every = [i for span in found.groups for i in range(span.start, span.stop)]
        assert every == list(range(found.total))
        learns = [i for g in found.groups if g.trainable for i in range(g.start, g.stop)]
        assert found.ranks == tuple(range(case.ranks)) and found.world_size == case.ranks
        for kind, placement in found.kinds:
            wanted = every if kind in ("parameters", "gathered") else learns
            rows = [covered(found, kind, rank) for rank in found.ranks]
            if placement.startswith("sharded"):
                copies = case.mesh[0] if placement == "sharded" else 1
                assert sorted(i for row in rows for i in row) == sorted(wanted * copies)
                assert len({len(row) for row in rows}) == 1  # as many on every rank
            elif placement == "none":
                assert rows == [[]] * case.ranks
            else:
                assert rows == [wanted] * case.ranks


@given(case=cases())
def test_each_segment_is_where_its_values_are(case: Case) -> None:
    """Parameter i of the model has the value i, and so has its gradient (of sum p^2 / 2)."""
    state = stacked_states(case)[2]
    found, layout = partition_map(state), state.setup.layout
    flat = {path: p.detach().flatten().tolist() for path, p in case.params.items()}
    held = {
        "parameters": dict(enumerate(state.params.flats)),
        "gradients": dict(zip(layout.trainable, state.gradients.flats, strict=False)),
    }
    placement = dict(found.kinds)
    for s in (s for s in found.segments if s.kind in held):
        mine = held[s.kind][s.group][s.rank].tolist()
        start = s.start - found.groups[s.group].start
        (replicas, shards), shard_numel = case.mesh, layout.groups[s.group].shard_numel
        if placement[s.kind].startswith("sharded"):
            start -= s.rank % shards * shard_numel
        if placement[s.kind] == "sharded over all ranks":
            start -= s.rank // shards * (shard_numel // replicas)
        length = s.stop - s.start
        values = mine[start : start + length]
        if s.leaf is None:
            assert values == [0.0] * length
        else:
            assert values == flat[found.leaves[s.leaf]][s.offset : s.offset + length]


@given(case=cases())
def test_kinds_say_what_the_stage_keeps(case: Case) -> None:
    first, inside, reduced = (dict(partition_map(s).kinds) for s in stacked_states(case))
    learns = any(not isinstance(p, torch.nn.Parameter) for p in case.params.values())
    filled = any(p.numel() for p in case.params.values() if not isinstance(p, torch.nn.Parameter))
    assert set(first) == {"parameters", "gradients", "optimizer"} and set(inside) <= KINDS
    replicas, shards = case.mesh
    kept = "replicated" if shards == 1 < replicas else "sharded"
    assert first["parameters"] == (kept if case.stage == 3 else "replicated")
    assert first["gradients"] == "none"
    kept = "sharded over all ranks" if case.over == "all" and replicas > 1 else kept
    sharded = kept if case.stage >= 1 else "replicated"
    assert first["optimizer"] == (sharded if filled else "none")
    assert inside.get("window") == ("partial" if learns else None)
    assert reduced["gradients"] == (sharded if learns else "none")


def test_it_is_plain_data() -> None:
    state = stacked_states(Case({"w": torch.ones(3)}, 2, 2, 64))[2]
    found = partition_map(state)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert found == partition_map(state) and hash(found) == hash(partition_map(state))
    assert len(found.to_dict()["segments"]) == len(found.segments)


def test_parameters_kept_over_a_window_are_shown() -> None:
    @fzero.coalesce
    def step_fn(state: TrainState) -> tuple[TrainState, TrainState]:
        state, _ = fzero.grad_and_reduce(loss_fn, state)()
        return state, state

    step = fzero.simulate(
        fzero.shard(step_fn, stage=3, reshard_after_forward="window"), world_size=2
    )
    _, inside = step(step.init({"w": torch.ones(7)}, fzero.optim.sgd(0.1)))
    found = partition_map(inside)
    assert dict(found.kinds) == {
        "parameters": "sharded",
        "gathered": "replicated",
        "window": "partial",
        "gradients": "none",
        "optimizer": "none",  # plain sgd keeps nothing
    }
    assert [found.label(s) for s in found.of(1, "parameters")] == ["w[4:7]", "padding[1]"]
    assert [found.label(s) for s in found.of(1, "gathered")] == ["w[0:7]", "padding[1]"]


def rank_map(rank: int, world_size: int, stage: int) -> PartitionMap:
    state = fzero.init({"a": torch.ones(3), "b": torch.ones(4)}, fzero.optim.adam(0.1), stage=stage)
    return partition_map(state)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_real_rank_shows_its_own_row_of_the_virtual_map(stage: int) -> None:
    step = fzero.simulate(fzero.shard(lambda state: (state, None), stage=stage), world_size=2)
    params = {"a": torch.ones(3), "b": torch.ones(4)}
    virtual = partition_map(step.init(params, fzero.optim.adam(0.1)))
    for rank, found in enumerate(run_ranks(rank_map, 2, stage)):
        assert found.ranks == (rank,)
        assert found.groups == virtual.groups and found.kinds == virtual.kinds
        assert list(found.segments) == [s for s in virtual.segments if s.rank == rank]


def donated() -> TrainState:
    def step_fn(state: TrainState) -> tuple[TrainState, None]:
        state, _ = fzero.grad_and_reduce(loss_fn, state)()
        return fzero.apply_gradients(state), None

    step = fzero.shard(step_fn, stage=2, donate=True)
    old = step.init({"w": torch.ones(2)}, fzero.optim.adam(0.1))
    step(old)
    return old


def one_virtual_rank() -> TrainState:
    step = fzero.simulate(fzero.shard(lambda state: (state, None), stage=3), world_size=2)
    stacked = step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1))
    return stacked.replace(step=stacked.step[0])  # as it is inside of fzero.simulate


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"w": torch.ones(2)}, fzero.LayoutError, "Fix: pass one TrainState"),
        (None, fzero.LayoutError, "Fix: pass one TrainState"),
        (donated, fzero.DonatedError, "a newer state has the .* of w now"),
        (one_virtual_rank, fzero.AxisError, "virtual ranks"),
    ],
)
def test_what_is_no_state_to_show_is_refused(wrong: Any, error: Any, words: str) -> None:
    state: Any = wrong() if callable(wrong) else wrong
    with pytest.raises(error, match=words):
        partition_map(state)


def test_an_encoded_leaf_is_counted_in_bytes() -> None:
    """64 x 64 codes of 4 bits, and 72 bytes of scales, which two ranks share with 24 of padding."""
    sharded = fzero.shard(lambda state: (state, None), stage=3, trainable=lambda path: path == "a")
    step = fzero.simulate(sharded, world_size=2)
    params = {"a": torch.ones(8), "base": torch.ones(64, 64)}
    state = step.init(params, fzero.optim.sgd(0.1), frozen=fzero.codecs.nf4())
    rows = partition_map(state).table().splitlines()
    assert "4 + 1,072 bytes" in rows[1] and "base[0:1072 bytes]" in rows[1]
    assert "28 + 1,048 bytes" in rows[4] and "base[1072:2120 bytes]" in rows[4]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_owners_keep_is_whole_on_one_rank(stage: int) -> None:
    rule = fzero.optim.from_torch(lambda params: torch.optim.Muon(params, lr=0.1))
    step = fzero.simulate(fzero.shard(lambda state: (state, None), stage=stage), world_size=2)
    state = step.init({"a": torch.ones(3, 5), "b": torch.ones(3, 5)}, rule)
    partition = partition_map(state)
    held = [[partition.label(s) for s in partition.of(rank, "optimizer")] for rank in (0, 1)]
    assert sorted(held) == [["a[0:15]"], ["b[0:15]"]]
