"""`functionalize` and buffers: constants that stay constant, or explicit in and out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fzero.errors import LayoutError
from fzero.transforms.functionalize import functionalize
from tests.covering import covered

Tensors = dict[str, Tensor]
Loss = Callable[[Tensors], tuple[Tensor, Any]]


class Counter(nn.Module):
    """Does something to its buffers in each forward."""

    calls: Tensor
    fixed: Tensor | None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.tensor(0.0))
        self.register_buffer("fixed", torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.calls += 1
        elif self.how == "new tensor":
            self.calls = self.calls + 1
        elif self.how == "made on first use":
            self.register_buffer("cache", torch.zeros(2))
        elif self.how == "dropped":
            self.fixed = None
        return self.weight * x + self.calls


def norm_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    )


ADVICE = r"updates buffers: calls[^$]*buffers=True"


# How a loss that returns the new buffers as aux is run: aux comes out, and under grad the gradient.
RUNS: dict[str, Callable[[Loss, Tensors], Any]] = {
    "plainly": lambda loss, params: ({}, loss(params)[1]),
    "in inference mode": torch.inference_mode()(lambda loss, params: ({}, loss(params)[1])),
    "under grad": lambda loss, params: torch.func.grad(loss, has_aux=True)(params),
    "under jvp": lambda loss, params: (
        {},
        torch.func.jvp(loss, (params,), (params,), has_aux=True)[-1],
    ),
}


@covered(training=[True, False], how=[*RUNS])
def test_buffers_in_and_out_equal_those_of_batchnorm_run_directly(training: bool, how: str) -> None:
    module = norm_net().train(training)
    apply, params, buffers = functionalize(module, buffers=True)
    first = {name: value.clone() for name, value in buffers.items()}
    now = buffers
    for step in range(2):
        x = torch.randn(4, 2, 4, 4) + step

        def loss(params: Tensors, x: Tensor = x, now: Tensors = now) -> tuple[Tensor, Any]:
            out, new = apply(params, x, buffers=now)
            return out.square().sum(), (out, new)

        assert all(torch.equal(now[name], value) for name, value in module.named_buffers())
        grads, (out, now) = RUNS[how](loss, params)
        want = module(x)
        torch.testing.assert_close(out, want)
        module.zero_grad()
        want.square().sum().backward()
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, module.get_parameter(name).grad)
        assert list(now) == list(buffers) == [name for name, _ in module.named_buffers()]
        for name, value in module.named_buffers():
            torch.testing.assert_close(now[name], value, rtol=0, atol=0)
            assert not now[name].requires_grad
    assert all(torch.equal(buffers[name], first[name]) for name in buffers)
    assert torch.equal(now["1.running_mean"], first["1.running_mean"]) is not training


@covered(how=["in place", "new tensor"], level=["none", "grad", "vmap"])
def test_a_module_that_updates_buffers_is_refused_and_they_keep_their_value(
    how: str, level: str
) -> None:
    module = Counter("idle")
    apply, params = functionalize(module)
    idle = apply(params, torch.ones(2))
    module.how = how  # not seen by what was made before
    assert torch.equal(apply(params, torch.ones(2)), idle)
    updating, params = functionalize(module)
    run = {
        "none": lambda: updating(params, torch.ones(2)),
        "grad": lambda: torch.func.grad(lambda p: updating(p, torch.ones(2)).sum())(params),
        "vmap": lambda: torch.func.vmap(lambda x: updating(params, x))(torch.ones(2)),
    }[level]
    by_torch = level == "grad" and how == "in place"  # which refuses the write before it is made
    expected: Any = (RuntimeError, "mutate a captured") if by_torch else (LayoutError, ADVICE)
    for _ in range(2):
        with pytest.raises(expected[0], match=expected[1]):
            run()
    assert module.calls == 0
    stateful, _, buffers = functionalize(module, buffers=True)
    out, new = stateful(params, torch.ones(()), buffers=buffers)
    out, new = stateful(params, torch.ones(()), buffers=new)
    assert out == 4 and new["calls"] == 2 and buffers["calls"] == 0 and module.calls == 0


def test_constants_are_those_of_the_moment_and_a_changed_one_is_never_used_again() -> None:
    module = Counter("idle")
    apply, params = functionalize(module)
    with torch.no_grad():
        module.calls += 100
    assert apply(params, torch.ones(())) == 2

    class Switch(Counter):
        def forward(self, x: Tensor, *, count: bool) -> Tensor:
            if count:
                self.calls += 1
            return self.weight * x + self.calls

    apply, params = functionalize(Switch("by argument"))
    assert apply(params, torch.ones(()), count=False) == 2
    for count in (True, False):
        with pytest.raises(LayoutError, match=ADVICE):
            apply(params, torch.ones(()), count=count)


def test_constants_first_used_in_inference_mode_can_be_differentiated_through_later() -> None:
    module = norm_net().eval()
    apply, params = functionalize(module)
    x = torch.randn(2, 2, 4, 4)
    with torch.inference_mode():
        with pytest.raises(RuntimeError):
            apply(params, x[0, 0])
        apply(params, x)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    apply(leaves, x).square().sum().backward()
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(leaves[name].grad, parameter.grad)


def test_batchnorm_is_refused_while_it_trains_and_constant_while_it_does_not() -> None:
    module = norm_net()
    with pytest.raises(LayoutError, match=r"train mode: 1;[^$]*buffers=True[^$]*module.eval\(\)"):
        functionalize(module)
    apply, params = functionalize(module.eval())
    x = torch.randn(2, 2, 4, 4)
    want = module(x)
    module.train()
    with pytest.raises(LayoutError, match="running statistics"):
        torch.func.grad(lambda p: apply(p, x).sum())(params)
    module.eval()
    assert torch.equal(apply(params, x), want)
    for norm in (nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3)):
        norm.track_running_stats = False
        apply, params = functionalize(norm)
        torch.testing.assert_close(apply(params, x[0, 0, :, :3]), norm(x[0, 0, :, :3]))


def test_spectral_norm_updates_buffers_in_train_mode_only() -> None:
    module = parametrizations.spectral_norm(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    apply, params = functionalize(module)
    with pytest.raises(LayoutError, match=r"parametrizations.weight.0._[uv]"):
        apply(params, x)
    stateful, params, buffers = functionalize(module, buffers=True)
    out, new = stateful(params, x, buffers=buffers)
    torch.testing.assert_close(out, module(x))
    for name, value in module.named_buffers():
        torch.testing.assert_close(new[name], value)
    module.eval()
    assert torch.equal(stateful(params, x, buffers=new)[0], module(x))


def test_buffers_where_they_do_not_belong_are_refused() -> None:
    apply, params = functionalize(Counter("idle"))
    stateful, _, buffers = functionalize(Counter("idle"), buffers=True)
    with pytest.raises(LayoutError, match=r"holds its buffers as constants[^$]*buffers=True"):
        apply(params, torch.ones(2), buffers=buffers)
    with pytest.raises(TypeError, match="'buffers'"):
        stateful(params, torch.ones(2))  # pyright: ignore[reportCallIssue]
    with pytest.raises(LayoutError, match="buffers has no 'fixed'"):
        stateful(params, torch.ones(2), buffers={"calls": buffers["calls"]})
    for how, name in (("made on first use", "cache"), ("dropped", "fixed")):
        apply, params, buffers = functionalize(Counter(how), buffers=True)
        with pytest.raises(LayoutError, match=f"added or dropped the buffer '{name}'"):
            apply(params, torch.ones(2), buffers=buffers)
