"""A loss may differentiate, and be differentiated, again; through every stage.

Inside the loss parameters are ordinary values, so all of torch.func and torch.autograd.grad must
give what it gives on whole parameters. Around `grad_and_reduce` a transform differentiates the
sum over ranks of what each rank returns; parameters that every rank holds whole (stages 0 to 2)
are then W inputs, and the derivative by the one that they stand for is the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.state import Buffers, TrainState
from tests.behaviours.networks import (
    PLACES,
    STAGES,
    Place,
    Tensors,
    assert_every_rank,
    at_every_place,
    gradient_on,
    hvp,
    mean_gradient,
    mlp,
    per_rank,
    regression,
    squared_loss,
    total,
    virtual,
)

APPLY, PARAMS = fzero.functionalize(mlp(3, 5, 5, 2))
PARAMS = {name: p.clone() for name, p in PARAMS.items()}
LOSS = squared_loss(APPLY)
RANKS = 2
X, Y = regression(RANKS, 4, 3, 2)
V = {k: torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape) for k, p in PARAMS.items()}


def dot(a: Any, b: Any) -> Tensor:
    return total((x * y).sum() for x, y in zip(a.values(), b.values(), strict=True))


def by_func(params: Any, x: Tensor, y: Tensor) -> Tensors:
    return torch.func.grad(LOSS)(params, x, y)


def by_autograd(params: Any, x: Tensor, y: Tensor) -> Tensors:
    found = torch.autograd.grad(LOSS(params, x, y), [*params.values()], create_graph=True)
    return dict(zip(params, found, strict=True))


def moved(params: Tensors, gradient: Tensors) -> Tensors:
    """One step of gradient descent."""
    return {name: p - 0.1 * gradient[name] for name, p in params.items()}


def forward_over_reverse(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """|H v|^2 by jvp of grad."""
    product = hvp(lambda p: LOSS(p, x, y), params, V)
    return dot(product, product)


def reverse_over_reverse(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """|H v|^2 by grad of grad."""
    product = torch.func.grad(lambda p: dot(by_func(p, x, y), V))(params)
    return dot(product, product)


def per_sample_norms(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """The sum of the norms of the gradients of each sample."""
    each = torch.func.vmap(torch.func.grad(LOSS), in_dims=(None, 0, 0))(params, x, y)
    return sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt().sum()


def penalty_by_func(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss plus (|dL/dx| - 1)^2, the derivative by torch.func."""
    slope = torch.func.grad(LOSS, argnums=1)(params, x, y)
    return LOSS(params, x, y) + (slope.norm(dim=-1) - 1).square().mean()


