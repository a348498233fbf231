"""Complex parameters train as in plain PyTorch, which steps them by their real views."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.func import functional_call

import fzero
from fzero import checkpoint
from fzero.adapter import Engine, gathered
from fzero.errors import FzeroError, LayoutError
from tests.adapter.on_ranks import STAGES, on_ranks


class Spectral(nn.Module):
    """A Fourier layer: real and complex parameters, a frozen and a 0-dim one, conj, a buffer."""

    turn: Tensor

    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        real = dtype.to_real()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.lift = nn.Linear(3, 5, dtype=real)
            self.w = nn.Parameter(torch.randn(5, 3, 4, dtype=dtype) * 0.3)
            self.b = nn.Parameter(torch.randn((), dtype=dtype))
            self.fixed = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
            self.out = nn.Linear(4, 2, dtype=dtype)
            self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.rfft(torch.tanh(self.lift(x)), dim=-1) * self.fixed.conj()
        h = torch.einsum("nk,dko->ndo", z, self.w) * self.turn + self.b
        y = self.out(h * self.w.conj().mean((0, 1)))
        return y.abs().sum((-1, -2)) + torch.view_as_real(self.w)[..., 1].mean()


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], optim.Optimizer]] = {
    "SGD": functools.partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "Adam": functools.partial(optim.Adam, lr=0.05, amsgrad=True),
    "AdamW": functools.partial(optim.AdamW, lr=0.05),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.05, momentum=0.5, centered=True),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.05),
    "Adadelta": functools.partial(optim.Adadelta, lr=0.5),
    "Adamax": functools.partial(optim.Adamax, lr=0.05),
    "NAdam": functools.partial(optim.NAdam, lr=0.05),
    "RAdam": functools.partial(optim.RAdam, lr=0.05),
    "ASGD": functools.partial(optim.ASGD, lr=0.05),
    "Rprop": functools.partial(optim.Rprop, lr=0.05),
}
UPDATES = 3


def batches(number: int, ranks: int) -> Tensor:
    source = torch.Generator().manual_seed(number)
    return torch.randn(ranks, 4, 3, generator=source, dtype=torch.float64)


@functools.cache
def plain(name: str, ranks: int, max_norm: float) -> tuple[nn.Module, optim.Optimizer, list[float]]:
    """Train by the mean loss of all ranks, on one process."""
    module = Spectral()
    optimizer, norms = OPTIMIZERS[name](module.parameters()), []
    for number in range(UPDATES):
        optimizer.zero_grad()
        (sum(module(x).square().sum() for x in batches(number, ranks)) / ranks).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), max_norm).item())
        optimizer.step()
    return module, optimizer, norms


def close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], label: str) -> None:
    assert found.keys() == wanted.keys(), label
    for path, x in wanted.items():
        assert found[path].dtype == x.dtype and found[path].shape == x.shape, f"{label}: {path}"
        assert torch.allclose(found[path], x.detach(), rtol=1e-8, atol=1e-8), f"{label}: {path}"


def train(e: Engine, rank: int, ranks: int, updates: int = UPDATES) -> None:
    for number in range(updates):
        e.backward(e(batches(number, ranks)[rank]).square().sum())
        assert e.step()


@on_ranks(pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow))
def test_an_engine_trains_as_plain_pytorch_with_each_optimizer(rank: int, world_size: int) -> None:
    for number, name in enumerate(OPTIMIZERS):
        stage = STAGES[(number + world_size) % len(STAGES)]
        module, optimizer, norms = plain(name, world_size, 1.0)
        mine = Spectral()
        e = Engine(mine, OPTIMIZERS[name](mine.parameters()), stage=stage)
        for step, norm in enumerate(norms):
            e(batches(step, world_size)[rank]).square().sum().backward()
            assert mine.w.grad is not None and mine.w.grad.dtype is torch.complex128
            largest = e.full_gradient("w").abs().max()
            assert torch.allclose(mine.w.grad.norm(float("inf")), largest)
            found = nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
            assert torch.allclose(found, torch.tensor(norm, dtype=torch.float64)), name
            assert e.step()
        label = f"{name}, stage {stage}"
        close(e.full_parameters(), dict(module.named_parameters()), label)
        own = optimizer.state[module.get_parameter("w")]
        for slot, value in e.full_optimizer_states()["w"].items():
            if value.ndim:
                close({slot: value}, {slot: own[slot]}, label)
        e.close()
        close(dict(mine.named_parameters()), dict(module.named_parameters()), label)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("how", ["plain", "coalesce", "remat", "scale_loss", "from_torch"])
def test_a_functional_step_trains_as_plain_pytorch(stage: int, how: str) -> None:
    apply, params = fzero.functionalize(Spectral())

    def loss(p: Any, x: Tensor) -> Tensor:
        return (fzero.remat(apply) if how == "remat" else apply)(p, x).square().sum()

    def one(state: Any, x: Tensor) -> Any:
        state, value = fzero.grad_and_reduce(loss, state)(x)
        return fzero.apply_gradients(state), value

    wraps: dict[str, Callable[[Any], Any]] = {
        "coalesce": fzero.coalesce,
        "scale_loss": lambda fn: fzero.scale_loss(fn, scale=64.0),
    }
    step = fzero.simulate(
        fzero.shard(wraps.get(how, lambda fn: fn)(one), stage=stage), world_size=2
    )
    rule = fzero.optim.adamw(0.05)
    if how == "from_torch":
        rule = fzero.optim.from_torch(OPTIMIZERS["AdamW"])
    state = step.init(params, rule)
    for number in range(UPDATES):
        state, _ = step(state, batches(number, 2))
    found = fzero.simulate(fzero.full_params, world_size=2)(state)
    wanted = dict(plain("AdamW", 2, float("inf"))[0].named_parameters())
    close({path: x[1] for path, x in found.items()}, wanted, how)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_torch_func_inside_and_around_a_step_has_torchs_gradient_of_complex_numbers(
    stage: int,
) -> None:
    """The gradient is that by real and imaginary part: the conjugate convention of torch."""
    module = Spectral()
    apply, params = fzero.functionalize(module)
    x, later = batches(0, 2)

    def loss(p: Any, scale: Tensor) -> Tensor:
        inner: Any = torch.func.grad(lambda w: (torch.view_as_real(w * x.sum()) ** 3).sum())(p["w"])
        each = torch.func.vmap(lambda z: (p["b"] * z).abs().sum())(x)
        return apply(p, x * scale).square().sum() + inner.abs().sum() + each.sum()

    state = fzero.init(params, fzero.optim.sgd(0.01), stage=stage)
    state, _ = fzero.grad_and_reduce(loss, state)(torch.ones((), dtype=torch.float64))
    own = {path: p.detach().clone() for path, p in params.items()}
    learning = {path: x.requires_grad_() for path, x in own.items() if path != "fixed"}
    loss_of = functional_call(module, own, (x,)).square().sum()
    more: Any = torch.func.grad(lambda w: (torch.view_as_real(w * x.sum()) ** 3).sum())(own["w"])
    total = loss_of + more.abs().sum() + (own["b"] * x).abs().sum()
    wanted = dict(zip(learning, torch.autograd.grad(total, list(learning.values())), strict=True))
    found = fzero.gradients(state)
    close({path: found[path] for path in wanted}, wanted, "gradients")

    def after_a_step(scale: Tensor) -> Tensor:
        state = fzero.init(params, fzero.optim.sgd(0.01), stage=stage)
        state, _ = fzero.grad_and_reduce(loss, state)(scale)
        return apply(fzero.full_params(fzero.apply_gradients(state)), later).sum()

    at = torch.ones((), dtype=torch.float64)
    slope: Any = torch.func.grad(after_a_step)(at)
    by_hand = (after_a_step(at + 1e-6) - after_a_step(at - 1e-6)) / 2e-6
    assert torch.allclose(slope, by_hand, rtol=1e-4)
    assert torch.allclose(torch.func.jvp(after_a_step, (at,), (torch.ones_like(at),))[1], slope)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"ordered": True, "loss_scale": 64.0, "check_finite": True},
    {"contiguous_gradients": True, "offload": fzero.Offload(optimizer="cpu", gradients="cpu")},
    {"overlap": False, "accumulate_dtype": torch.float64, "average_micro_batches": True},
    {"mesh": (2, 1), "optimizer_over": "all"},
)


@on_ranks(2)
def test_options_of_an_engine_change_nothing_but_rounding(rank: int, world_size: int) -> None:
    wanted = dict(plain("AdamW", 2, float("inf"))[0].named_parameters())
    for number, options in enumerate(OPTIONS):
        for stage in (STAGES[number], 3):
            module = Spectral()
            optimizer = OPTIMIZERS["AdamW"](module.parameters())
            e = Engine(module, optimizer, stage=stage, **options)
            train(e, rank, world_size)
            close(e.full_parameters(), wanted, f"stage {stage}, {options}")
            e.close()


@on_ranks(2)
def test_one_parameter_is_read_and_written_as_complex(rank: int, world_size: int) -> None:
    for stage in STAGES:
        module = Spectral()
        e = Engine(module, OPTIMIZERS["AdamW"](module.parameters()), stage=stage)
        train(e, rank, world_size, 1)
        e(batches(5, world_size)[rank]).square().sum().backward()
        before = e.full_gradient("w")
        e.set_full_gradient("w", before * 2j)
        e.set_local_gradient("w", e.local_gradient("w") * 1j)
        assert torch.allclose(e.full_gradient("w"), -2 * before)
        for clip in (
            lambda e=e: e.clip_grad_value_(0.1),
            lambda e=e: nn.utils.clip_grad_value_(e.module.parameters(), 0.1),
        ):
            with pytest.raises(FzeroError, match="complex"):
                clip()
        e.set_full_optimizer_state("w", "exp_avg", before)
        own = e.local_optimizer_state("w", "exp_avg")
        e.set_local_optimizer_state("w", "exp_avg", own * 2j)
        assert torch.allclose(e.full_optimizer_state("w", "exp_avg"), before * 2j)
        e.set_full_parameter("w", before)
        if stage == 3:
            e.set_local_parameter("w", e.local_parameter("w") * 1j)
            assert torch.equal(e.full_parameter("w"), before * 1j)
        with gathered(module.w, modify=True), torch.no_grad():
            module.w.fill_(2j)
        assert (e.full_parameter("w") == 2j).all() and (e.full_state_dict()["w"] == 2j).all()
        assert e.step()
        e.close()


@on_ranks(2)
def test_checkpoints_have_complex_tensors_and_fit_every_stage(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    for stage in (0, 3):
        module = Spectral()
        e = Engine(module, OPTIMIZERS["AdamW"](module.parameters()), stage=stage)
        train(e, rank, world_size, 2)
        wanted, slots = e.full_parameters(), e.full_optimizer_states()
        folder = tmp_path / f"{stage}"
        checkpoint.save(folder / "own", e)
        checkpoint.save_universal(folder / "universal", e)
        assert checkpoint.state_dict(e)["w"].dtype is torch.complex128
        for to, load, name in (
            (2, checkpoint.load, "own"),
            (3, checkpoint.load_universal, "universal"),
        ):
            other = Spectral()
            made = Engine(other, OPTIMIZERS["AdamW"](other.parameters()), stage=to)
            load(folder / name, made)
            close(made.full_parameters(), wanted, name)
            for path, some in made.full_optimizer_states().items():
                close(some, {k: x.to(some[k].dtype) for k, x in slots[path].items()}, name)
            made.close()
        e.close()
        single = Spectral(torch.complex64)
        e = Engine(single, None, stage=stage)
        checkpoint.export_safetensors(folder / "files", e)
        another = Engine(nn.Module.double(Spectral(torch.complex64)).float(), None, stage=2)
        another.set_full_parameter("w", torch.zeros(5, 3, 4, dtype=torch.complex64))
        checkpoint.import_safetensors(folder / "files", another)
        assert torch.equal(another.full_parameter("w"), e.full_parameter("w"))
        e.close()
        another.close()


class Squares(optim.Optimizer):
    """An Adam of one's own, which squares complex numbers: not what it does to real views."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    squares = self.state[p].setdefault("squares", torch.zeros_like(p))
                    squares.mul_(0.9).add_(p.grad**2)
                    p.sub_(group["lr"] * p.grad / (squares.sqrt() + 1e-3))


@pytest.mark.parametrize("make", [Squares, optim.Adafactor])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_rule_that_does_something_else_to_complex_numbers_is_refused(
    make: Any, stage: int
) -> None:
    for refused in (
        lambda: Engine(Spectral(), make, stage=stage),
        lambda: fzero.init({"w": Spectral().w}, fzero.optim.from_torch(make), stage=stage),
    ):
        with pytest.raises(LayoutError, match="is complex, and from_torch"):
            refused()


def test_what_has_no_complex_numbers_is_refused_by_name() -> None:
    params, rule = {"w": torch.ones(2, dtype=torch.complex64)}, fzero.optim.sgd(1.0)
    with pytest.raises(LayoutError, match="accumulate_dtype"):
        fzero.init(params, rule, stage=2, accumulate_dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="view_as_real"):
        rule.init(params)
    state = fzero.init(params, rule, stage=2)

    def one(state: Any) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: p["w"].abs().sum(), state)()
        return fzero.apply_gradients(state), loss

    with pytest.raises(LayoutError, match="max_value with the complex parameter w"):
        fzero.clip(one, max_value=1.0)(state)
