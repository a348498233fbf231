"""What a written transform may not do is refused by name, at its first call, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import CallError, LayoutError, MismatchError, PhaseError
from fzero.adapter import Engine
from tests.ranks import run_ranks

PARAMS = {
    "w": torch.arange(6.0).reshape(3, 2),
    "b": torch.ones(3),
    "s": torch.ones(()),
    "frozen": torch.arange(2),
}
Make = Callable[..., Any]


def make(**functions: Any) -> Any:
    return fzero.transform(name="bad", **functions)


def clone(params: Any, ctx: Any) -> Any:
    return {"mean": {path: p.clone() for path, p in params.items()}}


def each(do: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    return lambda tree: {path: do(x) for path, x in tree.items()}


def loss_fn(p: Any, x: Tensor) -> Tensor:
    return (x @ p["w"].mT + p["b"]).square().mean() * p["s"]


def stepped(transform: Any, ranks: int = 2, stage: int = 0, updates: int = 1) -> Any:
    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), loss

    step = fzero.simulate(fzero.shard(transform(step_fn), stage=stage), world_size=ranks)
    state = step.init(PARAMS, fzero.optim.sgd(0.1, momentum=0.5))
    for _ in range(updates):
        state, _ = step(state, torch.arange(4.0 * ranks).reshape(ranks, 2, 2))
    return state


def after(do: Callable[[Any, Any, Any], object], value: str = "reduced", **more: Any) -> Any:
    """A transform whose function does something, and returns what it was given."""

    def function(slots: Any, given: Any, ctx: Any) -> Any:
        do(slots, given, ctx)
        return slots, given

    return make(**{value: function}, **more)


def updating(do: Callable[[Any, Any, Any], Any]) -> Any:
    """A transform at `update`, of (slots, ctx, the parameters after the rule)."""

    def update(slots: Any, grads: Any, ctx: Any, rule: Any) -> Any:
        params = rule(grads)
        found = do(slots, ctx, params)
        return slots, params if found is None else found

    return make(init=clone, update=update)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a shape of params": (
        make(updated=lambda s, p, ctx: (s, each(torch.sum)(p))),
        LayoutError,
        r"bad: `updated` returned \(\) torch.float32 for params\['w'\], which is \(",
    ),
    "a dtype of params": (
        make(updated=lambda s, p, ctx: (s, each(torch.Tensor.half)(p))),
        LayoutError,
        r"`updated` returned \(\d,\) torch.float16 for params\[",
    ),
    "a shape of a slot": (
        make(init=clone, updated=lambda s, p, ctx: ({"mean": each(torch.sum)(p)}, p)),
        LayoutError,
        r"`updated` returned \(\) torch.float32 for slots\['mean'\]\['w'\]",
    ),
    "a slot left out": (
        make(init=clone, updated=lambda s, p, ctx: ({}, p)),
        LayoutError,
        r"`updated` returned slots with \[\]; it was given \['mean'\]",
    ),
    "a slot that init has not made": (
        make(init=clone, reduced=lambda s, g, ctx: ({**s, "more": s["mean"]}, g)),
        LayoutError,
        r"`reduced` returned slots with \['mean', 'more'\]; it was given \['mean'\]",
    ),
    "a path left out": (
        make(reduced=lambda s, g, ctx: (s, {"w": g["w"]})),
        LayoutError,
        r"`reduced` returned grads with \['w'\]; it was given \['b', 's', 'w'\]",
    ),
    "another path": (
        make(updated=lambda s, p, ctx: (s, {f"{k}x": x for k, x in p.items()})),
        LayoutError,
        r"params with \['bx', 'sx', 'wx'\]",
    ),
    "one value": (make(reduced=lambda s, g, ctx: g), LayoutError, "returned a dict, not a pair"),
    "nothing": (make(reduced=lambda s, g, ctx: None), LayoutError, "a NoneType, not a pair"),
    "a number": (
        make(reduced=lambda s, g, ctx: (s, dict.fromkeys(g, 0.0))),
        LayoutError,
        r"returned a float for grads\['",
    ),
    "a pair as a loss": (
        make(loss=lambda s, v, ctx: (s, v)),
        LayoutError,
        "`loss` returned a tuple",
    ),
    "a number as a loss": (
        make(loss=lambda s, v, ctx: 2 * v.item()),
        LayoutError,
        "`loss` returned a float",
    ),
    "a flat gradient": (
        make(local=lambda s, g, ctx: (s, g[None])),
        LayoutError,
        r"`local` returned \(1,\) .* for g, which is",
    ),
    "params written at updated": (
        make(updated=lambda s, p, ctx: (s, each(lambda x: x.mul_(2))(p))),
        PhaseError,
        "`updated` wrote in place",
    ),
    "grads written": (
        make(reduced=lambda s, g, ctx: (s, each(lambda x: x.mul_(2))(g))),
        PhaseError,
        "`reduced` wrote in place",
    ),
    "a gradient of a call written": (
        make(local=lambda s, g, ctx: (s, g.mul_(2))),
        PhaseError,
        "`local` wrote in place",
    ),
    "a loss written": (
        make(loss=lambda s, v, ctx: v.mul_(2)),
        PhaseError,
        "`loss` wrote in place",
    ),
    "a slot written": (
        updating(lambda s, ctx, p: each(lambda x: x.add_(1))(s["mean"]) and None),
        PhaseError,
        "`update` wrote in place",
    ),
    "ctx.params written": (
        after(lambda s, g, ctx: each(lambda x: x.add_(1))(ctx.params)),
        PhaseError,
        "`reduced` wrote in place",
    ),
    "ctx.params written at update": (
        updating(lambda s, ctx, p: each(lambda x: x.add_(1))(ctx.params) and None),
        PhaseError,
        "`update` wrote in place",
    ),
    "the parameters before written": (
        after(
            lambda s, p, ctx: each(lambda x: x.add_(1))(ctx.params), "updated", reads=("before",)
        ),
        PhaseError,
        "`updated` wrote in place",
    ),
    "what the rule made written": (
        updating(lambda s, ctx, p: each(lambda x: x.mul_(2))(p)),
        PhaseError,
        "`update` wrote in place",
    ),
    "the step written": (after(lambda s, g, ctx: ctx.step.add_(1)), PhaseError, "wrote in place"),
    "params written by init": (
        make(init=lambda p, ctx: {"m": each(lambda x: x.mul_(2))(p)}, reduced=lambda s, g, ctx: 0),
        PhaseError,
        "`init` wrote in place",
    ),
    "a slot that is equal changed at local": (
        make(init=lambda p, ctx: {"n": 0.0}, local=lambda s, g, ctx: ({"n": s["n"] + 1}, g)),
        LayoutError,
        "`local` changed the slot n, which is equal on all ranks",
    ),
    "a sum at local": (
        after(lambda s, g, ctx: ctx.sum([g]), "local"),
        CallError,
        r"ctx.sum at `local` or `loss`[\s\S]*Fix: ",
    ),
    "a norm at local": (
        after(lambda s, g, ctx: ctx.norm({ctx.path: g}, by="row"), "local"),
        CallError,
        "ctx.norm at `local`",
    ),
    "the rule twice": (
        make(update=lambda s, g, ctx, rule: (rule(g) and s, rule(g))),
        CallError,
        "`update` called the rule twice",
    ),
    "the rule without gradients": (
        make(update=lambda s, g, ctx, rule: (s, rule({}))),
        LayoutError,
        r"`update` returned grads with \[\]",
    ),
    "skip at updated": (
        after(lambda s, p, ctx: ctx.skip(), "updated"),
        CallError,
        r"ctx.skip\(\): the update is not to be skipped",
    ),
    "several flags": (
        after(lambda s, g, ctx: ctx.skip(g["w"] > 0)),
        LayoutError,
        r"ctx.skip got \d flags",
    ),
    "the parameters before, undeclared": (
        after(lambda s, p, ctx: ctx.params, "updated"),
        CallError,
        "ctx.params: the parameters before the update",
    ),
    "norm by another word": (
        after(lambda s, g, ctx: ctx.norm(g, by="column")),
        LayoutError,
        "ctx.norm: by='column'",
    ),
    "norm of a tensor": (
        after(lambda s, g, ctx: ctx.norm(g["w"])),
        LayoutError,
        "ctx.norm got a Tensor",
    ),
    "norm of a part": (
        after(lambda s, g, ctx: ctx.norm({"b": g["b"][:1]}, by="row")),
        LayoutError,
        'by="row" of 1 elements of b, of which this rank has',
    ),
    "norm of a number": (
        after(lambda s, g, ctx: ctx.norm({"b": 1.0})),
        LayoutError,
        "ctx.norm got a float",
    ),
    "normal of another leaf": (
        after(lambda s, g, ctx: ctx.normal("frozen")),
        LayoutError,
        "ctx.normal: 'frozen' is no leaf that learns; .*w.* are",
    ),
    "another number on each rank": (
        make(
            init=lambda p, ctx: {"n": 0.0},
            reduced=lambda s, g, ctx: ({"n": s["n"] + ctx.rank}, g),
        ),
        MismatchError,
        r"disagree about bad, `reduced`: rank 0 has bad/n[\s\S]*elsewhere=\"own\"",
    ),
    "another number from init": (
        make(init=lambda p, ctx: {"n": float(ctx.rank)}, loss=lambda s, v, ctx: v),
        MismatchError,
        "disagree about bad, `init`",
    ),
    "other gradients on each rank": (
        make(reduced=lambda s, g, ctx: (s, each(lambda x: x + ctx.rank)(g))),
        MismatchError,
        "disagree about bad, `reduced`",
    ),
    "other parameters on each rank": (
        updating(lambda s, ctx, p: each(lambda x: x + ctx.rank)(p)),
        MismatchError,
        "disagree about bad, `update`",
    ),
    "skip on one rank": (
        after(lambda s, g, ctx: ctx.skip(ctx.rank == 1)),
        MismatchError,
        "rank 0 has skipped: False, rank 1 has skipped: True",
    ),
    "an init of nothing": (
        make(init=lambda p, ctx: None, reduced=lambda s, g, ctx: (s, g)),
        LayoutError,
        "init returned a NoneType",
    ),
    "an init of one leaf": (
        make(init=lambda p, ctx: {"m": {"w": p["w"]}}, reduced=lambda s, g, ctx: (s, g)),
        LayoutError,
        r"init made a NoneType for bad/m\['",
    ),
    "an init of another leaf": (
        make(
            init=lambda p, ctx: {"m": {**p, "frozen": torch.ones(2)}},
            reduced=lambda s, g, ctx: (s, g),
        ),
        LayoutError,
        r"init made bad/m\['frozen'\], and no such leaf learns",
    ),
    "an init of complex numbers": (
        make(
            init=lambda p, ctx: {"m": each(lambda x: x + 1j)(p)}, reduced=lambda s, g, ctx: (s, g)
        ),
        LayoutError,
        r"init made complex numbers for bad/m\['.*which is real",
    ),
    "an init of words": (
        make(init=lambda p, ctx: {"m": "x"}, reduced=lambda s, g, ctx: (s, g)),
        LayoutError,
        "init made a str for the number bad/m",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_function_is_refused_by_name(what: str) -> None:
    transform, error, says = WRONG[what]
    with pytest.raises(error, match=says):
        stepped(transform)


class Net(nn.Module):
    """`PARAMS` as a module."""

    def __init__(self) -> None:
        super().__init__()
        for name, x in PARAMS.items():
            learns = x.is_floating_point()
            self.register_parameter(name, nn.Parameter(x.clone(), requires_grad=learns))

    def forward(self, x: Tensor) -> Tensor:
        return loss_fn(dict(self.named_parameters()), x)


@pytest.mark.parametrize("what", [key for key in WRONG if WRONG[key][1] is not MismatchError])
def test_by_an_engine_as_well_whose_parameters_are_as_before(what: str) -> None:
    transform, error, says = WRONG[what]
    module, x = Net(), torch.arange(4.0).reshape(2, 2)
    optimizer = torch.optim.SGD([*module.parameters()], 0.1, momentum=0.5)
    with pytest.raises(error, match=says):
        engine = Engine(module, optimizer, stage=2, transforms=[transform])
        engine.backward(engine(x))
        engine.step()
    assert all(torch.equal(p, PARAMS[k]) for k, p in module.named_parameters())


DEFINED: dict[str, tuple[dict[str, Any], str]] = {
    "a point's arguments": (
        {"updated": lambda s, p: (s, p)},
        r"'x': `updated` takes \(s, p\)[\s\S]*Fix: define it as updated\(slots, params, ctx\)",
    ),
    "arguments of init": ({"init": lambda p: {}, "loss": lambda s, v, ctx: v}, "`init` takes"),
    "a number": ({"reduced": 3}, "reduced=3"),
    "nothing": ({}, r"'x': it does nothing[\s\S]*Fix: give one of loss, local"),
    "what is read": ({"updated": clone, "reads": "before"}, "takes|reads='before'"),
    "needs": ({"reduced": lambda s, g, ctx: (s, g), "needs": "row"}, "needs='row'"),
    "a dtype as a form": (
        {"init": clone, "loss": lambda s, v, ctx: v, "slots": {"mean": torch.float32}},
        r"'x': slots=\{'mean': torch.float32\}",
    ),
    "forms without init": (
        {"loss": lambda s, v, ctx: v, "slots": {"mean": fzero.Form()}},
        "slots= without init=",
    ),
    "a rule of matrices": (
        {"update": lambda s, g, ctx, rule: (s, rule(g)), "needs": "matrix"},
        "`update` with needs='matrix'",
    ),
    "no word": ({"name": "my ema", "loss": lambda s, v, ctx: v}, "transform: name='my ema'"),
    "a name of fzero's": ({"name": "clip", "loss": lambda s, v, ctx: v}, "name='clip' is taken"),
    "the optimizer's": ({"name": "optimizer", "loss": lambda s, v, ctx: v}, "is taken"),
}


@pytest.mark.parametrize("what", DEFINED)
def test_what_contradicts_itself_is_refused_where_it_is_defined(what: str) -> None:
    arguments, says = DEFINED[what]
    with pytest.raises(LayoutError, match=says):
        fzero.transform(**{"name": "x", **arguments})


def test_a_name_that_is_taken_is_refused() -> None:
    one, other = (make(reduced=lambda s, g, ctx: (s, g)) for _ in range(2))
    with pytest.raises(LayoutError, match="bad was put around bad"):
        one(other(lambda state: (state, None)))
    with pytest.raises(LayoutError, match="two are named 'bad'"):
        fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=1, transforms=[one, other])
    apart = fzero.transform(name="alone", loss=lambda s, v, ctx: v, excludes=["bad"])
    with pytest.raises(LayoutError, match="alone beside bad"):
        fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=1, transforms=[one, apart])
    with pytest.raises(LayoutError, match="alone was put around bad"):
        apart(one(lambda state: (state, None)))


def test_a_state_without_its_slots_is_refused() -> None:
    transform = make(init=clone, reduced=lambda s, g, ctx: (s, g))
    state = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=1)
    step = fzero.shard(transform(lambda state: (state, None)), stage=1)
    with pytest.raises(PhaseError, match=r"bad: the state has no slots[\s\S]*transforms=\["):
        step(state)
    with pytest.raises(LayoutError, match="keeps nothing for 'bad'; it does for optimizer"):
        fzero.slots(state, "bad")


# After the first call.


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_skip_apart_later_raise_before_the_rule(stage: int) -> None:
    """By this rank's pieces, as a user might: parameters would part, or a gather wait for ever."""

    def look(slots: Any, grads: Any, ctx: Any) -> None:
        if ctx.step == 2 and ctx.rank == 1:
            ctx.skip()

    says = r"disagree about ctx.skip of an update: rank 0 has skipped: False[\s\S]*No update was"
    with pytest.raises(MismatchError, match=says):
        stepped(after(look), stage=stage, updates=4)
    assert stepped(after(look), stage=stage, updates=2).step.tolist() == [2, 2]


