"""Nothing is found where only sums are in another order, or numbers in a coarser dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import Compress, codecs
from tests.descends import descends
from tests.strategies import stages, worlds
from tests.tools.diff.faults import forgets_the_reduction
from tests.tools.diff.runs import batches, loss, run, step_with, updated

OPTIMIZERS = {
    "adamw": fzero.optim.adamw(0.01),
    "adam": fzero.optim.adam(0.01, weight_decay=0.1),
    "sgd": fzero.optim.sgd(0.1, momentum=0.9),
    "lion": fzero.optim.lion(0.01),
    "torch": fzero.optim.from_torch(lambda ps: torch.optim.AdamW(ps, lr=0.01)),
}


def one(
    step: Any, params: Any, optimizer: Any, batches: list[Any], stage: int, world_size: int
) -> fzero.tools.Run:
    step = fzero.shard(step, stage=stage)
    of_run = {"params": params, "optimizer": optimizer, "batches": batches}
    return fzero.tools.Run(step=step, world_size=world_size, **of_run)


def shuffled(order: list[int], factor: float) -> Any:
    def step(state: Any, batch: Any) -> Any:
        return updated(state, [x[order] for x in batch], lambda p, x: factor * loss(p, x))

    return step


@st.composite
def runs(draw: st.DrawFn, factor: float, **same: Any) -> fzero.tools.Run:
    """A run of the one program: any world, stage, order, buckets and transforms."""
    body: Any = shuffled(list(draw(st.permutations(range(3)))), factor)
    body = fzero.coalesce(body) if draw(st.booleans()) else body
    body = fzero.clip(body, max_norm=0.1 * factor) if same.pop("clips") else body
    body = fzero.scale_loss(body, 1024.0) if draw(st.booleans()) else body
    options = {
        "bucket_bytes": draw(st.sampled_from([16, 64, 10**6])),
        "ordered": draw(st.booleans()),
        "donate": draw(st.booleans()),
        "reshard_after_forward": draw(st.sampled_from([True, False, "window"])),
    }
    return run(body, draw(stages), draw(worlds), calls=2, micro_batches=3, **options, **same)


@settings(
    max_examples=max(6, settings().max_examples // 10), suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_order_of_sums(data: st.DataObject) -> None:
    same = {
        "optimizer": OPTIMIZERS[data.draw(st.sampled_from([*OPTIMIZERS]))],
        "dtype": data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16])),
        "clips": data.draw(st.booleans()),
    }
    factor = data.draw(st.sampled_from([1.0, 1e-3, 300.0]))
    found = fzero.diff(data.draw(runs(factor, **same)), data.draw(runs(factor, **same)))
    assert found is None, found


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({}, {"dtype": HALF, "stage": 3, "world_size": 2}),
        ({"dtype": HALF, "world_size": 2}, {"stage": 2, "world_size": 2}),
        ({}, {"body": fzero.autocast(updated, dtype=HALF), "stage": 3, "world_size": 3}),
        ({}, {"compress": Compress(gradients=codecs.cast(HALF)), "stage": 2, "world_size": 4}),
        ({}, {"compress": Compress(gradients=codecs.int8()), "stage": 2, "world_size": 3}),
        ({}, {"compress": Compress(parameters=codecs.int8()), "stage": 3, "world_size": 2}),
        ({}, {"mesh": (2, 2), "stage": 3, "world_size": 4}),
        ({}, {"mesh": (2, 2), "stage": 2, "world_size": 4, "optimizer_over": "all"}),
        ({"reduce_op": "sum"}, {"stage": 2, "world_size": 3, "gradient_predivide_factor": 3.0}),
        ({}, {"body": lambda s, b: forgets_the_reduction(s, b, reduced=False), "stage": 3}),
    ],
    ids=lambda options: ", ".join(map(str, options)) or "plain",
)
def test_what_the_options_ask_for(a: Any, b: Any) -> None:
    found = fzero.diff(run(**{"calls": 2, **a}), run(**{"calls": 2, **b}))
    assert found is None, found


def test_a_sum_of_other_losses_over_more_ranks() -> None:
    """Divided by the ranks in the loss, and then summed: the gradient is the mean."""
    shared = step_with(lambda p, x: loss(p, x) / fzero.axis_size())
    assert fzero.diff(run(), run(shared, 2, 3, reduce_op="sum")) is None


def test_one_batch_as_micro_batches() -> None:
    whole = descends(loss)

    def flat(one: fzero.tools.Run, world_size: int) -> fzero.tools.Run:
        made = [[x.flatten(1, 2) for x in batch] for batch in batches(world_size, 2)]
        return fzero.tools.Run(
            step=one.step,
            params=one.params,
            optimizer=one.optimizer,
            batches=[tuple(batch) for batch in made],
            world_size=world_size,
        )

    parts = fzero.coalesce(fzero.accumulate(whole, steps=2))
    assert fzero.diff(flat(run(whole), 1), flat(run(parts, 3, 2), 2)) is None


def test_masks_that_are_drawn_alike_and_dtypes_that_a_loss_fixes() -> None:
    """A loss in which fp32 is asked for is computed in float64; one that insists, as it is."""

    def asked(p: Any, batch: Any) -> Tensor:
        table = torch.ones(3, 3, dtype=torch.float32)
        return loss(p, batch) + (p["second"]["bias"].float() @ table).square().mean()

    def fixed(p: Any, batch: Any) -> Tensor:
        if p["second"]["bias"].dtype is not torch.float32:
            raise TypeError("this loss is for fp32")
        return asked(p, batch)

    def dropped(p: Any, batch: Any) -> Tensor:
        return loss(p, (torch.dropout(batch[0], 0.3, train=True), batch[1]))

    for body in (step_with(asked), step_with(fixed), step_with(dropped)):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        assert fzero.diff(run(body, 0, 2, calls=2), run(body, 3, 2, calls=2)) is None
        assert torch.equal(torch.get_rng_state(), before)
    for body, dtype in ((asked, torch.float64), (fixed, torch.float32)):
        doubled = step_with(lambda p, x: 2 * body(p, x))  # noqa: B023
        found = fzero.diff(run(step_with(body)), run(doubled, 2, 2))
        assert found is not None and found.compared_in is dtype


@pytest.mark.parametrize("seed", [8, 12])  # in which the two orders give two signs
def test_a_gradient_that_cancels_has_no_sign_to_compare(seed: int) -> None:
    """Lion moves by the sign of a gradient; here one of 2000 is zero but for rounding."""
    source = torch.Generator().manual_seed(seed)
    x = torch.rand(6, 2000, generator=source, dtype=torch.float64)
    x[5, 0] = -x[:5, 0].sum()
    orders = [torch.randperm(6, generator=source) for _ in range(2)]

    def step(state: Any, batch: Tensor) -> Any:
        for row in batch:  # one example after the other
            state, _ = fzero.grad_and_reduce(lambda p, row: (p["w"] * row).sum(), state)(row)
        return fzero.apply_gradients(state), None

    def summed(order: Tensor, stage: int, ranks: int) -> fzero.tools.Run:
        params = {"w": torch.ones(2000, dtype=torch.float64)}
        batches = [x[order].view(ranks, -1, 2000) * ranks]
        return one(step, params, OPTIMIZERS["lion"], batches, stage, ranks)

    assert fzero.diff(summed(orders[0], 0, 1), summed(orders[1], 2, 2)) is None


def test_a_gradient_below_the_rounding_of_its_leaf_has_no_sign_to_compare() -> None:
    """As that of the bias of attention's keys: it is zero, but for the rounding inside a loss."""

    step = descends(lambda p, x: (p["w"] * x).mean(0).sum())

    def of(tiny: float, stage: int, ranks: int) -> fzero.tools.Run:
        x = torch.rand(6, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x[:, 3] = tiny
        params = {"w": torch.ones(20, dtype=torch.float64)}
        return one(step, params, OPTIMIZERS["lion"], [x.view(ranks, -1, 20)], stage, ranks)

    assert fzero.diff(of(1e-17, 0, 1), of(-1e-17, 2, 2)) is None
    found = fzero.diff(of(1e-12, 0, 1), of(-1e-12, 2, 2))
    assert found is not None and found.path == "w" and found.index == (3,)


def test_a_chaotic_run_stays_beside_the_other_one() -> None:
    """p' = 3.9 p (1 - p): alone, rounding would be beyond every bound after 30 calls."""

    def energy(p: Any, w: Tensor) -> Tensor:
        x = p["x"]
        return (w * (x**2 / 2 - 3.9 * (x**2 / 2 - x**3 / 3))).mean()

    step = descends(energy)

    def chaotic(stage: int, world_size: int) -> fzero.tools.Run:
        weights = torch.tensor([0.1, 0.7, 1.3, 1.9, 0.3, 1.7], dtype=torch.float64)
        batches = [weights.view(world_size, -1)] * 30
        params = {"x": torch.tensor(0.3, dtype=torch.float64)}
        return one(step, params, fzero.optim.sgd(1.0), batches, stage, world_size)

    assert fzero.diff(chaotic(0, 1), chaotic(2, 3)) is None


def with_column(
    values: list[float], optimizer: Any, stage: int, world_size: int
) -> fzero.tools.Run:
    """Updates one after the other in a call; the gradient of element 3 is of these sizes."""

    def step(state: Any, batch: Tensor) -> Any:
        for x in batch:
            state, _ = descends(bent)(state, x)
        return state, None

    def bent(p: Any, x: Tensor) -> Tensor:
        return ((p["w"] + p["w"] ** 2 / 2) * x).mean(0).sum()

    source = torch.Generator().manual_seed(0)
    x = torch.rand(len(values), 6, 20, generator=source, dtype=torch.float64)
    for k, value in enumerate(values):
        x[k, :, 3] = value
    batch = x.view(len(values), world_size, -1, 20).transpose(0, 1).contiguous()
    params = {"w": torch.full((20,), 0.5, dtype=torch.float64)}
    return one(step, params, optimizer, [batch], stage, world_size)


@pytest.mark.parametrize(
    ("optimizer", "sizes"),
    [("adamw", (1e-8, 1e-8 + 1e-15)), ("adam", (1e-8, 1e-8 + 1e-15)), ("lion", (1e-17, -1e-17))],
)
@pytest.mark.parametrize("rest", [[], [0.3]], ids=["one update", "two updates"])
def test_what_an_optimizer_makes_of_rounding_is_no_difference(
    optimizer: str, sizes: tuple[float, float], rest: list[float]
) -> None:
    """Adam near |g| = eps, and Lion near 0, make updates that differ of gradients that do not.

    In a second update of the same call they would be other parameters.
    """
    a, b = (with_column([size, *rest], OPTIMIZERS[optimizer], 0, 1) for size in sizes)
    other = with_column([sizes[1], *rest], OPTIMIZERS[optimizer], 3, 2)
    assert fzero.diff(a, b) is None
    assert fzero.diff(a, other) is None


def by_rows(split: list[list[int]], stage: int, *, weighs: bool = True) -> fzero.tools.Run:
    """Two updates by the mean over 12 rows: split[rank][call] of them, each with its number."""
    ranks, calls = len(split), len(split[0])
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    parts = iter(rows.split([n for own in split for n in own]))
    x = torch.zeros(ranks, calls, 12, 3, dtype=torch.float64)
    for rank, own in enumerate(split):
        for call, n in enumerate(own):
            x[rank, call, :n] = next(parts)

    def step(state: Any, batch: Any) -> Any:
        for own, n in zip(batch[0], batch[1].tolist(), strict=True):
            g = fzero.grad_and_reduce(
                lambda p, x: (x @ p["w"]).square().mean(), state, weight=n if weighs else None
            )
            state, _ = g(own[:n])
        return fzero.apply_gradients(state), None

    return fzero.tools.Run(
        step=fzero.shard(fzero.coalesce(step), stage=stage),
        params={"w": torch.ones(3, 2, dtype=torch.float64)},
        batches=[(x, torch.tensor(split))] * 2,
        optimizer=fzero.optim.adam(0.1),
        world_size=ranks,
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weighted_calls_are_compared_by_their_share_in_the_update(stage: int) -> None:
    alone = by_rows([[12]], 0)
    assert fzero.diff(alone, by_rows([[3, 5], [0, 4]], stage)) is None
    found = fzero.diff(alone, by_rows([[3, 5], [1, 3]], stage, weighs=False))
    assert found is not None and found.operation == "loss"
