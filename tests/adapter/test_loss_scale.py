"""The loss scale of an engine: both drivers alike, every overflow skipped, no way around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.adapter import DynamicScale, Engine
from fzero.errors import LayoutError, PhaseError
from tests.adapter.test_same_bits import same
from tests.ranks import run_ranks
from tests.strategies import seeds, stages, worlds

INF = float("inf")
STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """A scalar, an empty, a frozen, an unused and a tied parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(3, 5, dtype=dtype), nn.Linear(5, 3, bias=False, dtype=dtype)
        self.c, self.unused = nn.Linear(5, 3, bias=False, dtype=dtype), nn.Linear(2, 2, dtype=dtype)
        self.c.weight = self.b.weight
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.empty = nn.Parameter(torch.ones(0, 3, dtype=dtype))
        self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.c(torch.tanh(self.a(self.b(torch.tanh(self.a(x))))))


def rows(rank: int, number: int, *, bad: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(2, 3, generator=source).to(dtype)
    return x.fill_(INF) if bad else x


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "not fused": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5, dampening=0.25),
}
SCALES: list[Any] = ["dynamic", 2.0**10, DynamicScale(init_scale=2.0, growth_interval=1)]


class Run(NamedTuple):
    stage: int
    optimizer: str
    scale: Any
    bad: tuple[int | None, ...]  # of each step: the rank whose loss overflows
    every: int = 1
    coalesced: bool = False
    max_norm: float | None = None
    bf16: bool = False


def engine_of(run: Run, scale: Any) -> Engine:
    net = Net(torch.bfloat16 if run.bf16 else torch.float32)
    return Engine(
        net,
        OPTIMIZERS[run.optimizer],
        stage=run.stage,
        loss_scale=scale,
        max_norm=run.max_norm,
        gradient_accumulation_steps=run.every,
        bucket_bytes=64,
    )


def by_engine(run: Run, rank: int, size: int, scale: Any, *, only_good: bool) -> Engine:
    """One update for each of `run.bad`; the bad ones left out if `only_good`."""
    engine = engine_of(run, scale)
    for number, bad in enumerate(run.bad):
        if bad is not None and only_good:
            continue
        for part in range(run.every):
            wrong = bad is not None and bad % size == rank and part == 0
            dtype = torch.bfloat16 if run.bf16 else torch.float32
            x = rows(rank, 10 * number + part, bad=wrong, dtype=dtype)
            if run.coalesced:
                with engine.coalesce():
                    engine.backward(loss_of(engine(x)))
            elif number % 2:
                engine.scale(loss_of(engine(x))).backward()
            else:
                engine.backward(loss_of(engine(x)))
            assert engine.step() is (part == run.every - 1)
        assert engine.step_was_skipped is (bad is not None and engine.needs_scaler())
    return engine


def check_skips(rank: int, size: int, run: Run) -> None:
    got = by_engine(run, rank, size, run.scale, only_good=False)
    want = by_engine(run, rank, size, 1.0, only_good=True)
    same(got.state, want.state)
    if not isinstance(run.scale, float):
        held = got.state.scale
        assert held is not None and held.scale.item() == got.loss_scale
    got.close()
    want.close()


bads = st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=4).map(tuple)
runs = st.builds(
    Run,
    stage=stages,
    optimizer=st.sampled_from([*OPTIMIZERS]),
    scale=st.sampled_from(SCALES),
    bad=bads,
    every=st.integers(1, 2),
    coalesced=st.booleans(),
    max_norm=st.sampled_from([None, 0.05]),
    bf16=st.booleans(),
)


def on_virtual(body: Callable[..., None], world_size: int, *args: Any) -> None:
    def each(x: Tensor) -> Tensor:
        body(fzero.axis_index(), world_size, *args)
        return x

    fzero.simulate(each, world_size=world_size)(torch.zeros(world_size, 1))


@settings(max_examples=25)
@given(runs, worlds)
def test_on_virtual_ranks_updates_with_an_overflow_leave_no_trace(run: Run, size: int) -> None:
    on_virtual(check_skips, size, run)


