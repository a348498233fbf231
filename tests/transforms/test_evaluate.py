"""`evaluate`: values, bytes and collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import DonatedError, LayoutError, MismatchError
from tests.covering import covered
from tests.descends import descends
from tests.drivers import each_rank
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks

DEPTH, WIDTH = 4, 32
UNIT = WIDTH * WIDTH * 4


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    for p in layers.parameters():
        p.data = torch.randint(-1, 2, p.shape).float()
    return layers


APPLY, PARAMS = fzero.functionalize(net())
OTHER = fzero.functionalize(net(1))[1]
RULE = fzero.optim.sgd(2.0**-8)
X = torch.arange(2.0 * WIDTH).remainder(3).sub(1).reshape(2, WIDTH)


def sent(log: Any, rank: int) -> Counter[str]:
    """Elements that a rank sends, by collective."""
    found: Counter[str] = Counter()
    for event in log.events:
        if event.rank == rank:
            found[event.op] += event.numel
    return found


def trained(stage: int, steps: int = 1, **options: Any) -> Any:
    state = fzero.init(PARAMS, RULE, stage=stage, **options)
    for _ in range(steps):
        state, _ = descends(lambda p, x: APPLY(p, x).sum())(state, X)
    return state


@covered(world=[1, 2, 3], stage=range(4))
def test_it_has_the_values_of_the_whole_parameters(stage: int, world: int) -> None:
    def body(rank: int) -> Any:
        state = trained(stage)
        x = X + rank
        before = state.progress, state.schedule
        found = fzero.evaluate(APPLY, state)(x)
        assert not found.requires_grad and (state.progress, state.schedule) == before
        return found, APPLY(fzero.full_params(state), x), fzero.evaluate(lambda p: p, state)()

    found, wanted, params = each_rank(body, world)
    assert torch.equal(found, wanted)
    assert {path: value.shape[1:] for path, value in params.items()} == {
        path: value.shape for path, value in PARAMS.items()
    }


@pytest.mark.xdist_group("gloo")
def test_a_rank_holds_the_units_of_a_forward_and_sends_each_once() -> None:
    for held, counts in run_ranks(resident, 2):
        assert held == X.nbytes
        rounds = counts.pop("agree")
        assert counts == {"all_gather": DEPTH * WIDTH * WIDTH} and rounds <= 4 * 12  # of 12 numbers


def resident(rank: int, world_size: int) -> Any:
    """Bytes beyond the state after it, and what it sends; while it runs, two units at most."""
    state = trained(3, units=APPLY.units)
    e = fzero.evaluate(APPLY, state)
    e(X)
    live, most = LiveBytes(), 2 * UNIT + 2 * X.nbytes  # and two activations
    with live, live.at_most(most, "evaluate"), fzero.count_collectives() as log:
        y = e(X)
        held = live.settled(X.nbytes)
    del y
    return held, dict(sent(log, rank))


def test_below_stage_3_one_rank_may_evaluate_alone() -> None:
    def body(rank: int) -> Tensor:
        state = trained(2)
        with fzero.count_collectives() as log:
            found = fzero.evaluate(APPLY, state)(X) if rank == 0 else APPLY(PARAMS, X)
        assert not log.events
        return found

    each_rank(body, 2)


def test_ranks_may_use_other_units_and_a_new_order_is_learned() -> None:
    def some(p: Any, rank: int) -> Tensor:
        order = [3, 0] if rank else [1, 2, 0]
        return sum(p[f"{i}.weight"].sum() * (i + 1) for i in order)  # type: ignore[return-value]

    def body(rank: int) -> Any:
        state = trained(3)
        e = fzero.evaluate(some, state)
        rounds = []
        for _ in range(3):
            with fzero.count_collectives() as log:
                found = e(rank)
            rounds.append(sent(log, rank)["all_gather"])
        assert rounds[1] == rounds[2] == DEPTH * WIDTH * WIDTH  # each once: nobody asks
        return found, some(fzero.full_params(state), rank)

    found, wanted = each_rank(body, 2)
    assert torch.equal(found, wanted)


@covered(stage=[2, 3], around=["loss", "window", "evaluation", "step", "no_grad", "inference"])
def test_it_is_served_wherever_it_stands(around: str, stage: int) -> None:
    def loss_fn(p: Any, x: Tensor, teacher: Any) -> Tensor:
        target = fzero.evaluate(APPLY, teacher)(x)
        return (APPLY(p, x) * target).sum()

    def plain(p: Any, x: Tensor) -> Tensor:
        return (APPLY(p, x) * APPLY(OTHER, x).detach()).sum()

    def step_fn(states: Any, x: Tensor) -> Any:
        student, value = fzero.grad_and_reduce(loss_fn, states[0])(x, states[1])
        if around == "window":
            value = fzero.evaluate(APPLY, student)(x).sum()
        return (fzero.apply_gradients(student), states[1]), value

    def body(rank: int) -> Any:
        student, teacher = trained(stage, 0), fzero.init(OTHER, RULE, stage=stage)
        own = fzero.init(PARAMS, RULE, stage=stage)
        wanted_state, wanted = fzero.grad_and_reduce(plain, own)(X)
        wanted_params = fzero.full_params(fzero.apply_gradients(wanted_state))
        if around == "evaluation":
            return fzero.evaluate(loss_fn, student)(X, teacher), wanted
        if around in ("no_grad", "inference"):
            context: Any = torch.no_grad if around == "no_grad" else torch.inference_mode
            with context():
                found = fzero.evaluate(APPLY, student)(X)
            assert found.is_inference() == (around == "inference")
            return found.clone(), APPLY(PARAMS, X)
        wraps: Any = fzero.coalesce if around == "window" else lambda fn: fn
        for _ in range(2):
            (after, _), value = wraps(step_fn)((student, teacher), X)
        params = fzero.full_params(after)
        assert all(torch.equal(params[path], wanted_params[path]) for path in params)
        return (value, APPLY(PARAMS, X).sum()) if around == "window" else (value, wanted)

    found, wanted = each_rank(body, 2)
    assert torch.equal(found, wanted)


def test_an_engine_evaluates_by_its_state() -> None:
    def body(rank: int) -> Any:
        engine = Engine(net(), torch.optim.SGD, stage=3)
        found = fzero.evaluate(APPLY, engine.state)(X)
        engine(X).sum().backward()
        again = fzero.evaluate(APPLY, engine.state)(X)
        engine.step()
        with torch.no_grad():
            own = engine(X)
        assert torch.equal(fzero.evaluate(APPLY, engine.state)(X), own)
        return found, again

    found, again = each_rank(body, 2)
    assert torch.equal(found[0], APPLY(PARAMS, X)) and torch.equal(found, again)


def test_transforms_and_gradients_by_inputs_work_inside() -> None:
    def forces(p: Any, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            force = torch.autograd.grad(APPLY(p, x).square().sum(), x)[0]
        each = torch.func.vmap(lambda row: APPLY(p, row))(x.detach())
        return force, each, torch.func.grad(lambda x: APPLY(p, x).square().sum())(x.detach())

    def body(rank: int) -> Any:
        return fzero.evaluate(forces, trained(3))(X), forces(fzero.full_params(trained(3)), X)

    found, wanted = each_rank(body, 2)
    assert all(
        torch.equal(a, b) and not a.requires_grad for a, b in zip(found, wanted, strict=True)
    )


def test_it_follows_autocast_and_is_exact_without() -> None:
    wide = {path: value / 7 for path, value in PARAMS.items()}

    def body(rank: int) -> Any:
        found = []
        for stage in (0, 3):
            step = fzero.shard(fzero.autocast(lambda s, x: (s, fzero.evaluate(APPLY, s)(x))),
                               stage=stage)  # fmt: skip
            state = step.init(wide, RULE)
            found.append((fzero.evaluate(APPLY, state)(X), step(state, X)[1]))
        return found

    (exact, low), (lazy, lazy_low) = each_rank(body, 2)
    assert torch.equal(exact, lazy) and torch.equal(low, lazy_low) and low.dtype is torch.bfloat16
    assert torch.equal(exact[0], APPLY(wide, X))


def test_what_lives_elsewhere_is_lent() -> None:
    def body(rank: int) -> Any:
        state = fzero.init(PARAMS, RULE, stage=3, offload=fzero.Offload(params="cpu"))
        return fzero.evaluate(APPLY, state)(X)

    assert torch.equal(each_rank(body, 2)[0], APPLY(PARAMS, X))


def test_wrong_calls_say_so_on_every_rank() -> None:
    state = fzero.init(PARAMS, RULE, stage=2)
    with pytest.raises(LayoutError, match="place of the function"):
        fzero.evaluate(state, APPLY)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="expected a TrainState"):
        fzero.evaluate(APPLY, PARAMS)
    step = fzero.shard(lambda s: trained_once(s), stage=2, donate=True)
    e = fzero.evaluate(APPLY, state)
    step(state)
    with pytest.raises(DonatedError):
        e(X)

    def alone(rank: int) -> Tensor:
        state = trained(3)
        e = fzero.evaluate(APPLY, state) if rank else fzero.grad_and_reduce(
            lambda p, x: APPLY(p, x).sum(), state)  # fmt: skip
        e(X)
        return X

    with pytest.raises(MismatchError):
        each_rank(alone, 2)

    def raises(rank: int) -> Tensor:
        state = trained(3)
        with pytest.raises(ZeroDivisionError if rank else fzero.PeerFailedError):
            fzero.evaluate(lambda p, x: APPLY(p, x) / (1 // (1 - rank)), state)(X)
        return fzero.evaluate(APPLY, state)(X)

    assert torch.isfinite(each_rank(raises, 2)).all()


def trained_once(state: Any) -> Any:
    state, loss = fzero.grad_and_reduce(lambda p: APPLY(p, X).sum(), state)()
    return fzero.apply_gradients(state), loss
