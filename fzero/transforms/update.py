"""`apply_gradients`: reduced gradients -> the optimizer -> new parameters, placed as before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.collectives import about
from fzero.machine.packing import cut, gather_parts, gather_parts_in_place
from fzero.optim.step_hooks import as_one_step, is_seen
from fzero.state import Buffers, TrainState, buffers, progress
from fzero.state.points import Points
from fzero.state.slots import settled
from fzero.transforms.backward_pass import (
    agree,
    reduce_agreed,
    refused,
    require_held,
    serving_pulls,
)
from fzero.transforms.donation import check_alive, donates, returned, take_over, undo_take_over
from fzero.transforms.leaf_slices import Prepared, fulls_of, given_back, is_general, pieces_of
from fzero.transforms.models import S, call_of_states, flatten_states
from fzero.transforms.points import Running, transforms_of
from fzero.transforms.recipe import begun, recipe_of


@torch._disable_dynamo
def apply_gradients(state: S) -> S:
    """Return the state after one update: p' = p + update(mean gradient), step' = step + 1.

    A pending window is reduced first (once) and stays open if it was; gradients are clipped as
    an enclosing `fzero.clip` asks; then they are cleared. Inside `fzero.accumulate` the update
    waits for the last micro-batch. `state` may be a pytree of states. A gradient of zero is a
    gradient, as in JAX: weight decay and momentum act on a leaf that no loss has used. A rank that
    holds nothing in a window counts as zero in the mean; gradients of any rank are enough.

    With a loss scale (`fzero.scale_loss`) gradients are divided by it first. An infinity or a NaN
    in them, on any rank, skips the update on every one: parameters, optimizer and `step` stay as
    they are, bit for bit, gradients are cleared, and the scale falls as its policy says. Each state
    of a pytree is skipped, or not, by its own gradients.

    Raises `MismatchError` on every rank if the ranks differ in options, optimizers or their rates,
    `PhaseError` if the state holds no gradients (also on a second call), `DonatedError`
    if it was used up, `NonFiniteError` on every rank if `fzero.check_finite` found any. With
    donation the update is made in the state's own buffers, which uses the state up; before that
    moment an error leaves it whole.

    Example:
        >>> import torch, fzero
        >>> state = fzero.init({"w": torch.tensor([3.0])}, fzero.optim.sgd(0.5), stage=0)
        >>> state, _ = fzero.grad_and_reduce(lambda p: (p["w"] ** 2).sum(), state)()
        >>> fzero.full_params(fzero.apply_gradients(state))
        {'w': tensor([0.])}
    """
    states, treespec = flatten_states("apply_gradients", state)
    for one in states:
        check_alive(one, optimizer=True)
    states = [begun(one) for one in states]
    due = [one for one in states if not one.setup.policy.defer_update]
    with serving_pulls(due, ends=True) as now:
        said = agree(call_of_states("apply_gradients", treespec), due, updates=True, now=now)
        served = iter(due if now is None else now())
    states = [one if one.setup.policy.defer_update else next(served) for one in states]
    require_held(said, "apply_gradients", treespec)
    if error := refused(states, treespec, said):
        raise error
    rest = iter(said)
    made: list[TrainState] = []
    for one in states:
        if one.setup.policy.defer_update:
            made.append(one.replace(progress=progress.defer_update(one.progress)))
        else:
            made.append(update(reduce_agreed(one, next(rest)))[0])
    returned(made, name="apply_gradients", given=states)
    new: Any = optree.tree_unflatten(treespec, made)
    return new


def update(
    state: TrainState,
    unused: Sequence[int] = (),
    *,
    begin: Callable[[], TrainState] | None = None,
    end: Callable[[TrainState], None] | None = None,
) -> tuple[TrainState, Tensor | None]:
    """Return the state after one update from its reduced gradients, and their norm if clipped.

    unused: leaves of the layout that are left as they are, with all that the optimizer keeps for
    them: the same on every rank. `step` and the optimizer's number of updates go on.

    It is one `step()` of an optimizer of torch.optim. After its pre hooks the update goes on from
    the state that `begin` returns, where hooks may write to gradients; `end` is given the state
    after it, before its post hooks. Where nothing is stepped (an overflow, no weight), none run.

    Both drivers come here: no rank is asked, what waited is reduced. Raises `PhaseError` if there
    are no gradients. If the optimizer raises, the state is as it was.

    The host reads no overflow if the rule looks for it itself, or if the update is differentiated
    or traced; else it reads one number.
    """
    state = begun(state)
    means = buffers.require_reduced(state.gradients)
    running = Running(state, state, is_general(state, means.flats), Prepared(means))
    for decides in recipe_of(state).decides:
        decides(running, means)
    if running.skips:
        running.read(lambda: _leaves_out(state))
    make = partial(_updated, running, unused, begin, end)
    bounds = state.setup.optimizer.of_torch
    if not bounds or running.kept or running.general:  # the latter torch.optim refuses
        return make()
    return as_one_step(bounds, make, found_inf=running.overflow if running.by_rule else None)


def _leaves_out(state: TrainState) -> bool:
    """Whether the optimizer skips an overflowing update by itself, without a host read.

    Not if hooks or transforms would see a step: a skipped update is none, so the host must know.
    """
    for point in ("reduced", "update", "updated"):
        if any(isinstance(one, Points) for one in transforms_of(state.setup, point)):
            return False
    rule = state.setup.optimizer
    seen = any(is_seen(bound.instance) for bound in rule.of_torch)
    return not seen and rule.skips(fulls_of(state), state.optimizer)


def _updated(
    running: Running,
    unused: Sequence[int],
    begin: Callable[[], TrainState] | None,
    end: Callable[[TrainState], None] | None,
) -> tuple[TrainState, Tensor | None]:
    if begin is not None:
        running.old = begin()
        running.put(running.old.replace(slots=running.state.slots))
    state, recipe = running.old, recipe_of(running.old)
    after = progress.saw_update(state.progress)
    running.ready = Prepared(buffers.require_reduced(state.gradients))
    try:
        for units in recipe.units:
            running.ready = units(running, running.ready)
        for hands_on in recipe.ready:
            running.ready = hands_on(running, running.ready)
        if running.skipped is not False:
            running.leave_out(running.skipped)
        if running.kept:
            for text in dict.fromkeys(one.says for one in running.skips if one.known and one.says):
                warnings.warn(text, UserWarning, stacklevel=3)
            held: Any = (state.params, state.optimizer)
            params, optimizer = take_over(held) if donates(state) else held  # used up as ever
        else:
            params, optimizer = _stepped(running, unused)
    except BaseException:
        given_back(state, running.ready)
        raise
    slots = running.state.slots
    new = state.replace(
        params=params,
        optimizer=optimizer,
        gradients=Buffers(),
        progress=after,
        setup=state.setup.idle,
        slots=settled(slots, running.lost()) if slots else slots,
        window=progress.after_update(state.window),
        step=state.step + 1,
    )
    if running.skips:
        new = running.selected(new)
    for change in recipe_of(new).updated:
        new = change(running, new)
    if end is not None:
        end(new)
    return new, running.ready.norm


def _stepped(running: Running, unused: Sequence[int]) -> tuple[Buffers, Any]:
    """Run the optimizer, and what transforms do around and after it, on this rank's shards.

    Then make the parameters whole again.
    """
    state, gradients = running.old, running.ready.gradients
    setup, layout = state.setup, state.setup.layout
    if running.general and (overflow := running.overflow) is not None:
        # Zeros in the place of infinities: what is not chosen must have finite derivatives, too.
        zeroed = (torch.where(overflow != 0, torch.zeros_like(g), g) for g in gradients.flats)
        gradients = Buffers(flats=tuple(zeroed), placement=gradients.placement)
    owned = donates(state)
    held, optimizer = state.params, state.optimizer
    if owned:  # from here on the old state is used up
        held, optimizer = take_over(held), take_over(optimizer)
    fulls = [held.flats[i] for i in layout.trainable]
    whole, part = setup.params, setup.optimizer_state
    splits = part is not whole
    shards = [cut(setup, full, whole, part) for full in fulls] if splits else fulls
    options: dict[str, Any] = {"differentiable": running.general, "owned": owned}
    if unused:
        options["unused"] = frozenset(layout.leaves[i].path for i in unused)
    if layout.options.block > 1:
        options["apart"] = True
    for told in recipe_of(state).rule:
        options |= told(state, fulls)
    if running.by_rule:  # it looks for an overflow itself
        options["found_inf"], options["grad_scale"] = running.overflow, running.ready.grad_scale
    step = setup.optimizer.advance
    for around in recipe_of(state).around:
        placed = state.replace(params=held, optimizer=optimizer)
        step = partial(around, running, placed)
    try:
        new, optimizer = step(shards, gradients.flats, optimizer, pieces_of(setup), **options)
    except BaseException:
        undo_take_over((state.params, state.optimizer), (held, optimizer))
        raise
    if splits and setup.axis.size > 1:
        with about(lambda: layout.paths(layout.trainable)):
            if owned:  # the shards stand in what is gathered; a kernel has written there
                for shard, made in zip(shards, new, strict=True):
                    if made is not shard:
                        shard.copy_(made)
                wanted = [full for full in fulls if full.numel()]
                gather_parts_in_place(setup, wanted, part, whole)
                new = fulls
            else:
                new = gather_parts(setup, new, part, whole)
    flats = list(held.flats)
    for i, flat in zip(layout.trainable, new, strict=True):
        flats[i] = flat
    return Buffers(flats=tuple(flats), placement=held.placement), optimizer
