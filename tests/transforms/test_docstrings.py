"""What the docstring of each public function of the functional side says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import fzero

OF_A_PAPER_OR_A_LIBRARY: list[Callable[..., Any]] = [
    *(fzero.accumulate, fzero.clip, fzero.coalesce, fzero.remat, fzero.shard, fzero.simulate),
    *(fzero.full_params, fzero.functionalize, fzero.gradients, fzero.init),
]
OTHERS: list[Callable[..., Any]] = [
    *(fzero.checkpoint.load, fzero.checkpoint.read_extra, fzero.checkpoint.save),
    *(fzero.axis_index, fzero.axis_size, fzero.check_finite, fzero.world),
]


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """The text of each Google section, by its name."""
    parts = re.split(r"^(\w+):\s", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """The parameters by name."""
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("function", OF_A_PAPER_OR_A_LIBRARY + OTHERS, ids=lambda f: f.__name__)
def test_it_says_what_goes_in_what_comes_out_and_what_is_raised(function: Any) -> None:
    found = sections(function)
    described = re.findall(r"^    (\w+): ", "\n" + found.get("Args", ""), flags=re.MULTILINE)
    assert described == parameters_of(function)
    assert ("Returns" in found) is (function is not fzero.checkpoint.save)
    assert re.findall(r"^    (\w+Error): ", "\n" + found["Raises"], flags=re.MULTILINE)
    assert ">>> " in found["Example"]
    assert ("Source" in found) is (function in OF_A_PAPER_OR_A_LIBRARY)
