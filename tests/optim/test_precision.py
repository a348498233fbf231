"""Which dtypes go together: every row of the table, and training in those that do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero import Compress
from fzero.adapter import Engine
from fzero.errors import LayoutError, PhaseError
from fzero.machine.codecs import cast, rounded
from fzero.optim.precision import Precision, require_precision
from fzero.state import Reduction
from tests.descends import descends

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# dtype of the model, options of the optimizer, options of the engine, what the error says.
REFUSALS: tuple[tuple[torch.dtype, dict[str, Any], dict[str, Any], str], ...] = (
    (FP32, {"state_dtype": FP16}, {}, "state_dtype=torch.float16"),
    (FP64, {"state_dtype": BF16}, {}, "parameters in torch.float64"),
    (FP16, {"master_weights": False}, {}, "squared gradients in fp16"),
    (BF16, {"stochastic_rounding": True}, {}, "stochastic_rounding with master_weights"),
    (
        FP16,
        {"stochastic_rounding": True, "master_weights": False, "state_dtype": FP32},
        {},
        "stochastic_rounding for parameters in torch.float16",
    ),
    (FP32, {}, {"accumulate_dtype": FP16}, "accumulate_dtype=torch.float16"),
    (BF16, {}, {"compress": Compress(gradients=cast(FP16))}, "gradients=cast(torch.float16)"),
)
OTHERS = (
    (
        FP32,
        {"stochastic_rounding": True, "master_weights": False},
        {},
        "stochastic_rounding, and parameters in ['torch.float32']",
    ),
    (BF16, {}, {"accumulate_dtype": FP16}, "accumulate_dtype=torch.float16"),
)


@pytest.mark.parametrize("kind", ["rule", "class"])
@pytest.mark.parametrize(("dtype", "options", "engine", "says"), [*REFUSALS, *OTHERS])
def test_what_does_not_go_together_is_refused_before_the_module_is_touched(
    dtype: torch.dtype, options: dict[str, Any], engine: dict[str, Any], says: str, kind: str
) -> None:
    module = nn.Linear(3, 2).to(dtype)
    before = module.weight
    optimizer = fzero.optim.adamw(0.1, **options) if kind == "rule" else torch.optim.AdamW
    given = engine if kind == "rule" else {**engine, **options}
    with pytest.raises(LayoutError, match="Fix: ") as caught:
        Engine(module, optimizer, stage=2, **given)
    assert says in str(caught.value)
    assert module.weight is before


@pytest.mark.parametrize("option", ["master_weights", "state_dtype", "stochastic_rounding"])
def test_another_kind_of_option_is_refused_by_name(option: str) -> None:
    wrong: dict[str, Any] = {option: "bf16"}
    for make in (fzero.optim.sgd, fzero.optim.adamw, fzero.optim.lion):
        with pytest.raises(LayoutError, match=f"{option}='bf16'"):
            make(0.1, **wrong)
    with pytest.raises(LayoutError, match=f"{option}='bf16'"):
        fzero.optim.from_torch(torch.optim.SGD, **wrong)


def test_a_foreign_pair_is_not_refused_for_its_precision() -> None:
    require_precision(object(), [], Reduction(codec=cast(FP16)))


# Training in what goes together: (dtype of the model, options, how far from fp32 it may be).
ALLOWED: tuple[tuple[torch.dtype, dict[str, Any], float], ...] = (
    (FP32, {}, 1e-6),
    (FP32, {"state_dtype": BF16}, 4e-3),
    (BF16, {}, 8e-3),
    (BF16, {"state_dtype": BF16}, 8e-3),
    (BF16, {"master_weights": False}, 3e-2),
    (BF16, {"master_weights": False, "state_dtype": FP32}, 3e-2),
    (BF16, {"master_weights": False, "stochastic_rounding": True}, 3e-2),
    (FP16, {}, 2e-3),
    (FP16, {"master_weights": False, "state_dtype": FP32}, 3e-3),
)


@pytest.mark.parametrize("kind", ["rule", "class"])
@pytest.mark.parametrize(("dtype", "options", "bound"), ALLOWED)
def test_what_goes_together_trains_near_fp32(
    dtype: torch.dtype, options: dict[str, Any], bound: float, kind: str
) -> None:
    def run(dtype: torch.dtype, options: dict[str, Any]) -> Any:
        def step_fn(state: Any, x: Tensor) -> Any:
            def loss(p: Any, x: Tensor) -> Tensor:
                return ((p["w"].float() * x).sum() - 1) ** 2 + p["b"].float().square().sum()

            state, value = fzero.grad_and_reduce(loss, state)(x)
            return fzero.apply_gradients(state), value

        rule = partial(torch.optim.AdamW, lr=0.02)
        made = fzero.optim.adamw(0.02, **options)
        optimizer = made if kind == "rule" else fzero.optim.from_torch(rule, **options)
        step = fzero.simulate(fzero.shard(step_fn, stage=2), world_size=3)
        params = {"w": torch.linspace(-1, 1, 7).to(dtype), "b": torch.full((3,), 0.5).to(dtype)}
        state = step.init(params, optimizer)
        for number in range(4):
            state, _ = step(state, torch.arange(21.0).view(3, 7) / 20 - number / 4)
        return state

    state = run(dtype, options)
    found, wanted = (
        fzero.simulate(fzero.full_params, world_size=3)(s) for s in (state, run(FP32, {}))
    )
    for path, value in wanted.items():
        assert found[path].dtype == dtype
        assert (found[path].double() - value.double()).abs().max() < bound
    slots = state.optimizer.moments if kind == "rule" else [*state.optimizer.slots.values()]
    kept = Precision(**options).kept(dtype)
    assert len(slots) == 2
    assert all(x.dtype is kept for some in slots for x in some)


# Rounding by chance.

numbers = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


@given(st.lists(numbers, min_size=1, max_size=20), st.integers(0, 2**31 - 1))
def test_a_number_is_rounded_to_one_of_its_neighbours(values: list[float], noise: int) -> None:
    x = torch.tensor(values, dtype=FP32)
    found = rounded(x, torch.full_like(x, noise, dtype=torch.int32)).float()
    bits = x.view(torch.int32)
    low = (bits & ~0xFFFF).view(FP32)
    high = ((bits & ~0xFFFF) + 0x10000).view(FP32)
    plain = torch.isfinite(x)
    assert torch.equal(found[~plain].isnan(), x[~plain].isnan())
    assert torch.equal(found[x.isinf()], x[x.isinf()])
    assert (((found == low) | (found == high)) & plain | ~plain).all()
    exact = plain & (bits & 0xFFFF == 0)
    assert torch.equal(found[exact], x[exact])


def _moved(stage: int, world_size: int, steps: int, **options: Any) -> Tensor:
    """4096 ones in bf16 after steps of 1/1024 down: a quarter of the distance to the next."""

    step_fn = descends(lambda p, x: (p["w"].float() * x).sum())
    step = fzero.simulate(fzero.shard(step_fn, stage=stage), world_size=world_size)
    optimizer = fzero.optim.sgd(2.0**-10, master_weights=False, **options)
    state = step.init(
        {"a": torch.ones(3, dtype=BF16), "w": torch.ones(4096, dtype=BF16)}, optimizer
    )
    for _ in range(steps):
        state, _ = step(state, torch.ones(world_size, 1))
    return fzero.simulate(fzero.full_params, world_size=world_size)(state)["w"][0]


def test_updates_that_are_too_small_for_bf16_are_kept_in_the_mean() -> None:
    assert torch.equal(_moved(2, 2, 8), torch.ones(4096, dtype=BF16))
    moved = 1 - _moved(2, 2, 8, stochastic_rounding=True).double()
    assert abs(moved.mean() - 8 / 1024) < 3e-4  # 4096 elements: a standard error of 6e-5


def test_chances_are_the_same_at_every_stage_and_number_of_ranks() -> None:
    wanted = _moved(0, 1, 4, stochastic_rounding=True)
    for stage, world_size in ((1, 2), (2, 3), (3, 2), (3, 4)):
        assert torch.equal(_moved(stage, world_size, 4, stochastic_rounding=True), wanted)


def test_an_update_that_is_rounded_by_chance_is_not_differentiated() -> None:
    optimizer = fzero.optim.sgd(0.1, master_weights=False, stochastic_rounding=True)
    state = fzero.init({"w": torch.ones(4, dtype=BF16)}, optimizer, stage=2)

    def after(x: Tensor) -> Tensor:
        made, _ = fzero.grad_and_reduce(lambda p: (p["w"].float() * x).sum(), state)()
        return fzero.full_params(fzero.apply_gradients(made))["w"].sum()

    with pytest.raises(PhaseError, match="stochastic_rounding was to be differentiated"):
        torch.func.grad(after)(torch.tensor(2.0))
