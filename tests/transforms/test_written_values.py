"""What a function of a transform is given: sums, norms, random numbers and slots of any form.

And `map_params` and `add_gradients` of a state: what they compute, send, and are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import LayoutError, Placement
from fzero.adapter import Engine
from fzero.transforms.points.context import normal
from tests.covering import covered
from tests.ranks import run_ranks
from tests.transforms import page
from tests.transforms.page import MADE
from tests.transforms.test_written_transforms import (
    LR,
    ROWS,
    SIX,
    Net,
    batches,
    by_engine,
    close,
    full,
    kept_of,
    loss_fn,
    one_call,
    plain,
    run,
    sgd,
    six,
    values,
    with_others,
)

PLACES = [(1, 0), (2, 0), (2, 1), (3, 2), (2, 3)]


def second_gradient() -> dict[str, Tensor]:
    """The gradients of the second update, in plain torch."""
    params = {k: p.clone().requires_grad_() for k, p in values().items()}
    optimizer, seats = sgd([*params.values()]), [*params.values()]
    found: Any = ()
    for x in batches(2):
        found = torch.autograd.grad(
            loss_fn(params, x), seats, allow_unused=True, materialize_grads=True
        )
        for p, g in zip(seats, found, strict=True):
            p.grad = g
        optimizer.step()
    return dict(zip(params, found, strict=True))


def row_norms(g: Tensor) -> Tensor:
    """Of each element, the norm of its row."""
    if g.ndim < 2 or not g.numel():
        return g.abs().norm().expand(g.shape)
    rows = [x.abs().norm().expand(x.shape) for x in g.unbind()]
    return torch.stack(rows)


def drawn(path: str, like: Tensor) -> Tensor:
    two = 2 if like.is_complex() else 1
    x = normal(3, torch.tensor(1), path, 0, torch.empty(two * like.numel()))
    return (torch.view_as_complex(x.view(-1, 2)) if two == 2 else x).view(like.shape)


@pytest.mark.parametrize("needs", ["element", "matrix"])
@pytest.mark.parametrize("place", PLACES)
def test_norms_and_noise_are_those_of_whole_tensors(place: tuple[int, int], needs: Any) -> None:
    ranks, stage = place
    names = ("leaf", "row", "noise", "before")

    def begin(params: Any, ctx: Any) -> Any:
        return {name: {k: torch.zeros_like(p) for k, p in params.items()} for name in names}

    def look(slots: Any, grads: Any, ctx: Any) -> Any:
        leaf, row = ctx.norm(grads, by="leaf"), ctx.norm(grads, by="row")
        made = {
            "leaf": {k: leaf[k].expand(g.shape).to(g.dtype) for k, g in grads.items()},
            "row": {k: row[k].to(g.dtype) for k, g in grads.items()},
            "noise": {k: ctx.normal(k, 3).to(g.dtype) for k, g in grads.items()},
            "before": {k: p.to(grads[k].dtype) for k, p in slots["before"].items()},
        }
        return made, grads

    made = fzero.transform(name="look", init=begin, reduced=look, needs=needs)
    kept = kept_of(run([made], ranks, stage, batches(2)), "look", ranks)
    for k, g in second_gradient().items():
        if needs == "matrix" and not g.numel():
            continue  # a leaf without elements has no owner
        close(kept["leaf"][k].real, g.abs().norm().expand(g.shape).to(g.abs().dtype))
        close(kept["row"][k].real, row_norms(g).to(g.abs().dtype))
        close(kept["noise"][k], drawn(k, g).to(g.dtype))


@pytest.mark.parametrize("place", PLACES)
def test_sums_over_all_leaves_are_those_of_whole_tensors(place: tuple[int, int]) -> None:
    ranks, stage = place

    def look(slots: Any, grads: Any, ctx: Any) -> Any:
        found = {"norm": ctx.norm(grads), "sum": ctx.sum([g.abs() for g in grads.values()])}
        found |= {"none": ctx.norm({}), "params": ctx.norm(ctx.params), "step": ctx.step}
        return {k: x.double() for k, x in found.items()}, grads

    zero = torch.zeros((), dtype=torch.float64)
    made = fzero.transform(
        name="look",
        init=lambda params, ctx: dict.fromkeys(("norm", "sum", "none", "params", "step"), zero),
        reduced=look,
    )
    kept = kept_of(run([made], ranks, stage, batches(2)), "look", ranks)
    grads = second_gradient().values()
    before = full(run([], ranks, stage, batches(1)), ranks)
    sizes = [before[k].abs().double().square().sum() for k in values()]
    close(kept["norm"], torch.stack([g.abs().double().square().sum() for g in grads]).sum().sqrt())
    close(kept["sum"], torch.stack([g.abs().double().sum() for g in grads]).sum())
    close(kept["params"], torch.stack(sizes).sum().sqrt())
    assert (kept["none"], kept["step"]) == (0, 1)


def test_noise_is_standard_normal_and_another_one_for_each_seed_step_and_path() -> None:
    like = torch.empty(40000)
    x = normal(0, torch.tensor(0), "w", 0, like)
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02
    assert abs((x.abs() < 1).float().mean() - 0.6827) < 0.01
    others = [(1, 0, "w"), (0, 1, "w"), (0, 0, "v")]
    for seed, step, path in others:
        y = normal(seed, torch.tensor(step), path, 0, like)
        assert abs((x * y).mean()) < 0.02


# The rule and what is around it.


@covered(ranks=[1, 2], stage=range(4), donate=[False, True])
def test_the_parameters_before_are_there_after_the_rule(
    ranks: int, stage: int, donate: bool
) -> None:
    """With donation the rule had written over them."""

    def update(slots: Any, grads: Any, ctx: Any, rule: Any) -> Any:
        after = rule(grads)  # first, and then what was before
        return slots, {k: ctx.params[k].lerp(p, 0.5) for k, p in after.items()}

    def updated(slots: Any, params: Any, ctx: Any) -> Any:
        return slots, {k: 2 * p - ctx.params[k] for k, p in params.items()}

    there = fzero.transform(name="half", update=update)
    back = fzero.transform(name="twice", updated=updated, reads=("before",))
    given = batches(3)
    state = run([there, back], ranks, stage, given, donate=donate)
    close(full(state, ranks), plain([], given)[0])


@pytest.mark.parametrize("stage", range(4))
def test_a_transform_may_make_the_parameters_itself(stage: int) -> None:
    def signs(slots: Any, grads: Any, ctx: Any, rule: Any) -> Any:
        return slots, {k: p - 0.1 * grads[k].sgn().to(p.dtype) for k, p in ctx.params.items()}

    state = run([fzero.transform(name="signs", update=signs)], 2, stage, batches(1))
    params = {k: p.requires_grad_() for k, p in values().items()}
    loss_fn(params, batches(1)[0]).backward()
    want = {k: p.detach() - 0.1 * p.grad.sgn() for k, p in params.items() if p.grad is not None}
    close(full(state, 2), want)


@pytest.mark.parametrize("stage", range(4))
def test_a_function_at_loss_is_differentiated_and_not_shown(stage: int) -> None:
    made = fzero.transform(name="thrice", loss=lambda slots, value, ctx: 3 * value)
    step = fzero.simulate(fzero.shard(made(one_call), stage=stage), world_size=2)
    state = step.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5))
    for x in batches(3):
        state, loss = step(state, x.view(2, ROWS // 2, 3))
    want = page.trained([], values(), lambda p, x: 3 * loss_fn(p, x), batches(3), sgd)
    close(full(state, 2), want)
    before = page.trained([], values(), lambda p, x: 3 * loss_fn(p, x), batches(2), sgd)
    close(loss.mean(), loss_fn(before, batches(3)[2]))


# Slots of any form.


@pytest.mark.parametrize("stage", range(4))
def test_what_each_rank_adds_up_of_its_own_is_a_sum(stage: int) -> None:
    form = fzero.Form(placement=Placement.PARTIAL, elsewhere="sum")
    made = fzero.transform(
        name="added",
        slots={"all": form},
        init=lambda params, ctx: {"all": 0.0},
        local=lambda slots, g, ctx: ({"all": slots["all"] + g}, g),
    )
    kept = kept_of(run([made], 2, stage, batches(2)), "added", 2)["all"]
    first = {k: p.requires_grad_() for k, p in values().items()}
    loss_fn(first, batches(1)[0]).backward()
    for k, g in second_gradient().items():
        own = first[k].grad
        close(kept[k], 2 * (g if own is None else g + own))


@pytest.mark.parametrize("stage", range(4))
def test_each_form_has_a_value_and_a_life(stage: int) -> None:
    number = fzero.Form(leaves="number")
    forms = {
        "update": fzero.Form(leaves="number", lifetime="update"),
        "run": number,
        "whole": fzero.Form(leaves="all", placement=Placement.REPLICATED),
        "cut": fzero.Form(leaves="all"),
        "shards": fzero.Form(placement=Placement.SHARDED),
        "over": fzero.Form(placement=Placement.OVER_ALL),
        "fine": fzero.Form(dtype=torch.float64),
        "named": fzero.Form(leaves="named"),
    }

    def begin(params: Any, ctx: Any) -> Any:
        named = {"x": torch.ones(2, 3), "n": torch.tensor(1)}
        sized = {"fine": {k: p.abs() for k, p in params.items()}, "named": named}
        return {**dict.fromkeys(forms, 1), "update": 0.0, **sized}

    def more(tree: Any) -> Any:
        return {k: more(x) for k, x in tree.items()} if isinstance(tree, dict) else tree + 1

    made = fzero.transform(
        name="forms", slots=forms, init=begin, reduced=lambda slots, g, ctx: (more(slots), g)
    )
    kept = kept_of(run([made], 2, stage, batches(3)), "forms", 2)
    assert (kept["update"], kept["run"]) == (0, 4)
    assert kept["named"]["n"] == 4 and torch.equal(kept["named"]["x"], torch.full((2, 3), 4.0))
    for name in ("whole", "cut", "shards", "over"):
        every = {*values(), "frozen"} if name in ("whole", "cut") else {*values()}
        assert set(kept[name]) == every
        for k, x in kept[name].items():
            assert x.dtype == with_others(values())[k].dtype and torch.all(x == 4)
    for k, x in kept["fine"].items():
        close(x.real, values()[k].abs().double() + 3)


def test_a_slot_of_a_complex_leaf_is_complex() -> None:
    """A real one took half of the room, and what followed it was displaced."""
    params = {"c": torch.ones(2, dtype=torch.complex64), "d": 2 * torch.ones(3, dtype=torch.cfloat)}
    made = fzero.transform(
        name="size",
        init=lambda p, ctx: {"of": {k: x.abs() for k, x in p.items()}},
        loss=lambda slots, value, ctx: value,
    )
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=1, transforms=[made])
    kept = fzero.slots(state, "size")["of"]
    assert torch.equal(kept["c"], params["c"]) and torch.equal(kept["d"], params["d"])
    low = fzero.transform(
        name="low",
        slots={"of": fzero.Form(dtype=torch.bfloat16)},
        init=lambda p, ctx: {"of": 0.0},
        loss=lambda slots, value, ctx: value,
    )
    with pytest.raises(LayoutError, match=r"init made torch.bfloat16 for low/of.*is complex"):
        fzero.init(params, fzero.optim.sgd(0.1), stage=1, transforms=[low])


# map_params.


@pytest.mark.parametrize("place", PLACES)
def test_map_params_sends_nothing_where_placements_agree(place: tuple[int, int]) -> None:
    """Else one all-gather for each bucket; masters that are empty had counted as masters."""
    ranks, stage = place
    crosses = ranks > 1 and stage in (1, 2)

    def on_rank(index: Tensor) -> Any:
        ema = page.names["ema"]
        rule = fzero.optim.sgd(LR, momentum=0.5)
        state = fzero.init(with_others(values()), rule, stage=stage, transforms=[ema])
        x = batches(1)[0].view(ranks, -1, 3)[index]
        there, _ = fzero.grad_and_reduce(loss_fn, state)(x)
        fulls, grads = fzero.full_params(state), fzero.gradients(there)
        for other, is_cut in (
            (state, False),
            (fulls, False),
            (there.gradients, True),
            (state.slots["ema/mean"], True),
        ):
            with fzero.count_collectives() as log:
                fzero.map_params(lambda p, o: p + o, state, other)
            buckets = len(state.setup.layout.trainable) if is_cut and crosses else 0
            assert log.counts().get("all_gather", 0) == buckets
        moved = fzero.full_params(fzero.map_params(lambda p, g: p - g, state, there.gradients))
        assert torch.equal(moved["frozen"], fulls["frozen"])
        for k in values():
            close(moved[k], fulls[k] - grads[k])
        return torch.zeros(())

    fzero.simulate(on_rank, world_size=ranks)(torch.arange(ranks))


@pytest.mark.parametrize("stage", range(4))
def test_map_params_is_differentiable(stage: int) -> None:
    """At stage 3 a gather of integers beside it had no jvp."""

    def on_rank(index: Tensor) -> Any:
        state = fzero.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5), stage=stage)
        x = batches(1)[0].view(2, -1, 3)[index]

        def of(a: Tensor) -> Tensor:
            there, _ = fzero.grad_and_reduce(lambda p: a * loss_fn(p, x), state)()
            moved = fzero.map_params(lambda p, g: p - (a * g).to(p.dtype), state, there.gradients)
            return fzero.full_params(moved)["w"].square().sum()

        a, h = torch.tensor(0.7, dtype=torch.float64), 1e-6
        slope = (of(a + h) - of(a - h)) / (2 * h)
        jvp = torch.func.jvp(of, (a,), (torch.ones_like(a),))[1]
        return fzero.pmean(torch.func.grad(of)(a)), jvp, slope

    grad, jvp, slope = fzero.simulate(on_rank, world_size=2)(torch.arange(2))
    close(grad, slope)
    close(jvp, slope)


# On real processes.


def by_processes(rank: int, ranks: int) -> dict[Any, Any]:
    """Parameters and slots, by stage."""
    found = {}
    for stage in range(4):
        step: Any = one_call
        for kind in ("outliers", "clip_rows", "noise", "ema"):
            step = MADE[kind][0]()(step)
        step = fzero.shard(step, stage=stage)
        state = step.init(with_others(values()), fzero.optim.sgd(LR, momentum=0.5))
        for x in batches(6, wild=4):
            state, _ = step(state, x.view(ranks, -1, 3)[rank])
        kept = {kind: fzero.slots(state, kind) for kind in ("outliers", "ema")}
        found[stage] = fzero.full_params(state), kept, state.step
    return found


@pytest.mark.xdist_group("gloo")
def test_processes_have_the_numbers_of_plain_torch() -> None:
    kinds = ["outliers", "clip_rows", "noise", "ema"]
    want, ones = plain(kinds, batches(6, wild=4))
    for found in run_ranks(by_processes, 2):
        for params, kept, step in found.values():
            close(params, want)
            close(kept["ema"], ones[-1].kept)
            close(kept["outliers"], ones[0].kept)
            assert step == 5


# In an engine.


RULES: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05),
    "momentum": lambda params: torch.optim.SGD(params, 0.05, momentum=0.5),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.01),
}


@covered(rule=sorted(RULES), stage=range(4))
def test_an_optimizer_has_the_state_that_it_has_without_a_transform(rule: str, stage: int) -> None:
    """Where one acts behind the rule, that makes new tensors, which are written back."""

    def ended(transforms: list[Any]) -> Any:
        module = Net()
        optimizer = RULES[rule]([*module.parameters()])
        engine = Engine(module, optimizer, stage=stage, transforms=transforms)
        for x in batches(3):
            engine.backward(engine(x))
            engine.step()
        engine.close()
        return module.state_dict(), optimizer.state_dict()["state"]

    (want, kept), (got, mine) = ended([]), ended([page.names["ema"]])
    assert all(torch.equal(got[k], p) for k, p in want.items())
    assert kept.keys() == mine.keys()
    for number, slots in kept.items():
        same = {k: torch.as_tensor(x) for k, x in mine[number].items() if x is not None}
        assert all(torch.equal(same[k], torch.as_tensor(x)) for k, x in slots.items() if k in same)
        assert same.keys() == {k for k, x in slots.items() if x is not None}


@pytest.mark.parametrize("home", [{"optimizer": "cpu"}, {"optimizer": "cpu", "gradients": "cpu"}])
@pytest.mark.parametrize("stage", range(4))
def test_an_engine_with_state_elsewhere_has_the_numbers_of_plain_torch(
    stage: int, home: dict[str, Any]
) -> None:
    given = batches(6, wild=4)
    got, kept, _ = by_engine(six(), 2, stage, given, offload=fzero.Offload(**home))
    want, ones = plain(list(SIX), given)
    close(got, want)
    for kind, one in zip(SIX, ones, strict=True):
        if one.kept is not None:
            close(kept[kind], one.kept, kind)


@pytest.mark.parametrize("stage", range(4))
def test_whole_matrices_are_those_of_plain_torch(stage: int) -> None:
    class Spectral(page.Plain):
        def reduced(self, step: int, grads: Any, params: Any) -> Any:
            def of(g: Tensor) -> Tensor:
                return g / torch.linalg.matrix_norm(g, 2).clamp(min=1.0) if g.ndim == 2 else g

            return {k: of(g) if g.numel() else g for k, g in grads.items()}

    given = [10 * x for x in batches(3)]
    state = run([page.names["spectral"], page.names["ema"]], 2, stage, given)
    ema = MADE["ema"][1]()
    close(full(state, 2), page.trained([Spectral(), ema], values(), loss_fn, given, sgd))
    close(kept_of(state, "ema", 2), ema.kept)


def test_a_slot_that_lives_for_a_window_begins_where_one_opens() -> None:
    """In both drivers: it counts the backwards of its window, and not those of earlier ones."""

    def count(slots: Any, g: Tensor, ctx: fzero.Context) -> Any:
        return {"calls": slots["calls"] + 1}, g

    form = fzero.Form(
        leaves="number",
        placement=fzero.Placement.PARTIAL,
        elsewhere="own",
        lifetime="window",
    )
    counts = fzero.transform(
        name="counts", slots={"calls": form}, init=lambda params, ctx: {"calls": 0}, local=count
    )

    def step_fn(state: Any, xs: Tensor) -> Any:
        for x in xs:
            state, _ = fzero.grad_and_reduce(lambda p, x: (p * x).sum(), state)(x)
        return fzero.apply_gradients(state), None

    step = fzero.shard(fzero.coalesce(counts(step_fn)), stage=2)
    state = step.init(torch.ones(2), fzero.optim.sgd(0.1))
    model = torch.nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    engine = Engine(model, sgd, stage=2, transforms=[counts])
    for calls in (3, 2):
        state, _ = step(state, torch.ones(calls))
        with engine.coalesce():
            for _ in range(calls):
                model(torch.ones(1, 2)).sum().backward()
        engine.step()
        assert state.slots["counts/calls"].value == calls
        assert engine.state.slots["counts/calls"].value == calls
    engine.close()


@pytest.mark.parametrize("stage, world", [(0, 2), (2, 2), (3, 3)])
def test_what_owners_keep_of_the_optimizer_is_read_whole(stage: int, world: int) -> None:
    params = {"w": torch.arange(12.0).view(4, 3), "v": torch.ones(2, 5)}

    def ranks_part(stage: int) -> Any:
        state = fzero.init(params, fzero.optim.soap(0.1), stage=stage)
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum() + p["v"].sum(), state)()
            state = fzero.apply_gradients(state)
        return fzero.slots(state, "optimizer")

    alone = ranks_part(0)
    assert alone["exp_avg"]["w"].shape == (4, 3) and alone["left"]["v"].shape == (2, 2)
    found = fzero.simulate(lambda: ranks_part(stage), world_size=world)()
    assert found.keys() == alone.keys()
    for slot, by_path in alone.items():
        for path, x in by_path.items():
            for rank in range(world):
                assert torch.allclose(found[slot][path][rank], x, atol=1e-5), (slot, path)


STRIDED: dict[str, dict[str, Any]] = {  # values that lie in memory in another way than as rows
    "number": {
        "init": lambda params, ctx: {"kept": torch.zeros(2, 3).t()},
        "reduced": lambda slots, grads, ctx: ({"kept": (slots["kept"].t() + 1).t()}, grads),
    },
    "one number, expanded": {
        "init": lambda params, ctx: {"kept": torch.zeros(()).expand(1)},
        "reduced": lambda slots, grads, ctx: ({"kept": (slots["kept"][0] + 1).expand(1)}, grads),
    },
    "by leaf, expanded": {
        "slots": {"kept": fzero.Form(placement=fzero.Placement.PARTIAL, elsewhere="sum")},
        "init": lambda params, ctx: {"kept": 0.0},
        "reduced": lambda slots, grads, ctx: (
            {"kept": {k: x.new_ones(()).expand(x.shape) for k, x in slots["kept"].items()}},
            grads,
        ),
    },
    "named": {
        "slots": {"kept": fzero.Form(leaves="named", placement=fzero.Placement.REPLICATED)},
        "init": lambda params, ctx: {"kept": {"x": torch.zeros(2, 3).t()}},
        "reduced": lambda slots, grads, ctx: (
            {"kept": {"x": (slots["kept"]["x"].t() + 1).t()}},
            grads,
        ),
    },
    "on owners, expanded": {
        "needs": "matrix",
        "init": lambda params, ctx: {"kept": {k: torch.zeros_like(p) for k, p in params.items()}},
        "reduced": lambda slots, grads, ctx: (
            {"kept": {k: g.new_ones(()).expand(g.shape) for k, g in grads.items()}},
            grads,
        ),
    },
}


@pytest.mark.parametrize("stage, world, to, ranks", [(0, 2, 3, 1), (2, 2, 1, 3), (3, 3, 0, 2)])
@pytest.mark.parametrize("kind", STRIDED)
def test_slots_of_any_strides_are_saved_and_moved(
    kind: str, stage: int, world: int, to: int, ranks: int, tmp_path: Path
) -> None:
    strided = fzero.transform(name="strided", **STRIDED[kind])

    def step_fn(state: Any) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p: p["w"].sum() + p["s"].sum(), state)()
        return fzero.apply_gradients(state), None

    def made(stage: int, world: int) -> tuple[Any, Any]:
        step = fzero.simulate(fzero.shard(strided(step_fn), stage=stage), world_size=world)
        params = {"w": torch.arange(6.0).view(2, 3), "s": torch.ones(1)}
        return step, step.init(params, fzero.optim.sgd(0.5))

    def kept(state: Any, world: int) -> list[Tensor]:
        values = fzero.simulate(lambda s: fzero.slots(s, "strided"), world_size=world)(state)
        return [x[0] for x in torch.utils._pytree.tree_leaves(values)]

    step, state = made(stage, world)
    for _ in range(2):
        state, _ = step(state)
    wanted = kept(state, world)
    assert wanted and all(x.ne(0).any() for x in wanted if x.numel())
    fzero.checkpoint.save(tmp_path / "saved", state)
    loaded = fzero.checkpoint.load(tmp_path / "saved", made(to, ranks)[1])
    moved = fzero.reshard(state, stage=to, mesh=(1, ranks))
    for other in (loaded, moved):
        for x, y in zip(kept(other, ranks), wanted, strict=True):
            assert torch.equal(x, y)


def test_a_slot_that_is_not_declared_has_the_form_of_one_without_slots() -> None:
    def begin(params: Any, ctx: fzero.Context) -> dict[str, Any]:
        mean = {path: p.clone() for path, p in params.items()}
        return {"mean": mean, "seen": 0, "mine": 0.0}

    own = fzero.Form(leaves="number", placement=Placement.PARTIAL, elsewhere="sum")

    def made(slots: dict[str, fzero.Form]) -> Any:
        keep = fzero.transform(
            name="keep", slots=slots, init=begin, reduced=lambda slots, grads, ctx: (slots, grads)
        )
        return fzero.init({"w": torch.ones(3)}, fzero.optim.sgd(0.1), stage=2, transforms=[keep])

    forms = {name: slot.form for name, slot in made({"mine": own}).slots.items()}
    assert forms["keep/mine"] == own
    assert forms["keep/mean"] == fzero.Form()
    assert forms["keep/seen"] == fzero.Form(leaves="number")
    with pytest.raises(LayoutError, match=r"init made .* and slots= has \['least'\]"):
        made({"least": own})