def failing(point: str, at: int, live: dict[int, bool]) -> Any:
    """Fails at one point of update `at`, while it is `live`; follows the parameters otherwise."""

    def fail(ctx: Any) -> None:
        if ctx.step == at and live.get(ctx.rank, True):
            raise ZeroDivisionError(point)

    def update(slots: Any, grads: Any, ctx: Any, rule: Any) -> Any:
        if point == "before the rule":
            fail(ctx)
        params = rule(grads)
        if point == "after the rule":
            fail(ctx)
        return slots, params

    def updated(slots: Any, params: Any, ctx: Any) -> Any:
        if point == "updated":
            fail(ctx)
        return {"mean": {k: m.lerp(params[k], 0.5) for k, m in slots["mean"].items()}}, params

    def of(name: str) -> Any:
        return lambda slots, x, ctx: (fail(ctx) if point == name else None, (slots, x))[1]

    return make(
        init=clone,
        loss=lambda slots, x, ctx: (fail(ctx) if point == "loss" else None, x)[1],
        local=of("local"),
        reduced=of("reduced"),
        update=update,
        updated=updated,
    )


POINTS = ("loss", "local", "reduced", "before the rule", "after the rule", "updated")
PLACES = [(2, 0), (2, 2), (2, 3)]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("place", PLACES)
def test_law_7_a_state_is_whole_where_a_function_raises(
    place: tuple[int, int], point: str, at: int
) -> None:
    """Also with donation, and after the first call: the rule had stepped it in place."""
    (ranks, stage), live = place, dict[int, bool]()

    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), loss

    x, kept = torch.arange(4.0 * ranks).reshape(ranks, 2, 2) / 4, []
    for donate in (False, True):
        live.clear()
        step = fzero.shard(failing(point, at, live)(step_fn), stage=stage, donate=donate)
        simulated = fzero.simulate(step, world_size=ranks)
        state = simulated.init(PARAMS, fzero.optim.sgd(0.01, momentum=0.5))
        for _ in range(at):
            state, _ = simulated(state, x)
        with pytest.raises(ZeroDivisionError):
            simulated(state, x)
        live.update(dict.fromkeys(range(ranks), False))
        for _ in range(2):
            state, _ = simulated(state, x)
        found = fzero.simulate(
            lambda s: (fzero.full_params(s), fzero.slots(s, "bad")), world_size=ranks
        )
        kept.append(found(state))
    live.update(dict.fromkeys(range(ranks), False))
    same_as = stepped_whole(failing("nowhere", 0, live), ranks, stage, at + 2, x)
    for params, slots in kept:
        assert all(torch.equal(params[k], same_as[0][k]) for k in params)
        assert all(torch.equal(slots["mean"][k], same_as[1]["mean"][k]) for k in slots["mean"])


