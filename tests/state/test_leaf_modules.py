"""Which modules are gathered as one: by class, name, suffix, granularity; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fzero.errors import LayoutError
from fzero.state.layout import LeafSpec, ModuleInfo, class_name, find_leaf_modules


class Expert(nn.Linear):
    """An expert: found as itself, and as a Linear."""


class Moe(nn.Module):
    """Two experts in a list, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2, bias=False)
        self.experts = nn.ModuleList([Expert(4, 4, bias=False) for _ in range(2)])


class SharedMoe(Moe):
    """A subclass."""


def described(model: nn.Module) -> list[ModuleInfo]:
    """The tree of a model, as the adapter describes it."""
    return [
        ModuleInfo(
            name=name,
            classes=tuple(class_name(cls) for cls in type(module).__mro__),
            numel=sum(p.numel() for p in module.parameters()),
            descendants=sum(1 for _ in module.modules()) - 1,
        )
        for name, module in model.named_modules()
    ]


def model() -> nn.Module:
    """Embedding of 40; h.0.moe and h.1.moe of 8 + 2 * 16 each, a norm of 8; a head of 800."""
    block: Any = nn.Module
    root, first, second = block(), block(), block()
    first.moe, second.moe, second.norm = Moe(), SharedMoe(), nn.LayerNorm(4)
    root.embed = nn.Embedding(10, 4)
    root.h = nn.ModuleList([first, second])
    root.head = nn.Linear(4, 200, bias=False)
    return root


TREE = described(model())
BOTH = ("h.0.moe", "h.1.moe")
EXPERTS = ("h.0.moe.experts.0", "h.0.moe.experts.1", "h.1.moe.experts.0", "h.1.moe.experts.1")


@pytest.mark.parametrize(
    ("spec", "leaves"),
    [
        (LeafSpec(), ()),
        (LeafSpec(classes="Moe"), BOTH),  # subclasses count
        (LeafSpec(classes=Moe), BOTH),
        (LeafSpec(classes=["SharedMoe"]), BOTH[1:]),
        (LeafSpec(classes=(f"{__name__}.Moe", Moe)), BOTH),
        (LeafSpec(classes=[nn.Embedding, "LayerNorm"]), ("embed", "h.1.norm")),
        (LeafSpec(names="h.0.moe"), BOTH[:1]),
        (LeafSpec(names=["h.1", "h.1.moe", "h.0.moe"]), ("h.0.moe", "h.1")),  # the outer one
        (LeafSpec(names=""), ("",)),
        (LeafSpec(name_suffixes=["1.moe", ".norm"]), ("h.1.moe", "h.1.norm")),
        (LeafSpec(name_suffixes="experts"), ("h.0.moe.experts", "h.1.moe.experts")),
        (LeafSpec(classes=Expert, name_suffixes="0.moe"), ("h.0.moe", *EXPERTS[2:])),
        (LeafSpec(granularity_threshold_numel=6), ()),
        # 40 elements in 1 + 5 modules, and 48 in 1 + 6: both are less than 7 each.
        (LeafSpec(granularity_threshold_numel=7), ("h.0", "h.1")),
        (LeafSpec(granularity_threshold_numel=54), ("h.0", "h.1")),
        (LeafSpec(granularity_threshold_numel=55), ("",)),  # all 928 elements in 1 + 16
    ],
)
def test_leaves_are_found(spec: LeafSpec, leaves: tuple[str, ...]) -> None:
    assert find_leaf_modules(TREE, spec).leaves == leaves


def test_a_threshold_below_every_module_is_a_warning() -> None:
    found = find_leaf_modules(TREE, LeafSpec(granularity_threshold_numel=3))
    (warning,) = found.warnings
    assert "makes no module a leaf: the least is 7, of 'h.0'" in warning
    assert "Fix: " in warning


def test_fine_grained_is_below_the_threshold_not_at_it() -> None:
    (info,) = [info for info in TREE if info.name == "h.0.moe"]  # 40 elements in 1 + 4 modules
    assert find_leaf_modules([info], LeafSpec(granularity_threshold_numel=8)).leaves == ()
    assert find_leaf_modules([info], LeafSpec(granularity_threshold_numel=9)).leaves == ("h.0.moe",)


def test_containers_and_large_modules_are_not_fine_grained() -> None:
    def info(name: str, cls: str, numel: int) -> ModuleInfo:
        return ModuleInfo(name=name, classes=(cls,), numel=numel, descendants=99)

    tree = [
        info("list", "torch.nn.modules.container.ModuleList", 100),
        info("own", "mine.Sequential", 100),
        info("large", "mine.Net", 1_000_000_001),
        info("most", "mine.Net", 1_000_000_000),
        info("empty", "mine.Net", 0),
    ]
    found = find_leaf_modules(tree, LeafSpec(granularity_threshold_numel=1_000_000_000))
    assert found.leaves == ("own", "most")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": "Moee"}, r"no class 'Moee' \(near: Moe, Module\)"),
        ({"classes": "other.Moe"}, r"no class 'other.Moe'"),
        ({"classes": nn.Conv2d}, r"no class 'torch.nn.modules.conv.Conv2d'"),
        ({"names": ["h.0.mo", "h.0.moe"]}, r"no name 'h.0.mo' \(near: h.0.moe"),
        ({"names": "q"}, r"no name 'q' \(near: nothing\)"),
        ({"name_suffixes": "expertz"}, r"no suffix 'expertz' \(near: experts\)"),
        ({"name_suffixes": ""}, r"no suffix ''"),
        ({"classes": "A", "names": "b"}, "class 'A'.*; no name 'b'"),
        ({"granularity_threshold_numel": -1}, "granularity_threshold_numel=-1"),
        ({"names": 3}, "names=3"),
        ({"classes": [3]}, r"classes=\[3\]"),
        ({"granularity_threshold_numel": 1.5}, "granularity_threshold_numel=1.5"),
    ],
)
def test_what_names_no_module_is_refused_with_what_comes_near(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=rf"{message}[\s\S]*Fix: "):
        find_leaf_modules(TREE, LeafSpec(**options))
