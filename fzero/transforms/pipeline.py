"""`Step`: a function that transforms have been put around, printable and in checked order."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

import torch

from fzero.context.modes import LEFT
from fzero.errors import LayoutError, PhaseError
from fzero.errors.check import refuse_module
from fzero.state import TrainState
from fzero.transforms import donation

P = ParamSpec("P")  # the arguments of a step
R = TypeVar("R")  # what it returns
Options = ParamSpec("Options")  # the options of a transform
S = TypeVar("S")  # the state, or a pytree of states, that it is given
ParamsT = TypeVar("ParamsT")  # the pytree of parameters of a state
Around = Callable[..., Any]  # (inner, state, *args, **kwargs) -> what inner returns


class Step(Generic[P, R]):
    """`around(fn)`: calls like `fn`, prints as `name(options) . fn`, gives `init` if it shards.

    Immutable; `inner` is what it was put around, `__wrapped__` too. To a type checker it has the
    arguments and the result of `fn`. `init_options` are options that a state for it is made with.
    """

    __slots__ = (
        "__dict__",
        "_around",
        "_init",
        "_prepare",
        "_told",
        "init_options",
        "inner",
        "name",
        "options",
    )

    def __init__(
        self,
        name: str,
        inner: Callable[P, R],
        around: Around,
        *,
        options: dict[str, Any],
        init: Callable[..., Any] | None = None,
        init_options: Mapping[str, Any] | None = None,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        require_function(name, inner)
        self.name, self.inner, self.options = name, inner, options
        self._around, self._init, self._prepare = around, init, prepare
        self.init_options, self._told = dict(init_options or {}), False
        functools.update_wrapper(self, inner, updated=())

    @torch._disable_dynamo
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the transformed function, with its own calling convention.

        Warns, once, of an update or gradients that it makes and drops.
        """
        noted = donation.HERE.begin()
        if noted is None:  # inside of another step
            return self._around(self.inner, *args, **kwargs)
        try:
            result = self._around(self.inner, *args, **kwargs)
            left = donation.left_by(noted, result)
            if LEFT:
                next(reversed(LEFT.values()))(result)
        except Exception as error:
            if LEFT:
                next(reversed(LEFT.values()))(error)
            raise
        finally:
            donation.HERE.end()
        if left is not None and not self._told:
            self._told = True
            donation.warn_of(left, describe_function(self.inner))
        return result

    @overload
    def init(self: Step[P, tuple[S, Any]], params: Any, optimizer: Any, **options: Any) -> S: ...
    @overload
    def init(self, params: Any, optimizer: Any, **options: Any) -> Any: ...
    def init(self, params: Any, optimizer: Any, **options: Any) -> Any:
        """Return a new state for this step, partitioned as its `fzero.shard` says.

        Args:
            params: as in `fzero.init`; inside of `simulate` whole ones, that all ranks are given.
            optimizer: as in `fzero.init`.
            options: others of `fzero.init`, such as `initializer`.

        Returns:
            A state; a pytree of them if the stage or the optimizer is one; stacked [W, ...] by
            `simulate`. A collective.

        Raises:
            PhaseError: if there is no `fzero.shard` in the step.
            LayoutError: as `fzero.init` does.
            AxisError: as `fzero.init` does.
        """
        init = self.find_init() or init_of_object(self.steps()[-1].inner)
        if init is None:
            raise PhaseError(
                f"{self!r} has no init: nothing in it says how to shard.",
                cause="`fzero.shard` is missing.",
                fix="wrap it: fzero.shard(step, stage=...), or call fzero.init(...).",
            )
        return self.prepared(init(params, optimizer, **options))

    def prepared(self, state: Any) -> Any:
        """Return a new state with the fields that the transforms of this step set in theirs."""
        for one in reversed(self.steps()):
            state = state if one._prepare is None else one._prepare(state)
        return state

    def steps(self) -> list[Step[..., Any]]:
        """Return this step and those inside of it, from the outside in."""
        found, one = list[Step[..., Any]](), cast("Any", self)
        while isinstance(one, Step):
            found.append(one)
            one = one.inner
        return found

    def find_init(self) -> Callable[..., Any] | None:
        """Return the init of the outermost transform that has one."""
        return next((one._init for one in self.steps() if one._init is not None), None)

    def names(self) -> list[str]:
        """Return the transforms from the outside in."""
        return [one.name for one in self.steps()]

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        head = f"{self.name}({shown})" if shown else self.name
        return f"{head} . {describe_function(self.inner)}"


class Transform(Protocol):
    """A transform that has its options and waits for its function: what `@clip(...)` applies."""

    def __call__(self, fn: Callable[P, R], /) -> Step[P, R]:
        """Return the step."""
        ...


class TransformFunction(Protocol[Options]):
    """A function such as `clip`: of a step, or of its options alone, when it makes a decorator."""

    @overload
    def __call__(
        self, fn: Callable[P, R], /, *args: Options.args, **options: Options.kwargs
    ) -> Step[P, R]: ...
    @overload
    def __call__(self, *args: Options.args, **options: Options.kwargs) -> Transform: ...


