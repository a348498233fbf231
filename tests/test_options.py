"""The table of options: signatures say the same; a driver takes what it says, or tells why not."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, LeafSpec
from fzero.adapter.setup import OLDER
from fzero.errors import CallError, LayoutError
from fzero.integrations.deepspeed._config_keys import KEYS
from fzero.options import (
    DRIVERS,
    OPTIONS,
    REQUIRED,
    EngineOptions,
    InitOptions,
    ModuleOptions,
    SharedOptions,
    StepOptions,
    Updating,
    grouped,
    taken_by,
)
from fzero.state import Gathering, Reduction
from fzero.state.points import options_in
from fzero.tools.certify import AXES
from tests.descends import descends

FUNCTIONS: dict[str, Any] = {
    "init": fzero.init,
    "shard": fzero.shard,
    "Engine": Engine.__init__,
    "plan": type(fzero.plan).__call__,
}
UNPACKED: dict[str, Any] = {
    "init": InitOptions,
    "shard": StepOptions,
    "Engine": EngineOptions,
    "plan": StepOptions,
}
OF_ONE_MODEL = {("Engine", "stage"): int, ("plan", "stage"): Any}
"""An engine has one module, and so one stage; `plan` hands a pytree on to `shard`."""
CERTIFY: Any = fzero.certify
ACCUMULATE: Any = fzero.accumulate


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_signature_of_a_driver_says_what_the_table_says(driver: str) -> None:
    code = inspect.unwrap(FUNCTIONS[driver])
    written = inspect.signature(code).parameters
    hints = {**typing.get_type_hints(code), **typing.get_type_hints(UNPACKED[driver])}
    taken = {one.name: one for one in taken_by(driver)}
    unpacked = typing.get_type_hints(UNPACKED[driver])
    assert {name for name in {*written, *unpacked} if name in OPTIONS} == {*taken}
    older = OLDER if driver == "Engine" else {}
    assert {*unpacked} - {*older} <= {*OPTIONS}
    assert all(unpacked[old] == OPTIONS[name].type for old, name in older.items())
    for name, one in taken.items():
        assert hints[name] == OF_ONE_MODEL.get((driver, name), one.type), name
        if name in written:
            assert written[name].kind is inspect.Parameter.KEYWORD_ONLY, name
            default = written[name].default
            assert (REQUIRED if default is inspect.Parameter.empty else default) == one.default


@pytest.mark.parametrize("driver", DRIVERS)
def test_help_shows_each_option_with_its_default(driver: str) -> None:
    seen = inspect.signature(FUNCTIONS[driver]).parameters
    documented: Any = (Engine if driver == "Engine" else FUNCTIONS[driver]).__doc__
    assert "{options}" not in documented and "options" not in seen
    words = " ".join(documented.split())
    for one in taken_by(driver):
        if one.default is not REQUIRED:
            assert seen[one.name].default == one.default
        assert f" {one.name}: {one.only}{one.help}" in words


def test_an_option_is_a_field_of_one_record_which_has_its_default() -> None:
    records = [
        SharedOptions(gathering=Gathering(), reduction=Reduction()),
        ModuleOptions(),
        Updating(),
    ]
    declared = [one.name for record in records for one in options_in(type(record))]
    assert len({*declared}) == len(declared)
    carried = [one for record in (*records, Gathering(), Reduction()) for one in fields(record)]
    assert {one.name for one in carried if "option" in one.metadata} == {*declared}
    assert {*OPTIONS} - {*declared} == {"stage", "mesh", "initializer", "donate"}
    for record in (*records, Gathering(), Reduction()):
        for name in (one.name for one in fields(record) if "option" in one.metadata):
            assert getattr(record, name) == OPTIONS[name].default, name


def test_what_is_no_option_of_a_record_cannot_be_set_by_a_keyword() -> None:
    made = grouped(SharedOptions, {"ordered": True, "weighted": True, "persistent": (1,)})
    assert made.reduction == Reduction(ordered=True) and made.gathering == Gathering()


def test_a_driver_without_an_option_has_a_reason_and_every_option_has_a_driver() -> None:
    for one in OPTIONS.values():
        assert {*one.instead} < {*DRIVERS} and all(one.instead.values()), one.name
        assert one.help.rstrip(")").endswith("."), one.name


CALLS: dict[str, Callable[..., Any]] = {
    "init": lambda **given: fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(1.0), **given),
    "shard": lambda **given: fzero.shard(lambda state: (state, None), **given),
    "Engine": lambda **given: Engine(nn.Linear(2, 1), torch.optim.SGD, **given),
    "plan": lambda **given: fzero.plan(nn.Linear(2, 1), torch.ones(1, 2), world=2, **given),
    "certify": lambda **given: CERTIFY(nn.Linear(2, 1), None, None, **given),
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_driver_takes_an_option_or_says_what_to_do_instead(driver: str) -> None:
    for name, one in OPTIONS.items():
        if driver in one.instead:
            with pytest.raises(CallError) as raised:
                CALLS[driver](stage=2, **{name: one.default})
            assert f"{driver} got" in str(raised.value), name
            assert f"Fix: {one.instead[driver]}" in str(raised.value), name
        elif driver != "plan":  # which would run a step for each
            CALLS[driver](**{"stage": 2, name: 2 if name == "stage" else one.default})


@pytest.mark.parametrize("name", [name for name, one in OPTIONS.items() if one.check])
def test_a_wrong_value_is_refused_by_name_in_every_driver(name: str) -> None:
    for driver in (d for d in DRIVERS if d not in OPTIONS[name].instead):
        with pytest.raises(LayoutError, match=f"{name}=<object"):
            CALLS[driver](**{"stage": 3, name: object()})


@pytest.mark.parametrize("driver", CALLS)
def test_a_misspelt_option_names_the_function_and_the_nearest(driver: str) -> None:
    wrong, right = ("windws", "windows") if driver == "certify" else ("orderd", "ordered")
    more = {} if driver == "certify" else {"stage": 2}
    with pytest.raises(CallError, match=rf"{driver} got .*{wrong}[\s\S]*Fix: write {right}="):
        CALLS[driver](**more, **{wrong: True})


def test_an_option_in_the_place_of_its_axis_is_told_the_axis() -> None:
    axes = {axis.name for axis in AXES}
    for one in OPTIONS.values():
        assert not one.axis or one.axis in axes, one.name
        if one.axis and one.name not in axes:
            with pytest.raises(CallError, match=rf"certify got[\s\S]*Fix: write {one.axis}="):
                CALLS["certify"](**{one.name: 1})


def test_deepspeeds_keys_are_those_of_the_table() -> None:
    named = {one.deepspeed: one.name for one in OPTIONS.values() if one.deepspeed}
    assert len(named) == sum(bool(one.deepspeed) for one in OPTIONS.values())
    assert {*named} <= {*KEYS}
    used = {key.path: key.says for key in KEYS.values() if key.use == "option"}
    assert used.items() <= named.items()


def test_older_spellings_are_taken_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    old: Any = {"gradient_accumulation_steps": 3}
    engine = Engine(nn.Linear(2, 1), torch.optim.SGD, stage=1, **old)
    assert engine.options.updating.micro_batches == 3
    assert repr(fzero.accumulate(steps=3)(torch.abs)) == (
        repr(fzero.accumulate(micro_batches=3)(torch.abs))
    )
    assert not recwarn.list
    for call in (
        lambda: Engine(nn.Linear(2, 1), torch.optim.SGD, stage=1, micro_batches=3, **old),
        lambda: ACCUMULATE(micro_batches=3, steps=3),
    ):
        with pytest.raises(CallError, match="two spellings of one option"):
            call()


def trained(driver: str, options: dict[str, Any], world: int) -> tuple[Tensor, int]:
    """A weight after two updates at stage 3, and how many gathers rank 0 made in them."""

    def body(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.mul(8).round())
        if driver == "Engine":
            with Engine(model, torch.optim.SGD, stage=3, **options) as engine:
                assert engine.optimizer is not None
                engine.optimizer.param_groups[0]["lr"] = 0.5
                for _ in range(2):
                    engine(x).sum().backward()
                    engine.step()
            return model.get_parameter("0.weight").detach().clone()
        apply, params = fzero.functionalize(model)
        state = fzero.init(params, fzero.optim.sgd(0.5), stage=3, **options)
        for _ in range(2):
            state, _ = descends(lambda p, x: apply(p, x).sum())(state, x)
        return fzero.full_params(state)["0.weight"]

    with fzero.count_collectives() as log:
        weights = fzero.simulate(body, world_size=world)(torch.ones(world, 3, 4))
    return weights[0], log.counts().get("all_gather", 0)


@pytest.mark.parametrize("driver", ["init", "Engine"])
def test_options_of_both_drivers_act_and_keep_the_numbers(driver: str) -> None:
    plain, _ = trained(driver, {}, 1)
    weights, usual = trained(driver, {}, 2)
    assert torch.equal(weights, plain)
    for options, fewer in (
        ({"prefetch_numel": 0}, False),
        ({"persistence_threshold_numel": 10**6}, True),
        ({"units": lambda path: "all"}, True),
    ):
        weights, gathers = trained(driver, options, 2)
        assert torch.equal(weights, plain), options
        assert gathers < usual if fewer else gathers == usual, options


def test_a_leaf_module_is_one_unit_whatever_units_say() -> None:
    options: Any = {"leaf_modules": LeafSpec(names="1"), "units": lambda path: path}

    def body(x: Tensor) -> Tensor:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        with Engine(model, torch.optim.SGD, stage=3, **options) as engine:
            names = [group.name for group in engine.state.setup.layout.groups]
        assert names == ["0.weight", "0.bias", "1"]
        return x

    fzero.simulate(body, world_size=2)(torch.ones(2))
