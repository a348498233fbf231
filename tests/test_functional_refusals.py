"""`functionalize`: what it refuses, and that it says how to go on."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fzero.errors import LayoutError
from fzero.functional import functionalize


def edit_child(module: nn.Sequential) -> None:
    module[0] = nn.Linear(2, 2)


def edit_depth(module: nn.Sequential) -> None:
    module.append(nn.ReLU())


def edit_class(module: nn.Sequential) -> None:
    parametrize.register_parametrization(module[0], "weight", nn.Identity())


@pytest.mark.parametrize("edit", [edit_child, edit_depth, edit_class])
def test_an_edited_module_is_refused(edit: Callable[[nn.Sequential], None]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    apply, params = functionalize(module)
    assert apply(params, torch.ones(2)).shape == (2,)
    edit(module)
    with pytest.raises(LayoutError, match=r"gained, lost or replaced[^$]*Fix: call `functionalize"):
        apply(params, torch.ones(2))


def locked() -> nn.Module:
    module = nn.Linear(2, 2)
    vars(module)["lock"] = threading.Lock()
    return module


def compiled() -> nn.Module:
    module = nn.Linear(2, 2)
    module.compile()
    return module


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # by torch.compile
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.sin, r"takes an nn.Module, got builtin_function_or_method"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"0 \(LazyLinear\)[^$]*run one forward first"),
        (lambda: nn.Embedding(3, 2, max_norm=1.0), r"max_norm=1.0[^$]*leave max_norm out"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), r"DataParallel[^$]*pass the module inside"),
        (locked, r"Linear cannot be copied: .*lock[^$]*outside of the module"),
        (lambda: nn.Sequential(compiled()), r"0 \(Linear\) is compiled"),
    ],
)
def test_what_cannot_be_functionalized_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        functionalize(make())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: list(p.values()), r"params is a list, not a dict"),
        (lambda p: {"weight": p["weight"]}, r"no 'bias' \(1 missing, 0 unexpected of 2\)"),
        (lambda p: p | {"head.weight": p["bias"]}, r"an unexpected 'head.weight' \(0 missing, 1"),
        (lambda p: p | {"bias": 1.0}, r"params\['bias'\] is a float, not a tensor"),
        (lambda p: p | {"bias": p["bias"][:1]}, r"shape \(1,\), the module has \(3,\)"),
    ],
)
def test_params_of_another_module_are_refused(edit: Callable[[Any], Any], message: str) -> None:
    apply, params = functionalize(nn.Linear(2, 3))
    with pytest.raises(LayoutError, match=message + r"[^$]*Fix: pass what `functionalize` return"):
        apply(edit(params), torch.ones(2))
