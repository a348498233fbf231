"""What a state is, as it is told to a rank that comes: each rule and option of fzero can be."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint.elements import local_states
from fzero.checkpoint.mesh_transition import as_received, as_sent, structure_of
from fzero.errors import LayoutError
from fzero.optim import schedules

MADE_OF = {"partition": ({"a": fzero.optim.muon(0.1), "b": fzero.optim.adamw(0.1)},)}
NO_RULES = {"as_optimizer", "unscaled", "require_elementwise", "require_leafwise"}
NO_RULES |= {"require_ordered", "require_precision", "require_real_views"}


def label(leaf: Any) -> str:
    return "a" if len(leaf.shape) == 2 else "b"


def is_wide(leaf: Any) -> bool:
    return leaf.shape[0] > 3


def rate(count: int) -> float:
    return 0.1 / (1 + count)


def functions_of(module: Any) -> dict[str, Callable[..., Any]]:
    names = [name for name in dir(module) if not name.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    return {name: fn for name, fn in found.items() if inspect.isfunction(fn)}


def rules() -> Iterator[tuple[str, Any]]:
    """Every rule of fzero.optim, every schedule, and what other options take functions."""
    for name, make in functions_of(fzero.optim).items():
        if name == "partition":
            yield name, make(*MADE_OF[name], label)
        elif name == "from_torch":
            yield name, make(functools.partial(torch.optim.Adagrad, lr=0.1))
        elif name == "no_optimizer":
            yield name, make()
        elif name not in NO_RULES:
            yield name, make(0.1)
    for name, make in functions_of(schedules).items():
        if make.__module__ == schedules.__name__:
            needed = inspect.signature(make).parameters.values()
            yield name, fzero.optim.sgd(make(*(8 for x in needed if x.default is x.empty)))
    yield "groups", fzero.optim.adamw(0.1, decay_mask=is_wide, groups=[(is_wide, {"lr": rate})])
    yield "adjust_lr", fzero.optim.muon(rate, adjust_lr="match_rms_adamw")
    yield "momentum", fzero.optim.sgd(0.1, momentum=0.9)
    yield "state_dtype", fzero.optim.adamw(0.1, state_dtype=torch.bfloat16)


def sent(optimizer: Any, **options: Any) -> Any:
    """The structure of a state, and as it is received."""
    made = fzero.simulate(
        lambda: fzero.init({"w": torch.ones(4, 4)}, optimizer, stage=2, **options), world_size=2
    )
    structure = structure_of(local_states("reshard", made(), apart=True))
    return structure, as_received(as_sent(structure))


@pytest.mark.parametrize(("name", "optimizer"), [*rules()])
def test_every_rule_and_schedule_of_fzero_is_told(name: str, optimizer: Any) -> None:
    structure, found = sent(optimizer)
    assert (
        found.pattern.setup.layout == structure.pattern.setup.layout
        and found.manifest == structure.manifest
    )
    assert repr(found.pattern.setup.optimizer) == repr(structure.pattern.setup.optimizer)
    if not hasattr(optimizer, "source"):  # one of torch has no equality
        assert found == structure


def codecs() -> dict[str, Any]:
    codecs = fzero.codecs
    found = {name: getattr(codecs, name) for name in dir(codecs) if name[0].islower()}
    kinds = {name: x for name, x in found.items() if inspect.isclass(x)}
    return {
        name: x for name, x in kinds.items() if issubclass(x, codecs.Codec) and x != codecs.Codec
    }


@pytest.mark.parametrize("name", codecs())
def test_every_codec_is_told(name: str) -> None:
    kind = codecs()[name]
    codec = kind(torch.bfloat16) if name == "cast" else kind()
    structure, found = sent(fzero.optim.sgd(0.1), compress=fzero.Compress(gradients=codec))
    assert found == structure


def test_local_updates_are_told() -> None:
    local = fzero.Local(every=2, outer=fzero.optim.muon(0.1))
    structure, _ = sent(fzero.optim.sgd(0.1))
    pattern = dataclasses.replace(structure.pattern, local=local)
    told = as_received(as_sent(dataclasses.replace(structure, pattern=pattern)))
    assert told.pattern.local == local


class Odd:
    def __call__(self, count: int) -> float:
        return 0.1

    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")


def test_what_cannot_be_told_is_named() -> None:
    def inside(count: int) -> float:
        return 0.1

    cases: list[tuple[Any, str]] = [
        (fzero.optim.adam(lambda count: 0.1), r"the function .*<lambda> \(.*test_structure.py:\d+"),
        (fzero.optim.muon(0.1, decay_mask=lambda leaf: True), r"the function .*<lambda>"),
        (fzero.optim.adam(inside), r"the function .*inside"),
        (fzero.optim.adam(functools.partial(inside)), r"the function .*inside"),
        (fzero.optim.adam(Odd()), "RuntimeError: not this one"),
    ]
    for optimizer, match in cases:
        with pytest.raises(LayoutError, match=match) as caught:
            sent(optimizer)
        assert "Fix: use" in str(caught.value) and "a rule of fzero" not in str(caught.value)


def test_a_function_that_this_process_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = as_sent(sent(fzero.optim.adam(rate))[0])
    monkeypatch.delattr(f"{__name__}.rate")
    with pytest.raises(LayoutError, match=r"cannot be read on this rank: AttributeError: .*rate"):
        as_received(data)
