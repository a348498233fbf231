"""Five steps of every optimizer against torch.optim (Lion: its formula), on shards and alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import fzero
from fzero.optim import rules
from fzero.state import NAMESPACE
from tests.covering import covered
from tests.descends import descends
from tests.optim.cases import CASES, trained
from tests.optim.torch_cases import ELEMENTWISE
from tests.oracle import linear_loss, square_loss, train
from tests.strategies import (
    LEARNING,
    integers,
    on_rank,
    same,
    seeds,
    stages,
    tensors,
    trees,
    worlds,
)

STEPS = 5


def close_updates(actual: Any, expected: Any, start: Any) -> None:
    """Compare what was added to `start`: a parameter can hide its update."""
    for got, want, before in zip(tensors(actual), tensors(expected), tensors(start), strict=True):
        assert got.dtype == want.dtype == before.dtype
        scale = max([1.0, *(x.abs().max().item() for x in (want, before) if x.numel())])
        moved, wanted = got.double() - before.double(), want.double() - before.double()
        torch.testing.assert_close(moved, wanted, rtol=0, atol=scale * rounding(got.dtype))


def rounding(dtype: torch.dtype) -> float:
    """What five steps may differ by, at 1: a few roundings; of 16-bit parameters only one."""
    if not dtype.is_floating_point:
        return 0.0
    return torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 8)


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=max(3, settings().max_examples // 3))
@given(tree=trees(LEARNING, max_leaves=4, learning=True), ranks=worlds, stage=stages, seed=seeds)
def test_training_is_torchs(name: str, tree: Any, ranks: int, stage: int, seed: int) -> None:
    """With gradients that depend on the parameters, where the dtypes are wide enough for that."""
    xs = integers((STEPS, ranks), seed, bound=1)
    ours, theirs = CASES[name]
    loss = linear_loss if any(x.dtype is torch.bfloat16 for x in tensors(tree)) else square_loss
    got, state = trained(tree, ours(), xs, loss=loss, stage=stage)
    if not state.setup.layout.trainable:
        return
    want = train(loss, tree, [list(x) for x in xs], theirs)
    for rank in range(ranks):
        close_updates(on_rank(got, rank), want, tree)
    assert state.step.tolist() == [STEPS] * ranks


@covered(name=sorted(CASES), dtype=[torch.float32, torch.float64, torch.bfloat16])
def test_the_pure_pair_is_torchs_too(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ours, theirs = CASES[name]
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    params: Any = {"w": torch.randn(3, 5).to(dtype), "b": [torch.randn(2).to(dtype)]}
    reference = [p.to(wide, copy=True) for p in tensors(params)]
    optimizer, torchs = ours(), theirs(reference)
    state, start = optimizer.init(params), params
    for _ in range(STEPS):
        grads: Any = optree.tree_map(torch.randn_like, params, namespace=NAMESPACE)
        kept = [x.clone() for x in tensors((grads, params, state))]
        updates, new = optimizer.update(grads, state, params)
        same(tensors((grads, params, state)), kept)
        for p, g in zip(reference, tensors(grads), strict=True):
            p.grad = g.to(wide)
        torchs.step()
        params = optree.tree_map(torch.add, params, updates, namespace=NAMESPACE)
        state = new
    close_updates(tensors(params), [p.to(dtype) for p in reference], tensors(start))


@pytest.mark.parametrize("name", sorted(CASES))
def test_formula_and_kernel_agree_on_bf16_without_masters(name: str) -> None:
    """The formula rounds after each operation, the fused kernel once."""
    optimizer = CASES[name].ours(master_weights=False)
    start = [torch.randn(7).bfloat16(), torch.randn(0).bfloat16(), torch.randn(1).bfloat16()]
    ends = []
    for differentiable in (True, False):
        params, state = start, optimizer.init(start)
        for _ in range(STEPS):
            grads = [(p * p).cos() for p in start]
            params, state = optimizer.advance(
                params, grads, state, (), differentiable=differentiable
            )
        ends.append((params, state.moments))
    torch.testing.assert_close(*ends, rtol=0.02, atol=0.02)


def test_bf16_parameters_with_masters_do_not_lose_small_updates() -> None:
    optimizer = fzero.optim.sgd(2.0**-10)
    state = fzero.init({"w": torch.ones(3, dtype=torch.bfloat16)}, optimizer, stage=0)
    for _ in range(16):
        state, _ = descends(lambda p: p["w"].sum())(state)
    assert fzero.full_params(state)["w"].tolist() == [1 - 2.0**-6] * 3


@covered(scale=[None, "dynamic"], default=[torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_no_update(default: torch.dtype, scale: Any) -> None:
    """In bf16 a counter would stay at 256, and in fp16 the first dynamic scale is infinite."""

    step_fn = descends(lambda p: p["w"].square().sum())

    def after(dtype: torch.dtype) -> Tensor:
        torch.set_default_dtype(dtype)
        try:
            state = fzero.init({"w": torch.arange(3, dtype=torch.float32)}, optimizer, stage=0)
            for _ in range(260):
                state, _ = step(state)
        finally:
            torch.set_default_dtype(torch.float32)
        return fzero.full_params(state)["w"]

    optimizer, step = fzero.optim.adam(0.01), fzero.scale_loss(step_fn, scale)
    assert torch.equal(after(default), after(torch.float32))


WITHOUT_MASTERS: dict[str, Any] = {
    "sgd": fzero.optim.sgd(0.5, momentum=0.5, master_weights=False),
    "torch's sgd": fzero.optim.from_torch(
        partial(torch.optim.SGD, lr=0.5, momentum=0.5), master_weights=False
    ),
}


@covered(dtype=[torch.bfloat16, torch.float16], stage=[0, 3], name=[*WITHOUT_MASTERS])
def test_without_masters_every_element_of_16_bits_is_updated(
    name: str, stage: int, dtype: torch.dtype
) -> None:
    """p' = p - m / 2, m = m / 2 + g: exact, for all numbers are multiples of 1/4 below 16.

    There are more elements than fit a vector register.
    """
    params, *grads = (integers((71,), seed).to(dtype) for seed in (1, 2, 3))
    state = fzero.init({"w": params}, WITHOUT_MASTERS[name], stage=stage)
    for grad in grads:
        state, _ = descends(lambda p, g: (p["w"] * g).sum())(state, grad)
    want = params - 0.5 * grads[0] - 0.5 * (0.5 * grads[0] + grads[1])
    same(fzero.full_params(state), {"w": want})


@covered(name=sorted(set(CASES) - {"lion", "lion decayed"}), stage=[0, 3])
def test_an_update_can_be_differentiated(name: str, stage: int) -> None:
    """d p'/dc and its derivative, against finite differences; Lion is a step function of c."""
    start = fzero.init(torch.tensor([1.0, -2.0, 0.5]).double(), CASES[name].ours(), stage=stage)

    def trained(c: Tensor) -> Tensor:
        state = start
        for _ in range(2):
            state, _ = descends(lambda p, c: (p**2 * c).sum())(state, c)
        return fzero.full_params(state)

    c = torch.tensor([1.0, 2.0, 3.0]).double().requires_grad_()
    assert torch.autograd.gradcheck(trained, c)
    assert torch.autograd.gradgradcheck(trained, c)
    by_func = torch.func.jacrev(trained)(c.detach())
    torch.testing.assert_close(by_func, torch.autograd.functional.jacobian(trained, c))


