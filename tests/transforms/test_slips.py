"""What a newcomer slips on: the error names the function, what was seen, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.errors import CallError, FzeroError, LayoutError, PhaseError
from tests.descends import descends

APPLY, PARAMS = fzero.functionalize(nn.Linear(2, 1))
X, RULE = torch.ones(3, 2), fzero.optim.sgd(0.1)
STATE = fzero.init(PARAMS, RULE, stage=2)
ANY: Any = fzero  # a type checker sees most of these


ENGINE: Any = Engine
ANY_STATE: Any = STATE


def loss_fn(p: Any, x: Any) -> Any:
    return APPLY(p, x).sum()


step_fn = descends(loss_fn)


def swapped(state: Any, x: Any) -> Any:
    return step_fn(state, x)[::-1]


SLIPS: dict[str, tuple[Callable[[], Any], type[FzeroError], str, str]] = {
    **{
        f"{name}: return loss, state": (
            lambda wrap=wrap: wrap(swapped)(STATE, X),
            LayoutError,
            f"{name}: swapped returned \\(Tensor, TrainState\\)",
            "return state, loss",
        )
        for name, wrap in {
            "shard": fzero.shard(stage=2),
            "coalesce": fzero.coalesce,
            "accumulate": fzero.accumulate(steps=3),
            "clip": fzero.clip(max_norm=1.0),
            "autocast": fzero.autocast,
            "check_finite": fzero.check_finite,
        }.items()
    },
    "the batch beside the state": (
        lambda: ANY.grad_and_reduce(loss_fn, STATE, X),
        CallError,
        "grad_and_reduce: too many",
        r"grad_and_reduce\(loss, state\)\(batch\)",
    ),
    "the batch by name": (
        lambda: ANY.grad_and_reduce(loss_fn, STATE, batch=X),
        CallError,
        "grad_and_reduce got .*'batch'",
        r"grad_and_reduce\(loss, state\)\(batch\)",
    ),
    "evaluate with the batch": (
        lambda: ANY.evaluate(APPLY, STATE, X),
        CallError,
        "evaluate: too many",
        r"evaluate\(fn, state\)\(batch\)",
    ),
    "apply(state, x)": (
        lambda: ANY.functionalize(nn.Linear(2, 1))[0](STATE, X),
        LayoutError,
        "apply got a TrainState",
        r"fzero.evaluate\(apply, state\)\(x\)",
    ),
    "apply(x)": (lambda: APPLY(*(X,)),  # type: ignore[arg-type]
        LayoutError, "apply got a Tensor", r"apply\(params, x\)"),
    "a misspelt option of a transform": (
        lambda: ANY.clip(step_fn, maxnorm=1.0),
        CallError,
        "clip got .*'maxnorm'",
        "write max_norm=",
    ),
    **{
        f"{name} without an option, {how}": (
            call,
            CallError,
            f"{name} got none of its options, and would do nothing",
            rf"give {options}[\s\S]*or leave {name} out \({options.partition('=')[0]}=None is",
        )
        for name, options in {
            "clip": "max_norm= or max_value=",
            "compress": "gradients= or parameters=",
            "offload": "optimizer= or gradients= or params=",
        }.items()
        for how, call in {
            "around a step": lambda name=name: getattr(ANY, name)(step_fn),
            "as a decorator": lambda name=name: getattr(ANY, name)(),
            "with an option that is not enough": lambda name=name: getattr(ANY, name)(
                step_fn, **{"offload": {"folder": "."}, "compress": {"over": "all"}}.get(name, {})
            ),
        }.items()
    },
    "an option by position": (
        lambda: ANY.accumulate(step_fn, 4),
        CallError,
        "accumulate: too many",
        r"accumulate\(step, micro_batches=4\)",
    ),
    "no stage": (
        lambda: ANY.shard(step_fn),
        CallError,
        "shard: missing .*'stage'",
        r"shard\(step, stage=2\)",
    ),
    "no optimizer": (
        lambda: ANY.init(PARAMS, stage=2),
        CallError,
        "init: missing .*'optimizer'",
        r"init\(params, optimizer",
    ),
    "an engine without a stage": (
        lambda: ENGINE(nn.Linear(2, 1), torch.optim.SGD),
        CallError,
        "Engine: missing .*'stage'",
        r"Engine\(module, optimizer, stage=2\)",
    ),
    "the stage of an engine by position": (
        lambda: ENGINE(nn.Linear(2, 1), torch.optim.SGD, 2),
        CallError,
        "Engine: too many",
        r"Engine\(module, optimizer, stage=2\)",
    ),
    **{
        f"init(optimizer, params): {name}": (
            lambda optimizer=optimizer: fzero.init(optimizer, PARAMS, stage=2),
            CallError,
            "init got an optimizer .* in the place of the parameters",
            r"init\(params, optimizer, stage=2\)",
        )
        for name, optimizer in {
            "a rule": RULE,
            "a class": torch.optim.SGD,
            "an instance": torch.optim.SGD([torch.ones(1)]),
            "a pair": (RULE.init, RULE.update),
            "none": fzero.optim.no_optimizer(),
        }.items()
    },
    "state[...]": (
        lambda: STATE["weight"],
        CallError,
        r"state\['weight'\]: a TrainState has no items",
        r"fzero.full_params\(state\)\['weight'\]",
    ),
    **{
        f"{name}(model)": (
            lambda wrap=wrap: wrap(nn.Linear(2, 1)),
            CallError,
            f"{name} got a Linear, an nn.Module",
            r"fzero.adapter.Engine\(model, optimizer, stage=2\)",
        )
        for name, wrap in {
            "shard": ANY.shard,
            "clip": ANY.clip(max_norm=1.0),
            "accumulate": lambda model: fzero.accumulate(model, steps=2),
        }.items()
    },
    "shard(model, stage=2)": (
        lambda: fzero.shard(nn.Linear(2, 1), stage=2),
        CallError,
        "shard got a Linear, an nn.Module",
        r"fzero.functionalize\(model\)",
    ),
    **{
        f"{name}(model, state)": (
            lambda wrap=wrap: wrap(nn.Linear(2, 1), STATE)(X),
            CallError,
            f"{name} got a Linear",
            rf"functionalize\(model\)(.|\n)*{name}\(",
        )
        for name, wrap in {"evaluate": ANY.evaluate, "grad_and_reduce": ANY.grad_and_reduce}.items()
    },
    **{
        f"init({name})": (
            lambda params=params: fzero.init(params, RULE, stage=0),
            LayoutError,
            f"the parameters are a {kind}, not a tensor",
            fix,
        )
        for name, params, kind, fix in (
            ("model", nn.Sequential(nn.Linear(2, 1)), "Sequential", "functionalize"),
            ("parameters()", nn.Linear(2, 1).parameters(), "generator", "named_parameters"),
            ("number", 3.0, "float", "torch.as_tensor"),
        )
    },
    **{
        f"a loss that is {name}": (
            lambda loss=loss: ANY.grad_and_reduce(lambda p, x: loss(loss_fn(p, x)), STATE)(X),
            LayoutError,
            f"{seen}(.|\n)*Usual cause: {cause}",
            fix,
        )
        for name, loss, seen, cause, fix in (
            ("item()", lambda x: x.item(), "is a float", "loss.item", "a scalar tensor"),
            ("numpy", lambda x: x.detach().numpy(), "is a ndarray", "loss.item", "scalar tensor"),
            ("None", lambda x: None, "is a NoneType", "a loss function without a return", "return"),
            ("a list", lambda x: [x, x], "is a list of 2", "several losses", "has_aux=True"),
            ("an object", lambda x: object(), "is a object", "the output of a model", "scalar"),
            ("of samples", lambda x: x.expand(3), r"has shape \(3,\)", "per-sample", "mean"),
            ("a count", lambda x: x.long(), "has dtype torch.int64", "a count", "floating"),
        )
    },
    **{
        f"optim.{name}('1e-3')": (
            lambda rule=rule: rule("1e-3"),
            LayoutError,
            f"optim.{name}: lr='1e-3'(.|\n)*a text",
            r"float\('1e-3'\)",
        )
        for name, rule in {
            name: getattr(ANY.optim, name) for name in ("adam", "adamw", "lion", "sgd", "muon")
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_named_with_its_fix(name: str) -> None:
    call, kind, seen, fix = SLIPS[name]
    with pytest.raises(kind, match=f"{seen}[\\s\\S]*Fix: [\\s\\S]*{fix}") as raised:
        call()
    assert len(str(raised.value).splitlines()) == 3


def test_an_error_of_the_users_own_function_is_its_own() -> None:
    with pytest.raises(TypeError, match="takes 1 positional"):
        fzero.grad_and_reduce(lambda p: p, STATE)(X)  # type: ignore[call-arg]


def test_a_state_is_not_iterable_as_before() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        list(ANY_STATE)


WRITES: dict[str, Callable[[Any], Any]] = {
    "a method": lambda w: w.mul_(2.0),
    "a view": lambda w: w[0].zero_(),
    "an operator": lambda w: w.__iadd__(1.0),
    "an index": lambda w: w.__setitem__(slice(0, 1), 0.0) or w,
}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", WRITES)
def test_a_loss_that_writes_to_a_parameter_is_told_so_at_every_stage(name: str, stage: int) -> None:
    def body(state: Any, x: Any) -> Any:
        return fzero.grad_and_reduce(lambda p, x: WRITES[name](p["weight"]).sum(), state)(x)

    step = fzero.simulate(fzero.shard(body, stage=stage), world_size=2)
    with pytest.raises(FzeroError, match="in place"):
        step(step.init(PARAMS, RULE), torch.stack([X, X]))
    with pytest.raises(FzeroError, match="in place"):  # of an argument that learns
        step(step.init(PARAMS, RULE), torch.stack([X, X]).requires_grad_())


def test_another_error_of_torch_in_a_loss_stays_what_it_is() -> None:
    state = fzero.init(PARAMS, RULE, stage=0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fzero.grad_and_reduce(lambda p: (p["weight"] @ torch.ones(3, 3)).sum(), state)()
    versions = [flat._version for flat in state.params.flats]
    with pytest.raises(PhaseError, match="such as a parameter"):
        fzero.grad_and_reduce(lambda p: p["weight"].zero_().sum(), state)()
    assert versions == [flat._version for flat in state.params.flats]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_evaluation_that_writes_to_a_parameter_raises(stage: int) -> None:
    def body(state: Any) -> Any:
        return state, fzero.evaluate(lambda p: p["weight"].zero_().sum(), state)()

    step = fzero.simulate(fzero.shard(body, stage=stage), world_size=2)
    with pytest.raises(FzeroError, match="in place"):
        step(step.init(PARAMS, RULE))


class OfItsOwn:
    """A step with an init of its own."""

    def init(self, params: Any, optimizer: Any) -> Any:
        return fzero.init(params, optimizer, stage=2)

    def __call__(self, state: Any, x: Any) -> Any:
        return step_fn(state, x)


def test_an_object_with_an_init_of_its_own_is_simulated() -> None:
    both = torch.stack([X, X])
    for wrap in (lambda step: step, fzero.coalesce, fzero.clip(max_norm=1e9)):
        step = fzero.simulate(wrap(OfItsOwn()), world_size=2)
        state, _ = step(step.init(PARAMS, RULE), both)
        plain = fzero.simulate(fzero.shard(step_fn, stage=2), world_size=2)
        wanted, _ = plain(plain.init(PARAMS, RULE), both)
        for mine, theirs in zip(state.params.flats, wanted.params.flats, strict=True):
            assert torch.equal(mine, theirs)
