"""`iter_params`: its tensors, its order, what it leaves out, and how it ends on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import (
    AxisError,
    DonatedError,
    LayoutError,
    MismatchError,
    PeerFailedError,
    PhaseError,
)
from fzero.machine.partition import named_leaves
from tests.covering import covered
from tests.drivers import each_rank
from tests.experts_on_axes import PARAMS as MOE
from tests.experts_on_axes import meshes, mine_of, optimizers
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks
from tests.strategies import integers, same, stages, trees, worlds

DEPTH, WIDTH = 4, 32
RULE = fzero.optim.sgd(1.0)
FIRST = "0.weight"


def on_ranks(body: Callable[[int], Any], world: int) -> list[Any]:
    """What `body(rank)` returns on virtual ranks, of any kind."""
    found: dict[int, Any] = {}

    def kept(rank: int) -> Tensor:
        found[rank] = body(rank)
        return torch.zeros(())

    each_rank(kept, world)
    return [found[rank] for rank in range(world)]


def net(layers: int = 3, width: int = 5, **kinds: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, **kinds) for _ in range(layers)))


def odd() -> dict[str, Any]:
    """Leaves of every kind: frozen in the middle of a unit, other dtypes, empty, scalar, tied."""
    tied = integers((3, 5), 1)
    return {
        "embed.weight": tied,
        "h.0.w": integers((5, 7), 2, torch.float32),
        "h.0.base": nn.Parameter(integers((7, 3), 3, torch.float32), requires_grad=False),
        "h.0.low": integers((9,), 4, torch.bfloat16),
        "h.1.w": integers((5, 7), 5, torch.float32),
        "h.1.count": torch.tensor(3),
        "scale": torch.tensor(2.0),
        "empty": torch.zeros(0, 4),
        "z": torch.complex(integers((3,), 6), integers((3,), 7)),
        "head.weight": tied,
    }


def moved(params: Any, path: str) -> Any:
    """The parameters with another value of one of them."""
    return params | {path: params[path] + 1}


# What it yields.


@given(trees(learning=True), worlds, stages)
def test_it_has_the_leaves_of_every_pytree(tree: Any, world: int, stage: int) -> None:
    paths, leaves, _ = named_leaves(tree)
    assume(len({*paths}) == len(paths))
    wanted = {path: x.detach() for path, x in zip(paths, leaves, strict=True)}

    def body(_: int) -> Any:
        weights = fzero.iter_params(fzero.init(tree, RULE, stage=stage))
        found = dict(weights)
        assert {*weights.digests} == {*wanted} and not weights.stopped_by
        return found

    for found in on_ranks(body, world):
        same(found, wanted)


@pytest.mark.parametrize("stage", range(4))
def test_order_and_digests_do_not_depend_on_stage_and_ranks(stage: int) -> None:
    def body(_: int) -> Any:
        weights = fzero.iter_params(fzero.init(odd(), RULE, stage=stage))
        return [path for path, _ in weights], weights.digests

    order = [path for path in odd() if path != "head.weight"]
    order.insert(1, "head.weight")  # after the other path of the same tensor
    plain = fzero.iter_params(fzero.init(odd(), RULE, stage=0))
    assert [path for path, _ in plain] == order
    for world in (1, 2, 3, 4):
        assert on_ranks(body, world) == [(order, plain.digests)] * world


def test_a_digest_is_of_the_bits_the_dtype_and_the_shape() -> None:
    def digest_of(x: Tensor) -> str:
        weights = fzero.iter_params(fzero.init({"x": x}, RULE, stage=3))
        assert list(weights)
        return weights.digests["x"]

    x = integers((4, 6), 1, torch.float32)
    others = [
        x.flip(0),
        x.reshape(6, 4),
        x.view(torch.int32),
        x + 2.0**-20 * (x == x.max()),
        x.double(),
    ]
    assert len({digest_of(y) for y in [x, *others]}) == 1 + len(others)
    assert digest_of(x.t().contiguous().t()) == digest_of(x)


def test_tensors_are_copies_in_memory_of_their_own() -> None:
    def body(_: int, stage: int) -> None:
        state = fzero.init(odd(), RULE, stage=stage)
        for _path, x in fzero.iter_params(state):
            assert not x.requires_grad and type(x) is Tensor
            assert x.untyped_storage().nbytes() <= x.nbytes + 128  # the padding of a group
            x.zero_()
        same(fzero.full_params(state)["h.0.base"].detach(), odd()["h.0.base"].detach())
        fzero.check_replicas(state)
        assert torch.equal(fzero.full_params(state)["h.0.w"], odd()["h.0.w"])

    for stage in range(4):
        for world in (1, 2):
            each_rank(lambda rank, stage=stage: body(rank, stage) or torch.zeros(()), world)


OPTIONS: list[tuple[range, dict[str, Any]]] = [
    (range(4), {"mesh": (2, 2)}),
    (range(1, 4), {"mesh": (2, 2), "optimizer_over": "all"}),
    (range(4), {"local": fzero.Local(every=2), "mesh": (2, 2)}),
    (range(4), {"logical_ranks": 4}),
    (range(3), {"bucket_bytes": 64}),
    (range(1, 4), {"offload": fzero.Offload(optimizer="cpu")}),
    (range(3, 4), {"offload": fzero.Offload(params="cpu")}),
    (
        range(4),
        {"frozen": fzero.codecs.int8(block=8), "trainable": lambda path: path != "0.weight"},
    ),
    (range(4), {"frozen": fzero.codecs.nf4(), "trainable": lambda path: path != "1.weight"}),
    (range(3, 4), {"compress": fzero.Compress(parameters=fzero.codecs.int8(block=64))}),
]


@pytest.mark.parametrize(
    ("stage", "options"), [(stage, options) for some, options in OPTIONS for stage in some]
)
def test_it_has_the_values_of_full_params(stage: int, options: dict[str, Any]) -> None:
    apply, params = fzero.functionalize(net())
    x = integers((4, 2, 5), 3, torch.float32)

    def body(rank: int) -> tuple[dict[str, str], Any]:
        state = fzero.init(params, fzero.optim.sgd(2.0**-6), stage=stage, **options)
        for _ in range(3):
            state, _ = fzero.grad_and_reduce(lambda p, x: apply(p, x).sum(), state)(x[rank])
            state = fzero.apply_gradients(state)
        weights = fzero.iter_params(state)
        found = dict(weights)
        same(found, fzero.full_params(state))
        assert [*found] == [*params]
        stored = {key: options[key] for key in ("frozen", "trainable") if key in options}
        again = fzero.iter_params(fzero.init(found, RULE, stage=1, **stored))
        assert list(again) and again.digests == weights.digests
        assert list(fzero.iter_params(state, since=weights.digests)) == []
        return weights.digests, found

    digests = [one for one, _ in on_ranks(body, 4)]
    assert digests == digests[:1] * 4


@covered(
    stage=[0, 3, {"dense": 2, "experts": 3}],
    mesh=[{"data": 2, "expert": 2}, {"data": 1, "expert": 3}],
)
def test_states_on_parts_of_a_mesh_are_those_of_this_place(
    stage: Any, mesh: dict[str, int]
) -> None:
    over = fzero.Mesh(mesh)
    world = torch.Size(mesh.values()).numel()

    def body(rank: int, params: Any = MOE) -> Any:
        states = fzero.init(mine_of(params, over), optimizers(), stage=stage, mesh=meshes(over))
        weights = fzero.iter_params(states)
        found = dict(weights)
        mine = mine_of(MOE, over)
        wanted = {"dense.w": mine["dense"]["w"], "dense.b": mine["dense"]["b"]}
        same(found, wanted | {"experts.up": mine["experts"]["up"]})
        # Of one place alone another value: all ranks go through it, each with its own.
        last = MOE | {"experts": {"up": MOE["experts"]["up"].clone()}}
        last["experts"]["up"][-1] += 1
        other = fzero.init(mine_of(last, over), optimizers(), stage=stage, mesh=meshes(over))
        changed = fzero.iter_params(other, since=weights.digests)
        assert [path for path, _ in changed] == ["experts.up"]
        alone = fzero.iter_params(states["experts"])
        assert [path for path, _ in alone] == ["up"]
        return weights.digests, alone.digests

    found = on_ranks(body, world)
    assert found == found[:1] * world


def test_the_states_of_a_tree_come_one_after_another() -> None:
    def body(_: int) -> list[str]:
        tree = {"b": [torch.ones(3), torch.ones(2)], "a": torch.ones(())}
        states = fzero.init(tree, RULE, stage={"b": 3, "a": 1})
        return [path for path, _ in fzero.iter_params(states)]

    assert on_ranks(body, 2) == [["a", "b.0", "b.1"]] * 2


@covered(stage=range(4), world=[1, 2, 3])
def test_an_engine_has_the_names_of_its_module(stage: int, world: int) -> None:
    def body(rank: int) -> None:
        module = net()
        plain = net()
        engine = Engine(module, torch.optim.SGD(module.parameters(), 1.0), stage=stage)
        weights = fzero.iter_params(engine.state)
        same(dict(weights), dict(plain.state_dict()))
        with engine.coalesce():  # parameters stay as they are in an open window
            engine.backward(engine(torch.ones(1, 5)).sum())
            assert list(fzero.iter_params(engine.state, since=weights.digests)) == []
        engine.step()
        plain(torch.ones(1, 5)).sum().backward()
        torch.optim.SGD(plain.parameters(), 1.0).step()
        receiver = net()
        for path, x in fzero.iter_params(engine.state, since=weights.digests):
            receiver.load_state_dict({path: x}, strict=False)
        for found, wanted in zip(receiver.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, wanted)

    on_ranks(body, world)


# What it leaves out.


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_unchanged_leaves_are_neither_gathered_nor_yielded(stage: int, world: int) -> None:
    params = odd()

    def body(rank: int) -> None:
        weights = fzero.iter_params(fzero.init(params, RULE, stage=stage))
        assert len([*weights]) == len(params)
        for path in ("h.0.w", "h.0.base", "scale", "z"):
            state = fzero.init(moved(params, path), RULE, stage=stage)
            with fzero.count_collectives() as log:
                since = fzero.iter_params(state, since=weights.digests)
                found = dict(since)
            same(found, {path: moved(params, path)[path].detach()})
            sent = [one.numel for one in log.events if one.op == "all_gather"]
            assert len(sent) == world * (stage == 3 and world > 1)
            assert sum(sent) <= 2 * params[path].numel() + 64 * world
            assert {k: v for k, v in since.digests.items() if k != path} == {
                k: v for k, v in weights.digests.items() if k != path
            }
            assert since.digests[path] != weights.digests[path]
            assert not [*fzero.iter_params(state, since=since.digests)]

    on_ranks(body, world)


def test_digests_of_a_subset_or_of_more_leave_out_what_they_have() -> None:
    state = fzero.init(odd(), RULE, stage=0)
    weights = fzero.iter_params(state)
    assert [*weights]
    since = {path: weights.digests[path] for path in ("scale", "empty")} | {"other": "0"}
    left = [path for path, _ in fzero.iter_params(state, since=since)]
    assert {*left} == {*odd()} - {"scale", "empty"}
    tied = weights.digests | {"head.weight": "of another tensor"}
    assert [path for path, _ in fzero.iter_params(state, since=tied)] == [
        "embed.weight",
        "head.weight",
    ]


# How it ends.


def stops_at(state: Any, rank: int, who: int, count: int, how: str) -> Any:
    """The paths that a rank gets where rank `who` stops after `count` tensors; the iterator."""
    weights, paths = fzero.iter_params(state), list[str]()
    try:
        for path, _ in weights:
            paths.append(path)
            if rank == who and len(paths) == count:
                if how == "break":
                    break
                if how == "close":
                    weights.close()
                if how == "error":
                    raise ZeroDivisionError
    except ZeroDivisionError:
        assert rank == who
    return paths, weights


@covered(
    stage=[0, 2, 3],
    how=["break", "close", "error"],
    who=[0, 1],
    count=[1, 2, 3, 6],
    world=[1, 2, 3],
)
def test_a_rank_that_stops_ends_it_for_all(
    stage: int, how: str, who: int, count: int, world: int
) -> None:
    params = dict(net().named_parameters())
    who %= world

    def body(rank: int) -> Any:
        state = fzero.init(params, RULE, stage=stage)
        paths, weights = stops_at(state, rank, who, count, how)
        assert weights.stopped_by == (who,)
        left = dict(fzero.iter_params(state, since=weights.digests))
        assert [*weights] == [] and next(weights, None) is None
        weights.close()
        same(fzero.full_params(state), params)  # all ranks are at one place
        return paths, weights.digests, [*left]

    found = on_ranks(body, world)
    units = (count + 1) // 2  # of two leaves each, where they are gathered together
    for rank, (paths, digests, left) in enumerate(found):
        seen = [*params][:count] if rank == who else [*params][: 2 * units]
        assert paths == seen
        assert [*digests] == [*params][: 2 * (units - 1)] and digests == found[0][1]
        assert left == [*params][2 * (units - 1) :]  # and not one twice that all have had


def test_all_ranks_may_stop_where_each_likes() -> None:
    def body(rank: int) -> Any:
        state = fzero.init(dict(net().named_parameters()), RULE, stage=3)
        weights, count = fzero.iter_params(state), 0
        for count, _ in enumerate(weights, start=1):
            if count == 3 + rank // 2:
                break
        pairs = zip(fzero.iter_params(state), fzero.iter_params(state), strict=True)
        assert all(path == other for (path, _), (other, _) in pairs)
        return count, weights.stopped_by

    assert on_ranks(body, 3) == [(3, (0, 1, 2)), (3, (0, 1, 2)), (4, (0, 1, 2))]


def test_who_takes_values_by_next_closes_it() -> None:
    def body(rank: int) -> Any:
        state = fzero.init(dict(net().named_parameters()), RULE, stage=3)
        weights = fzero.iter_params(state)
        paths = [next(weights)[0]]
        if rank == 1:
            weights.close()
        else:
            paths += [path for path, _ in weights]
        # One that is not closed meets the next call of the other ranks: all raise.
        other = fzero.iter_params(state)
        next(other)
        with pytest.raises(MismatchError, match="rank 0 full_params, rank 1 iter_params, on to 1"):
            fzero.full_params(state) if rank == 0 else [*other]
        other.close()
        return paths, fzero.full_params(state)["0.bias"].shape

    assert on_ranks(body, 2) == [(["0.weight", "0.bias"], (5,)), (["0.weight"], (5,))]


def test_other_calls_may_be_made_in_the_loop_by_all_ranks_alike() -> None:
    def body(rank: int) -> None:
        state = fzero.init(dict(net().named_parameters()), RULE, stage=3)
        for path, x in fzero.iter_params(state):
            assert torch.equal(fzero.full_params(state)[path], x)
            with torch.no_grad():
                assert torch.equal(fzero.evaluate(lambda p, path=path: p[path] + 0, state)(), x)

    on_ranks(body, 2)


def test_a_state_that_is_used_up_meanwhile_is_refused_on_all_ranks() -> None:
    apply, params = fzero.functionalize(net())

    def step_fn(state: Any) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: apply(p, torch.ones(5)).sum(), state)()
        return fzero.apply_gradients(state), loss

    def body(_: int) -> None:
        step: Any = fzero.shard(step_fn, stage=3, donate=True)
        state = step.init(params, RULE)
        weights = fzero.iter_params(state)
        next(weights)
        new, _ = step(state)
        with pytest.raises(DonatedError):
            list(weights)
        assert len([*fzero.iter_params(new)]) == len(params)

    on_ranks(body, 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_steps_within_a_unit_is_heard_at_its_next_tensor(stage: int) -> None:
    module = net()
    engine = fzero.adapter.Engine(module, RULE, stage=stage)
    weights = fzero.iter_params(engine.state)
    next(weights)
    engine.backward(module(torch.ones(1, 5)).sum())
    engine.step()
    with pytest.raises(DonatedError):
        next(weights)


@pytest.mark.xdist_group("gloo")
def test_in_processes_one_unit_is_whole_at_a_time() -> None:
    for paths, digests, rest in run_ranks(streamed, 2):
        assert paths == [f"{i}.weight" for i in range(DEPTH)]
        assert len(digests) == DEPTH and rest == 2  # that of the unit of the rank that breaks


def streamed(rank: int, world_size: int) -> Any:
    params = dict(net(DEPTH, WIDTH, bias=False).named_parameters())
    unit = params["0.weight"].nbytes
    state, paths = fzero.init(params, RULE, stage=3), list[str]()
    fzero.full_params(state)
    live = LiveBytes()
    with live, live.at_most(1.1 * unit, "iter_params"):
        weights = fzero.iter_params(state)
        for path, x in weights:
            paths.append(path)
            assert torch.equal(x, params[path])
            del x
    wide = {f"h.{i}.{k}": torch.ones(WIDTH, WIDTH) for i in range(3) for k in range(4)}
    state_of_wide = fzero.init(wide, RULE, stage=3)
    with (
        live,
        live.at_most(6.1 * unit, "iter_params"),
    ):  # four, the one that is used, that of before
        for _path, x in fzero.iter_params(state_of_wide):
            assert x.shape == (WIDTH, WIDTH)
        del x
    stopped = 0
    for stopped, _ in enumerate(fzero.iter_params(state), start=1):
        if rank == 1 and stopped == 2:
            break
    return paths, weights.digests, stopped


# What is refused.


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_inside_of_a_loss_a_transform_or_an_evaluation_it_is_refused(
    stage: int, world: int
) -> None:
    def body(_: int) -> None:
        state = fzero.init(dict(net().named_parameters()), RULE, stage=stage)

        def reads(p: Any) -> Tensor:
            return sum((x.sum() for _, x in fzero.iter_params(state)), p[FIRST].sum())

        with pytest.raises(PhaseError, match=r"torch\.func"):
            torch.func.grad(lambda x: reads({FIRST: x}))(torch.ones(2))
        if world > 1:
            with pytest.raises(PhaseError, match="inside of a loss"):
                fzero.grad_and_reduce(reads, state)()
            if stage == 3:
                with pytest.raises(PhaseError, match="an evaluation"):
                    fzero.evaluate(reads, state)()
        assert len([*fzero.iter_params(state)]) == 6

    on_ranks(body, world)


def test_what_is_no_state_or_no_digests_is_refused() -> None:
    module = net()
    state = fzero.init(dict(module.named_parameters()), RULE, stage=0)
    engine = Engine(net(), lambda ps: torch.optim.SGD(ps, 1.0), stage=0)
    for wrong in (module, dict(module.named_parameters()), {}, None, engine):
        with pytest.raises(LayoutError, match="iter_params"):
            fzero.iter_params(wrong)
    weights = fzero.iter_params(state)
    for since in (weights, [*weights], {FIRST: 3}, "digests", {0: "a"}):
        with pytest.raises(LayoutError, match="since"):
            fzero.iter_params(state, since=since)  # type: ignore[arg-type]


def test_where_tensors_have_no_values_it_is_refused() -> None:
    def step(state: Any) -> Any:
        return state, sum(x.sum() for _, x in fzero.iter_params(state))

    with pytest.raises(PhaseError, match="a trace or a plan, where tensors have no values"):
        fzero.trace(step)(fzero.init({"w": torch.ones(2)}, RULE, stage=3))


def test_ranks_with_other_digests_or_other_calls_all_raise() -> None:
    def body(rank: int) -> None:
        state = fzero.init(dict(net().named_parameters()), RULE, stage=2)
        weights = fzero.iter_params(state)
        assert [*weights]
        since = weights.digests if rank else None
        with pytest.raises(MismatchError, match=r"since the beginning, rank 1 .* since digests"):
            fzero.iter_params(state, since=since)
        with pytest.raises(LayoutError if rank else PeerFailedError):
            fzero.iter_params(state, since=[] if rank else {})  # type: ignore[arg-type]
        assert not [*fzero.iter_params(state, since=weights.digests)]

    on_ranks(body, 2)


def test_states_on_meshes_of_other_ranks_are_refused() -> None:
    def body(_: int) -> None:
        one = fzero.init({"w": torch.ones(2)}, RULE, stage=0, mesh=fzero.Axis(size=1))
        all_of_them = fzero.init({"w": torch.ones(2)}, RULE, stage=0)
        with pytest.raises(AxisError, match="no parts of one mesh"):
            fzero.iter_params([all_of_them, one])

    on_ranks(body, 2)
