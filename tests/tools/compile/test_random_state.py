"""A compiled step draws what the step draws, and leaves the random state as the step does."""

from __future__ import annotations

import functools
import random
import time
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.errors import LayoutError
from tests.adapter.on_ranks import on_ranks
from tests.descends import descends

RULE = fzero.optim.sgd(2.0**-4)
OWN = torch.Generator()
HELD = SimpleNamespace(generator=torch.Generator(), table=torch.arange(6.0), power=2)


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x * x)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        mask = torch.rand(x.shape)
    return x * mask + torch.rand(x.shape)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(11)
    return x * torch.randint(0, 4, x.shape)


def by_new_generator(x: Tensor) -> Tensor:
    one = torch.Generator().manual_seed(5)
    return x * torch.rand(x.shape, generator=one) + torch.rand(x.shape, generator=one)


def by_copied_state(x: Tensor) -> Tensor:
    one = torch.Generator()
    one.set_state(torch.get_rng_state())
    return x * torch.rand(x.shape, generator=one) + torch.rand(x.shape)


def by_own_generator(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=OWN) + HELD.table.bernoulli(
        0.5, generator=HELD.generator
    )


def again(x: Tensor) -> Tensor:
    state = OWN.get_state()
    first = torch.rand(x.shape, generator=OWN)
    OWN.set_state(state)
    return x * first + torch.rand(x.shape, generator=OWN)