def check_drivers(rank: int, size: int, run: Run) -> None:
    """The engine and the functional step hold the same bits, the scale's among them."""
    engine = by_engine(run, rank, size, run.scale, only_good=False)
    apply, params = fzero.functionalize(Net(torch.bfloat16 if run.bf16 else torch.float32))

    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p, x: loss_of(apply(p, x)), state)(x)
        return fzero.apply_gradients(state), None

    step: Any = fzero.scale_loss(fzero.clip(step_fn, max_norm=run.max_norm), run.scale)
    step = fzero.shard(step, stage=run.stage, donate=True, bucket_bytes=64)
    state = step.init(params, fzero.optim.from_torch(OPTIMIZERS[run.optimizer]))
    for number, bad in enumerate(run.bad):
        wrong = bad is not None and bad % size == rank
        dtype = torch.bfloat16 if run.bf16 else torch.float32
        state, _ = step(state, rows(rank, 10 * number, bad=wrong, dtype=dtype))
    same(engine.state, state)
    held, theirs = engine.state.scale, state.scale
    assert held is not None and held.policy == theirs.policy
    for name in ("scale", "good_updates", "hysteresis_left", "overflowed"):
        assert torch.equal(getattr(held, name), getattr(theirs, name)), name
    engine.close()


@settings(max_examples=25)
@given(runs.map(lambda run: run._replace(every=1, coalesced=False)), worlds, seeds)
def test_both_drivers_hold_the_same_bits(run: Run, size: int, seed: int) -> None:
    on_virtual(check_drivers, size, run)


CHOSEN = (
    Run(0, "fused", "dynamic", (None, 1, 0, None), max_norm=0.05),
    Run(1, "not fused", 2.0**10, (2, None, None)),
    Run(2, "momentum", SCALES[2], (0, None, 1, None), every=2, coalesced=True),
    Run(3, "adamw", "dynamic", (None, 1, None), bf16=True),
)


def on_gloo(rank: int, size: int) -> None:
    for run in CHOSEN:
        check_skips(rank, size, run)
        check_drivers(rank, size, run._replace(every=1, coalesced=False))


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("world_size", [2, 3])
def test_on_gloo_ranks_too(world_size: int) -> None:
    run_ranks(on_gloo, world_size, timeout_s=240.0)  # several engines, on a busy machine


# What goes around the scale.


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scale", [8.0, "dynamic", DynamicScale(init_scale=1.0), torch.ones(())])
def test_a_plain_backward_raises_and_changes_nothing(stage: int, scale: Any) -> None:
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=stage, loss_scale=scale)
    assert engine.needs_scaler()
    out = loss_of(engine(rows(0, 0, bad=False)))
    for backward in (out.backward, functools.partial(torch.autograd.backward, [out])):
        with pytest.raises(PhaseError, match=r"without engine\.scale[\s\S]*engine\.backward"):
            backward(retain_graph=True)
        with pytest.raises(PhaseError, match="no gradients"):
            engine.step()
    engine.scale(out).backward()
    wanted = engine.full_gradients()
    with pytest.raises(PhaseError, match=r"without engine\.scale"):  # a scaled one came before
        loss_of(engine(rows(0, 1, bad=False))).backward()
    for path, gradient in engine.full_gradients().items():
        assert torch.equal(gradient, wanted[path]), path
    engine.close()


@pytest.mark.parametrize("scale", [1, 1.0, None])
def test_without_a_scale_nothing_is_needed(scale: Any) -> None:
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=2, loss_scale=scale)
    loss = loss_of(engine(rows(0, 0, bad=False)))
    assert not engine.needs_scaler() and engine.state.scale is None
    assert engine.scale(loss) is loss and engine.scale_if_loss(loss) is loss
    loss.backward()
    engine.step()
    assert engine.loss_scale == 1.0 and engine.step_was_skipped is False
    engine.close()


def gradients(backward: Callable[[Engine, Tensor, Tensor], None], scale: Any = 8.0) -> Any:
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=1, loss_scale=scale)
    losses = [loss_of(engine(rows(0, number, bad=False))) for number in (0, 1)]
    backward(engine, *losses)
    found = engine.full_gradients(), engine.global_grad_norm
    engine.close()
    return found


