"""Leaf modules: subtrees whose parameters are gathered and released as one.

For modules that use other parts of themselves on each rank (a mixture of experts), so that all
ranks gather the same, and for many small modules whose gathers would cost more than they save.
Works on a description of the module tree; no module is looked at or marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from fzero.errors import LayoutError, explain
from fzero.errors.check import is_count, require

CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
"""torch's containers, which are no unit of work: by granularity they never become leaves."""

LARGEST_LEAF_NUMEL = 1_000_000_000
"""A larger subtree never becomes a leaf by granularity: all of it would be live at once."""

_CONTAINER_MODULE = "torch.nn.modules.container"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """One module of the tree, as far as the choice of leaves needs it."""

    name: str  # qualified; "" is the root
    classes: tuple[str, ...]  # its class and that one's bases (the mro), fully qualified
    numel: int  # parameter elements in its subtree, tied ones once
    descendants: int  # modules below it

    @property
    def granularity_numel(self) -> float:
        """Elements for each module of the subtree: numel / (1 + descendants)."""
        return self.numel / (1 + self.descendants)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpec:
    """What is to be a leaf. A module that any of the four names is one.

    `classes`: types, or names, bare ("MoE") or fully qualified ("models.moe.MoE"); subclasses
    count. `names`: qualified names of modules. `name_suffixes`: ends of qualified names.
    `granularity_threshold_numel`: modules of fewer elements for each module of their subtree
    than this; 0 is none. A string alone stands for a tuple of one.
    """

    classes: Sequence[str | type] | str | type = ()
    names: Sequence[str] | str = ()
    name_suffixes: Sequence[str] | str = ()
    granularity_threshold_numel: int = 0

    def __post_init__(self) -> None:
        """Refuse what names no module."""
        cause = "a module itself, or a number that is no int."
        kinds = {"classes": (str, type), "names": (str,), "name_suffixes": (str,)}
        for field, allowed in kinds.items():
            value: Any = getattr(self, field)
            several = isinstance(value, Iterable) and not isinstance(value, str | type)
            each: list[Any] = [*getattr(self, field)] if several else [value]
            good = all(isinstance(one, allowed) for one in each)
            wanted = "names" + (" or classes" if type in allowed else "") + ", one or a list"
            require(f"LeafSpec: {field}", value, lambda _, good=good: good, wanted, cause=cause)
        name, numel = "granularity_threshold_numel", self.granularity_threshold_numel
        wanted = "elements for each module, an int; 0 is off"
        require(f"LeafSpec: {name}", numel, lambda x: is_count(x, 0), wanted, cause=cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafModules:
    """The leaf modules of a model, of which none is inside another.

    `warnings` are for the user, one text each.
    """

    leaves: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def class_name(cls: type) -> str:
    """The fully qualified name of a class, as `ModuleInfo.classes` has it.

    Example:
        >>> class_name(LeafSpec)
        'fzero.state.leaf_modules.LeafSpec'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def find_leaf_modules(tree: Sequence[ModuleInfo], spec: LeafSpec) -> LeafModules:
    """Choose the leaves of `tree` (parents before children) that `spec` names.

    The outermost of nested leaves is the leaf. Raises `LayoutError` for a class, a name or a
    suffix that is nowhere in the tree, naming all of them and what comes near.

    Example:
        >>> tree = [
        ...     ModuleInfo(name="", classes=("gpt.Gpt",), numel=90, descendants=3),
        ...     ModuleInfo(name="h.moe", classes=("gpt.MoE",), numel=60, descendants=1),
        ...     ModuleInfo(name="h.moe.up", classes=("torch.nn.Linear",), numel=60, descendants=0),
        ...     ModuleInfo(name="head", classes=("torch.nn.Linear",), numel=30, descendants=0),
        ... ]
        >>> find_leaf_modules(tree, LeafSpec(classes="MoE")).leaves
        ('h.moe',)
    """
    chosen = _named(tree, spec)
    fine, warnings = _fine_grained(tree, spec.granularity_threshold_numel)
    chosen |= fine
    leaves = tuple(
        info.name
        for info in tree
        if info.name in chosen and not any(up in chosen for up in _path(info.name)[1:])
    )
    return LeafModules(leaves=leaves, warnings=warnings)


def _named(tree: Sequence[ModuleInfo], spec: LeafSpec) -> set[str]:
    """The modules that a class, a name or a suffix of `spec` names."""
    chosen: set[str] = set()
    missing: list[str] = []
    names = [info.name for info in tree]
    classes = dict.fromkeys(full for info in tree for full in info.classes)
    known = [*classes, *dict.fromkeys(_bare(full) for full in classes)]

    def collect(
        kind: str, wanted: str, near: Iterable[str], fits: Callable[[ModuleInfo], bool]
    ) -> None:
        found = {info.name for info in tree if fits(info)}
        chosen.update(found)
        if not found:
            close = get_close_matches(wanted, list(near), n=3, cutoff=0.5)
            missing.append(f"{kind} {wanted!r} (near: {', '.join(close) or 'nothing'})")

    for cls in _listed(spec.classes):
        collect("class", cls, known, partial(_has_class, full_or_bare=cls))
    for name in _listed(spec.names):
        collect("name", name, names, partial(_is_named, name=name))
    for suffix in _listed(spec.name_suffixes):
        ends = dict.fromkeys(name.rsplit(".", 1)[-1] for name in names)
        collect("suffix", suffix, ends, partial(_ends_with, suffix=suffix))
    if missing:
        raise LayoutError(
            f"leaf modules: the model has no {'; no '.join(missing)}.",
            cause="a misspelt name, or the name of a module before it was wrapped.",
            fix="take names from `model.named_modules()`; a class by its bare or fully "
            "qualified name, or itself.",
        )
    return chosen


def _fine_grained(
    tree: Sequence[ModuleInfo], threshold_numel: int
) -> tuple[set[str], tuple[str, ...]]:
    """The modules below the threshold, and a warning if that is no module at all."""
    candidates = [info for info in tree if _can_be_fine_grained(info)]
    fine = {info.name for info in candidates if info.granularity_numel < threshold_numel}
    if fine or not threshold_numel:
        return fine, ()
    least = min(candidates, key=lambda info: info.granularity_numel, default=None)
    seen = (
        "no module has parts"
        if least is None
        else (f"the least is {least.granularity_numel:,.0f}, of {least.name or '(root)'!r}")
    )
    return set(), (
        explain(
            f"granularity_threshold_numel={threshold_numel:,} makes no module a leaf: {seen}.",
            cause="a threshold that was chosen for a model of smaller modules.",
            fix="raise it above the least granularity, or leave it out (0).",
        ),
    )


def _can_be_fine_grained(info: ModuleInfo) -> bool:
    container = info.classes[0] in {f"{_CONTAINER_MODULE}.{name}" for name in CONTAINERS}
    return 0 < info.numel <= LARGEST_LEAF_NUMEL and info.descendants > 0 and not container


def _has_class(info: ModuleInfo, full_or_bare: str) -> bool:
    return any(full_or_bare in (full, _bare(full)) for full in info.classes)


def _is_named(info: ModuleInfo, name: str) -> bool:
    return info.name == name


def _ends_with(info: ModuleInfo, suffix: str) -> bool:
    return bool(suffix) and info.name.endswith(suffix)


def _bare(full: str) -> str:
    return full.rpartition(".")[2]


def _path(name: str) -> list[str]:
    """`name`, its parent, and so on up to the root."""
    path = [name]
    while path[-1]:
        path.append(path[-1].rpartition(".")[0])
    return path


def _listed(given: Sequence[str | type] | str | type) -> tuple[str, ...]:
    listed = (given,) if isinstance(given, str | type) else given
    texts = (item if isinstance(item, str) else class_name(item) for item in listed)
    return tuple(dict.fromkeys(texts))