def transform_function(
    fn: Callable[Concatenate[Any, Options], Any],
) -> TransformFunction[Options]:
    """Tell type checkers in which two ways a transform is called. `fn` is returned as it is."""
    return cast("Any", fn)


def describe_function(fn: Any) -> str:
    """Return how a function shows in a pipeline."""
    if isinstance(fn, Step):
        return repr(fn)
    return getattr(fn, "__name__", type(fn).__name__)


def init_options_of(fn: Any) -> dict[str, Any]:
    """Return the options of `fzero.init` that the transforms of `fn` ask for."""
    found: dict[str, Any] = {}
    for one in reversed(fn.steps()) if isinstance(fn, Step) else ():
        # The one option of which several transforms ask for a part: from the inside out.
        more = (*found.get("transforms", ()), *one.init_options.get("transforms", ()))
        found |= one.init_options | ({"transforms": more} if more else {})
    return found


def init_of_object(fn: Any) -> Callable[..., Any] | None:
    """Return the method `init` of an object that is called as a step; None if it has none."""
    own = getattr(fn, "init", None)
    return own if callable(own) else None


def names_inside(fn: Any) -> list[str]:
    """Return the names of the transforms that `fn` already has, from the outside in."""
    return fn.names() if isinstance(fn, Step) else []


def transform(
    name: str,
    fn: Callable[..., Any] | None,
    around: Around,
    *,
    never_around: tuple[str, ...],
    right: str,
    options: dict[str, Any],
    init_of: Callable[[Any], Callable[..., Any]] | None = None,
    init_options: Mapping[str, Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
) -> Step[..., Any] | Transform:
    """Return the step around(fn); without `fn`, a decorator that returns the step.

    never_around, right: see `require_order`. init_of: (fn) -> the init of the step.
    """

    def wrap(inner: Callable[..., Any]) -> Step[..., Any]:
        refuse_module(name, inner)
        require_order(name, inner, never_around=never_around, right=right)
        return Step(
            name,
            inner,
            around,
            options=options,
            init=init_of and init_of(inner),
            init_options=init_options,
            prepare=prepare,
        )

    return wrap if fn is None else wrap(fn)


def entering(name: str, enter: Callable[[Any], Any]) -> Around:
    """Return what calls a step with what `enter` makes of its states."""

    def around(
        inner: Callable[..., Any], state: Any, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        return returned_pair(name, inner, inner(enter(state), *args, **kwargs))

    return around


def require_function(name: str, fn: Any) -> None:
    """Raise `LayoutError` if the transform `name` is given something else."""
    if not callable(fn):
        raise LayoutError(
            f"fzero.{name} got a {type(fn).__name__}, not a function.",
            cause="options were passed by position, or a state in place of the step.",
            fix=f"write fzero.{name}(step_fn, ...) or @fzero.{name}(...).",
        )


def require_order(name: str, fn: Any, *, never_around: tuple[str, ...], right: str) -> None:
    """Raise `LayoutError` if `fn` has a transform that `name` cannot be put around."""
    for inside in names_inside(fn):
        if inside in never_around:
            raise LayoutError(
                f"fzero.{name} around {describe_function(fn)}.",
                cause=f"{name} was put around {inside}, where it cannot be right.",
                fix=f"write {right}.",
            )


def returned_pair(name: str, fn: Any, returned: Any) -> tuple[Any, Any]:
    """Return (state, aux), or raise `LayoutError` if a step did not return such a pair."""
    if isinstance(returned, tuple) and len(returned) == 2:
        if not isinstance(returned[1], TrainState) or isinstance(returned[0], TrainState):
            return returned
        raise LayoutError(
            f"{name}: {describe_function(fn)} returned ({type(returned[0]).__name__}, TrainState), "
            "not (state, aux).",
            cause="the loss before the state: a step returns the state first, as lax.scan does.",
            fix="end it with `return state, loss`.",
        )
    kind, cause = type(returned).__name__, "the step returned only the state, or only the loss."
    fix = "end it with `return state, loss` (or `return state, None`)."
    if isinstance(returned, tuple):
        kind += f" of {len(cast('tuple[Any, ...]', returned))}"
        cause = "more, or less, than a state and one value beside it."
        fix = "put all that is not the state into one: `return state, (loss, accuracy)`."
    elif isinstance(returned, Coroutine | AsyncGenerator | Generator):
        cause = "an async function, or one with a `yield`, as the step: it has not run yet."
        fix = "write it with `def` and `return state, loss`; wait for data before it is called."
        returned.close() if not isinstance(returned, AsyncGenerator) else None
    elif callable(returned):
        cause = "a function that was not called, such as grad_and_reduce(loss, state)."
        fix = "call it on the batch: state, loss = grad_and_reduce(loss_fn, state)(batch)."
    raise LayoutError(
        f"{name}: {describe_function(fn)} returned a {kind}, not (state, aux).",
        cause=cause,
        fix=fix,
    )