WAYS: dict[str, Callable[[Engine, Tensor, Tensor], None]] = {
    "engine.backward": lambda e, a, b: e.backward(a + b),
    "engine.backward of each": lambda e, a, b: (e.backward(a), e.backward(b))[0],
    "scaled, engine.backward": lambda e, a, b: e.backward(e.scale(a + b)),
    "a list": lambda e, a, b: e.backward([a, b]),
    "a list, one scaled": lambda e, a, b: e.backward((e.scale(a), b)),
    "scaled, plain": lambda e, a, b: e.scale(a + b).backward(),
    "a plain list": lambda e, a, b: torch.autograd.backward([e.scale(a), e.scale(b)]),
    "a sum of scaled": lambda e, a, b: (e.scale(a) + e.scale(b)).backward(),
    "scale_if_loss": lambda e, a, b: e.scale_if_loss(e.scale_if_loss(a + b)).backward(),
    "given gradient": lambda e, a, b: e.backward(torch.stack([a, b]), torch.ones(2)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_scale_a_loss_gives_its_gradient(way: str) -> None:
    wanted, norm = gradients(WAYS["engine.backward"], scale=1.0)
    found, same_norm = gradients(WAYS[way])
    assert norm is not None and norm.dtype == same_norm.dtype
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(same_norm, norm)


def test_a_loss_is_not_scaled_twice() -> None:
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=1, loss_scale=8.0)
    loss = loss_of(engine(rows(0, 0, bad=False)))
    with pytest.raises(PhaseError, match=r"scaled twice[\s\S]*engine\.scale\(a \+ b\)"):
        engine.scale(engine.scale(loss))
    with pytest.raises(PhaseError, match="scaled twice"):
        engine.backward(engine.scale(loss) + 1)
    with pytest.raises(PhaseError, match="no gradients"):
        engine.step()
    engine.close()


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_loss_that_another_engine_scaled_is_refused(scale: float) -> None:
    first = Engine(Net(), OPTIMIZERS["adamw"], stage=0, loss_scale=8.0)
    second = Engine(Net(), OPTIMIZERS["adamw"], stage=1, loss_scale=scale)
    both = loss_of(second(first(rows(0, 0, bad=False))))
    with pytest.raises(PhaseError, match="one engine scaled reached the parameters of another"):
        first.backward(both)
    for one in (second, first):
        one.zero_grad()
        one.backward(loss_of(one(rows(0, 0, bad=False))))
        assert one.step()
    for one in (second, first):
        one.close()


def test_scale_if_loss_leaves_everything_else_as_it_is() -> None:
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=0, loss_scale=8.0)
    out = engine(rows(0, 0, bad=False))
    loss = loss_of(out)
    others = [out, loss.detach(), loss.item(), None, "loss", {"loss": loss}, [loss]]
    others += [torch.ones((), dtype=torch.int64), torch.ones((), requires_grad=True)]
    for x in others:
        assert engine.scale_if_loss(x) is x
    assert engine.scale_if_loss(loss).item() == 8 * loss.item()
    assert engine.scale_if_loss(loss.reshape(1)).shape == (1,)
    engine.close()


@pytest.mark.parametrize("wrong", [1.0, None, "loss", torch.ones((), dtype=torch.int64)])
def test_scale_refuses_what_is_no_loss(wrong: Any) -> None:
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=0, loss_scale=8.0)
    with pytest.raises(LayoutError, match=r"engine\.scale got[\s\S]*scale_if_loss"):
        engine.scale(wrong)
    engine.close()


@pytest.mark.parametrize("wrong", [0, -1.0, INF, "static", True, {"init_scale": 2.0}])
def test_a_wrong_scale_is_refused_and_the_module_is_as_it_was(wrong: Any) -> None:
    net = Net()
    with pytest.raises(LayoutError, match=r"loss_scale=[\s\S]*DynamicScale"):
        Engine(net, OPTIMIZERS["adamw"], stage=3, loss_scale=wrong)
    assert type(net.gain) is nn.Parameter


