"""Transforms that a user writes, as docs/write_a_transform.md does, against plain PyTorch."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from tests.covering import covered
from tests.transforms import page
from tests.transforms.page import MADE, Plain, Tensors

LR, ROWS = 0.05, 24


def values(seed: int = 0) -> dict[str, Any]:
    """Leaves of uneven sizes: an empty one, a scalar, a complex one, one that nothing uses."""
    g = torch.Generator().manual_seed(seed)
    made = {
        "w": torch.randn(5, 3, generator=g, dtype=torch.float64),
        "b": torch.randn(5, generator=g, dtype=torch.float64),
        "empty": torch.zeros(0, 4, dtype=torch.float64),
        "scalar": torch.randn((), generator=g, dtype=torch.float64),
        "c": torch.randn(3, 2, generator=g, dtype=torch.complex128),
        "unused": torch.randn(2, 2, generator=g, dtype=torch.float64),
        "cube": torch.randn(2, 3, 2, generator=g),
    }
    return made


def loss_fn(p: Any, x: Tensor) -> Tensor:
    """The mean over rows [n, 3]."""
    h = torch.tanh(x @ p["w"].mT + p["b"]) * p["scalar"]
    c = (p["c"] * (1 + 2j)).abs().square().sum()
    return (
        h.square().mean()
        + x.mean() * (p["cube"] * 0.5).square().sum()
        + 0.1 * c
        + 0.0 * (p["empty"].sum())
    )


def with_others(params: Tensors) -> dict[str, Any]:
    """The parameters with a frozen leaf and a tied one."""
    return {**params, "frozen": torch.arange(3), "tied": params["b"]}


def batches(count: int, wild: int | None = None) -> list[Tensor]:
    """Batches [ROWS, 3]; the one of number `wild` is far away."""
    g = torch.Generator().manual_seed(1)
    made = [1 + torch.randn(ROWS, 3, generator=g, dtype=torch.float64) for _ in range(count)]
    if wild is not None:
        made[wild] = 100 * made[wild]
    return made


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, LR, momentum=0.5)


def run(
    transforms: list[Any],
    ranks: int,
    stage: int,
    given: list[Tensor],
    state: Any = None,
    **options: Any,
) -> Any:
    """Train `shard(transforms(step))` on virtual ranks; the stacked state."""

    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), loss

    step: Any = step_fn
    for one in transforms:
        step = one(step)
    step = fzero.simulate(fzero.shard(step, stage=stage, **options), world_size=ranks)
    if state is None:
        state = step.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5))
    for x in given:
        state, _ = step(state, x.view(ranks, ROWS // ranks, 3))
    return state


def kept_of(state: Any, name: str, ranks: int) -> Any:
    """What a transform keeps, of rank 0; all ranks have the same."""
    found = fzero.simulate(lambda s: fzero.slots(s, name), world_size=ranks)(state)
    return _first(found)


def _first(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _first(v) for k, v in tree.items()}
    for other in tree[1:]:
        assert torch.equal(tree[0], other)
    return tree[0]


def full(state: Any, ranks: int) -> Any:
    return _first(fzero.simulate(fzero.full_params, world_size=ranks)(state))


def close(got: Any, want: Any, what: str = "") -> None:
    if isinstance(want, dict):
        for key in want:
            close(got[key], want[key], f"{what}/{key}")
        return
    want = torch.as_tensor(want)
    low = want.dtype in (torch.float32, torch.complex64)
    tol = 1e-5 if low or got.dtype == torch.float32 else 1e-7
    torch.testing.assert_close(
        got.to(want.dtype), want, rtol=tol, atol=tol, msg=lambda m: f"{what}: {m}"
    )


def plain(kinds: list[str], given: list[Tensor]) -> tuple[Tensors, list[Plain]]:
    ones = [MADE[kind][1]() for kind in kinds]
    return page.trained(ones, values(), loss_fn, given, sgd), ones


@covered(kind=sorted(MADE), ranks=[1, 2, 3, 4], stage=range(4), donate=[False, True])
def test_a_step_with_one_is_that_of_plain_torch(
    kind: str, ranks: int, stage: int, donate: bool
) -> None:
    given = batches(6, wild=4 if kind == "outliers" else None)
    made = MADE[kind][0]()
    state = run([made], ranks, stage, given, donate=donate)
    want, (one,) = plain([kind], given)
    close(full(state, ranks), want)
    if one.kept is not None:
        close(kept_of(state, made.name, ranks), one.kept)
    assert state.step.tolist() == [5 if kind == "outliers" else 6] * ranks


class Net(nn.Module):
    """The leaves of `values` as a module."""

    def __init__(self) -> None:
        super().__init__()
        for name, x in values().items():
            self.register_parameter(name, nn.Parameter(x.clone()))
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.tied = self.b

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.named_parameters())
        return loss_fn(own, x) + 0 * own["unused"].sum()


def by_engine(
    transforms: list[Any], ranks: int, stage: int, given: list[Tensor], **more: Any
) -> Any:
    """Train an engine on virtual ranks: its full parameters, and what its transforms keep."""

    def on_rank(index: Tensor) -> Any:
        model = Net()
        optimizer = torch.optim.SGD([*model.parameters()], LR, momentum=0.5)
        engine = Engine(model, optimizer, stage=stage, transforms=transforms, **more)
        for x in given:
            engine.backward(engine(x.view(ranks, ROWS // ranks, 3)[index]))
            engine.step()
        kept = {
            one.name: fzero.slots(engine.state, one.name) if one.init else {} for one in transforms
        }
        found = {k: v.clone() for k, v in engine.full_parameters().items()}
        step = engine.state.step.clone()
        engine.close()
        return found, kept, step

    return _first_of(fzero.simulate(on_rank, world_size=ranks)(torch.arange(ranks)))


def _first_of(tree: Any) -> Any:
    return tuple(_first(one) for one in tree)


@covered(kind=sorted(MADE), ranks=[1, 2, 3, 4], stage=range(4))
def test_an_engine_with_one_is_that_of_plain_torch(kind: str, ranks: int, stage: int) -> None:
    given = batches(6, wild=4 if kind == "outliers" else None)
    made = MADE[kind][0]()
    got, kept, step = by_engine([made], ranks, stage, given)
    want, (one,) = plain([kind], given)
    close(got, want)
    if one.kept is not None:
        close(kept[made.name], one.kept)
    assert step == (5 if kind == "outliers" else 6)


# Together, and with everything else.

SIX = ("outliers", "clip_rows", "noise", "schedule_free", "lookahead", "ema")


def six() -> list[Any]:
    return [MADE[kind][0]() for kind in SIX]


def around(step: Any, transforms: list[Any]) -> Any:
    for one in transforms:
        step = one(step)
    return step


def trained_by(
    wrap: Any, ranks: int, stage: int, given: list[Tensor], calls: int = 1, **options: Any
) -> Any:
    """Train `shard(wrap(step))`, of several calls for each update; the stacked state."""

    def step_fn(state: Any, x: Tensor) -> Any:
        for part in x.chunk(calls):
            state, loss = fzero.grad_and_reduce(lambda p, x: loss_fn(p, x) / calls, state)(part)
        return fzero.apply_gradients(state), loss

    step = fzero.simulate(fzero.shard(wrap(step_fn), stage=stage, **options), world_size=ranks)
    state = step.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5))
    for x in given:
        state, _ = step(state, x.view(ranks, ROWS // ranks, 3))
    return state


def is_plain(state: Any, ranks: int, given: list[Tensor], kinds: Any = SIX) -> None:
    """Parameters and slots are those of plain torch."""
    want, ones = plain(list(kinds), given)
    close(full(state, ranks), want)
    for kind, one in zip(kinds, ones, strict=True):
        if one.kept is not None:
            close(kept_of(state, kind, ranks), one.kept, kind)


SCALE = fzero.DynamicScale(init_scale=2.0**10)
WRAPS: dict[str, Any] = {
    "alone": lambda step: around(step, six()),
    "coalesce around": lambda step: fzero.coalesce(around(step, six())),
    "around coalesce": lambda step: around(fzero.coalesce(step), six()),
    "accumulate around": lambda step: fzero.accumulate(around(step, six()), micro_batches=2),
    "around accumulate": lambda step: around(fzero.accumulate(step, micro_batches=2), six()),
    "scale around": lambda step: fzero.scale_loss(around(step, six()), SCALE),
    "around scale": lambda step: around(fzero.scale_loss(step, SCALE), six()),
    "offload": lambda step: fzero.offload(around(step, six()), optimizer="cpu"),
}


@covered(
    wrap=sorted(WRAPS), place=[(1, 0), (2, 1), (3, 2), (2, 3)], donate=[False, True], calls=[1, 2]
)
def test_six_go_with_everything_else(
    wrap: str, place: tuple[int, int], donate: bool, calls: int
) -> None:
    """What changes the units of a gradient is undone before them, wherever it stands."""
    ranks, stage = place
    given = batches(6, wild=4)
    state = trained_by(WRAPS[wrap], ranks, stage, given, calls, donate=donate)
    is_plain(state, ranks, given)


@pytest.mark.parametrize("over", ["shard", "all"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_six_on_a_hybrid_mesh(stage: int, over: str) -> None:
    given = batches(6, wild=4)
    is_plain(run(six(), 4, stage, given, mesh=(2, 2), optimizer_over=over), 4, given)


@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_leaves_out_all_that_they_do(stage: int) -> None:
    given = batches(5)
    wild = [*given[:2], given[0] * float("inf"), *given[2:]]
    state = trained_by(WRAPS["around scale"], 2, stage, wild, donate=stage % 2 == 1)
    is_plain(state, 2, given)
    got, kept, step = by_engine(six(), 2, stage, wild, loss_scale=SCALE)
    want, ones = plain(list(SIX), given)
    close(got, want)
    for kind, one in zip(SIX, ones, strict=True):
        if one.kept is not None:
            close(kept[kind], one.kept, kind)
    assert step == 5


@pytest.mark.parametrize("stage", range(4))
def test_weighted_calls_are_a_mean_before_they_see_it(stage: int) -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        for part in x.split([1, len(x) - 1]):
            state, loss = fzero.grad_and_reduce(loss_fn, state, weight=len(part))(part)
        return fzero.apply_gradients(state), loss

    given = batches(6, wild=4)
    step = fzero.simulate(fzero.shard(around(step_fn, six()), stage=stage), world_size=2)
    state = step.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5))
    for x in given:
        state, _ = step(state, x.view(2, ROWS // 2, 3))

    def weighted(p: Any, x: Tensor) -> Tensor:  # of both ranks
        parts = [part for own in x.chunk(2) for part in own.split([1, len(own) - 1])]
        return sum(len(part) * loss_fn(p, part) for part in parts) / len(x)  # type: ignore

    ones = [MADE[kind][1]() for kind in SIX]
    close(full(state, 2), page.trained(ones, values(), weighted, given, sgd))
    close(kept_of(state, "ema", 2), ones[-1].kept)


@pytest.mark.parametrize("stage", range(4))
def test_several_states_have_slots_of_their_own(stage: int) -> None:
    """Also one of which nothing learns."""
    kinds = ("outliers", "schedule_free", "ema")

    def step_fn(states: Any, x: Tensor) -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            return loss_fn(p["a"], x) + 2 * loss_fn(p["b"], x) + 0 * p["f"]["z"].sum()

        states, value = fzero.grad_and_reduce(loss, states)(x)
        return fzero.apply_gradients(states), value

    stages = {"a": stage, "b": 3 if stage == 3 else (stage + 1) % 3, "f": 0}
    inside = fzero.shard(around(step_fn, [MADE[kind][0]() for kind in kinds]), stage=stages)
    step = fzero.simulate(inside, world_size=2)
    rule: Any = fzero.optim.sgd(LR, momentum=0.5)
    rules = {"a": rule, "b": rule, "f": fzero.optim.no_optimizer()}
    params = {"a": with_others(values()), "b": with_others(values()), "f": {"z": torch.ones(3)}}
    states, given = step.init(params, rules), batches(4)
    for x in given:
        states, _ = step(states, x.view(2, ROWS // 2, 3))
    for key, factor in (("a", 1), ("b", 2)):
        ones = [MADE[kind][1]() for kind in kinds]
        want = page.trained(ones, values(), lambda p, x, by=factor: by * loss_fn(p, x), given, sgd)
        close(full(states[key], 2), want)
        for kind, one in zip(kinds, ones, strict=True):
            close(kept_of(states[key], kind, 2), one.kept, kind)
    assert kept_of(states["f"], "ema", 2) == {"mean": {}}


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("stage", range(4))
def test_masters_are_what_they_see_of_16_bits(stage: int, masters: bool) -> None:
    """The average of masters is finer than 16 bits; without masters it is of the parameters."""
    g = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(5, 3, generator=g).bfloat16(), "s": torch.randn((), generator=g)}
    seen = list[Any]()

    def look(slots: Any, params: Any, ctx: Any) -> Any:
        seen.append(params["w"].dtype)
        return slots, params

    def step_fn(state: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            return (torch.tanh(x @ p["w"].float().mT) * p["s"]).square().mean()

        state, value = fzero.grad_and_reduce(loss, state)()
        return fzero.apply_gradients(state), value

    made = around(step_fn, [fzero.transform(name="look", updated=look), page.names["ema"]])
    step = fzero.simulate(fzero.shard(made, stage=stage), world_size=2)
    state = step.init(params, fzero.optim.sgd(LR, master_weights=masters))
    mean = params["w"].float()
    for x in batches(4):
        state, _ = step(state, x.view(2, ROWS // 2, 3).float())
        now = kept_of(state, "optimizer", 2)["masters"]["w"] if masters else full(state, 2)["w"]
        mean = mean.lerp(now.float(), 0.01)
    kept = kept_of(state, "ema", 2)["mean"]["w"]
    assert kept.dtype == torch.float32 and set(seen) == {
        torch.float32 if masters else torch.bfloat16
    }
    torch.testing.assert_close(kept, mean)


@covered(ranks=[1, 2, 3, 4], stage=range(4), donate=[False, True])
def test_sam_is_that_of_plain_torch(ranks: int, stage: int, donate: bool) -> None:
    given = batches(3)
    sam = FunctionType(page.names["sam_step"].__code__, {**page.names, "loss_fn": loss_fn})

    def step_fn(state: Any, x: Tensor) -> Any:
        return sam(state, x, 0.05)

    step = fzero.shard(page.names["ema"](step_fn), stage=stage, donate=donate)
    simulated = fzero.simulate(step, world_size=ranks)
    state = simulated.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5))
    params = {k: p.clone().requires_grad_() for k, p in values().items()}
    optimizer = sgd([*params.values()])

    def gradient(p: Any, x: Tensor) -> Any:
        seats = [*p.values()]
        found = torch.autograd.grad(loss_fn(p, x), seats, allow_unused=True, materialize_grads=True)
        return dict(zip(p, found, strict=True))

    for x in given:
        state, _ = simulated(state, x.view(ranks, ROWS // ranks, 3))
        first = gradient(params, x)
        norm = torch.stack([g.abs().square().sum() for g in first.values()]).sum().sqrt()
        moved = {
            k: (p + 0.05 / norm * first[k]).detach().requires_grad_() for k, p in params.items()
        }
        for k, g in gradient(moved, x).items():
            params[k].grad = g
        optimizer.step()
    close(full(state, ranks), {k: p.detach() for k, p in params.items()})


@pytest.mark.parametrize("stage", range(4))
def test_a_compiled_step_has_the_same_numbers_and_skips(stage: int) -> None:
    given = batches(6, wild=4)
    step = fzero.shard(around(one_call, six()), stage=stage)
    state = step.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5))
    compiled = fzero.compile(step, backend="eager")
    for x in given:
        state, _ = compiled(state, x)
    want, ones = plain(list(SIX), given)
    close(fzero.full_params(state), want)
    close(fzero.slots(state, "ema"), ones[-1].kept)


def one_call(state: Any, x: Tensor) -> Any:
    state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
    return fzero.apply_gradients(state), loss


def test_a_compiled_step_sees_another_number_in_a_function() -> None:
    """It had the first one for ever."""
    rate = 1.0

    def times(slots: Any, grads: Any, ctx: Any) -> Any:
        return slots, {path: rate * g for path, g in grads.items()}

    def step_fn(state: Any) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: p["w"].sum(), state)()
        return fzero.apply_gradients(state), loss

    made = fzero.transform(name="times", reduced=times)
    for step in (fzero.shard(made(step_fn), stage=0), fzero.shard(step_fn, stage=0)):
        rate = 1.0
        compiled = fzero.compile(step, backend="eager")
        options: dict[str, Any] = {} if step.names()[1:] else {"transforms": [made]}
        state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=0, **options)
        state, _ = compiled(state)
        rate = 4.0
        state, _ = compiled(state)
        assert fzero.full_params(state)["w"].tolist() == [-4.0, -4.0]


@pytest.mark.parametrize("stage", range(4))
def test_the_plan_is_what_is_counted(stage: int) -> None:
    step = fzero.shard(around(one_call, six()), stage=stage)
    rule, params, (x,) = fzero.optim.sgd(LR, momentum=0.5), with_others(values()), batches(1)
    planned = fzero.plan.of_step(step, params, rule, x[: ROWS // 2], world=2, device="cpu")
    simulated = fzero.simulate(step, world_size=2)
    state = simulated.init(params, rule)
    state, _ = simulated(state, x.view(2, ROWS // 2, 3))  # the first checks what functions return
    with fzero.count_collectives() as log:
        state, _ = simulated(state, x.view(2, ROWS // 2, 3))
    assert dict(planned.collectives) == dict(log.counts())
    own = fzero.simulate(lambda s: torch.tensor(fzero.state_bytes(s)["slots"]), world_size=2)(state)
    assert own.tolist() == [planned.bytes["slots"]] * 2


def test_they_print_as_a_pipeline_and_are_traced() -> None:
    step = fzero.shard(page.names["ema"](fzero.clip(one_call, max_norm=1.0)), stage=2)
    assert repr(step) == "shard(stage=2) . ema . clip(max_norm=1.0) . one_call"
    assert repr(page.names["ema"]) == "ema(updated)"
    state = step.init(with_others(values()), fzero.optim.sgd(LR))
    assert "lerp" in str(fzero.trace(step)(state, batches(1)[0]))


@pytest.mark.parametrize("stage", range(4))
def test_a_whole_update_is_differentiated_through_them(stage: int) -> None:
    """By the first parameters, of which slots are made: jvp had left those out."""

    def on_rank(index: Tensor) -> Any:
        step = fzero.shard(around(one_call, six()), stage=stage)
        given, params = [x.view(2, ROWS // 2, 3)[index] for x in batches(2)], values()

        def of(a: Tensor) -> Tensor:
            state = step.init({**params, "w": a * params["w"]}, fzero.optim.sgd(LR, momentum=0.5))
            for x in given:
                state, _ = step(state, x)
            kept = fzero.slots(state, "ema")["mean"]["w"].square().sum()
            return fzero.full_params(state)["w"].square().sum() + kept

        a, h = torch.tensor(1.1, dtype=torch.float64), 1e-5
        slope = (of(a + h) - of(a - h)) / (2 * h)
        mapped = torch.func.vmap(of)(torch.stack([a, 1.01 * a]))
        jvp = torch.func.jvp(of, (a,), (torch.ones_like(a),))[1]
        return fzero.pmean(torch.func.grad(of)(a)), jvp, slope, mapped, of(a), of(1.01 * a)

    grad, jvp, slope, mapped, *both = fzero.simulate(on_rank, world_size=2)(torch.arange(2))
    torch.testing.assert_close(grad, slope, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(jvp, slope, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mapped, torch.stack(both, 1))


@pytest.mark.parametrize("kind", ["bf16", "int8", "powersgd"])
@pytest.mark.parametrize("stage", range(4))
def test_a_codec_at_wire_is_that_of_compress(stage: int, kind: str) -> None:
    options = {"batch_dims": 0} if kind == "powersgd" else {}
    codec: Any = getattr(fzero.codecs, kind)(**options)
    params = {k: p for k, p in values().items() if k != "c"}

    def step_fn(state: Any, x: Tensor) -> Any:
        nothing = torch.zeros(1, dtype=torch.complex128)
        state, loss = fzero.grad_and_reduce(lambda p: loss_fn({**p, "c": nothing}, x), state)()
        return fzero.apply_gradients(state), loss

    def run_by(step: Any) -> Any:
        simulated = fzero.simulate(fzero.shard(step, stage=stage), world_size=2)
        state = simulated.init(params, fzero.optim.sgd(LR, momentum=0.5))
        for x in batches(3):
            state, _ = simulated(state, x.view(2, ROWS // 2, 3))
        return full(state, 2)

    wired = fzero.transform(name="wired", wire=codec)
    got = run_by(wired(page.names["ema"](step_fn)))
    want = run_by(fzero.compress(step_fn, gradients=codec))
    assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("stage", range(3))
def test_replicas_of_local_updates_have_averages_of_their_own(stage: int) -> None:
    given, ema = batches(4), page.names["ema"]

    def run_by(step: Any) -> Any:
        simulated = fzero.simulate(fzero.shard(step, stage=stage), world_size=2)
        state = simulated.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5))
        for x in given:
            state, _ = simulated(state, x.view(2, ROWS // 2, 3))
        return state

    state, without = (
        run_by(fzero.local(ema(one_call), every=2)),
        run_by(fzero.local(one_call, every=2)),
    )
    assert torch.equal(full(state, 2)["w"], full(without, 2)["w"])
    own = fzero.simulate(lambda s: fzero.slots(s, "ema")["mean"]["w"], world_size=2)(state)
    assert not torch.equal(own[0], own[1])