def penalty_by_autograd(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """The same by torch.autograd.grad."""
    x = x.detach().requires_grad_()
    value = LOSS(params, x, y)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value + (slope.norm(dim=-1) - 1).square().mean()


def parameter_penalty(params: Any, x: Tensor, y: Tensor, *, gradient: Any) -> Tensor:
    """|dL/dp|^2, the derivative by the parameters themselves."""
    slope = gradient(params, x, y)
    return dot(slope, slope)


def maml(params: Any, x: Tensor, y: Tensor, *, gradient: Any) -> Tensor:
    """Two inner steps on half of the batch, the outer loss on the other half."""
    for _ in range(2):
        params = moved(params, gradient(params, x[:2], y[:2]))
    return LOSS(params, x[2:], y[2:])


def two_backwards(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """One graph used for two first derivatives, then for the loss."""
    value = LOSS(params, x, y)
    weights = [params["0.weight"], params["4.weight"]]
    first = torch.autograd.grad(value, weights, retain_graph=True)
    second = torch.autograd.grad(2 * value, weights, retain_graph=True)
    agree = all(torch.equal(2 * a, b) for a, b in zip(first, second, strict=True))
    return value * agree


def hessian_trace(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """The trace of the Hessian by one layer's bias, and a Jacobian on top of it."""
    bias = params["2.bias"]

    def of_bias(b: Tensor) -> Tensor:
        return LOSS({**params, "2.bias": b}, x, y)

    jacobian = torch.func.jacrev(lambda b: APPLY({**params, "2.bias": b}, x))(bias)
    return torch.func.hessian(of_bias)(bias).trace() + jacobian.square().sum()


INSIDE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "hvp, forward over reverse": (forward_over_reverse, forward_over_reverse),
    "hvp, reverse over reverse": (reverse_over_reverse, forward_over_reverse),
    "per-sample gradients": (per_sample_norms, per_sample_norms),
    "gradient penalty by torch.func": (penalty_by_func, penalty_by_func),
    "gradient penalty by torch.autograd": (penalty_by_autograd, penalty_by_func),
    "parameter penalty by torch.autograd": (
        partial(parameter_penalty, gradient=by_autograd),
        partial(parameter_penalty, gradient=by_func),
    ),
    "MAML by torch.func": (partial(maml, gradient=by_func), partial(maml, gradient=by_func)),
    "MAML by torch.autograd": (
        partial(maml, gradient=by_autograd),
        partial(maml, gradient=by_func),
    ),
    "one graph used three times": (two_backwards, LOSS),
    "hessian and jacrev": (hessian_trace, hessian_trace),
}
"""name -> (the loss that fzero is given, one that is known to be the same on whole parameters)."""


@at_every_place
@pytest.mark.parametrize("name", INSIDE)
def test_second_order_inside_the_loss(name: str, place: Place) -> None:
    loss, known = INSIDE[name]
    want = mean_gradient(known, PARAMS, per_rank(X, Y))
    assert_every_rank(gradient_on(loss, PARAMS, X, Y, **place), want)


@at_every_place
@pytest.mark.parametrize(("stage", "reshard"), PLACES)
def test_one_state_is_trained_inside_the_loss_of_another(
    stage: int, reshard: Any, place: Place
) -> None:
    """Bilevel: weights of samples are learned through an update of the model, both sharded."""
    weights = {"logits": torch.zeros(2).double()}

    def weighted(params: Any, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(logits)[:, None] * (APPLY(params, x) - y).square()).mean()

    def run(x: Tensor, y: Tensor) -> Any:
        learner = fzero.init(weights, fzero.optim.sgd(0.1), **place)
        model = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=stage, reshard_after_forward=reshard)

        def validation(weights: Any, x: Tensor, y: Tensor) -> Tensor:
            new, _ = fzero.grad_and_reduce(weighted, model)(weights["logits"], x[:2], y[:2])
            return LOSS(fzero.full_params(fzero.apply_gradients(new)), x[2:], y[2:])

        return fzero.gradients(fzero.grad_and_reduce(validation, learner)(x, y)[0])

    def unsharded(weights: Any) -> Tensor:
        def train_loss(params: Any) -> Tensor:
            each = (weighted(params, weights["logits"], x[:2], y[:2]) for x, y in per_rank(X, Y))
            return total(each) / RANKS

        return mean_loss(moved(PARAMS, torch.func.grad(train_loss)(PARAMS)), slice(2, 4))

    assert_every_rank(virtual(run, RANKS, X, Y), torch.func.grad(unsharded)(weights))


def mean_loss(params: Any, part: slice = slice(None)) -> Tensor:
    """The objective: the mean over ranks, on whole parameters."""
    return total(LOSS(params, x[part], y[part]) for x, y in per_rank(X, Y)) / RANKS


def whole(state: TrainState, buffers: Buffers) -> Any:
    """What `buffers`, placed as the parameters are, hold as a pytree: summed over replicas."""
    if state.stage < 3:
        flats = tuple(fzero.psum(flat) for flat in buffers.flats)
        buffers = Buffers(flats=flats, placement=buffers.placement)
    return fzero.full_params(state.replace(params=buffers))


def _with(state: TrainState, flats: Any) -> TrainState:
    return state.replace(params=Buffers(flats=tuple(flats), placement=state.params.placement))


def around(what: Callable[[TrainState, Tensor, Tensor], Any], **place: Any) -> Any:
    """`what(state, x, y)` on virtual ranks: the result of each."""

    def run(x: Tensor, y: Tensor) -> Any:
        return what(fzero.init(PARAMS, fzero.optim.sgd(0.1), **place), x, y)

    return virtual(run, RANKS, X, Y)


def passed(state: TrainState, flats: Any, x: Tensor, y: Tensor) -> TrainState:
    return fzero.grad_and_reduce(LOSS, _with(state, flats))(x, y)[0]


def forward_around(state: TrainState, x: Tensor, y: Tensor) -> Any:
    """H v by jvp of the mean gradient."""
    tangents = fzero.init(V, fzero.optim.sgd(0.1), stage=state.stage).params.flats

    def gradient(flats: Any) -> Any:
        return fzero.gradients(passed(state, flats, x, y))

    return torch.func.jvp(gradient, (state.params.flats,), (tangents,))[1]


def reverse_around(state: TrainState, x: Tensor, y: Tensor, *, autograd: bool = False) -> Any:
    """H v by the gradient of (mean gradient) . V."""

    def dotted(flats: Any) -> Tensor:
        gradients = fzero.gradients(passed(state, flats, x, y))
        return dot(gradients, V) / RANKS  # each rank returns it: their mean

    if autograd:
        leaves = tuple(flat.clone().requires_grad_() for flat in state.params.flats)
        found = torch.autograd.grad(dotted(leaves), leaves)
    else:
        found = torch.func.grad(dotted)(state.params.flats)
    return whole(state, Buffers(flats=tuple(found), placement=state.params.placement))


def maml_around(state: TrainState, x: Tensor, y: Tensor, *, window: bool = False) -> Any:
    """The inner step is a sharded update, over all ranks' support sets."""

    def inner(state: Any, x: Tensor, y: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(LOSS, state)(x, y)
        return fzero.apply_gradients(state), None

    def outer(flats: Any) -> Tensor:
        step = fzero.coalesce(inner) if window else inner
        new, _ = step(_with(state, flats), x[:2], y[:2])
        return LOSS(fzero.full_params(new), x[2:], y[2:]) / RANKS

    found = torch.func.grad(outer)(state.params.flats)
    return whole(state, Buffers(flats=found, placement=state.params.placement))


def unsharded_maml(params: Any) -> Tensor:
    return mean_loss(moved(params, torch.func.grad(mean_loss)(params, slice(0, 2))), slice(2, 4))


AROUND: dict[str, Callable[..., Any]] = {
    "hvp, forward over reverse": forward_around,
    "hvp, reverse over reverse by torch.func": reverse_around,
    "hvp, reverse over reverse by torch.autograd": partial(reverse_around, autograd=True),
    "MAML": maml_around,
    "MAML in a window": partial(maml_around, window=True),
}


@at_every_place
@pytest.mark.parametrize("name", AROUND)
def test_second_order_around_the_step(name: str, place: Place) -> None:
    product = hvp(mean_loss, PARAMS, V)
    assert all(h.abs().max() > 1e-3 for h in product.values())  # it could show what is wrong
    want = product if "hvp" in name else torch.func.grad(unsharded_maml)(PARAMS)
    assert_every_rank(around(AROUND[name], **place), want)


@pytest.mark.parametrize("stage", STAGES)
def test_vmap_around_grad_and_reduce(stage: int) -> None:
    """The mean over ranks of the gradient of each sample."""

    def mapped(state: TrainState, x: Tensor, y: Tensor) -> Any:
        def one(x: Tensor, y: Tensor) -> Any:
            return fzero.gradients(fzero.grad_and_reduce(LOSS, state)(x, y)[0])

        return torch.func.vmap(one)(x, y)

    got = around(mapped, stage=stage)
    for i in range(X.shape[1]):
        want = mean_gradient(LOSS, PARAMS, per_rank(X[:, i], Y[:, i]))
        assert_every_rank({k: g[:, i] for k, g in got.items()}, want)


@at_every_place
def test_an_argument_that_requires_grad_is_differentiated_through(place: Place) -> None:
    """Data learned by gradient matching: d(g . v)/dx, with ordinary autograd around."""

    def by_data(state: TrainState, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        new, _ = fzero.grad_and_reduce(LOSS, state)(x, y)
        return torch.autograd.grad(dot(fzero.gradients(new), V) / RANKS, x)[0]

    got = around(by_data, **place)
    for rank, (x, y) in enumerate(per_rank(X, Y)):
        want = torch.func.grad(lambda x, y=y: dot(by_func(PARAMS, x, y), V))(x)
        torch.testing.assert_close(got[rank], want / RANKS)