class SetBack(torch.autograd.Function):
    """y = x * mask, with a mask that the backward draws again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.state = torch.get_rng_state()
        return x * torch.rand(x.shape)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            return dys[0] * torch.rand(dys[0].shape)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": dropped,
    "rrelu": lambda x: F.rrelu(x - 3, training=True),
    "fork_rng": forked,
    "manual_seed": seeded,
    "a new generator": by_new_generator,
    "a copied state": by_copied_state,
    "own generators": by_own_generator,
    "drawn twice": again,
    "permuted": lambda x: x[torch.randperm(x.numel())] * HELD.power,
    "a function that sets back": SetBack.apply,
    "none": lambda x: x * HELD.table,
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "": lambda fn: fn,
    "remat": fzero.remat,
    "checkpoint": lambda fn: lambda x: checkpoint(fn, x, use_reentrant=False),
    "reentrant": lambda fn: lambda x: checkpoint(fn, x, use_reentrant=True),
}


def generators() -> list[torch.Generator]:
    return [torch.default_generator, OWN, HELD.generator]


def differences(step: Any, calls: Sequence[Sequence[Any]], **options: Any) -> list[str]:
    """What a step and the compiled step do otherwise, over some calls; nothing is expected."""
    compiled = fzero.compile(step, backend="eager", **options)
    state, other = (step.init({"w": torch.arange(1.0, 7.0)}, RULE) for _ in range(2))
    found = []
    for number, arguments in enumerate(calls):
        before = [one.manual_seed(7 + number).get_state() for one in generators()]
        state, loss = step(state, *arguments)
        after = [one.get_state() for one in generators()]
        for one, known in zip(generators(), before, strict=True):
            one.set_state(known)
        other, got = compiled(other, *arguments)
        full, mine = (fzero.full_params(one)["w"] for one in (state, other))
        found += ["loss"] * (not torch.equal(loss, got))
        found += ["parameters"] * (not torch.equal(full, mine))
        same = all(torch.equal(x, y.get_state()) for x, y in zip(after, generators(), strict=True))
        found += ["random state"] * (not same)
    return found


def loss_of(parts: Sequence[tuple[str, str]]) -> Callable[..., Tensor]:
    functions = [AROUND[around](DRAWS[draw]) for draw, around in parts]

    def loss(p: Any, *xs: Tensor) -> Tensor:
        h = p["w"]
        for fn in functions:
            h = fn(h).sin()
        for number, x in enumerate(xs):
            h = h * x + number
        return h.sum()

    return loss


X = torch.arange(6.0)
PAIRS = st.tuples(st.sampled_from([*DRAWS]), st.sampled_from([*AROUND]))
# A checkpoint of torch stops its recomputation before rrelu has filled its noise: never the same.
PARTS = st.lists(PAIRS.filter(lambda pair: pair != ("rrelu", "checkpoint")), max_size=3)
BATCHES = st.lists(st.sampled_from([(X, X), (X, X + 1), (X, X.clone())]), min_size=3, max_size=3)


@settings(max_examples=8)
@given(parts=PARTS, batches=BATCHES, stage=st.integers(0, 3), donate=st.booleans())
def test_random_programs_have_the_bits_and_the_random_state_of_the_step(
    parts: Any, batches: Any, stage: int, donate: bool
) -> None:
    step = fzero.shard(descends(loss_of(parts)), stage=stage, donate=donate)
    assert differences(step, batches) == []  # a warning would be an error


@pytest.mark.parametrize("draw", DRAWS)
def test_each_way_to_draw_is_compiled_where_it_is_recomputed(draw: str) -> None:
    around = "remat" if draw in ("a function that sets back", "rrelu") else "checkpoint"
    step = fzero.shard(descends(loss_of([(draw, around), ("dropout", "")])), stage=2)
    assert differences(step, [(X,), (X + 1,), (X + 2,)]) == []


@pytest.mark.parametrize("transformed", [False, True])
def test_remat_sets_a_generator_of_the_users_back(transformed: bool) -> None:
    found = []
    for around in (lambda fn: fn, fzero.remat):
        fn: Any = around(lambda w: by_own_generator(w * w).sin().sum())
        OWN.manual_seed(0)
        HELD.generator.manual_seed(0)
        w = torch.arange(6.0, requires_grad=not transformed)
        grad = torch.func.grad(fn)(w) if transformed else torch.autograd.grad(fn(w), w)[0]
        found.append([grad, torch.rand(2, generator=OWN), torch.rand(2, generator=HELD.generator)])
    assert all(map(torch.equal, *found))


WRITTEN = torch.zeros(6)
RUNS_ITSELF: dict[str, tuple[Callable[..., Tensor], str]] = {
    "python": (
        lambda p, x: (p["w"] * x).sum() * (2 if random.random() > 2 else 1),
        "each call changes random",
    ),
    "clock": (
        lambda p, x: (p["w"] * x).sum() * (1 + time.perf_counter_ns()),
        "its graph returns another",
    ),
    "written": (
        lambda p, x: (p["w"] * x * WRITTEN.add_(1)).sum(),
        "writes into a tensor that is none of its arguments",
    ),
    "counted": (
        lambda p, x: (p["w"] * x).sum() * tick(),
        "each call changes .*COUNT",
    ),
}
COUNT: list[int] = list(range(100))


def tick() -> int:
    COUNT.append(1)
    return len(COUNT)


@pytest.mark.parametrize("name", RUNS_ITSELF)
def test_what_a_graph_does_not_have_runs_as_the_step_itself_with_one_warning(name: str) -> None:
    loss, why = RUNS_ITSELF[name]
    compiled = fzero.compile(fzero.shard(descends(loss), stage=1), backend="eager")
    state = compiled.init({"w": torch.ones(6)}, RULE)
    with pytest.warns(UserWarning, match=rf"the step itself runs from now on: (?s:.*){why}"):
        for _ in range(2):  # the first call may fill what later ones find
            state, _ = compiled(state, X)
    WRITTEN.zero_()
    lost = [compiled(state, torch.ones(6))[1] for _ in range(2)]  # a warning would be an error
    assert name != "written" or lost[1] == 2 * lost[0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"logical_ranks": 2}, "logical ranks run one after another"),
        ({"rule": fzero.optim.adamw(0.1, state_dtype=fzero.codecs.int8())}, "encoded moments"),
        ({"local": True}, "replicas of local updates"),
    ],
)
def test_states_that_no_graph_has_are_named(options: Any, why: str) -> None:
    rule, local = options.pop("rule", RULE), options.pop("local", False)
    step_fn = descends(lambda p, x: (p["w"] * x).sum())
    step = fzero.shard(fzero.local(step_fn, every=2) if local else step_fn, stage=1, **options)
    compiled = fzero.compile(step, backend="eager")
    state = compiled.init({"w": torch.ones(6)}, rule)
    with pytest.warns(UserWarning, match=why):
        _, loss = compiled(state, X.reshape(6, 1))
    assert torch.equal(loss, step(state, X.reshape(6, 1))[1])


MANY = [torch.Generator() for _ in range(100)]


@functools.lru_cache
def table(length: int) -> Tensor:
    return torch.arange(float(length)) * len(COUNT)


def test_what_the_first_call_fills_is_found_by_later_ones() -> None:
    kept = SimpleNamespace(scale=None)

    def loss(p: Any, x: Tensor) -> Tensor:
        if kept.scale is None:
            kept.scale = x + 1
        return (p["w"] * table(6) * kept.scale * torch.rand(6, generator=MANY[0]) * x).sum()

    step = fzero.shard(descends(loss), stage=2)
    outs = []
    for fn in (step, fzero.compile(step, backend="eager")):
        kept.scale, state = None, step.init({"w": torch.ones(6)}, RULE)
        table.cache_clear()
        MANY[0].manual_seed(0)
        outs.append([])
        for number in range(3):
            state, value = fn(state, X + number)
            outs[-1].append(value)
    assert all(map(torch.equal, *outs))


def two(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return (p["w"] * x).sum() + (p["w"] * y).pow(2).sum()


def test_one_tensor_given_twice_is_another_graph_than_two() -> None:
    step = fzero.shard(descends(two), stage=0)
    assert differences(step, [(X, X), (X, X + 1), (X + 2, X)]) == []
    listed = fzero.shard(descends(lambda p, xs: two(p, *xs)), stage=1)
    assert differences(listed, [([X, X],), ([X, X + 1],)]) == []
    whole = torch.arange(9.0)
    assert differences(step, [(whole[:6], whole[3:]), (whole[:6], whole[:6])]) == []


def test_a_reference_that_is_the_state_at_first_stays_one() -> None:
    def step_fn(state: Any, reference: Any, x: Tensor) -> tuple[Any, Tensor]:
        past = fzero.full_params(reference)["w"]
        loss = fzero.grad_and_reduce(lambda p: ((p["w"] - past + 1) * x).pow(2).sum(), state)
        state, value = loss()
        return fzero.apply_gradients(state), value

    step = fzero.shard(step_fn, stage=1)
    compiled = fzero.compile(step, backend="eager")
    first = state = other = step.init({"w": torch.ones(6)}, RULE)
    for number in range(3):
        state, loss = step(state, first, X + number)
        other, found = compiled(other, first, X + number)
        assert torch.equal(loss, found)


@pytest.mark.parametrize("numbers", [(1, 1.0, True), (0.0, -0.0, 2.0)])
def test_numbers_of_other_kinds_are_other_graphs(numbers: Any) -> None:
    def loss(p: Any, x: Tensor, k: Any) -> Tensor:
        scaled = (x.long() * k).sum()
        return (p["w"] * x).sum() + scaled / 3 + torch.tensor(float(k)).signbit()

    step = fzero.shard(descends(loss), stage=0)
    compiled = fzero.compile(step, backend="eager")
    state = step.init({"w": torch.ones(6)}, RULE)
    for number in numbers:
        a, b = (one(state, X + 1, number)[1] for one in (step, compiled))
        assert torch.equal(a, b) and a.dtype == b.dtype


def by_leaf(slots: Any, grads: Any, ctx: Any) -> Any:
    return slots, {path: g / (1 + ctx.norm({path: g})) for path, g in grads.items()}


FACTOR = SimpleNamespace(k=1.0)


@on_ranks(2)
def test_ranks_that_read_other_parts_of_what_collectives_give_make_the_same_ones(rank: int) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return (p["a"] * x).sum() + (p["b"] * x[0]).pow(2).sum() * p["c"] * FACTOR.k

    values = {"a": torch.arange(1.0, 6.0), "b": torch.ones(3, 1), "c": torch.ones(())}
    norms = fzero.transform(name="norms", reduced=by_leaf)
    step = fzero.shard(norms(descends(loss)), stage=1)
    compiled = fzero.compile(step, backend="eager")
    state = other = step.init(values, RULE)
    for number in range(3):
        FACTOR.k = 2.0 if rank and number == 2 else 1.0  # a new graph on one rank
        x = torch.arange(5.0) + number + rank
        state, lost = step(state, x)
        other, found = compiled(other, x)
        assert torch.equal(lost, found)
    assert all(map(torch.equal, state.params.flats, other.params.flats))
    step = fzero.shard(
        descends(lambda p, x: (p["a"] * x).sum() * (random.random() if rank else 1)), stage=1
    )
    compiled = fzero.compile(step, backend="eager")
    state = step.init(values, RULE)
    with pytest.warns(UserWarning, match="changes random" if rank else "another rank has no graph"):
        for _ in range(2):
            compiled(state, X[:5])
    compiled(state, X[:5])


def test_a_write_into_the_batch_is_refused_as_before() -> None:
    step = fzero.shard(descends(lambda p, x: (p["w"] * x.mul_(2)).sum()), stage=0)
    compiled = fzero.compile(step, backend="eager")
    with warnings.catch_warnings(), pytest.raises(LayoutError, match="one of its arguments"):
        compiled(compiled.init({"w": torch.ones(6)}, RULE), X.clone())


@torch.library.custom_op("fzero_test::once", mutates_args=())
def once(x: Tensor) -> Tensor:
    """Raise in the first run on rank 1."""
    COUNT_OF_RUNS[0] += 1
    if torch.distributed.get_rank() and COUNT_OF_RUNS[0] == 1:
        raise RuntimeError("on one rank alone")
    return x.clone()


once.register_fake(torch.empty_like)
COUNT_OF_RUNS = [0]


@on_ranks(2, timeout_s=60)
def test_a_graph_that_raises_on_one_rank_alone_leaves_no_rank_waiting(rank: int) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * once(x.detach()) + fzero.psum(x)).sum()

    for stage in (0, 3):
        COUNT_OF_RUNS[0] = 0
        step = fzero.shard(descends(loss), stage=stage, donate=stage == 3)
        compiled = fzero.compile(step, backend="eager")
        state = other = step.init({"w": torch.ones(6)}, RULE)
        why = "the graph raises RuntimeError: on one rank" if rank else "graph returns another"
        with pytest.warns(UserWarning, match=why):
            state, got = compiled(state, X + rank)
        other = step.init({"w": torch.ones(6)}, RULE)
        other, lost = step(other, X + rank)
        assert torch.equal(got, lost)
        assert all(map(torch.equal, state.params.flats, other.params.flats))
