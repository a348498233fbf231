"""One update is one `step()` of a torch.optim optimizer, for whoever has put something around it.

    optimizer.step()              as a scheduler, a profiler or the user has wrapped it
        step pre hooks            of all optimizers, and of this one: its parameters are the user's
            the update            all of it: the rule steps parts, as often as it has to, `silent`
        step post hooks

The rule of a class runs on flats, on parts of them and on whole parameters of an owner, one after
the other; none of these is a step that anybody asked for.

bound: a `torch_probe.Bound` in all that follows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fzero.context.current_rank import current_ranks, is_abstract
from fzero.errors import PhaseError

T = TypeVar("T")
Update = Callable[[], T]

_ranks_of: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()


def as_one_step(bounds: Sequence[Any], update: Update[T], *, found_inf: Tensor | None = None) -> T:
    """Run an update as the `step()` of these optimizers, each once; return what it returns.

    found_inf: what they show meanwhile as `found_inf`, as under `torch.amp.GradScaler`.

    Raises `PhaseError` if a wrapper of `step` does not come to it, or twice. Nothing is visible of
    the update of an abstract rank, which is planned or traced.
    """
    if is_abstract():
        return update()
    for bound in reversed(bounds):
        update = partial(_shared, bound, update, found_inf)
    return update()


def bound_here(instance: Optimizer) -> None:
    """Note that this rank steps an optimizer: virtual ranks may share one."""
    here = current_ranks()
    if here is not None and not is_abstract():
        _ranks_of.setdefault(instance, set()).add(here.rank)


def _shared(bound: Any, update: Update[T], found_inf: Tensor | None) -> T:
    """Of virtual ranks that share an optimizer the first one makes the step that is seen.

    All others compute between its hooks: what those change holds for all ranks alike.
    """
    here = current_ranks()
    sharing = _ranks_of.get(bound.instance, set())
    if here is None or not {*range(here.size)} <= sharing or here.size == 1:
        return _seen(bound, update, found_inf)

    def together() -> T:
        here.exchange("optimizer.step() begins", None, bool)
        made = update()
        here.exchange("optimizer.step() ends", None, bool)
        return made

    made = together() if here.rank else _seen(bound, together, found_inf)
    here.exchange("optimizer.step() is over", None, bool)
    return made


def _seen(bound: Any, update: Update[T], found_inf: Tensor | None) -> T:
    instance = bound.instance
    with shown_attributes(instance, found_inf=found_inf):
        if is_wrapped(instance):
            return _wrapped(bound, update)
        note_step(instance)
        hooked: Any = Optimizer.profile_hook_step(lambda *_, **__: update())
        return hooked(instance)


def _wrapped(bound: Any, update: Update[T]) -> T:
    """Call `step` of an optimizer, which somebody has wrapped.

    What the wrapper has hold of is the function of the class. So the update is made by the last
    pre hook; the function then steps a copy that has nothing to step.
    """
    instance, made = bound.instance, list[T]()
    nobody: Any = None

    def last(_: Any, args: Any, kwargs: Any) -> Any:
        nonlocal nobody
        if made:
            raise _not_once(instance, "called it twice")
        made.append(update())
        nobody = none_of_all()
        nobody.__enter__()
        return (bound.idle(), *args[1:]), kwargs

    def first(*_: Any) -> None:
        nonlocal nobody
        if nobody is not None:
            nobody.__exit__(None, None, None)
            nobody = None

    handles = [instance.register_step_pre_hook(last), instance.register_step_post_hook(first)]
    vars(instance)[HOOKS[1]].move_to_end(handles[1].id, last=False)
    try:
        # A compiled step would compile the update of all ranks: it runs as it was before.
        getattr(instance.step, "_torchdynamo_orig_callable", instance.step)()
    finally:
        first()
        for handle in handles:
            handle.remove()
    if not made:
        raise _not_once(instance, "did not call it")
    return made[0]


def _not_once(instance: Optimizer, seen: str) -> PhaseError:
    return PhaseError(
        f"{type(instance).__name__}.step was replaced by something that {seen}.",
        cause="a wrapper that steps on a condition, or several times. An update is one step, which "
        "all ranks make.",
        fix="decide before engine.step(), or apply_gradients, on every rank alike; "
        "engine.zero_grad() leaves an update out.",
    )


# A step that nobody sees

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


def shown_attributes(instance: Any, **values: Tensor | None) -> AbstractContextManager[None]:
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