def test_where_adam_never_saw_a_gradient_its_derivative_is_zero_not_nan() -> None:
    start = fzero.init(torch.ones(2), fzero.optim.adam(0.1), stage=0)
    mask = torch.tensor([1.0, 0.0])

    def trained(c: Tensor) -> Tensor:
        state, _ = fzero.grad_and_reduce(lambda p, c: (p * c * mask).sum(), start)(c)
        return fzero.full_params(fzero.apply_gradients(state)).sum()

    grad = torch.func.grad(trained)(torch.ones(2))
    assert grad.isfinite().all()
    assert grad[1] == 0


# What lies between the leaves of a flat, and behind the last one

EVERY: dict[str, Any] = {name: case.ours() for name, case in CASES.items()}
for _name, (_kind, _options) in ELEMENTWISE.items():
    EVERY[f"torch's {_name}"] = fzero.optim.from_torch(partial(_kind, **_options))


def padding_of(layout: fzero.state.Layout, index: int) -> Tensor:
    """Where no leaf of a group is, [W l]."""
    free = torch.ones(layout.full_numel(index), dtype=torch.bool)
    group = layout.groups[index]
    for leaf, offset in zip(group.leaves, group.offsets, strict=True):
        free[offset : offset + layout.leaves[leaf].numel] = False
    return free


