"""Modes of the calling thread, and losses that are not pure: seen, or refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jvp
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.errors import AxisError, DonatedError, LayoutError, PhaseError

PARAMS = {"a": torch.ones(3), "b": torch.ones(2)}
KEEPS = [(0, True), (1, True), (2, True), (3, True), (3, False), (3, "window")]


def linear(p: Any, x: Tensor) -> Tensor:
    return (p["a"] * x).sum()


def step(state: Any, x: Tensor) -> Any:
    state, loss = fzero.grad_and_reduce(linear, state)(x)
    return fzero.apply_gradients(state), loss


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_inference_mode_is_refused_and_no_grad_is_not(stage: int, ranks: int) -> None:
    run = fzero.simulate(fzero.shard(step, stage=stage), world_size=ranks)
    x = torch.ones(ranks, 3)
    state = run.init(PARAMS, fzero.optim.sgd(0.5))
    with torch.inference_mode():
        with pytest.raises(PhaseError, match="inference_mode"):
            run(state, x)
        with pytest.raises(PhaseError, match="inference_mode"):
            run.init(PARAMS, fzero.optim.sgd(0.5))
    with torch.no_grad():
        state, _ = run(state, x)
    full = fzero.simulate(fzero.full_params, world_size=ranks)(state)
    assert full["a"][0].tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "reshard"), KEEPS)
def test_a_loss_that_writes_to_a_parameter_is_refused(stage: int, reshard: Any, ranks: int) -> None:
    def writes(p: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            p["a"].mul_(2.0)
        return (p["a"] * x).sum()

    def run(x: Tensor) -> Any:
        state = fzero.init(PARAMS, fzero.optim.sgd(0.5), stage=stage, reshard_after_forward=reshard)
        with pytest.raises((PhaseError, LayoutError), match=r"to a parameter in|in place"):
            fzero.grad_and_reduce(writes, state)(x)
        return x

    fzero.simulate(run, world_size=ranks)(torch.ones(ranks, 3))


def test_virtual_ranks_have_the_modes_of_the_caller() -> None:
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        device = torch.empty(2).device.type
        seen.append(((x @ x).dtype, torch.is_grad_enabled(), device))
        return x

    run, x = fzero.simulate(look, world_size=2), torch.ones(2, 2, 2)
    run(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), torch.device("meta"):
        run(x)
    assert seen == [(torch.float32, True, "cpu")] * 2 + [(torch.bfloat16, False, "meta")] * 2
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.timeout(60)
def test_autocast_inside_a_loss_on_virtual_ranks_does_not_lock_them_up() -> None:
    """Its cache of casts holds a lock of the process while a cast waits for another rank."""

    def loss(p: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ p["w"] @ p["w"]).float().sum()

    def run(x: Tensor) -> Any:
        state = fzero.init({"w": torch.eye(2)}, fzero.optim.sgd(0.1), stage=3)
        return fzero.gradients(fzero.grad_and_reduce(loss, state)(x)[0])["w"]

    found = fzero.simulate(run, world_size=2)(torch.ones(2, 1, 2))
    assert found.tolist() == [[[2.0, 2.0], [2.0, 2.0]]] * 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where tests inherit that it is ignored (nohup)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_virtual_ranks() -> None:
    ticks: list[int] = []

    def run(x: Tensor) -> Tensor:
        while len(ticks) < 10**6:
            x = fzero.psum(x) / 2
            ticks.append(1)
            if len(ticks) == 10:
                os.kill(os.getpid(), signal.SIGINT)
        return x

    with pytest.raises(KeyboardInterrupt):
        fzero.simulate(run, world_size=2)(torch.ones(2))
    count, x = len(ticks), torch.tensor(0.3)
    assert jvp(torch.sin, (x,), (x,))[1] == x * torch.cos(x)
    assert len(ticks) == count < 10**6


def test_a_trace_on_virtual_ranks_is_refused_and_one_on_one_rank_is_right() -> None:
    def traced(x: Tensor) -> Tensor:
        with pytest.raises(PhaseError, match="inside a trace"):
            make_fx(lambda x: fzero.psum(x))(x)
        return fzero.psum(x)

    assert fzero.simulate(traced, world_size=2)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert make_fx(lambda x: fzero.psum(x) * 2)(torch.ones(2))(torch.ones(2)).tolist() == [2, 2]


FORWARD: dict[str, Any] = {
    "jvp of jvp": lambda f: along(along(f)),
    "three": lambda f: along(along(along(f))),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "grad of both": lambda f: grad(along(along(f))),
    "jvp of grad of jvp": lambda f: along(grad(along(f))),
    "jacfwd of hessian": lambda f: jacfwd(torch.func.hessian(f)),
}


def along(f: Any) -> Any:
    return lambda x: jvp(f, (x,), (x * 2,))[1]


@pytest.mark.parametrize("name", FORWARD)
def test_remat_is_the_identity_in_forward_mode_of_any_order(name: str) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.sin(x).sum().pow(3)

    x = torch.tensor([0.3, -0.7], dtype=torch.float64)
    assert torch.allclose(FORWARD[name](fzero.remat(f))(x), FORWARD[name](f)(x), rtol=1e-12)


VIEWS: dict[str, Any] = {
    "transposed": lambda w, x: x @ w.T,
    "seen": lambda w, x: torch.tanh(w.view(-1)).sum() * x,
    "a row": lambda w, x: w[0] * x,
    "unsqueezed": lambda w, x: (w[None] * x).sum(),
    "in chunks": lambda w, x: sum(part.square().sum() for part in w.chunk(2)) * x,
    "a view of a view": lambda w, x: w.T[0].reshape(-1, 1) * x,
}


@pytest.mark.parametrize("name", VIEWS)
def test_remat_takes_views_of_what_it_is_given(name: str) -> None:
    f = VIEWS[name]
    w = torch.arange(4.0, dtype=torch.float64).view(2, 2)
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    state = fzero.init({"w": w}, fzero.optim.sgd(0.1), stage=0)

    def loss(p: Any, x: Tensor) -> Tensor:
        return fzero.remat(f)(p["w"], x).square().sum()

    found = fzero.gradients(fzero.grad_and_reduce(loss, state)(x)[0])["w"]
    assert torch.allclose(found, grad(lambda w: f(w, x).square().sum())(w), rtol=1e-13)


def test_remat_recomputes_under_the_autocast_of_its_call() -> None:
    seen: list[torch.dtype] = []

    def f(w: Tensor) -> Tensor:
        y = w @ w
        seen.append(y.dtype)
        return y.float().sum()

    w = torch.eye(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fzero.remat(f)(w)
    inside.backward()
    outside = fzero.remat(f)(w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outside.backward()
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_a_function_that_is_called_again_with_a_donated_state_says_so() -> None:
    def twice(state: Any) -> Any:
        state, _ = fzero.grad_and_reduce(linear, state)(torch.ones(3))
        again = fzero.grad_and_reduce(linear, state)
        new, _ = again(torch.ones(3))
        with pytest.raises(DonatedError):  # the sum that it adds to is now that of `new`
            again(torch.ones(3))
        return fzero.apply_gradients(new), None

    run = fzero.shard(twice, stage=0, donate=True)
    state, _ = run(run.init(PARAMS, fzero.optim.sgd(0.5)))
    assert fzero.full_params(state)["a"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: fzero.optim.adamw(0.1, decay_mask=True), "decay_mask=True"),  # type: ignore[arg-type]
        (lambda: fzero.optim.sgd(0.1, groups=[{"lr": 1.0}]), "groups="),  # type: ignore[list-item]
        (lambda: fzero.optim.sgd(0.1, groups=[("a", {"lr": 1.0})]), "groups="),  # type: ignore[list-item]
    ],
)
def test_optimizers_refuse_what_is_no_test_of_leaves(make: Any, error: str) -> None:
    with pytest.raises(LayoutError, match=error):
        make()


def test_wrong_arguments_are_refused_before_anything_is_made() -> None:
    sgd = fzero.optim.sgd(0.1)
    with pytest.raises(LayoutError, match="trainable='a'"):
        fzero.init(PARAMS, sgd, stage=0, trainable="a")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="units="):
        fzero.init(PARAMS, sgd, stage=0, units=["a"])  # type: ignore[arg-type]
    with pytest.raises(AxisError, match="size=2"):
        fzero.Axis(size=2)
    tied = torch.nn.Parameter(torch.ones(2))
    for names in (("a", "b"), ("b", "a")):
        with pytest.raises(LayoutError, match="one tensor"):
            fzero.init(dict.fromkeys(names, tied), sgd, stage=0, trainable=lambda path: path != "a")


def test_a_schedule_that_gives_no_number_says_so() -> None:
    state = fzero.init(PARAMS, fzero.optim.sgd(lambda t: None), stage=0)  # type: ignore[arg-type]
    state, _ = fzero.grad_and_reduce(linear, state)(torch.ones(3))
    with pytest.raises(LayoutError, match=r"lr\(0\) = None"):
        fzero.apply_gradients(state)


class Foreign:
    """An (init, update) pair with an update of choice."""

    def __init__(self, update: Any) -> None:
        self.update = update

    def init(self, params: Any) -> Any:
        return [torch.zeros_like(p) for p in params]


def pair_step(update: Any, dtype: torch.dtype = torch.float32) -> Any:
    params = {name: p.to(dtype) for name, p in PARAMS.items()}
    state = fzero.init(params, Foreign(update), stage=0)
    return fzero.apply_gradients(fzero.grad_and_reduce(linear, state)(torch.ones(3))[0])


def test_a_foreign_pair_keeps_dtypes_and_shapes_and_may_not_write() -> None:
    new = pair_step(lambda g, s, p: ([-x.float() for x in g], s), torch.bfloat16)
    assert {flat.dtype for flat in new.params.flats} == {torch.bfloat16}
    assert (
        fzero.full_params(pair_step(lambda g, s: ([-x for x in g], s)))["a"].tolist() == [0.0] * 3
    )

    def writes(g: Any, s: Any, p: Any) -> Any:
        s[0].add_(1.0)
        return g, s

    for wrong, seen in (
        (lambda g, s, p: ([x.sum() for x in g], s), "an update is"),
        (lambda g, s, p: (g[:1], s), "it gave a list"),
        (lambda g, s, p: ([None] * len(g), s), "NoneType"),
        (writes, "it wrote to"),
    ):
        with pytest.raises(LayoutError, match=seen):
            pair_step(wrong)