# By path, external, saved.


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_by_path_are_without_the_scale_and_set_as_they_are_got(stage: int) -> None:
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=stage, loss_scale=2.0**40)
    plain = Engine(Net(), OPTIMIZERS["adamw"], stage=stage)
    for one in (engine, plain):
        one.backward(loss_of(one(rows(0, 0, bad=False))))
        for path in ("a.weight", "gain"):
            one.set_full_gradient(path, 2 * one.full_gradient(path))
        one.clip_grad_norm_(0.01)
    for path, gradient in plain.full_gradients().items():
        assert torch.equal(engine.full_gradients()[path], gradient), path
        assert torch.equal(engine.full_gradient(path), gradient), path
        assert torch.equal(engine.local_gradient(path), plain.local_gradient(path)), path
    for one in (engine, plain):
        one.step()
    same(engine.state, plain.state)
    engine.close()
    plain.close()


def test_fp16_gradients_are_read_and_stepped_in_fp32() -> None:
    """At a scale of 2^20 the true gradients are nothing in fp16."""
    for max_norm in (None, 1e9):
        module = nn.Linear(4, 1, bias=False, dtype=torch.float16)
        nn.init.ones_(module.weight)
        engine = Engine(
            module,
            functools.partial(torch.optim.SGD, lr=2.0**20),
            stage=1,
            loss_scale=2.0**20,
            accumulate_dtype=torch.float16,
            max_norm=max_norm,
        )
        out = engine(torch.full((1, 4), 2.0**-14, dtype=torch.float16))
        engine.backward(out.float().sum() * 2.0**-13)
        assert engine.state.gradients.flats[0].dtype is torch.float16
        gradient = engine.full_gradient("weight")
        assert gradient.unique().tolist() == [2.0**-27]
        engine.set_full_gradient("weight", gradient)
        engine.step()
        assert engine.full_parameter("weight").unique().tolist() == [1 - 2.0**-7]
        engine.close()


def test_large_fp32_sums_of_fp16_gradients_do_not_overflow_where_they_are_stepped() -> None:
    """Their sum with the scale on it is beyond fp16, without it is not."""
    module = nn.Linear(2, 1, bias=False, dtype=torch.float16)
    nn.init.zeros_(module.weight)
    optimizer = functools.partial(torch.optim.SGD, lr=1.0)
    engine = Engine(module, optimizer, stage=1, loss_scale=2.0**12, master_weights=False)
    for _ in range(4):
        engine.backward(engine(torch.full((1, 2), 8.0, dtype=torch.float16)).float().sum())
    engine.step()
    assert engine.full_parameter("weight").unique().tolist() == [-32.0]
    engine.close()


def test_an_external_scale_is_the_users_and_read_for_the_first_loss() -> None:
    own = torch.tensor(4.0)
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=2, loss_scale=own)
    plain = Engine(Net(), OPTIMIZERS["adamw"], stage=2)
    for step in range(3):
        for one in (engine, plain):
            early = one.scale(loss_of(one(rows(0, step, bad=False))))
            if one is engine:
                own.mul_(2)
            one.backward(early)
            one.backward(loss_of(one(rows(0, 10 + step, bad=False))))
            one.step()
        assert engine.loss_scale == 4.0 * 2 ** (step + 1)
    same(engine.state, plain.state)
    engine.close()
    plain.close()


@pytest.mark.parametrize("policy", ["dynamic", DynamicScale(init_scale=8.0, hysteresis=2)])
def test_a_saved_scale_goes_on(policy: Any, tmp_path: Any) -> None:
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=2, loss_scale=policy)
    for bad in (True, True, False):
        engine.backward(loss_of(engine(rows(0, 0, bad=bad))))
        engine.step()
    fzero.checkpoint.save(tmp_path, engine.state)
    first = engine.state.scale
    other = Engine(Net(), OPTIMIZERS["adamw"], stage=3, loss_scale=policy)
    other.state = fzero.checkpoint.load(tmp_path, other.state)
    held = other.state.scale
    assert held is not None and first is not None and held.policy == first.policy
    for name in ("scale", "good_updates", "hysteresis_left"):
        assert torch.equal(getattr(held, name), getattr(first, name)), name
    plain = Engine(Net(), OPTIMIZERS["adamw"], stage=0)
    plain.state = fzero.checkpoint.load(tmp_path, plain.state)
    assert plain.state.scale is None
    fzero.checkpoint.save(tmp_path / "plain", plain.state)
    other.state = fzero.checkpoint.load(tmp_path / "plain", other.state)
    assert other.loss_scale == (2.0**16 if policy == "dynamic" else 8.0)
    for one in (engine, other, plain):
        one.close()
