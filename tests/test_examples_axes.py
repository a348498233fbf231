"""The examples along an axis: value, gradient and H v are those of one process, in float64."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
import one_process
from tests.covering import covered
from tests.descends import descends
from tests.ranks import run_ranks
from tests.test_examples_small import FOLDER, require_claims, run

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

AXIS = {"ulysses": "seq", "ring_attention": "seq", "siglip": "ring", "moe": "expert"}


def example(name: str) -> Any:
    return importlib.import_module(name)


def pieces(module: Any, whole: Any, ranks: int) -> list[Tensor]:
    return [torch.stack([module.piece(x, r, ranks) for r in range(ranks)]) for x in whole]


def on_virtual_ranks(name: str, ranks: int, stage: int, params: Any, v: Any, whole: Any) -> Any:
    """Value, gradient and H v of the example's loss on virtual ranks; those of rank 0."""
    module = example(name)
    sharded = fzero.shard(
        one_process.results(module.loss, v), stage=stage, mesh={AXIS[name]: ranks}
    )
    step = fzero.simulate(sharded, world_size=ranks)
    state = step.init(params, fzero.optim.sgd(0.1))
    _, (value, *grads) = step(state, *pieces(module, whole, ranks))
    return [value[0], *({path: g[0] for path, g in one.items()} for one in grads)]


def close(found: Any, wanted: Any, within: float) -> None:
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=within, atol=within)


@covered(ranks=[2, 3, 4], stage=range(4), name=[*AXIS])
def test_on_virtual_ranks(name: str, stage: int, ranks: int) -> None:
    module = example(name)
    v = {path: torch.randn_like(x) for path, x in module.params.items()}
    found = on_virtual_ranks(name, ranks, stage, module.params, v, module.whole)
    close(found, one_process.exact(module.plain, module.params, v, module.whole), 1e-11)


@pytest.mark.parametrize("name", AXIS)
def test_under_autocast(name: str) -> None:
    """In bf16, with remat, at stage 3: as far from one process as bf16 rounds."""
    module, ranks = example(name), 4
    params = {path: x.float() for path, x in module.params.items()}
    whole = [x.float() if x.is_floating_point() else x for x in module.whole]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = torch.func.grad(module.plain)(params, *whole)
    lowered = fzero.autocast(descends(module.loss), dtype=torch.bfloat16)
    step = fzero.simulate(fzero.shard(lowered, stage=3, mesh={AXIS[name]: ranks}), world_size=ranks)
    state, _ = step(step.init(params, fzero.optim.sgd(1.0)), *pieces(module, whole, ranks))
    after = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    exact = torch.func.grad(module.plain)(params, *whole)
    for path, g in wanted.items():
        moved = params[path] - after[path][0]
        size = exact[path].norm()
        assert (moved - exact[path]).norm() < 2 * (g - exact[path]).norm() + 0.02 * size, path


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mixture_in_which_one_rank_gets_everything(ranks: int) -> None:
    """Its first expert gets all rows, all others none, and have no gradient."""
    module = example("moe")
    params = dict(module.params)
    params["router"] = params["router"].clone()
    params["router"][0, 0] += 100
    x, y = module.whole
    whole = torch.cat([torch.ones_like(x[:, :1]), x[:, 1:]], 1), y
    assert not module.routed(params, whole[0])[0].any()
    v = {path: torch.randn_like(p) for path, p in params.items()}
    found = on_virtual_ranks("moe", ranks, 3, params, v, whole)
    close(found, one_process.exact(module.plain, params, v, whole), 1e-11)
    assert found[1]["up"][0].any() and not found[1]["up"][1:].any()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["ulysses", "ring_attention", "moe"])
def test_a_rank_keeps_its_part_of_the_activations(name: str, ranks: int) -> None:
    """What autograd saves of a loss but for parameters: 1 / W of one rank's, and a tenth more."""
    module, found = example(name), dict[int, int]()

    def weighed(p: Any, *batch: Tensor) -> Tensor:
        with saved(p) as kept:
            value = module.loss(p, *batch)
        found[fzero.axis_index()] = sum(kept.values())
        return value

    step = fzero.simulate(
        fzero.shard(descends(weighed), stage=0, mesh={AXIS[name]: ranks}), world_size=ranks
    )
    step(step.init(module.params, fzero.optim.sgd(0.1)), *pieces(module, module.whole, ranks))
    params = {path: x.clone().requires_grad_() for path, x in module.params.items()}
    with saved(params) as whole:
        value = module.plain(params, *module.whole)
    assert value.requires_grad and len(found) == ranks
    assert 0 < max(found.values()) <= (1 / ranks + 0.1) * sum(whole.values())


@contextlib.contextmanager
def saved(params: dict[str, Tensor]) -> Iterator[dict[int, int]]:
    """The bytes of each storage that autograd saves in the block, but for those of parameters."""
    kept: dict[int, int] = {}
    own = {x.untyped_storage().data_ptr() for x in params.values()}

    def pack(x: Tensor) -> Tensor:
        if (place := x.untyped_storage().data_ptr()) not in own:
            kept[place] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


def test_each_rank_of_the_ring_has_as_many_blocks() -> None:
    """Of the causal mask in zigzag order: 2 W + 1 each, whatever W."""
    for size in range(1, 9):
        for rank in range(size):
            mine = (rank, 2 * size - 1 - rank)
            assert sum(theirs <= one for one in mine for theirs in range(2 * size)) == 2 * size + 1


@pytest.mark.parametrize("name", AXIS)
def test_alone(name: str) -> None:
    require_claims(f"{name}.py", run(f"{name}.py"), ranks=1)


def on_a_rank(rank: int, world_size: int) -> list[str]:
    pairs = zip((3, 2, 3, 0), AXIS, strict=True)
    return [run(f"{name}.py --stage {stage}") for stage, name in pairs]


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_processes(ranks: int) -> None:
    for name, said in zip(AXIS, run_ranks(on_a_rank, ranks)[0], strict=True):
        require_claims(f"{name}.py", said, ranks)
        assert f"along {AXIS[name]!r}, on {ranks} rank(s)" in said


def states_on_a_rank(rank: int, world_size: int) -> list[str]:
    return [run(f"moe_states.py {of}") for of in ("--experts 2 --stage 3", "--stage 2")]


@pytest.mark.xdist_group("gloo")
def test_experts_as_states_on_an_axis() -> None:
    """Three updates, alone and on four processes, as 2 x 2 and as 1 x 4."""
    require_claims("moe_states.py", run("moe_states.py"), ranks=1)
    for said, places in zip(run_ranks(states_on_a_rank, 4)[0], (2, 4), strict=True):
        require_claims("moe_states.py", said, ranks=4)
        assert f"{places} place(s) along 'expert', on 4 rank(s)" in said


@pytest.mark.parametrize("name", [*AXIS, "moe_states"])
def test_each_is_shorter_than_100_lines(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 100
