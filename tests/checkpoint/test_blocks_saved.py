"""In a layout of blocks a run goes on elsewhere with the bits of the one that stayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fzero
from fzero.machine.packing import leaf_ranges
from tests.checkpoint.states import on_ranks
from tests.optim.any_ranks import (
    SHAPES,
    Place,
    blocks,
    everywhere,
    gradients,
    one_update,
    params,
    same_bits,
)
from tests.strategies import on_rank

RULES: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "adamw": (partial(fzero.optim.adamw, 1e-2), torch.bfloat16),
    "torch's": (lambda: fzero.optim.from_torch(torch.optim.RMSprop), torch.float32),
    "soap": (lambda: fzero.optim.soap(1e-2, refresh_every=2, batch_dims=0), torch.float32),
}
MOVES = [
    (Place(3, 2), Place()),
    (Place(), Place(4, 3)),
    (Place(4, 2, over="all", mesh=(2, 2)), Place(3, 1, 500)),
]


def made(place: Place, name: str) -> Any:
    """A new state, stacked."""
    rule, dtype = RULES[name]
    given = {k: torch.nn.Parameter(x) for k, x in params(dtype).items()}
    step = fzero.shard(
        lambda state: (state, None),
        stage=place.stage,
        mesh=place.mesh,
        bucket_bytes=place.bucket_bytes,
        optimizer_over=place.over,
        reduce_op="sum",
    )
    with blocks():
        return fzero.simulate(step, world_size=place.ranks).init(given, rule())


def trained(state: Any, name: str, updates: Sequence[int]) -> Any:
    start = params(RULES[name][1])

    def run(held: Any) -> Any:
        for number in updates:
            held = one_update(held, gradients(RULES[name][1], number, start))[0]
        return held

    return on_ranks(run, state)


def contents(state: Any) -> Any:
    return on_ranks(lambda held: (fzero.full_params(held), fzero.slots(held, "optimizer")), state)


def same_as_at_home(state: Any, name: str) -> None:
    """Its ranks have the bits of a run of three updates on one rank."""
    home, found = contents(trained(made(Place(), name), name, range(3))), contents(state)
    for rank in range(len(state.step)):
        same_bits(on_rank(found, rank), on_rank(home, 0))


@pytest.mark.parametrize(("source", "target"), MOVES)
@pytest.mark.parametrize("name", RULES)
def test_a_save_goes_on_elsewhere_with_the_same_bits(
    name: str, source: Place, target: Place, tmp_path: Path
) -> None:
    fzero.checkpoint.save(tmp_path / "saved", trained(made(source, name), name, range(2)))
    state = fzero.checkpoint.load(tmp_path / "saved", made(target, name))
    same_as_at_home(trained(state, name, [2]), name)


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_a_state_that_is_moved_goes_on_with_the_same_bits(source: Place, target: Place) -> None:
    state = trained(made(source, "adamw"), "adamw", range(2))
    mesh = target.mesh or (1, target.ranks)
    moved: Any = fzero.reshard(state, stage=target.stage, mesh=mesh)
    assert moved.setup.layout.options.block == state.setup.layout.options.block > 1
    same_as_at_home(trained(moved, "adamw", [2]), "adamw")


def test_padding_is_in_no_file(tmp_path: Path) -> None:
    start = params(torch.float32)
    with blocks():
        state = fzero.init(start, fzero.optim.sgd(0.1), stage=0)
    fzero.checkpoint.save(tmp_path / "saved", state)
    (manifest,) = (tmp_path / "saved").rglob(".metadata")
    stored = dcp.FileSystemReader(manifest.parent).read_metadata().state_dict_metadata
    numels = [
        x.size.numel() for x in stored.values() if isinstance(x, dcp.metadata.TensorStorageMetadata)
    ]
    assert sum(n for n in numels if n > 1) == sum(
        x.numel() for x in start.values() if x.numel() > 1
    )
    flats = [flat.numel() for flat in state.params.flats]
    assert sum(flats) > sum(x.numel() for x in start.values())
    assert len(flats) == len(SHAPES)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_padding_stays_zero(stage: int) -> None:
    def sees(state: Any) -> None:
        layout, kept = state.setup.layout, fzero.slots(state, "optimizer")
        assert kept
        for flats, placement in (
            (state.params.flats, state.setup.params),
            (state.optimizer.moments[0], state.setup.optimizer_state),
            (state.optimizer.moments[1], state.setup.optimizer_state),
        ):
            part = state.setup.part(placement, state.setup.axis.rank)
            for index, flat in enumerate(flats):
                rest = torch.ones(flat.shape, dtype=torch.bool)
                for one in leaf_ranges(layout, index, part):
                    one.of(rest).fill_(False)
                assert not flat.detach()[rest].any()

    everywhere(Place(3, stage), partial(fzero.optim.adamw, 1e-2), each=sees)
