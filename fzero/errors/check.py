"""Checks of what a user gives for an option. Each raises one error, which names the option."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from fzero.errors import CallError, LayoutError

P = ParamSpec("P")
R = TypeVar("R")


def require(
    name: str,
    value: Any,
    good: Callable[[Any], bool],
    wanted: str,
    *,
    cause: str = "a value of another kind or out of range.",
) -> None:
    """Raise `LayoutError`, naming the option and what is wanted, for a value that is not `good`.

    Example:
        >>> require("steps", 2, is_count, "an int of 1 or more")
    """
    if not good(value):
        raise LayoutError(f"{name}={value!r}.", cause=cause, fix=f"give {wanted}.")


def check_flags(**flags: Any) -> None:
    """Raise `LayoutError` for what is no bool: "no" would count as True."""
    for name, value in flags.items():
        cause = "a word from a config file or a command line."
        require(name, value, lambda x: isinstance(x, bool), "True or False", cause=cause)


def is_number(value: Any) -> bool:
    """Whether it is a finite number; True and False are none here."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (isinstance(value, int) or math.isfinite(value))


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above zero."""
    return is_number(value) and value > 0


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is an int of `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def called_as(
    usage: str,
    name: str = "",
    *,
    of_module: bool = False,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    any_of: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function that is called with other arguments say how it is called.

    of_module: its first argument may be an nn.Module; of others it never is. prepare: is given the
    keywords first, and returns those that the function gets. any_of: keywords without all of which
    the function would do nothing; one that is written as None is a user's way to switch it off.

    Example:
        >>> half = called_as("half(x)")(lambda x: x / 2)
        >>> half(4)
        2.0
    """

    def wrap(fn: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            this = name or fn.__name__
            more: Any = kwargs if prepare is None else prepare(kwargs)
            try:
                signature.bind(*args, **more)
            except TypeError as error:  # of the binding, not of the function itself
                if args and not of_module:
                    refuse_module(this, args[0])
                takes_any = any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values())
                unknown = [key for key in more if key not in signature.parameters and not takes_any]
                if unknown:
                    known = signature.parameters
                    raise unknown_option(this, unknown[0], known, usage) from None
                raise CallError(
                    f"{this}: {error}.",
                    cause="an argument too many or too few, or options that were given by "
                    "position.",
                    fix=f"call it as {usage}.",
                ) from None
            if any_of and not more.keys() & any_of:
                options = " or ".join(f"{one}=" for one in any_of)
                raise CallError(
                    f"{this} got none of its options, and would do nothing.",
                    cause="a transform that was put around a step by its name alone.",
                    fix=f"give {options}: {usage}; or leave {this} out ({any_of[0]}=None is the "
                    "identity).",
                )
            return fn(*args, **more)  # pyright: ignore[reportCallIssue]

        return checked

    return wrap


def refuse_module(name: str, fn: Any) -> None:
    """Raise `CallError` for a module in the place of a function of the state."""
    if isinstance(fn, nn.Module):
        raise CallError(
            f"{name} got a {type(fn).__name__}, an nn.Module; it takes a function.",
            cause="a model in the place of a step, of a loss, or of the function to evaluate.",
            fix="use fzero.adapter.Engine(model, optimizer, stage=2), or apply, params = "
            "fzero.functionalize(model) and a function that calls apply(params, x).",
        )


def require_function_of_params(name: str, fn: Any, usage: str, what: str = "function") -> None:
    """Raise `LayoutError` for what is no function, and `CallError` for a model in its place.

    A module without parameters may be a function of (params, *args).
    """
    if not callable(fn):
        raise LayoutError(
            f"{name} got a {type(fn).__name__} in the place of the {what}.",
            cause=f"its arguments in another order, or a {what} that was called already.",
            fix=f"pass the function: {usage}.",
        )
    if isinstance(fn, nn.Module) and next(fn.parameters(), None) is not None:
        raise CallError(
            f"{name} got a {type(fn).__name__}, an nn.Module with parameters of its own.",
            cause="the model in the place of a function: of its parameters the state has a copy.",
            fix=f"apply, params = fzero.functionalize(model); make the state of `params`, and call "
            f"{name}({'apply' if name == 'evaluate' else 'loss'}, state)(x), with a function that "
            "calls apply(params, x).",
        )


def unknown_option(name: str, option: str, known: Iterable[str], usage: str = "") -> CallError:
    """Return the error for a keyword that a function does not have, and the nearest that it has."""
    known = [key for key in known if not key.startswith("_")]
    near = [_ELSEWHERE[option]] if _ELSEWHERE.get(option) in known else []
    near = near or difflib.get_close_matches(option, known, n=1)
    fix = f"write {near[0]}=." if near else f"call it as {usage or name + '(...)'}; its options "
    fix += "" if near else f"are {', '.join(sorted(known))}."
    return CallError(
        f"{name} got an unexpected keyword argument {option!r}.",
        cause="a misspelt option, or one of another function.",
        fix=fix,
    )


_ELSEWHERE = {
    "wd": "weight_decay",
    "decay": "weight_decay",
    "learning_rate": "lr",
    "step_size": "lr",
    **dict.fromkeys(("beta1", "beta2", "b1", "b2"), "betas"),
    "epsilon": "eps",
    "mom": "momentum",
    "mask": "decay_mask",
    "accum_steps": "steps",
}
"""{what other libraries call an option: its name}, where no letters show it."""
