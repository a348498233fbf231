"""`fzero.reshard` on processes: ranks that leave and come, what they are told, what is refused."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero.checkpoint import load, save
from fzero.state import NAMESPACE, TrainState
from tests.checkpoint.states import ADAM, blank, contents, mixed, train
from tests.ranks import run_ranks
from tests.strategies import same

pytestmark = pytest.mark.xdist_group("gloo")


def tensors_of(state: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(state, namespace=NAMESPACE) if isinstance(x, Tensor)]


def init(stage: int, mesh: Any = None, optimizer: Any = ADAM) -> TrainState:
    return fzero.init(blank(mixed()), optimizer, stage=stage, mesh=mesh, bucket_bytes=64)


def _go_and_come(rank: int, size: int, folder: Path, optimizer: Any) -> list[Any]:
    two = DeviceMesh("cpu", [0, 1])
    found: list[Any] = []
    state: Any = train(fzero.init(mixed(), optimizer, stage=1, bucket_bytes=64), 1)
    for number, (stage, mesh) in enumerate([(3, two), (2, None), (0, two), (3, None)]):
        larger = number % 2 == 0  # the old mesh is
        if state is not None:
            save(folder / f"{number}", state)
        new: Any = fzero.reshard(state, stage=stage, mesh=mesh or fzero.world())
        assert (new is None) == (larger and rank == 2)
        if new is not None:
            wanted = load(folder / f"{number}", init(stage, mesh, optimizer), rng=False)
            same(tensors_of(new), tensors_of(wanted))
            assert new.setup.layout == wanted.setup.layout
            new = train(new, 1)
            found.append(contents(new))
        state = new
    return found


@pytest.mark.parametrize(
    "optimizer", [ADAM, fzero.optim.from_torch(functools.partial(torch.optim.AdamW, lr=0.1))]
)
def test_three_ranks_two_and_three_again_as_by_checkpoints(tmp_path: Path, optimizer: Any) -> None:
    found = run_ranks(_go_and_come, 3, tmp_path, optimizer)
    same(found[0], found[1])
    same(found[2], [found[0][1], found[0][3]])


def _refused(rank: int, size: int) -> list[str]:
    first, other = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    world, found = fzero.world(), list[str]()
    state = init(1)
    part = init(1, first) if rank < 2 else None
    schedule = fzero.optim.adam(lambda count: 0.1)
    unnamed = init(1, first, schedule) if rank < 2 else None
    calls: list[Any] = [
        lambda: fzero.reshard(state, stage=rank),
        lambda: fzero.reshard(state, stage=9 if rank == 1 else 2),
        lambda: fzero.reshard(part, mesh=other),
        lambda: fzero.reshard(None, mesh=world),
        lambda: fzero.reshard(unnamed, mesh=world),
        lambda: fzero.reshard(state, mesh=fzero.Axis(size=1)),
    ]
    for call in calls:
        with pytest.raises(fzero.FzeroError) as raised:
            call()
        found.append(str(raised.value).splitlines()[0])
    again = fzero.reshard(part, stage=3, mesh=world)
    same(fzero.full_params(again), fzero.full_params(state))
    matrices = {"w": torch.arange(12.0).view(3, 4)}
    told = fzero.init(matrices, fzero.optim.muon(0.1), stage=2, mesh=first) if rank < 2 else None
    same(fzero.full_params(fzero.reshard(told, stage=3, mesh=world)), matrices)
    return found


def test_what_cannot_be_raises_on_every_rank() -> None:
    found = run_ranks(_refused, 3)
    texts = [
        "the ranks disagree about reshard",
        "reshard: stage=9",
        "reshard from the ranks [0, 1] to the ranks [1, 2]",
        "none of the 3 ranks has a state",
        "cannot be described to a rank that has none",
        "which is another rank on each of 3 processes",
    ]
    for text, *lines in zip(texts, *found, strict=True):
        assert all(text in line for line in lines), lines


def _options(rank: int, size: int, folder: Path) -> None:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    three, four = DeviceMesh("cpu", [0, 1, 3]), fzero.world()
    params = {"a": torch.arange(24.0).view(6, 4), "b": torch.ones(3, 5)}
    int8 = fzero.Compress(gradients=fzero.codecs.int8(block=4))
    cases: list[tuple[Any, int, int, Any, Any, dict[str, Any]]] = [
        (ADAM, 3, 1, four, two, {"optimizer_over": "all"}),
        (fzero.optim.shampoo(0.1), 1, 3, two, three, {}),
        (ADAM, 1, 2, four, three, {"compress": int8}),
        (ADAM, 3, 1, two, (4, 1), {"local": fzero.Local(every=2)}),
    ]
    for number, (optimizer, stage, to, old, new, options) in enumerate(cases):

        def made(stage: int, mesh: Any, of: Any = optimizer, more: Any = options) -> TrainState:
            return fzero.init(params, of, stage=stage, mesh=mesh, **more)

        state = train(made(stage, old), 3)
        save(folder / f"{number}", state)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* has . replicas", UserWarning)
            found = fzero.reshard(state, to, new)
            if found is not None:
                wanted = load(folder / f"{number}", made(to, new), rng=False)
                same(tensors_of(found), tensors_of(wanted))
                train(found, 1)


@pytest.mark.slow
def test_meshes_of_two_dims_owners_residuals_and_local_updates(tmp_path: Path) -> None:
    run_ranks(_options, 4, tmp_path)
