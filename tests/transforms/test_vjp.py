"""`vjp`: a pull adds the bits that `grad_and_reduce` of sum(c * out) adds, whatever is between."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.errors import CallError, FzeroError, LayoutError, PhaseError
from tests.covering import covered
from tests.drivers import each_rank
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks
from tests.strategies import stages, worlds


class Net(nn.Module):
    """Three layers of uneven sizes, a frozen one, and a parameter that most calls do not use."""

    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)
        self.last.requires_grad_(requires_grad=False)
        self.extra = nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout(0.5 if drops else 0.0)

    def forward(self, x: Tensor, *, extra: bool = False) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(x)))
        out = self.last(self.second(hidden))
        return out * self.extra.sum() if extra else out


def net(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(seed)
    return fzero.functionalize(Net(**options).to(dtype))


APPLY, PARAMS = net()
OTHER = net(1)[1]


def x_of(seed: int, rank: Any, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(16 * seed + int(rank))
    return torch.randn(rows, 5, generator=generator)


def c_of(seed: int, rank: Any, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(999 + 16 * seed + int(rank))
    return torch.randn(rows, 3, generator=generator)


def encode(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    return APPLY(params, x, extra=extra)


def rule(**options: Any) -> Any:
    return fzero.optim.adamw(0.1, **options)


def same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for path, value in a.items():
        assert torch.equal(value, b[path]), path


def by_both(body: Callable[..., Any], world: int) -> None:
    """Compare full parameters of body(rank, whether by pulls)."""
    found, wanted = (each_rank(functools.partial(body, by_vjp=by), world) for by in (True, False))
    same(found, wanted)


# The programs: forwards, pulls in any order, plain calls between, windows, updates.

PROGRAMS = st.lists(
    st.tuples(
        st.booleans(),  # in a window
        st.lists(st.booleans(), min_size=1, max_size=4),  # forwards: uses the extra parameter
        st.randoms(use_true_random=False),
        st.integers(0, 2),  # pulls that never come
        st.booleans(),  # a plain call in the middle
    ),
    min_size=1,
    max_size=3,
)


def run_program(
    program: Any,
    rank: Any,
    by_vjp: bool,
    *,
    fn: Callable[..., Tensor] = encode,
    wrap: Callable[[Any], Any] = lambda fn: fn,
    weighted: bool = False,
    optimizer: Any = None,
    params: Any = PARAMS,
    **options: Any,
) -> Any:
    """Return the parameters after a program, by pulls or by the gradient calls they stand for."""

    def body(state: Any, calls: Any) -> Any:
        forwards, order, plain = calls
        pulls = {}
        if by_vjp:
            for number, extra in enumerate(forwards):
                out, pulls[number] = fzero.vjp(fn, state)(x_of(number, rank), extra=extra)
                assert not out.requires_grad
        for place, number in enumerate(order):
            x, c = x_of(number, rank), c_of(number, rank)
            weight = 1.0 + number + int(rank) if weighted else None
            if plain and place == 1:
                loss = lambda p: encode(p, x_of(9, rank)).square().sum()  # noqa: E731
                state, _ = fzero.grad_and_reduce(loss, state, weight=weight)()
            if by_vjp:
                state = pulls[number](state, c, weight)
            else:
                loss = lambda p: (c * fn(p, x, extra=forwards[number])).sum()  # noqa: B023, E731
                state, _ = fzero.grad_and_reduce(loss, state, weight=weight)()
        return state, None

    step = fzero.shard(wrap(body), **options)
    window = fzero.shard(fzero.coalesce(wrap(body)), **options)
    state = step.init(params, optimizer or rule())
    for in_window, forwards, chance, missing, plain in program:
        order = [*range(len(forwards))]
        chance.seed(len(forwards))
        chance.shuffle(order)
        order = order[: max(1, len(order) - missing)]
        state, _ = (window if in_window else step)(state, (forwards, order, plain))
        state = fzero.apply_gradients(state)
    return fzero.full_params(state)


@given(program=PROGRAMS, ranks=worlds, stage=stages, weighted=st.booleans(), donate=st.booleans())
def test_random_programs_have_the_bits_of_gradient_calls(
    program: Any, ranks: int, stage: int, weighted: bool, donate: bool
) -> None:
    options = {"stage": stage, "weighted": weighted, "donate": donate, "bucket_bytes": 100}
    by_both(lambda rank, by_vjp: run_program(program, rank, by_vjp, **options), ranks)


ONE = [(True, [False, True, False], random.Random(0), 0, True)] * 2
APART = [(False, [False, True, False], random.Random(0), 1, True)] * 2


def rematerialised(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    return fzero.remat(lambda p, x: encode(p, x, extra))(params, x)


def checkpointed(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    made: Any = checkpoint(lambda x: encode(params, x, extra), x, use_reentrant=False)
    return made


def evaluating(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    teacher = fzero.init(OTHER, fzero.optim.no_optimizer(), stage=3)
    return encode(params, x, extra) - fzero.evaluate(encode, teacher)(x)


def communicating(params: Any, x: Tensor, extra: bool = False) -> Tensor:
    out = encode(params, x, extra)
    return out + fzero.pmean(out.square())


FEATURES: dict[str, dict[str, Any]] = {
    "remat": {"fn": rematerialised},
    "checkpoint": {"fn": checkpointed},
    "evaluate": {"fn": evaluating},
    "a collective": {"fn": communicating},
    "autocast": {"wrap": lambda fn: fzero.autocast(fn, dtype=torch.bfloat16)},
    "loss scale": {"wrap": lambda fn: fzero.scale_loss(fn, scale=2.0**7)},
    "check": {"wrap": fzero.check_finite},
    "clip": {"wrap": lambda fn: fzero.clip(fn, max_norm=0.1)},
    "codec": {"wrap": lambda fn: fzero.compress(fn, gradients=fzero.codecs.int8())},
    "kept in a window": {"reshard_after_forward": "window"},
    "persistent": {"persistence_threshold_numel": 8},
    "no prefetch": {"prefetch_numel": 0},
    "sums in order": {"ordered": True},
    "offload": {"wrap": lambda fn: fzero.offload(fn, optimizer="cpu", gradients="cpu")},
}


@covered(feature=[*FEATURES], stage=range(4), world=[1, 2, 3])
def test_beside_a_feature_it_has_the_bits_of_gradient_calls(
    feature: str, stage: int, world: int
) -> None:
    options = {"stage": stage, "bucket_bytes": 100, **FEATURES[feature]}
    for program in (ONE, APART):
        by_both(functools.partial(run_program, program, **options), world)


def added(
    state: Any, fn: Any, by_vjp: bool, x: Any, c: Any, weight: Any = None, **options: Any
) -> Any:
    if by_vjp:
        _, pull = fzero.vjp(fn, state, **options)(x)
        return pull(state, c, weight)
    loss = lambda p, x: (c * fn(p, x)).sum()  # noqa: E731
    return fzero.grad_and_reduce(loss, state, weight=weight, **options)(x)[0]


@pytest.mark.parametrize("stage", range(4))
def test_on_named_axes_it_has_the_bits_of_gradient_calls(stage: int) -> None:
    def fn(params: Any, x: Tensor) -> Tensor:
        out = encode(params, x)
        return out * (1 + fzero.axis_index("seq")) * fzero.psum(out.sum(), "seq")

    def body(rank: int, by_vjp: bool) -> Any:
        def step_fn(state: Any, x: Tensor, c: Tensor) -> Any:
            return fzero.apply_gradients(added(state, fn, by_vjp, x, c)), None

        mesh = fzero.Mesh({"data": 2, "seq": 2})
        step = fzero.shard(step_fn, stage=stage, mesh=mesh, bucket_bytes=100)
        state = step.init(PARAMS, rule())
        for _ in range(2):
            state, _ = step(state, x_of(0, int(rank) // 2), c_of(0, rank))
        return fzero.full_params(state)

    by_both(body, 4)


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_have_no_cotangent_of_a_collective_take_part_in_its_backward(stage: int) -> None:
    def fn(params: Any, x: Tensor) -> Any:
        out = encode(params, x)
        return out, fzero.psum(out.sum())

    def body(rank: int, by_vjp: bool) -> Any:
        x, c, first = x_of(0, rank), c_of(0, rank), int(rank) == 0
        state = fzero.init(PARAMS, rule(), stage=stage, bucket_bytes=100)
        for _ in range(2):
            if by_vjp:
                _, pull = fzero.vjp(fn, state)(x)
                state = pull(state, (c, 1.0 if first else None))
            else:

                def loss(params: Any) -> Tensor:
                    out, total = fn(params, x)
                    return (c * out).sum() + (total if first else 0.0)

                state, _ = fzero.grad_and_reduce(loss, state)()
            state = fzero.apply_gradients(state)
        return fzero.full_params(state)

    by_both(body, 3)


@covered(logical=[2, 3, 5], world=[1, 2], stage=range(4), window=[True, False])
def test_of_logical_ranks_it_has_the_bits_of_gradient_calls(
    logical: int, world: int, stage: int, window: bool
) -> None:
    apply, params = net(drops=True)

    def body(rank: int, by_vjp: bool) -> Any:
        options: Any = {"logical_ranks": logical, "seed": 3, "bucket_bytes": 100}
        state = fzero.init(params, rule(), stage=stage, **options)
        mine = state.setup.carried(int(rank))
        x, c = (torch.cat([of(0, one) for one in mine]) for of in (x_of, c_of))
        weight = [1.0 + one for one in mine]

        def step_fn(state: Any) -> Any:
            for _ in range(2):
                if by_vjp:
                    out, pull = fzero.vjp(lambda p, x: apply(p, x), state)(x)
                    assert out.shape == (len(mine), 4, 3)
                    state = pull(state, c.view(out.shape), weight)
                else:
                    loss = lambda p, x, c: (c * apply(p, x)).sum()  # noqa: E731
                    state, _ = fzero.grad_and_reduce(loss, state, weight=weight)(x, c)
            return state, None

        step: Any = fzero.coalesce(step_fn) if window else step_fn
        for _ in range(2):
            state = fzero.apply_gradients(step(state)[0])
        return fzero.full_params(state)

    by_both(body, world)


@pytest.mark.parametrize("wrt", [None, "a", "b"])
@pytest.mark.parametrize("stage", [{"a": 3, "b": 3}, {"a": 0, "b": 3}, {"a": 2, "b": 1}])
def test_of_several_states_it_has_the_bits_of_gradient_calls(stage: Any, wrt: Any) -> None:
    def fn(params: Any, x: Tensor) -> Tensor:
        return encode(params["a"], x) * encode(params["b"], x)

    def body(rank: int, by_vjp: bool) -> Any:
        given = {"a": PARAMS, "b": OTHER}, {"a": rule(), "b": fzero.optim.sgd(0.1)}
        states = fzero.init(*given, stage=stage, bucket_bytes=100)
        states = added(states, fn, by_vjp, x_of(0, rank), c_of(0, rank), wrt=wrt)
        for key in "ab" if wrt is None else wrt:
            states = {**states, key: fzero.apply_gradients(states[key])}
        full = {key: fzero.full_params(states[key]) for key in "ab"}
        return {f"{key}.{path}": x for key, some in full.items() for path, x in some.items()}

    by_both(body, 2)


@covered(stage=range(4), world=[1, 2])
def test_of_an_encoded_base_it_has_the_bits_of_gradient_calls(stage: int, world: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 3))
    layers[0].requires_grad_(requires_grad=False)
    apply, params = fzero.functionalize(layers)

    def body(rank: int, by_vjp: bool) -> Any:
        state = fzero.init(params, rule(), stage=stage, frozen=fzero.codecs.nf4())
        x = torch.ones(4, 64) * (1 + int(rank))
        state = added(state, apply, by_vjp, x, c_of(0, rank))
        return fzero.full_params(fzero.apply_gradients(state))

    by_both(body, world)


def test_the_parts_of_an_accumulation_are_pulled_one_after_another() -> None:
    def body(rank: int, by_vjp: bool) -> Any:
        def step_fn(state: Any, x: Tensor, c: Tensor) -> Any:
            return fzero.apply_gradients(added(state, encode, by_vjp, x, c)), None

        step = fzero.shard(fzero.coalesce(fzero.accumulate(step_fn, micro_batches=2)), stage=3)
        state = step.init(PARAMS, rule())
        for _ in range(2):
            state, _ = step(state, x_of(0, rank), c_of(0, rank))
        return fzero.full_params(state)

    by_both(body, 2)


@covered(stage=range(4), window=[True, False], world=[2, 3])
def test_a_rank_that_does_not_pull_counts_as_zero(stage: int, window: bool, world: int) -> None:
    def body(rank: int, by_vjp: bool) -> Any:
        def step_fn(state: Any) -> Any:
            if not by_vjp:
                c = c_of(0, rank) * (int(rank) == 1)
                return added(state, encode, by_vjp, x_of(0, rank), c), None
            _, pull = fzero.vjp(encode, state)(x_of(0, rank))
            if int(rank) == 1:
                state = pull(state, c_of(0, rank))
            return state, None

        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, bucket_bytes=100)
        for _ in range(2):
            state, _ = (fzero.coalesce(step_fn) if window else step_fn)(state)
            state = fzero.apply_gradients(state)
        return fzero.full_params(state)

    by_both(body, world)


# What real ranks answer: gloo processes.


def misfit(rank: int, world_size: int, what: str, stage: int, window: bool) -> str:
    """Return the kind of error that a rank gets; it can make another step behind it."""

    def step_fn(state: Any) -> Any:
        if what == "forwards" and rank:
            return added(state, encode, by_vjp=False, x=x_of(0, rank), c=1.0), None
        pulls = [fzero.vjp(encode, state)(x_of(i, rank))[1] for i in range(2)]
        if what == "orders" and rank:
            pulls = pulls[::-1]
        rows = 3 if what == "shapes" and not rank else 4
        for pull in pulls:
            state = pull(state, c_of(0, rank)[:rows])
        if what == "twice" and not rank:
            state = pulls[0](state, c_of(0, rank))
        return state, None

    found = "nothing"
    state = fzero.init(PARAMS, rule(), stage=stage, bucket_bytes=100)
    try:
        state, _ = (fzero.coalesce(step_fn) if window else step_fn)(state)
        state = fzero.apply_gradients(state)
    except FzeroError as error:
        found = type(error).__name__
    state = fzero.init(PARAMS, rule(), stage=stage, bucket_bytes=100)
    added(state, encode, by_vjp=True, x=x_of(0, rank), c=c_of(0, rank))
    return found


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("what", ["orders", "forwards", "shapes", "twice"])
def test_what_differs_by_rank_is_an_error_on_all(what: str) -> None:
    own = {"shapes": "LayoutError", "twice": "PhaseError"}.get(what)
    wanted = ["MismatchError"] * 3 if own is None else [own, *["PeerFailedError"] * 2]
    for stage in (0, 1, 3):
        for window in (False, True):
            found = run_ranks(misfit, 3, what, stage, window)
            local = what == "orders" and window and stage < 3  # each adds up its own
            assert found == (["nothing"] * 3 if local else wanted), (stage, window)


def of_two_models(rank: int, world_size: int, stage: int, equal: bool, joint: bool) -> list[Any]:
    """Return what a rank gets that leaves out the pull of the second model, and by both ways."""
    torch.manual_seed(2)
    apply, params = (encode, OTHER) if equal else fzero.functionalize(nn.Linear(5, 3))
    x, c = x_of(0, rank), c_of(0, rank)

    def update(by_vjp: bool) -> Any:
        states = fzero.init({"a": PARAMS, "b": params}, {"a": rule(), "b": rule()}, stage=stage)
        a, b = states["a"], states["b"]
        if by_vjp:
            pulls = fzero.vjp(encode, a)(x)[1], fzero.vjp(apply, b)(x)[1]
            a = pulls[0](a, c)
            b = b if rank else pulls[1](b, c)
        else:
            a, b = added(a, encode, False, x, c), added(b, apply, False, x, c * (rank == 0))
        if joint:
            states = fzero.apply_gradients({"a": a, "b": b})
        else:
            states = {"a": fzero.apply_gradients(a), "b": fzero.apply_gradients(b)}
        return [*fzero.full_params(states["a"]).values(), *fzero.full_params(states["b"]).values()]

    found = []
    for by_vjp in (True, False):
        try:
            found.append(update(by_vjp))
        except FzeroError as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_pull_that_a_rank_leaves_out_is_served_by_an_update_of_its_own_states_alone(
    stage: int, equal: bool
) -> None:
    for found, wanted in run_ranks(of_two_models, 2, stage, equal, True):
        assert len(found) == len(wanted)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    # Else its update of `a` would take part with shards, and count gradients, of another model.
    for found, _ in run_ranks(of_two_models, 2, stage, equal, False):
        assert found == "MismatchError"


def of_one_after_both(rank: int, world_size: int, stage: int) -> bool:
    """Whether the update of a model alone serves its pull, after a forward of both models."""

    def update(by_vjp: bool) -> Any:
        states = fzero.init({"a": PARAMS, "b": OTHER}, {"a": rule(), "b": rule()}, stage=stage)
        a, x, c = states["a"], x_of(0, rank), c_of(0, rank)
        if by_vjp:
            fzero.vjp(lambda p, x: encode(p["a"], x) + encode(p["b"], x), states)(x)
            _, pull = fzero.vjp(encode, a)(x)
            a = a if rank else pull(a, c)
        else:
            a = added(a, encode, False, x, c * (rank == 0))
        return fzero.full_params(fzero.apply_gradients(a))

    same(update(True), update(False))
    return True


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_of_more_models_is_another_one(stage: int) -> None:
    assert all(run_ranks(of_one_after_both, 2, stage))


def crossed(rank: int, world_size: int, stage: int) -> str:
    apply, params = fzero.functionalize(nn.Linear(5, 3))
    models = [(encode, fzero.init(PARAMS, rule(), stage=stage))]
    models += [(apply, fzero.init(params, rule(), stage=stage))]
    try:
        for fn, state in reversed(models) if rank else models:
            added(state, fn, False, x_of(0, rank), c_of(0, rank))
    except FzeroError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", range(4))
def test_gradient_calls_of_other_models_do_not_go_together(stage: int) -> None:
    assert run_ranks(crossed, 2, stage) == ["MismatchError"] * 2


WIDTH, DEPTH, ROWS = 64, 6, 8


def tower() -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(DEPTH)]
    return fzero.functionalize(nn.Sequential(*layers))


def kept_between(
    rank: int, world_size: int, stage: int, low: bool, again: bool = False, tangent: bool = False
) -> int:
    """Bytes that live between a forward and its pull."""
    apply, params = tower()
    if tangent:
        of = apply
        apply = lambda p, x: torch.func.jvp(lambda x: of(p, x), (x,), (x,))[1]  # noqa: E731
    state = fzero.init(params, rule(), stage=stage, bucket_bytes=1)
    x = torch.randn(ROWS, WIDTH)
    with LiveBytes() as live, torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        out, pull = fzero.vjp(fzero.remat(apply) if again else apply, state)(x)
        del out
        gc.collect()
        time.sleep(0.1)  # threads of gloo let go
        between = live.alive()
        assert pull(state, torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)).gradients.held
        return between


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("stage", range(4))
def test_between_a_forward_and_its_pull_there_are_activations_alone(stage: int) -> None:
    activations = DEPTH * ROWS * WIDTH * 4  # what tanh saves; the last one is the output
    assert run_ranks(kept_between, 2, stage, False) == [activations] * 2
    # What a layer is given in bf16, which the tanh before saves, too; and x is cast.
    low = (DEPTH + 1) * ROWS * WIDTH * 2
    assert run_ranks(kept_between, 2, stage, True) == [low] * 2
    outputs = ROWS * WIDTH * 4  # for what is run again, of which the user has the inputs
    assert run_ranks(kept_between, 2, stage, False, True) == [outputs] * 2
    assert run_ranks(kept_between, 2, stage, False, True, True) == [outputs] * 2  # forward mode


@pytest.mark.xdist_group("gloo")
def test_forwards_that_are_never_pulled_leave_nothing_behind() -> None:
    for before, after in run_ranks(forgotten, 2):
        assert before == after


def forgotten(rank: int, world_size: int) -> tuple[int, int]:
    apply, params = tower()
    state = fzero.init(params, rule(), stage=3)
    found = []
    with LiveBytes() as live:
        for _ in range(3):
            for _ in range(2):
                _ = fzero.vjp(lambda p, x: apply(p, x), state)(torch.ones(ROWS, WIDTH))
            gc.collect()
            time.sleep(0.1)
            found.append(live.alive())
    return found[0], found[-1]


@covered(stage=range(4), scale=[None, 2.0**6], later=[True, False])
def test_a_cotangent_goes_through_the_next_model(
    stage: int, scale: float | None, later: bool
) -> None:
    """h of one model into another one, against plain PyTorch on one process."""
    torch.manual_seed(4)
    first, second = nn.Linear(5, 6).double(), nn.Linear(6, 1).double()
    (one, one_params), (two, two_params) = map(fzero.functionalize, (first, second))
    x = torch.stack([x_of(0, rank).double() for rank in range(3)])

    def body(rank: int) -> Any:
        def step_fn(states: Any) -> Any:
            h, pull = fzero.vjp(one, states["one"])(x[int(rank)])
            h.requires_grad_()
            if later:
                out, next_pull = fzero.vjp(lambda p: two(p, h), states["two"])()
                b = next_pull(states["two"], 2 * out / out.numel())
            else:
                loss = lambda p: two(p, h).square().mean()  # noqa: E731
                b, _ = fzero.grad_and_reduce(loss, states["two"])()
            c = h.grad if b.scale is None else h.grad / b.scale.scale
            states = {"one": pull(states["one"], c), "two": b}
            return fzero.apply_gradients(states), None

        step = fzero.shard(fzero.scale_loss(step_fn, scale=scale or 1.0), stage=stage)
        rules = {"one": fzero.optim.sgd(0.1), "two": fzero.optim.sgd(0.1)}
        states, _ = step(step.init({"one": one_params, "two": two_params}, rules))
        full = {key: fzero.full_params(state) for key, state in states.items()}
        return {f"{key}.{path}": p for key, some in full.items() for path, p in some.items()}

    second(first(x.flatten(0, 1))).square().mean().backward()
    found = each_rank(body, 3)
    for key, module in (("one", first), ("two", second)):
        for path, p in module.named_parameters():
            assert p.grad is not None
            wanted = (p - 0.1 * p.grad).detach()
            torch.testing.assert_close(found[f"{key}.{path}"][0], wanted, rtol=1e-12, atol=1e-14)


# What is refused, and what goes on.


def state_at(stage: int, **options: Any) -> Any:
    return fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, **options)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("donate", [True, False])
def test_an_update_ends_what_is_pending_and_a_skipped_one_does_not(
    stage: int, donate: bool
) -> None:
    def step_fn(state: Any, factor: float) -> Any:
        _, pull = fzero.vjp(encode, state)(x_of(0, 0))
        state = pull(state, factor * c_of(0, 0), retain=True)
        return fzero.apply_gradients(state), pull

    step = fzero.shard(fzero.scale_loss(step_fn), stage=stage, donate=donate)
    state, pull = step(step.init(PARAMS, rule()), float("inf"))
    found = fzero.full_gradients(pull(state, c_of(0, 0)))
    wanted, _ = fzero.grad_and_reduce(
        lambda p: (c_of(0, 0) * encode(p, x_of(0, 0))).sum(), state_at(stage)
    )()
    for path, gradient in fzero.full_gradients(wanted).items():
        assert gradient is None or torch.equal(found[path], gradient)
    state, pull = step(step.init(PARAMS, rule()), 1.0)
    with pytest.raises(PhaseError, match="vjp was at update 0, and it is at update 1"):
        pull(state, c_of(0, 0))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_pull_is_called_once_or_as_often_as_it_is_retained(stage: int) -> None:
    def body(rank: int) -> Any:
        state = state_at(stage)
        out, pull = fzero.vjp(encode, state)(x_of(0, rank))
        for factor in (1.0, 2.0):
            state = pull(state, factor * torch.ones_like(out), retain=True)
        state = pull(state, 4.0 * torch.ones_like(out))
        with pytest.raises(PhaseError, match="was called before"):
            pull(state, out)
        wanted = state_at(stage)
        for factor in (1.0, 2.0, 4.0):
            loss = lambda p: (factor * encode(p, x_of(0, rank))).sum()  # noqa: B023, E731
            wanted, _ = fzero.grad_and_reduce(loss, wanted)()
        found, right = fzero.gradients(state), fzero.gradients(wanted)
        for path, gradient in right.items():
            assert gradient is None or torch.equal(found[path], gradient)
        return torch.zeros(())

    each_rank(body, 2)


def test_a_retained_pull_that_raises_can_be_called_again() -> None:
    class Raises(torch.autograd.Function):
        fails = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *dy: Any) -> Any:
            if Raises.fails:
                raise ValueError("in a backward")
            return dy[0]

    state = state_at(3)
    raises: Any = Raises.apply
    _, pull = fzero.vjp(lambda p, x: raises(encode(p, x)), state)(x_of(0, 0))
    with pytest.raises(ValueError, match="in a backward"):
        pull(state, c_of(0, 0), retain=True)
    Raises.fails = False
    assert pull(state, c_of(0, 0)).progress.backwards == 1


def test_cotangents_may_be_made_in_inference_mode() -> None:
    state = state_at(3)
    out, pull = fzero.vjp(encode, state)(x_of(0, 0))
    with torch.inference_mode():
        c = out.square()
    found = fzero.full_gradients(pull(state, c, retain=True))
    for path, gradient in fzero.full_gradients(pull(state, out.square())).items():
        assert gradient is None or torch.equal(found[path], gradient)


OUT: dict[str, Any] = {"x": torch.ones(2), "n": None, "l": [2.0]}
MISFITS: dict[str, tuple[Any, str]] = {
    "a shape": ({**OUT, "x": torch.ones(3)}, r"out\['x'\] has shape \[3\]"),
    "a number": ({**OUT, "x": 1.0}, r"out\['x'\] is a float"),
    "of an integer": ({**OUT, "n": torch.tensor(1)}, r"out\['n'\] is not None"),
    "another structure": ({"x": torch.ones(2)}, "do not fit the outputs"),
    "no structure": (torch.ones(2), "do not fit the outputs"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_cotangents_that_do_not_fit_are_refused_and_lose_nothing(case: str) -> None:
    def fn(params: Any) -> Any:
        return {"x": params["extra"] * 3, "n": torch.tensor(3), "l": [params["extra"].sum()]}

    state = state_at(3)
    _, pull = fzero.vjp(fn, state)()
    cotangents, seen = MISFITS[case]
    with pytest.raises(LayoutError, match=seen):
        pull(state, cotangents)
    state = pull(state, {**OUT, "x": OUT["x"].double()})  # cast to the dtype of the output
    assert fzero.full_gradients(state)["extra"].tolist() == [5.0, 5.0]


def requires_grad() -> Any:
    return fzero.vjp(encode, state_at(3))(x_of(0, 0).requires_grad_())


def other_state() -> Any:
    return fzero.vjp(encode, state_at(3))(x_of(0, 0))[1](state_at(2), c_of(0, 0))


def read_state_updated() -> Any:
    states = fzero.init({"a": PARAMS, "b": OTHER}, {"a": rule(), "b": rule()}, stage=3)
    fn = lambda p, x: encode(p["a"], x) * encode(p["b"], x)  # noqa: E731
    _, pull = fzero.vjp(fn, states, wrt="a")(x_of(0, 0))
    b = added(states["b"], encode, True, x_of(0, 0), c_of(0, 0))
    return pull({**states, "b": fzero.apply_gradients(b)}, c_of(0, 0))


def writes() -> Any:
    def fn(params: Any) -> Any:
        with torch.no_grad():
            return params["extra"].mul_(2)

    return fzero.vjp(fn, state_at(1))()


def collective_of_logical_ranks() -> Any:
    state = state_at(3, logical_ranks=2)
    return fzero.vjp(communicating, state)(torch.cat([x_of(0, 0), x_of(0, 1)]))


def inference() -> Any:
    with torch.inference_mode():
        return fzero.vjp(encode, state_at(3))(x_of(0, 0))


def learns_nothing() -> Any:
    return fzero.vjp(encode, fzero.init(PARAMS, fzero.optim.no_optimizer(), stage=3))


def pull_of_one() -> Any:
    state = state_at(3)
    return functools.partial(fzero.vjp(encode, state)(x_of(0, 0))[1], state)


def twin() -> Any:
    other = fzero.init(OTHER, fzero.optim.sgd(0.5), stage=3)
    return fzero.vjp(encode, state_at(3))(x_of(0, 0))[1](other, c_of(0, 0))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an argument that requires grad": (requires_grad, PhaseError, "requires grad"),
    "a torch.func transform": (
        lambda: torch.func.grad(lambda x: fzero.vjp(encode, state_at(3))(x)[0].sum())(x_of(0, 0)),
        PhaseError,
        "torch.func",
    ),
    "inference mode": (inference, PhaseError, "inference_mode"),
    "another state": (other_state, PhaseError, "at stage 2 .* and vjp .* at stage 3"),
    "the state of another model of the same architecture": (twin, PhaseError, "another model"),
    "a state that was only read, and updated": (read_state_updated, PhaseError, "at update 1"),
    "a write to a parameter": (writes, LayoutError, "written in place"),
    "a collective of logical ranks": (collective_of_logical_ranks, PhaseError, "several logical"),
    "a pickle": (lambda: pickle.dumps(pull_of_one().func), PhaseError, "pickled or copied"),
    "a copy": (lambda: copy.deepcopy(pull_of_one().func), PhaseError, "pickled or copied"),
    "a weight that is a function": (
        lambda: pull_of_one()(c_of(0, 0), lambda x: 1.0),
        LayoutError,
        "weight is a function",
    ),
    "a negative weight": (
        lambda: pull_of_one()(c_of(0, 0), -1.0),
        LayoutError,
        "weight=-1.0",
    ),
    "arguments in another order": (
        lambda: fzero.vjp(state_at(3), encode),
        LayoutError,
        "in the place of the function",
    ),
    "a module": (lambda: fzero.vjp(Net(), state_at(3)), CallError, "parameters of its own"),
    "an output that is no tensor": (
        lambda: fzero.vjp(lambda p: ("a", p["extra"]), state_at(3))(),
        LayoutError,
        "an output is a str",
    ),
    "a state that does not learn": (learns_nothing, LayoutError, "no leaf of the state learns"),
    "sizes without logical ranks": (
        lambda: fzero.vjp(encode, state_at(3), sizes=[1]),
        LayoutError,
        "no logical ranks",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses_by_name(what: str) -> None:
    call, kind, seen = REFUSED[what]
    with pytest.raises(kind, match=seen):
        call()


def test_a_step_with_pulls_is_traced_compiled_and_proved() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        out, pull = fzero.vjp(encode, state)(x)
        return fzero.apply_gradients(pull(state, 2 * out)), out.square().sum()

    step = fzero.shard(step_fn, stage=3)
    state, again = step.init(PARAMS, rule()), step.init(PARAMS, rule())
    compiled = fzero.compile(step, backend="eager")
    for seed in range(2):
        state, loss = step(state, x_of(seed, 0))
        again, other = compiled(again, x_of(seed, 0))
        assert torch.equal(loss, other)
    same(fzero.full_params(state), fzero.full_params(again))
    proof = fzero.prove(step, step.init(PARAMS, fzero.optim.sgd(0.1)), (x_of(0, 0),), world=2)
    assert "mean over ranks of gradients" in str(proof)
