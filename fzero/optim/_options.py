"""Checks of the numbers that an optimizer is made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import is_number


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise `LayoutError` for the first option that is no number in its range."""
    lr = options["lr"]
    if isinstance(lr, Tensor):
        raise _lr_is_a_tensor(name)
    if not callable(lr) and not _at_least_zero(lr):
        fix = "use a number >= 0 or a schedule step -> number"
        raise bad_option(name, f"lr={lr!r}", fix, lr)
    for key in ("weight_decay", "eps"):
        if key in options and not _at_least_zero(options[key]):
            raise bad_option(name, f"{key}={options[key]!r}", "use a number >= 0", options[key])
    if "betas" in options:
        betas = options["betas"]
        if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(map(_rate, betas))):
            raise bad_option(name, f"betas={betas!r}", "use two numbers in [0, 1)")
    if "momentum" in options:
        momentum = options["momentum"]
        if not _rate(momentum):
            raise bad_option(name, f"momentum={momentum!r}", "use a number in [0, 1)", momentum)
        if options["nesterov"] and not momentum:
            raise bad_option(name, "nesterov=True with momentum=0", "set momentum, e.g. 0.9")


def _lr_is_a_tensor(name: str) -> LayoutError:
    return LayoutError(
        f"optim.{name}: lr is a tensor.",
        cause="a rate that is to be differentiated or mapped (torch.func, a meta-gradient), or a "
        "number that was left in a tensor; options of a rule are fixed numbers, equal on all "
        "ranks.",
        fix="for a number, pass float(lr), or a schedule step -> number. To differentiate or map "
        "the rate, give an (init, update) pair whose update closes over it: (lambda params: (), "
        "lambda grads, state, params: ([-lr * g for g in grads], state)).",
    )


def plain_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with a float or an int in the place of each number of a subclass of these.

    numpy's float64 is one. Others may compute with something else than their value, and a recorded
    update holds values.

    Example:
        >>> import numpy as np
        >>> plain_numbers({"lr": np.float64(0.5), "betas": (np.float64(0.5), 0), "nesterov": True})
        {'lr': 0.5, 'betas': (0.5, 0), 'nesterov': True}
    """
    return {key: _plain(value) for key, value in options.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if callable(value) or isinstance(value, bool) or not is_number(value):
        return value
    return float(value) if isinstance(value, float) else int(value)


def check_tests(name: str, decay_mask: Any, groups: Any) -> None:
    """Raise `LayoutError` unless the mask is a test of leaves, and groups are pairs with one."""
    if decay_mask is not None and not callable(decay_mask):
        raise bad_option(name, f"decay_mask={decay_mask!r}", "use leaf -> whether it decays")
    pairs = isinstance(groups, tuple | list) and all(map(_is_group, groups))
    if not pairs:
        raise bad_option(name, f"groups={groups!r}", "use [(leaf -> bool, {option: value}), ...]")


def bad_option(name: str, seen: str, fix: str, value: object = None) -> LayoutError:
    """Return the error for an option that cannot be; `value` is what was given, if that is one."""
    cause = "a mistyped option."
    if isinstance(value, str):
        cause = "a text in the place of a number: YAML reads 1e-3 (without a dot) as a text."
        fix = f"{fix}; float({value!r}) makes one of a text"
    return LayoutError(f"optim.{name}: {seen} is not possible.", cause=cause, fix=f"{fix}.")


def _is_group(group: Any) -> bool:
    pair = isinstance(group, tuple | list) and len(group) == 2
    return pair and callable(group[0]) and isinstance(group[1], Mapping)


def _at_least_zero(value: Any) -> bool:
    return is_number(value) and value >= 0


def _rate(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1
