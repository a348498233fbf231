"""Programs that differ in a constant, a view, an operand or an output are told apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero.tools.trace import Op
from tests.descends import descends
from tests.tools.plot.traces import by_hand, value
from tests.tools.trace.steps import Of

D = 4
Body = Callable[[Tensor, Tensor], Tensor]


def traced(
    body: Body,
    stage: int = 2,
    *,
    rank: int = 0,
    world: int = 2,
    optimizer: Any = None,
    wrap: Callable[[Any], Any] = lambda step: step,
    **options: Any,
) -> Any:
    """The trace of a step whose loss is the sum of body(w, x), both of [4, 4]."""
    apply, params = fzero.functionalize(Of(body, D, D))
    step = fzero.shard(wrap(descends(lambda p, x: apply(p, x).sum())), stage=stage, **options)
    step = fzero.simulate(step, world_size=world)
    state = step.init(params, optimizer or fzero.optim.adamw(1e-3))
    return fzero.trace(step, rank=rank)(state, torch.zeros(world, D, D))


def table(theta: float) -> Tensor:
    return theta ** (torch.arange(D) / D)


def norm(eps: float) -> Body:
    return lambda w, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rope(theta: float) -> Body:
    """With a table that is made once, and is a constant of the step."""
    made = table(theta)
    return lambda w, x: (x @ w) * made


TWO: dict[str, tuple[Body, Body]] = {
    "eps of a norm by hand": (norm(1e-6), norm(1e-5)),
    "eps of a layer norm": (
        lambda w, x: F.layer_norm(x, (D,), w[0], eps=1e-6),
        lambda w, x: F.layer_norm(x, (D,), w[0], eps=1e-5),
    ),
    "weight or bias of a layer norm": (
        lambda w, x: F.layer_norm(x, (D,), weight=w[0]),
        lambda w, x: F.layer_norm(x, (D,), bias=w[0]),
    ),
    "a table": (rope(1e4), rope(5e5)),
    "a table made in the step": (
        lambda w, x: (x @ w) * table(1e4),
        lambda w, x: (x @ w) * table(5e5),
    ),
    "a tensor of one number": (
        lambda w, x: w * x * torch.tensor(2.0),
        lambda w, x: w * x * torch.tensor(3.0),
    ),
    "a weight transposed": (lambda w, x: x @ w, lambda w, x: x @ w.T),
    "an activation transposed": (lambda w, x: w @ x.relu(), lambda w, x: w @ x.relu().T),
    "a permutation": (
        lambda w, x: (w * x).view(2, 2, 4).permute(0, 1, 2).cumsum(1),
        lambda w, x: (w * x).view(2, 2, 4).permute(1, 0, 2).cumsum(1),
    ),
    "a shape": (
        lambda w, x: (w * x).view(2, 2, 4).softmax(0).flatten(),
        lambda w, x: (w * x).view(2, 4, 2).softmax(0).flatten(),
    ),
    "a slice": (lambda w, x: (w * x)[:2], lambda w, x: (w * x)[2:]),
    "columns for rows": (lambda w, x: w[0] * x, lambda w, x: w[:, 0] * x),
    "an expanded dim": (
        lambda w, x: w[0].expand(D, D) * x,
        lambda w, x: w[0][:, None].expand(D, D) * x,
    ),
    "a flip of signs": (lambda w, x: (w * x) - 1, lambda w, x: 1 - (w * x)),
    "an exponent": (lambda w, x: (w * x) ** 2, lambda w, x: (w * x) ** 3),
    "a base": (lambda w, x: 2.0 ** (w * x), lambda w, x: 3.0 ** (w * x)),
    "a divisor": (lambda w, x: w @ x / 2, lambda w, x: w @ x / math.sqrt(D + 1)),
    "an alpha": (lambda w, x: w.add(x, alpha=2), lambda w, x: w.add(x, alpha=3)),
    "a dim": (lambda w, x: (w * x).softmax(0), lambda w, x: (w * x).softmax(1)),
    "a dropout": (lambda w, x: F.dropout(w * x, 0.1), lambda w, x: F.dropout(w * x, 0.2)),
    "a keyword": (
        lambda w, x: F.gelu(w * x),
        lambda w, x: F.gelu(w * x, approximate="tanh"),
    ),
    "a clamp": (lambda w, x: (w * x).clamp(min=0.5), lambda w, x: (w * x).clamp(max=0.5)),
    "the order of operands": (lambda w, x: w.sin() - x.sin(), lambda w, x: x.sin() - w.sin()),
    "which of two values": (
        lambda w, x: (a := w * x) * (a * x).exp() + a,
        lambda w, x: (a := w * x) * (b := a * x).exp() + b,
    ),
    "an index": (
        lambda w, x: (w * x)[torch.arange(2)],
        lambda w, x: (w * x)[:, torch.arange(2)],
    ),
    "a fill": (
        lambda w, x: (w * x).masked_fill(x > 0, -1.0),
        lambda w, x: (w * x).masked_fill(x > 0, -2.0),
    ),
    "a triangle": (lambda w, x: (w * x).tril(), lambda w, x: (w * x).tril(1)),
}


GATHERED = ("eps of a norm by hand", "a table", "a weight transposed", "which of two values")


@pytest.mark.parametrize(
    ("name", "stage"), [*((name, 0) for name in TWO), *((name, 3) for name in GATHERED)]
)
def test_two_programs_are_told_apart(name: str, stage: int) -> None:
    a, b = (traced(body, stage) for body in TWO[name])
    found = a.diff(b)
    assert found and found.first[0] is not None and found.first[0].name in str(found)
    shown = [[line[1:] for line in found.lines[2:] if line[0] == mark] for mark in "-+"]
    assert shown[0] != shown[1], "lines that differ are shown alike"
    assert a.diff(traced(TWO[name][0], stage)).equal and b.diff(a)


def warmup(steps: int) -> Callable[[int], float]:
    return lambda t: 0.1 * min(1.0, (t + 1) / steps)


OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "lr": (lambda: fzero.optim.sgd(0.1), lambda: fzero.optim.sgd(0.2)),
    "betas": (
        lambda: fzero.optim.adamw(1e-3),
        lambda: fzero.optim.adamw(1e-3, betas=(0.9, 0.99)),
    ),
    "a schedule": (
        lambda: fzero.optim.sgd(warmup(3)),
        lambda: fzero.optim.sgd(warmup(4)),
    ),
    "a partial schedule": (
        lambda: fzero.optim.sgd(functools.partial(lambda a, t: a / (t + 1), 0.1)),
        lambda: fzero.optim.sgd(functools.partial(lambda a, t: a / (t + 1), 0.2)),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_told_apart(name: str) -> None:
    one, other = OPTIMIZERS[name]
    body = TWO["a weight transposed"][0]
    a, again, b = (traced(body, optimizer=make()) for make in (one, one, other))
    assert a.diff(again).equal and not a.diff(b).equal


def test_transforms_are_told_apart_by_their_numbers() -> None:
    a, again, b = (
        traced(norm(1e-6), wrap=functools.partial(fzero.clip, max_norm=c)) for c in (1.0, 1.0, 2.0)
    )
    assert a.diff(again).equal and not a.diff(b).equal


def test_what_comes_out_is_part_of_a_program() -> None:
    def step(first: bool) -> Any:
        def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
            a, b = x.sin(), x.cos()
            return state, (a, b) if first else (b, a)  # type: ignore[return-value]

        state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), stage=0)
        return fzero.trace(step_fn)(state, torch.ones(3))

    found = step(True).diff(step(False))
    assert found and "-  return aux[0] sin" in found.lines
    assert found.first == (None, None)


def test_parameters_before_and_after_an_update_are_not_the_same() -> None:
    def step(*, new: bool) -> Any:
        def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
            def loss(p: Any, x: Tensor) -> Tensor:
                return (p["w"] * x).sum()

            after, _ = fzero.grad_and_reduce(loss, state)(x)
            after = fzero.apply_gradients(after)
            return after, fzero.evaluate(loss, after if new else state)(x)

        step = fzero.simulate(fzero.shard(step_fn, stage=2), world_size=2)
        state = step.init({"w": torch.ones(8)}, fzero.optim.sgd(0.1))
        return fzero.trace(step)(state, torch.ones(2, 8))

    assert step(new=True).diff(step(new=True)).equal
    assert not step(new=True).diff(step(new=False)).equal


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)])
def test_ranks_of_one_program_are_equal(stage: int, mesh: tuple[int, int]) -> None:
    told: dict[str, Any] = {"world": 4, "mesh": mesh}
    clips = functools.partial(fzero.clip, max_norm=1.0)
    a, b = (traced(rope(1e4), stage, rank=rank, wrap=clips, **told) for rank in (0, 3))
    assert a.diff(b).equal


def test_views_that_give_the_same_elements_are_the_same() -> None:
    a = traced(lambda w, x: w.T.T.view(2, 8).view(D, D) @ x[:, 1:][:, 1:].T.t()[:, :1])
    b = traced(lambda w, x: w.view(16).view(D, D) @ x[:, 2:3])
    assert [line for line in a.diff(b).lines if " mm" in line] == []


def test_numbers_are_printed_and_lines_have_a_hundred_columns_at_most() -> None:
    text = str(traced(lambda w, x: (x @ w).pow(3).add(1e-6).div(7) * table(10.0)))
    lines = [" ".join(line.partition(" = ")[2].split()[:3]) for line in text.splitlines()]
    assert any(line.startswith("pow ") and line.endswith(" 3") for line in lines)
    assert any(line.startswith("add ") and line.endswith(" 1e-06") for line in lines)
    assert any(line.startswith("div ") and line.endswith(" 7") for line in lines)
    assert any(line.startswith("pow 10.0 ") for line in lines)

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_block_with_a_long_name = nn.ModuleDict(
                {f"a_layer_with_a_long_name_{i}": nn.Linear(D, D) for i in range(3)}
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.a_block_with_a_long_name.values():
                x = torch.cat([layer(x), *x.split(1, -1)], -1)[:, :D]
            return x

    for stage in (0, 3):
        apply, params = fzero.functionalize(Long())
        step = fzero.shard(descends(lambda p, x: apply(p, x).sum()), stage=stage)  # noqa: B023
        step = fzero.simulate(step, world_size=2)
        trace = fzero.trace(step)(step.init(params, fzero.optim.adamw(0.1)), torch.zeros(2, D, D))
        other = fzero.trace(step, rank=1)(
            step.init(params, fzero.optim.sgd(0.1)), torch.zeros(2, D, D)
        )
        for shown in (trace, trace.diff(other), trace.diff(traced(norm(1.0)))):
            assert max(map(len, str(shown).splitlines())) <= 100
            assert "a_layer_with_a_long_name_2.weight" in str(shown) or shown is not trace


def test_a_norm_is_printed_in_one_way() -> None:
    shown = set()
    for stage in (0, 2, 3):
        for before in (lambda x: x, lambda x: x.sin().cos().exp()):
            text = str(traced(lambda w, x: norm(1e-6)(w, before(x)), stage))  # noqa: B023
            forward = text.split("forward")[1].split("backward")[0]
            assert "pointwise ops" not in text
            names = [
                line.partition(" = ")[2].split()[0] for line in forward.splitlines() if "=" in line
            ]
            own = [name for name in names if name not in ("sin", "cos", "exp", "all_gather")]
            shown.add(tuple(own))
    assert shown == {("pow", "mean", "add", "rsqrt", "mul", "mul", "sum")}


def collective(kind: str, path: str, numel: int) -> Op:
    told: dict[str, Any] = {"kind": "collective", "wire_bytes": numel, "detail": f"dp: {path}"}
    return Op(name=kind, phase="backward", reads=(), gives=(value("x", numel),), **told)


COLLECTIVES = st.builds(
    collective,
    st.sampled_from(["all_gather", "reduce_scatter"]),
    st.sampled_from(["w", "v"]),
    st.sampled_from([4, 8]),
)
SCHEDULES = st.lists(COLLECTIVES, min_size=1, max_size=12)


@given(a=SCHEDULES, b=SCHEDULES, extra=COLLECTIVES, data=st.data())
def test_schedules_are_equal_or_every_collective_that_is_not_is_shown(
    a: list[Op], b: list[Op], extra: Op, data: Any
) -> None:
    assert by_hand(a).diff(by_hand(b), only="collectives").equal == (a == b)
    at = data.draw(st.integers(0, len(a)))
    found = by_hand(a).diff(by_hand([*a[:at], extra, *a[at:]]), only="collectives")
    marked = [line for line in found.lines[2:] if line[0] in "-+"]
    assert marked == [f"+* {extra.name} -> {extra.gives[0]}   <{extra.detail}>"]


def test_collectives_alone_are_compared() -> None:
    """What is computed between them makes no difference; of two ranks the one more is shown."""
    one, other = (traced(body, 3) for body in TWO["eps of a norm by hand"])
    assert not one.diff(other).equal and one.diff(other, only="collectives").equal
    found = traced(norm(1.0), 2).diff(traced(norm(1.0), 3), only="collectives")
    assert {line.split()[0] for line in found.lines[3:]} <= {"*", "-*", "+*"}
    assert [line.split()[1] for line in found.lines if line[0] == "+"][1:] == ["all_gather"]
    assert found.first[0] is not None and found.first[0].name == "reduce_scatter"

    def step_fn(state: Any, x: Tensor) -> Any:
        return state, fzero.pmean(x) if fzero.axis_index() == 1 else x

    step = fzero.simulate(fzero.shard(step_fn, stage=0), world_size=2)
    state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0))
    ranks = [fzero.trace(step, rank=r)(state, torch.ones(2, 3)) for r in range(2)]
    lines = ranks[0].diff(ranks[1], only="collectives").lines
    assert lines[3:] == ("+* all_reduce -> f32[3]   <dp>",)
    with pytest.raises(fzero.LayoutError, match=r"given a function(.|\n)*Fix: .*fzero.trace\(step"):
        ranks[0].diff(step_fn)  # type: ignore[arg-type]
    with pytest.raises(fzero.LayoutError, match="only='ops'"):
        ranks[0].diff(ranks[1], only="ops")  # type: ignore[arg-type]


def test_partners_of_a_permutation_are_told_apart() -> None:
    def steps(*pairs: tuple[int, int]) -> Any:
        def step_fn(state: Any, x: Tensor) -> Any:
            return state, fzero.ppermute(x, pairs)

        step = fzero.simulate(fzero.shard(step_fn, stage=0), world_size=3)
        state = step.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0))
        return fzero.trace(step)(state, torch.ones(3, 3))

    assert steps((0, 1)).diff(steps((0, 1)), only="collectives").equal
    assert steps((0, 1)).diff(steps((0, 2)), only="collectives")
