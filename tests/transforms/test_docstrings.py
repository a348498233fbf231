"""What the docstring of each public function of the functional side says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import fzero

PUBLIC: list[Callable[..., Any]] = [
    fzero.accumulate,
    fzero.axis_index,
    fzero.axis_size,
    fzero.checkpoint.load,
    fzero.checkpoint.read_extra,
    fzero.checkpoint.save,
    fzero.clip,
    fzero.coalesce,
    fzero.full_params,
    fzero.functionalize,
    fzero.gradients,
    fzero.init,
    fzero.remat,
    fzero.shard,
    fzero.simulate,
    fzero.world,
]
OF_A_PAPER_OR_A_LIBRARY = {
    *("accumulate", "clip", "coalesce", "full_params", "functionalize", "gradients", "init"),
    *("remat", "shard", "simulate"),
}
RETURNS_NOTHING = {"save"}


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """The text of each Google section, by its name."""
    parts = re.split(r"^(\w+):\s", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)
def test_it_says_what_goes_in_what_comes_out_and_what_is_raised(function: Any) -> None:
    found, name = sections(function), function.__name__
    described = re.findall(r"^    (\w+): ", "\n" + found.get("Args", ""), flags=re.MULTILINE)
    assert described == list(inspect.signature(function).parameters)
    assert ("Returns" in found) is (name not in RETURNS_NOTHING)
    assert re.findall(r"^    (\w+Error): ", "\n" + found["Raises"], flags=re.MULTILINE)
    assert ">>> " in found["Example"]
    assert ("Source" in found) is (name in OF_A_PAPER_OR_A_LIBRARY)
