"""The step of a rule without the hooks of its optimizer, which are those of an update."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ALL: tuple[dict[int, Any], ...] = (
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)


def rule_step(instance: Optimizer) -> None:
    """Step what an optimizer has now by the rule of its class: no hook, no wrapper."""
    with silent(instance):
        type(instance).step(instance)


def is_wrapped(instance: Optimizer) -> bool:
    """Whether somebody has put something around the `step` of an optimizer.

    Not torch's schedulers, which note there that a step was made: see `note_step`.
    """
    code = getattr(vars(instance).get("step"), "__code__", None)
    of_torch = code is not None and code.co_filename == lr_scheduler.__file__
    return "step" in vars(instance) and not of_torch


def note_step(instance: Any) -> None:
    """Do what the wrapper of torch's schedulers does: they warn if no step was made before."""
    if "step" in vars(instance):
        instance._opt_called = True


def has_pre_hooks(instance: Optimizer, but: int = 0) -> bool:
    """Whether anything of a user's runs before a step; `but` so many hooks of the optimizer."""
    own = vars(instance).get(HOOKS[0], ())
    return len(own) > but or is_wrapped(instance) or bool(_OF_ALL[0])


def is_seen(instance: Optimizer) -> bool:
    """Whether code of a user's runs around a step; an engine's own hook is none."""
    hooks = [hook for name in HOOKS for hook in vars(instance).get(name, {}).values()]
    own = any(not str(getattr(hook, "__module__", "")).startswith("fzero.") for hook in hooks)
    return own or is_wrapped(instance) or any(_OF_ALL)


@contextmanager
def silent(instance: Optimizer) -> Iterator[None]:
    """Run no step hook in this block: not of this optimizer, nor those of all optimizers.

    A step() that calls super().step() would run them again.
    """
    own = {name: OrderedDict[int, Any]() for name in HOOKS if vars(instance).get(name)}
    with swapped(vars(instance), own), none_of_all():
        yield


@contextmanager
def swapped(
    entries: dict[str, Any], values: Mapping[str, Any], written: Iterable[str] = ()
) -> Iterator[None]:
    """Set entries of a dict inside the block; afterwards they are as they were, or not there.

    written: keys that something in the block sets.

    Example:
        >>> group = {"lr": 0.1}
        >>> with swapped(group, {"lr": 0.2}, ["step"]):
        ...     group["step"] = 1
        >>> group
        {'lr': 0.1}
    """
    keys = {*values, *written}
    before = {key: entries[key] for key in keys if key in entries}
    entries.update(values)
    try:
        yield
    finally:
        for key in keys - before.keys():
            entries.pop(key, None)
        entries.update(before)


def told(instance: Any, **values: Tensor | None) -> AbstractContextManager[None]:
    """Set attributes of an optimizer inside, as `torch.amp.GradScaler` does; None: not that one."""
    return swapped(vars(instance), {name: x for name, x in values.items() if x is not None})


@contextmanager
def none_of_all() -> Iterator[None]:
    """Empty the tables of the hooks of all optimizers; they have what they had afterwards."""
    before = [dict(table) for table in _OF_ALL]
    if not any(before):
        yield
        return
    for table in _OF_ALL:
        table.clear()
    try:
        yield
    finally:
        for table, had in zip(_OF_ALL, before, strict=True):
            table.update(had)
