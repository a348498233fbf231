"""One update is one `step()` of a torch.optim optimizer, for whoever has put something around it.

    optimizer.step()              as a scheduler, a profiler or the user has wrapped it
        step pre hooks            of all optimizers, and of this one: its parameters are the user's
            the update            all of it: the rule steps parts, as often as it has to, `silent`
        step post hooks

The rule of a class runs on flats, on parts of them and on whole parameters of an owner, one after
the other; none of these is a step that anybody asked for.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fzero.context.here import current_ranks, is_abstract
from fzero.errors import PhaseError
from fzero.optim._bind import Bound
from fzero.optim._silent import HOOKS, is_wrapped, none_of_all, note_step, told
from fzero.optim._silent import has_pre_hooks as has_pre_hooks
from fzero.optim._silent import is_seen as is_seen

T = TypeVar("T")
Update = Callable[[], T]

_ranks_of: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()


def as_one_step(
    bounds: Sequence[Bound], update: Update[T], *, found_inf: Tensor | None = None
) -> T:
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


def _shared(bound: Bound, update: Update[T], found_inf: Tensor | None) -> T:
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


def _seen(bound: Bound, update: Update[T], found_inf: Tensor | None) -> T:
    instance = bound.instance
    with told(instance, found_inf=found_inf):
        if is_wrapped(instance):
            return _wrapped(bound, update)
        note_step(instance)
        hooked: Any = Optimizer.profile_hook_step(lambda *_, **__: update())
        return hooked(instance)


def _wrapped(bound: Bound, update: Update[T]) -> T:
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
        return (_idle(bound), *args[1:]), kwargs

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


def _idle(bound: Bound) -> Optimizer:
    """Return a copy of an optimizer that steps nothing of anybody's: what its experiment stepped.

    One parameter, for many rules take no empty list.
    """
    instance, idle = bound.instance, object.__new__(type(bound.instance))
    vars(idle).update(vars(instance))
    vars(idle).update({name: OrderedDict() for name in HOOKS})
    for name in ("found_inf", "grad_scale"):  # for a fused kernel, which there is none of
        vars(idle).pop(name, None)
    idle.state, idle.param_groups = defaultdict(dict), []
    for (number, dtype, shape), kept in [*bound.kept.items()][:1]:
        p = nn.Parameter(torch.ones(shape, dtype=dtype, device=bound.devices[number]))
        p.grad = torch.ones_like(p)
        idle.state.update({} if kept.late else {p: copy.deepcopy(kept.sample)})
        idle.param_groups.append({**instance.param_groups[number], "params": [p]})
    return idle


def _not_once(instance: Optimizer, seen: str) -> PhaseError:
    return PhaseError(
        f"{type(instance).__name__}.step was replaced by something that {seen}.",
        cause="a wrapper that steps on a condition, or several times. An update is one step, which "
        "all ranks make.",
        fix="decide before engine.step(), or apply_gradients, on every rank alike; "
        "engine.zero_grad() leaves an update out.",
    )
