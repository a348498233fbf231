"""Every backward of an engine with a loss scale is scaled, once; what is read is without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import DynamicScale, Engine
from fzero.errors import LayoutError, PhaseError
from tests.adapter.on_ranks import on_ranks
from tests.adapter.same_bits import same
from tests.adapter.scaled import INF, OPTIMIZERS, Net, loss_of, rows

STAGES = (0, 1, 2, 3)

# What goes around the scale.


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scale", [8.0, "dynamic", DynamicScale(init_scale=1.0), torch.ones(())])
def test_a_plain_backward_raises_and_changes_nothing(stage: int, scale: Any) -> None:
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=stage, loss_scale=scale)
    assert engine.needs_scaler()
    x = rows(0, 0, bad=False).requires_grad_()
    out = loss_of(engine(x))
    torch.autograd.grad(out, x, retain_graph=True)  # no parameter gets a gradient by it
    for backward in (out.backward, functools.partial(torch.autograd.backward, [out])):
        with pytest.raises(PhaseError, match=r"without engine\.scale[\s\S]*engine\.backward"):
            backward(retain_graph=True)
        with pytest.raises(PhaseError, match="no gradients"):
            engine.full_gradients()
    engine.scale(out).backward()
    wanted, _ = gradients(lambda e, a, b: e.backward(a), scale=1.0)
    torch.testing.assert_close(engine.full_gradients(), wanted)
    wanted = engine.full_gradients()
    with pytest.raises(PhaseError, match=r"without engine\.scale"):  # a scaled one came before
        loss_of(engine(rows(0, 1, bad=False))).backward()
    with pytest.raises(PhaseError, match=r"without engine\.scale"):
        loss_of(engine(rows(0, 1, bad=False))).backward()
    for path, gradient in engine.full_gradients().items():
        assert torch.equal(gradient, wanted[path]), path
    engine.backward(loss_of(engine(rows(0, 1, bad=False))))
    wanted, _ = gradients(WAYS["engine.backward"], scale=1.0)
    torch.testing.assert_close(engine.full_gradients(), wanted)
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
        engine.full_gradients()
    engine.close()


def test_a_loss_that_was_scaled_before_the_update_is_refused() -> None:
    class Sum(nn.Module):  # autograd saves no parameter, and so sees no change
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.w.sum()

    optimizer = functools.partial(torch.optim.SGD, lr=1.0)
    scale = DynamicScale(init_scale=2.0, growth_interval=1)
    engine = Engine(Sum(), optimizer, stage=0, loss_scale=scale)
    early = engine.scale(engine())
    engine.backward(engine())
    engine.step()
    with pytest.raises(PhaseError, match="scaled before the last update"):
        early.backward()
    engine.backward(engine())
    engine.step()
    assert engine.full_parameter("w").tolist() == [-1.0] * 3
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


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (functools.partial(torch.optim.SGD, lr=1.0), -32.0),
        (functools.partial(torch.optim.AdamW, lr=1.0, fused=True), -1.0),  # which skips itself
    ],
)
def test_large_fp32_sums_of_fp16_gradients_do_not_overflow_where_they_are_stepped(
    optimizer: Any, wanted: float
) -> None:
    """Their sum with the scale on it is beyond fp16, without it is not."""
    module = nn.Linear(2, 1, bias=False, dtype=torch.float16)
    nn.init.zeros_(module.weight)
    options: dict[str, Any] = {"stage": 1, "loss_scale": 2.0**12, "master_weights": False}
    engine = Engine(module, optimizer, state_dtype=torch.float32, **options)
    for _ in range(4):
        engine.backward(engine(torch.full((1, 2), 8.0, dtype=torch.float16)).float().sum())
    engine.step()
    assert engine.full_parameter("weight").unique().tolist() == [wanted]
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


@on_ranks(2)
def test_ranks_read_an_external_scale_anew_after_zero_grad(rank: int) -> None:
    """One whose batch was bad has not read what the other one has."""
    own = torch.tensor(4.0)
    engine = Engine(Net(), OPTIMIZERS["adamw"], stage=1, loss_scale=own)
    plain = Engine(Net(), OPTIMIZERS["adamw"], stage=1)
    if rank == 0:
        with engine.no_sync():
            engine.backward(loss_of(engine(rows(rank, 0, bad=False))))
    engine.zero_grad()
    own.mul_(2)
    for one in (engine, plain):
        one.backward(loss_of(one(rows(rank, 2, bad=False))))
        one.step()
    same(engine.state, plain.state)


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