@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.float32), (3, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_padding_stays_zero_in_parameters_gradients_and_masters_and_finite_in_states(
    name: str, stage: int, dtype: torch.dtype
) -> None:
    """Also on ranks that have nothing but padding. (Adamax keeps max(0, eps) there.)"""
    ranks = 3
    params = {
        "a.v": integers((5,), 1, dtype) + 0.5,
        "a.w": integers((7, 3), 2, dtype) + 0.5,
        "b": torch.tensor(2.0, dtype=dtype),
    }

    def loss(p: Any) -> Tensor:
        total = sum(((x.float() ** 2).sum() for x in p.values()), torch.zeros(()))
        return total * (1 + fzero.axis_index())

    def step_fn(state: Any) -> tuple[Any, Any]:
        state, _ = fzero.grad_and_reduce(loss, state)()
        return fzero.apply_gradients(state), state.gradients.flats

    step = fzero.clip(step_fn, max_norm=1.0)
    run = fzero.simulate(fzero.shard(step, stage=stage), world_size=ranks)
    state = run.init(params, EVERY[name])
    gradients: Any = ()
    for _ in range(3):
        state, gradients = run(state)

    layout = state.setup.layout
    for index in range(len(layout.groups)):
        free = padding_of(layout, index)
        assert free.any()

        def padding(x: Tensor, free: Tensor = free) -> Tensor:
            """Of a shard, or of all, of each rank."""
            return x[free.view(ranks, -1) if x.numel() == free.numel() else free.expand(ranks, -1)]

        masters = [x for x in state.optimizer.masters[index : index + 1] if x.numel()]
        for x in (gradients[index], state.params.flats[index], *masters):
            assert not padding(x).any()
        for x in states_of(state.optimizer, index):
            assert padding(x).isfinite().all()


def states_of(optimizer: Any, index: int) -> list[Tensor]:
    """The moments or slots of one group, [W, l] each."""
    kept = optimizer.slots.values() if hasattr(optimizer, "slots") else optimizer.moments
    return [each[index] for each in kept if each[index].dim() == 2]


@pytest.mark.parametrize("stage", range(4))
def test_a_donating_step_keeps_what_a_device_without_kernels_has_made(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: (p["w"] * x).sum() ** 2, state)()
        return fzero.apply_gradients(state), None

    def weights() -> Tensor:
        train = fzero.simulate(fzero.shard(step, stage=stage, donate=True), world_size=2)
        state = train.init({"w": torch.arange(5.0, dtype=torch.float64)}, fzero.optim.adamw(0.1))
        for _ in range(2):
            state, _ = train(state, torch.tensor([1.0, 2.0], dtype=torch.float64))
        full = fzero.simulate(lambda state, _: fzero.full_params(state), world_size=2)
        return full(state, torch.zeros(2))["w"]

    wanted = weights()
    monkeypatch.setattr(rules, "_get_fused_kernels_supported_devices", list)
    torch.testing.assert_close(weights(), wanted, rtol=1e-12, atol=1e-12)
