"""Law: `fzero.reshard(s, ...)` = load(save(s), ...), bit for bit, for every stage and mesh.

What a checkpoint has no room for, an update that is under way, goes on as if nothing had been.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import optree
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.checkpoint import load, save
from fzero.state import NAMESPACE, Phase
from fzero.state.progress import open_window
from tests.checkpoint.states import (
    ADAM,
    blank,
    first_rank,
    make,
    mixed,
    on_ranks,
    snapshot,
    train,
)
from tests.strategies import same, stages, trees

reshard: Any = fzero.reshard  # with arguments of any kind


def _begin(params: Any) -> dict[str, list[Tensor]]:
    return {"sum": [torch.full_like(p, 0.5) for p in params]}


def _update(grads: Any, state: Any, params: Any) -> Any:
    sums = [s + g * g for s, g in zip(state["sum"], grads, strict=True)]
    return [-g / s.sqrt() for g, s in zip(grads, sums, strict=True)], {"sum": sums}


OPTIMIZERS: dict[str, Any] = {
    "adam": ADAM,
    "momentum": fzero.optim.sgd(0.5, momentum=0.5),
    "torch's adagrad": fzero.optim.from_torch(
        functools.partial(torch.optim.Adagrad, lr=0.5, initial_accumulator_value=0.5)
    ),
}
places = st.fixed_dictionaries(
    {
        "ranks": st.integers(1, 5),
        "stage": stages,
        "replicas": st.integers(1, 2),
        "over": st.sampled_from(["shard", "all"]),
    }
)
Place = dict[str, Any]


def mesh_of(place: Place) -> tuple[int, int]:
    replicas = place["replicas"] if place["ranks"] % place["replicas"] == 0 else 1
    return replicas, place["ranks"] // replicas


def equal(found: Any, wanted: Any) -> None:
    """All of two states is equal: layouts, options and counters, and each bit of each buffer."""
    mine, theirs = (optree.tree_flatten(x, namespace=NAMESPACE) for x in (found, wanted))
    assert mine[1] == theirs[1]
    for a, b in zip(mine[0], theirs[0], strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


@given(trees(learning=True), places, places, st.sampled_from(sorted(OPTIMIZERS)))
@example(
    mixed(),
    {"ranks": 4, "stage": 3, "replicas": 2, "over": "all"},
    {"ranks": 5, "stage": 1, "replicas": 1, "over": "all"},
    "adam",
)
@settings(max_examples=12)
def test_it_is_what_a_checkpoint_gives(
    params: Any, source: Place, target: Place, name: str
) -> None:
    optimizer = OPTIMIZERS[name]
    state = on_ranks(train, make(params, optimizer=optimizer, **source), 2)
    target = {**target, "over": source["over"]}
    before = snapshot(state)
    found = fzero.reshard(state, stage=target["stage"], mesh=mesh_of(target))
    with tempfile.TemporaryDirectory() as folder:
        save(folder, state)
        equal(found, load(folder, make(blank(params), optimizer=optimizer, **target)))
    equal(state, before)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 6))
def test_all_stages_and_numbers_of_ranks(ranks: int) -> None:
    for stage in range(4):
        state = on_ranks(train, make(mixed(), stage=stage, ranks=ranks), 2)
        with tempfile.TemporaryDirectory() as folder:
            save(folder, state)
            for to in range(4):
                for size in range(1, 6):
                    wanted = load(folder, make(blank(mixed()), stage=to, ranks=size))
                    equal(fzero.reshard(state, stage=to, mesh=(1, size)), wanted)


def matrices() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=g) for name, shape in zip("abc", SHAPES, strict=True)
    }


SHAPES = ((6, 4), (3, 5), (7, 7))
INT8 = fzero.codecs.int8(block=4, memory=torch.int8)
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a rule whose padding begins with other values": ((_begin, _update), {}),
    "owners": (fzero.optim.shampoo(0.1), {}),
    "residuals": (ADAM, {"compress": fzero.Compress(gradients=INT8)}),
    "factors": (ADAM, {"compress": fzero.Compress(gradients=fzero.codecs.powersgd(rank=1))}),
    "local updates": (ADAM, {"local": fzero.Local(every=2, fragments=2)}),
    "owners apart": (
        fzero.optim.shampoo(0.1),
        {"local": fzero.Local(every=2, outer=fzero.optim.shampoo(0.1, eps=1e-3))},
    ),
    "late fragments": (ADAM, {"local": fzero.Local(every=4, fragments=2, delay=3)}),
    "offloaded": (ADAM, {"offload": fzero.Offload(optimizer="disk", folder=tempfile.gettempdir())}),
    "small units": (ADAM, {"persistence_threshold_numel": 16}),
    "units": (ADAM, {"units": lambda path: "all", "bucket_bytes": 100}),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.filterwarnings("ignore:.* has . replicas")
def test_what_options_keep_goes_along(option: str) -> None:
    optimizer, options = OPTIONS[option]

    def init(stage: int, mesh: tuple[int, int]) -> Any:
        make = functools.partial(fzero.init, matrices(), optimizer, stage=stage, mesh=mesh)
        return fzero.simulate(lambda: make(**options), world_size=mesh[0] * mesh[1])()

    for stage, to, mesh in ((1, 3, (2, 2)), (3, 2, (1, 3)), (3, 0, (2, 1))):
        state = on_ranks(train, init(stage, (2, 1)), 3)
        with tempfile.TemporaryDirectory() as folder:
            save(folder, state)
            equal(fzero.reshard(state, stage=to, mesh=mesh), load(folder, init(to, mesh)))


# An update that is under way.


def loss(params: Any, x: Tensor) -> Tensor:
    return sum(((p.double() * x).sum() for p in params.values()), torch.zeros(()).double())


def half(state: Any, *, window: bool, weighted: bool) -> Any:
    """Return the state after a gradient, whole numbers, which is reduced or waits in a window."""
    if window:
        state = state.replace(window=open_window(state.window))
    rank = fzero.axis_index()
    weight = 1.0 + rank if weighted else None
    return fzero.grad_and_reduce(loss, state, weight=weight)(torch.tensor(6.0 * (rank + 1)))[0]


def other_half(state: Any) -> Any:
    return fzero.apply_gradients(state)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_gradients_go_along(window: bool, weighted: bool) -> None:
    for ranks, stage, to, size in ((3, 3, 1, 2), (2, 1, 3, 4), (2, 0, 2, 2), (1, 3, 3, 3)):
        start = make({"a": torch.ones(7), "b": torch.ones(3, 2)}, stage=stage, ranks=ranks)
        state = on_ranks(functools.partial(half, window=window, weighted=weighted), start)
        moved: Any = fzero.reshard(state, stage=to, mesh=(1, size))
        assert moved.phase is Phase.READY and moved.window.is_open == window
        wanted, found = on_ranks(other_half, state), on_ranks(other_half, moved)
        same(first_rank(found), first_rank(wanted))


def test_the_loss_scale_goes_on() -> None:
    policy = fzero.DynamicScale(init_scale=8.0, growth_interval=2)
    scaled = fzero.scale_loss(lambda state: (train(state, 1), None), scale=policy)

    def around(state: Any) -> Any:
        return scaled(state)[0]

    state = on_ranks(around, make(mixed(), stage=1, ranks=2))
    found: Any = fzero.reshard(state, stage=3, mesh=(1, 3))
    assert found.scale.policy == policy
    assert found.scale.good_updates.tolist() == [1, 1, 1]
    assert on_ranks(around, found).scale.scale.tolist() == [16.0] * 3


@pytest.mark.parametrize("backwards", [None, 2, 3])
def test_inside_of_a_step_the_stage_changes_between_two_gradients(backwards: int | None) -> None:
    def step(state: Any, *, to: int | None) -> Any:
        state, _ = fzero.grad_and_reduce(loss, state)(torch.tensor(2.0 + fzero.axis_index()))
        if to is not None:
            before = state.window
            state = fzero.reshard(state, stage=to)
            assert state.window.length == before.length and state.window.is_open == before.is_open
        state, _ = fzero.grad_and_reduce(loss, state)(torch.tensor(4.0))
        return fzero.apply_gradients(state), None

    def coalesced(state: Any, to: int | None) -> Any:
        return fzero.coalesce(functools.partial(step, to=to), backwards=backwards)(state)[0]

    start = make({"a": torch.ones(7), "b": torch.ones(3, 2)}, stage=1, ranks=2)
    wanted = on_ranks(coalesced, start, None)
    found = on_ranks(coalesced, start, 3)
    assert found.stage == 3
    same(first_rank(found), first_rank(wanted))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda s: reshard({"g": s}, stage=2), "got a dict"),
        (lambda s: fzero.reshard(None), "a rank without a state, and no mesh"),
        (lambda s: fzero.reshard(s, stage=4), "stage=4"),
        (lambda s: reshard(s, mesh=3), "mesh=3"),
        (lambda s: on_ranks(lambda one: fzero.reshard(one, mesh=(1, 1)), s), "there are 2 ranks"),
        (
            lambda s: torch.func.vmap(lambda x: on_ranks(fzero.reshard, s, 3))(torch.ones(2)),
            "transform",
        ),
    ],
)
def test_what_cannot_be_is_refused(wrong: Any, text: str) -> None:
    with pytest.raises(fzero.FzeroError, match=text):
        wrong(make({"w": torch.ones(3)}, stage=1, ranks=2))


def test_options_that_a_stage_cannot_have_are_named() -> None:
    compress = fzero.Compress(parameters=fzero.codecs.int8())
    state = fzero.init({"w": torch.ones(3)}, ADAM, stage=3, compress=compress)
    with pytest.raises(fzero.LayoutError, match=r"parameters=int8.* at stage 1") as raised:
        fzero.reshard(state, stage=1)
    assert "keeps its options" in raised.value.__notes__[0]