def stepped_whole(transform: Any, ranks: int, stage: int, updates: int, x: Tensor) -> Any:
    """Parameters and slots after some updates."""

    def step_fn(state: Any, x: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(loss_fn, state)(x)
        return fzero.apply_gradients(state), loss

    step = fzero.simulate(fzero.shard(transform(step_fn), stage=stage), world_size=ranks)
    state = step.init(PARAMS, fzero.optim.sgd(0.01, momentum=0.5))
    for _ in range(updates):
        state, _ = step(state, x)
    read = lambda s: (fzero.full_params(s), fzero.slots(s, "bad"))  # noqa: E731
    return fzero.simulate(read, world_size=ranks)(state)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("place", PLACES)
def test_law_7_an_engine_goes_on_where_a_function_raised(
    place: tuple[int, int], point: str, at: int
) -> None:
    (ranks, stage), live = place, dict[int, bool]()
    transform = failing(point, at, live)
    xs = torch.arange(4.0 * ranks).reshape(ranks, 2, 2) / 4

    def on_rank(index: Tensor) -> Any:
        module, x = Net(), xs[index]
        optimizer = torch.optim.SGD([*module.parameters()], 0.01, momentum=0.5)
        engine = Engine(module, optimizer, stage=stage, transforms=[transform])
        for update in range(at + 2):
            if update == at:
                before = {k: p.clone() for k, p in engine.full_parameters().items()}
                with pytest.raises(ZeroDivisionError):
                    engine.backward(engine(x))
                    engine.step()
                live[int(index)] = False
                now = engine.full_parameters()
                assert all(torch.equal(now[k], p) for k, p in before.items())
                engine.zero_grad()
            engine.backward(engine(x))
            engine.step()
        found = {k: p.clone() for k, p in engine.full_parameters().items()}
        kept = fzero.slots(engine.state, "bad")
        engine.close()
        return found, kept

    got = fzero.simulate(on_rank, world_size=ranks)(torch.arange(ranks))
    live.update(dict.fromkeys(range(ranks), False))
    want = stepped_whole(failing("nowhere", 0, live), ranks, stage, at + 2, xs)
    assert all(torch.equal(got[0][k], want[0][k]) for k in want[0] if k != "frozen")
    assert all(torch.equal(got[1]["mean"][k], want[1]["mean"][k]) for k in want[1]["mean"])


def test_the_parameters_before_are_not_there_because_another_transform_reads_them() -> None:
    """It had them as long as the other one was there."""
    other = fzero.transform(name="other", updated=lambda s, p, ctx: (s, dict(p)), reads=("before",))
    reader = after(lambda s, p, ctx: ctx.params, "updated")
    with pytest.raises(CallError, match=r"ctx\.params: the parameters before the update"):
        stepped(lambda step: reader(other(step)))


# On real processes.


def raises_before_a_sum(rank: int, ranks: int) -> str:
    def look(slots: Any, grads: Any, ctx: Any) -> None:
        if rank == 0:
            raise ZeroDivisionError("of rank 0")
        ctx.norm(grads)

    def step_fn(state: Any) -> Any:
        state, loss = fzero.grad_and_reduce(lambda p: loss_fn(p, torch.ones(2, 2)), state)()
        return fzero.apply_gradients(state), loss

    step = fzero.shard(after(look)(step_fn), stage=2)
    state = step.init(PARAMS, fzero.optim.sgd(0.1))
    try:
        step(state)
    except (ZeroDivisionError, MismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.xdist_group("gloo")
def test_a_rank_that_raises_before_a_sum_of_others_is_not_waited_for() -> None:
    """They waited in the sum, and it for them to hear of its error."""
    mine, theirs = run_ranks(raises_before_a_sum, 2)
    assert mine == "ZeroDivisionError: of rank 0"
    assert theirs.startswith("MismatchError: ") and "rank 0 has ZeroDivisionError" in theirs
