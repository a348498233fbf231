"""Functions of users that look at more than single elements: found at their first use."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.covering import covered
from tests.transforms import page
from tests.transforms.test_written_transforms import (
    batches,
    by_engine,
    close,
    full,
    loss_fn,
    run,
    sgd,
    values,
)

PLACES = [(1, 0), (2, 0), (2, 1), (3, 3)]
Of = Any


def over(fn: Of) -> Of:
    """A function of one piece, at `reduced` or `updated`."""
    return lambda slots, some, ctx: (slots, {k: fn(x) if x.numel() else x for k, x in some.items()})


def centered(x: Tensor) -> Tensor:
    return x - x.mean()


def begin(params: Any, ctx: Any) -> Any:
    return {"kept": {k: p.clone() for k, p in params.items()}, "seen": 0.0}


def into_slot(slots: Any, grads: Any, ctx: Any) -> Any:
    kept = {k: centered(x) if x.numel() else x for k, x in grads.items()}
    return {**slots, "kept": {k: x.to(slots["kept"][k].dtype) for k, x in kept.items()}}, grads


def into_number(slots: Any, grads: Any, ctx: Any) -> Any:
    return {**slots, "seen": slots["seen"] + ctx.rank * 0 + grads["w"].abs().sum().float()}, grads


def into_norm(slots: Any, grads: Any, ctx: Any) -> Any:
    norm = ctx.norm({k: centered(x) if x.numel() else x for k, x in grads.items()})
    return slots, {k: x / (1 + norm.to(x.dtype)) for k, x in grads.items()}


def into_skip(slots: Any, grads: Any, ctx: Any) -> Any:
    ctx.skip(any(bool((x.abs() > 1e6).any()) for x in grads.values()))
    return slots, grads


def by_params(slots: Any, grads: Any, ctx: Any) -> Any:
    sizes = {k: p.abs().mean().to(p.dtype) if p.numel() else 1.0 for k, p in ctx.params.items()}
    return slots, {k: x * sizes[k] for k, x in grads.items()}


def into_rule(slots: Any, grads: Any, ctx: Any, rule: Any) -> Any:
    return slots, rule({k: centered(x) if x.numel() else x for k, x in grads.items()})


def after_rule(slots: Any, grads: Any, ctx: Any, rule: Any) -> Any:
    return slots, {k: x.flip(0) for k, x in rule(grads).items()}


def wrong_init(params: Any, ctx: Any) -> Any:
    return {"kept": {k: p / max(p.numel(), 1) for k, p in params.items()}}


def count(params: Any, ctx: Any) -> Any:
    return {"seen": float(sum(p.numel() for p in params.values()))}


WRONG: dict[str, dict[str, Any]] = {
    "reduced": {"reduced": over(centered)},
    "updated": {"updated": over(lambda x: x.flip(0))},
    "update, before": {"update": into_rule},
    "update, after": {"update": after_rule},
    "init": {"init": wrong_init, "reduced": lambda slots, grads, ctx: (slots, grads)},
    "init, a count": {"init": count, "reduced": lambda slots, grads, ctx: (slots, grads)},
    "a slot": {"init": begin, "reduced": into_slot},
    "a number": {"init": begin, "reduced": into_number},
    "a norm of": {"reduced": into_norm},
    "a flag": {"reduced": into_skip},
    "parameters": {"reduced": by_params},
    "chance": {"reduced": over(lambda x: x * (1 + 0.1 * torch.rand_like(x.real)))},
}


EACH = [(kind, PLACES[(i + j) % 4]) for i, kind in enumerate(sorted(WRONG)) for j in (0, 2)]


@pytest.mark.parametrize("kind, place", EACH)
def test_it_is_found_at_every_point_and_stage(kind: str, place: tuple[int, int]) -> None:
    ranks, stage = place
    wrong = fzero.transform(name="wrong", **WRONG[kind])
    point = kind.partition(",")[0] if kind in ("updated", "init") or "," in kind else "reduced"
    with pytest.raises(LayoutError, match=rf"wrong: `{point}` looks at more") as caught:
        run([wrong], ranks, stage, batches(1))
    text = str(caught.value)
    for way in ("ctx.norm", "ctx.sum", "ctx.shape", "ctx.normal", 'needs="leaf"'):
        assert way in text
    assert any(leaf in text for leaf in (*values(), "seen", "ctx.skip"))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_all_ranks_raise_the_same(stage: int) -> None:
    """Also where only one of them has elements of the leaf."""

    def on_rank(rank: Tensor) -> Any:
        wrong = fzero.transform(name="wrong", reduced=over(centered))
        rule = fzero.optim.sgd(0.1)
        state = fzero.init({"w": torch.arange(3.0)}, rule, stage=stage, transforms=[wrong])
        state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum(), state)()
        with pytest.raises(LayoutError, match=r"more than single elements: .* w"):
            fzero.apply_gradients(state)
        return fzero.full_params(state)["w"]

    found = fzero.simulate(on_rank, world_size=4)(torch.arange(4))
    assert torch.equal(found[3], torch.arange(3.0))


def right(slots: Any, grads: Any, ctx: fzero.Context) -> Any:
    """All that a function may ask."""
    assert isinstance(ctx, fzero.Context)
    total, norms, rows = ctx.norm(grads), ctx.norm(grads, by="leaf"), ctx.norm(grads, by="row")
    ctx.skip(ctx.sum(grads).isnan())
    alike = fzero.psum(total.detach().clone()) / fzero.axis_size()
    new = {}
    for k, x in grads.items():
        numel = max(1, ctx.shape(k).numel())
        factor = (total / numel + norms[k] + rows[k] + alike + len(k) + ctx.rank * 0).to(
            x.real.dtype
        )
        noise = ctx.normal(k, seed=3).to(x.dtype)
        new[k] = x / (1 + factor) + 0.01 * noise + slots["kept"][k].to(x.dtype) * 0.1
        new[k] = torch.where(ctx.params[k].abs() > 1, new[k], 2 * new[k])
    return {**slots, "seen": slots["seen"] + total.to(slots["seen"].dtype)}, new


@pytest.mark.parametrize("place", PLACES[1::2])
def test_what_is_asked_of_ctx_passes(place: tuple[int, int]) -> None:
    ranks, stage = place
    one = fzero.transform(name="right", init=begin, reduced=right)
    got = full(run([one], ranks, stage, batches(2)), ranks)
    close(got, full(run([one], 1, 0, batches(2)), 1))


def test_later_calls_are_not_tested() -> None:
    calls = list[int]()

    def counted(slots: Any, grads: Any, ctx: Any) -> Any:
        calls.append(max(x.numel() for x in grads.values()))
        return slots, grads

    one = fzero.transform(name="counted", reduced=counted)
    state = run([one], 1, 0, batches(1))
    count = len(calls)
    run([one], 1, 0, batches(3), state)
    assert len(calls) == count + 3 and max(calls) <= 1024


def test_a_gradient_at_local_is_whole_anyway() -> None:
    def bounded(slots: Any, g: Tensor, ctx: Any) -> Any:
        return slots, g / (1 + g.abs().square().sum().sqrt()).to(g.dtype)

    one = fzero.transform(name="bounded", local=bounded)
    close(full(run([one], 2, 3, batches(2)), 2), full(run([one], 2, 0, batches(2)), 2))


# Whole leaves.


def top(x: Tensor) -> Tensor:
    most = x.abs().flatten().topk(max(1, x.numel() // 3))[0][-1]
    return torch.where(x.abs() >= most, x, torch.zeros_like(x))


WHOLE: dict[str, Any] = {
    "centralized": lambda g, p: g - g.mean(),
    "by its norm": lambda g, p: g / (g.norm() + 1e-3),
    "top k": lambda g, p: top(g),
    "sorted": lambda g, p: g if g.is_complex() else g.flatten().sort()[0].view(g.shape),
    "by the norm of its leaf": lambda g, p: g * (p.norm() / (1 + g.norm())),
}


class Whole(page.Plain):
    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def reduced(self, step: int, grads: Any, params: Any) -> Any:
        return {k: self.fn(g, params[k]) if g.numel() else g for k, g in grads.items()}


@covered(kind=sorted(WHOLE), ranks=[1, 2, 3, 4], stage=range(4), engine=[False, True])
def test_whole_leaves_are_those_of_plain_torch(
    kind: str, ranks: int, stage: int, engine: bool
) -> None:
    def reduced(slots: Any, grads: Any, ctx: Any) -> Any:
        return slots, {k: WHOLE[kind](g, ctx.params[k]) for k, g in grads.items()}

    one = fzero.transform(name="whole", reduced=reduced, needs="leaf", reads=("before",))
    given = batches(3)
    if engine:
        got = by_engine([one], ranks, stage, given)[0]
    else:
        got = full(run([one], ranks, stage, given), ranks)
    close(got, page.trained([Whole(WHOLE[kind])], values(), loss_fn, given, sgd))


@pytest.mark.parametrize("place", PLACES)
def test_whole_parameters_before_an_update(place: tuple[int, int]) -> None:
    ranks, stage = place

    def updated(slots: Any, params: Any, ctx: Any) -> Any:
        old = ctx.params
        return slots, {k: p * (old[k].norm() / p.norm().clamp(min=1e-3)) for k, p in params.items()}

    class Kept(page.Plain):
        def update(self, grads: Any, params: Any, rule: Any) -> Any:
            self.old = params
            return rule(grads)

        def updated(self, step: int, params: Any) -> Any:
            return updated({}, params, self.ctx(self.old))[1]

        @dataclass
        class ctx:
            params: Any

    one = fzero.transform(name="kept", updated=updated, needs="leaf", reads=("before",))
    got = full(run([one], ranks, stage, batches(3)), ranks)
    close(got, page.trained([Kept()], values(), loss_fn, batches(3), sgd))
    bare = fzero.transform(name="bare", updated=updated, needs="leaf")
    with pytest.raises(fzero.FzeroError, match="reads="):
        run([bare], ranks, stage, batches(1))


@pytest.mark.parametrize("place", [(1, 0), (2, 2)])
def test_a_whole_leaf_says_nothing_of_others(place: tuple[int, int]) -> None:
    ranks, stage = place

    def wrong(slots: Any, grads: Any, ctx: Any) -> Any:
        norm = sum(g.abs().square().sum() for g in grads.values()) ** 0.5
        return slots, {k: g / norm.to(g.dtype) for k, g in grads.items()}

    one = fzero.transform(name="wrong", reduced=wrong, needs="leaf")
    with pytest.raises(LayoutError, match="looks at more than one leaf"):
        run([one], ranks, stage, batches(1))


# map_params, rules, codecs.


@pytest.mark.parametrize("place", PLACES)
def test_map_params_finds_it_once_for_each_code(place: tuple[int, int]) -> None:
    ranks, stage = place
    calls = list[int]()

    def counted(p: Tensor) -> Tensor:
        calls.append(p.numel())
        return 2 * p

    def on_rank(rank: Tensor) -> Any:
        params = {"w": torch.arange(7.0) + 1, "v": torch.ones(3, 5), "e": torch.zeros(0)}
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage)
        for fn in (
            lambda p: p - p.mean() if p.numel() else p,
            lambda p: p.flip(0),
            lambda p: p / max(1, p.numel()),
            lambda p: p + torch.rand_like(p),
        ):
            with pytest.raises(LayoutError, match="map_params: fn looks at more"):
                fzero.map_params(fn, state)
        for _ in range(3):
            fzero.map_params(lambda p: counted(p), state)
        several = len(calls)
        fzero.map_params(lambda p: counted(p), state)  # another code
        return torch.tensor(several), fzero.full_params(fzero.map_params(counted, state))["w"]

    _, w = fzero.simulate(on_rank, world_size=ranks)(torch.arange(ranks))
    assert torch.equal(w[0], 2 * torch.arange(7.0) + 2)


class Rule(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * self.change(p, p.grad))

    def change(self, p: Any, g: Any) -> Tensor:
        return g


class Rows(Rule):
    def change(self, p: Any, g: Any) -> Tensor:
        return g / (g.norm(dim=-1, keepdim=True) + 1e-6) if g.ndim == 2 else g


class Trust(Rule):
    def change(self, p: Any, g: Any) -> Tensor:
        return g * (p.norm() / g.norm()).clamp(max=10)


class RandomRows(Rule):
    def change(self, p: Any, g: Any) -> Tensor:
        return g - g.mean() + torch.rand_like(g)


class Rounded(Rule):
    def change(self, p: Any, g: Any) -> Tensor:
        return torch.floor(64 * g + torch.rand_like(g)) / 64


class Signs(Rule):
    def change(self, p: Any, g: Any) -> Tensor:
        return g.bfloat16().sign().to(g.dtype) * p.abs().sqrt()


def bound(rule: Any) -> Any:
    params = {"w": torch.ones(4, 6), "b": torch.ones(6)}
    return fzero.optim.from_torch(rule, needs="element").bind(params)


@pytest.mark.parametrize("rule", [Rows, Trust, RandomRows])
def test_a_rule_of_elements_that_looks_at_more(rule: Any) -> None:
    with pytest.raises(LayoutError, match=f"{rule.__name__}.*than single elements"):
        bound(rule)


def test_a_rule_of_elements_passes_and_one_by_chance_warns_once() -> None:
    assert bound(Signs).elementwise
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert bound(Rounded).elementwise
    assert len(seen) == 1 and "draws random numbers" in str(seen[0].message)


@dataclass(frozen=True)
class Largest(fzero.codecs.Codec):
    """Halves of the largest of a row; or, not `scaled`, of single elements."""

    block: int = 1
    scaled: bool = True

    def encode(self, x: Tensor) -> Any:
        scale = x.abs().amax(-1, keepdim=True) if self.scaled else torch.ones_like(x[..., :1])
        return (x / scale).half(), scale

    def decode(self, parts: Any, numel: int, dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype) * parts[1].to(dtype)

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel + 4

    def bound(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True).expand_as(x) * 2.0**-10


def test_a_codec_that_says_that_it_encodes_elements() -> None:
    def wire(codec: Any) -> Any:
        return fzero.transform(name="wired", wire=codec)

    assert wire(Largest(scaled=False)).wire is not None and wire(Largest(block=64)).wire is not None
    with pytest.raises(LayoutError, match="it says block=1, and"):
        wire(Largest())
