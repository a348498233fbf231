"""`apply_gradients`: reduced gradients -> the optimizer -> new parameters, placed as before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.collectives import about
from fzero.machine.offload import at_home
from fzero.machine.owners import owners_of
from fzero.machine.parts import cut, gather_parts, gather_parts_in_place
from fzero.optim.visible import as_one_step, is_seen
from fzero.state import Buffers, Slot, TrainState, buffers, progress
from fzero.state.form import settled, undone
from fzero.transforms.agree import Agreed, agree, nonfinite, reduce_agreed, require_held
from fzero.transforms.donation import check_alive, donates, take_over, undo_take_over
from fzero.transforms.observe import tell
from fzero.transforms.outer import after_local_update
from fzero.transforms.points import Running, reduced, renewed, transforms_of
from fzero.transforms.prepare import fulls_of, is_general, prepared, scaled
from fzero.transforms.scaled import after_update, found_inf, unless_overflow, with_value
from fzero.transforms.states import S, flatten_states
from fzero.transforms.stepping import Stepping
from fzero.transforms.weights import NOTHING, is_nothing, total_weight
from fzero.transforms.written import require_unwritten, returned


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
        check_alive(one)
        require_unwritten(one, optimizer=True)
    states = [with_value(one) for one in states]
    due = [one for one in states if not one.setup.policy.defer_update]
    said = agree("apply_gradients", due, updates=True)
    require_held(said, "apply_gradients")
    if bad := nonfinite(states, treespec, said):
        raise bad
    rest = iter(said)
    made = [_apply(one, rest) for one in states]
    returned(*made)
    new: Any = optree.tree_unflatten(treespec, made)
    return new


def _apply(state: TrainState, said: Iterator[Agreed]) -> TrainState:
    if state.setup.policy.defer_update:
        return state.replace(progress=progress.defer_update(state.progress))
    return update(reduce_agreed(state, next(said)))[0]


class _Decided(NamedTuple):
    """What is known of an update before it is made."""

    total: Tensor | None  # of weights
    general: bool  # whether it is to be differentiated, mapped or traced
    found: Tensor | None  # whether there was an overflow, with a loss scale
    skips: bool  # whether the optimizer leaves an overflowing update out by itself
    empty: bool  # the total weight is 0
    kept: bool  # nothing is stepped


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

    The host reads no overflow if the optimizer `skips`, or if the update is differentiated or
    traced; else it reads one number.
    """
    state = with_value(state)
    decided = _decided(state)

    def all_of_it() -> tuple[TrainState, Tensor | None]:
        new, norm = _updated(state if begin is None else begin(), decided, unused)
        if end is not None:
            end(new)
        return new, norm

    if decided.kept or decided.general:  # the latter torch.optim refuses
        return all_of_it()
    shown = decided.found if decided.skips else None
    return as_one_step(state.setup.optimizer.of_torch, all_of_it, found_inf=shown)


def _decided(state: TrainState) -> _Decided:
    total = total_weight(state)
    means = buffers.require_reduced(state.gradients)
    general = is_general(state, means.flats)
    empty = is_nothing(state, total, general=general)
    tell("reduced", state, (means, total))
    found = None if state.scale is None else found_inf(state, means, state.scale)
    skips = found is not None and not general and _skips(state)
    kept = empty or (found is not None and not skips and not general and bool(found))
    return _Decided(total, general, found, skips, empty, kept)


def _updated(
    state: TrainState, decided: _Decided, unused: Sequence[int]
) -> tuple[TrainState, Tensor | None]:
    after = progress.saw_update(state.progress)
    total, general, found, skips, empty, kept = decided
    held = buffers.require_reduced(state.gradients)
    ready = prepared(state, held, total, divides=skips)
    ready = tell("prepared", state, ready, default=ready)
    running = Running(state, general=general)
    try:
        gradients = ready.gradients if kept else reduced(running, ready.gradients)
        slots = running.state.slots  # those that stay where a transform skips the update
        left_out = running.skipped
        kept = kept or left_out is True
        advance = partial(_advance, state, running, unused=unused)
        if kept:
            if empty:
                warnings.warn(NOTHING, UserWarning, stacklevel=3)
            params, optimizer = _kept(state)
        elif general and found is not None:
            params, optimizer = _where_finite(state, gradients, found, running)
        else:
            told = (found, ready.grad_scale) if skips else None
            params, optimizer = advance(gradients, general=general, told=told)
    except BaseException:
        if ready.in_place and donates(state):
            undo_take_over(state.gradients, scaled(state, ready.gradients, 1 / ready.factor))
        raise
    new = state.replace(
        params=params,
        optimizer=optimizer,
        gradients=Buffers(),
        progress=after,
        setup=state.setup.with_weights(False),
        slots=settled(running.state.slots, found),
        **after_update(state, found),
    )
    if general and found is not None:
        new = new.replace(slots=unless_overflow(found, undone(state.slots), new.slots))
    if left_out is not False:
        new = _left_out(state, new, slots, left_out)
    elif empty:
        new = new.replace(step=state.step, scale=state.scale)
    elif total is not None and general:
        new = _where_counted(state, new, total)
    new = renewed(after_local_update(new, general=general), "update")
    new = tell("updated", new, found, default=new)
    return new if general else at_home(new), ready.norm


def _left_out(
    old: TrainState, new: TrainState, slots: dict[str, Slot], flag: Tensor | bool
) -> TrainState:
    """Return the state after an update that transforms have left out: it has `slots`.

    flag: whether they have, [] where that cannot be read.
    """
    if flag is True:
        return new.replace(step=old.step, slots=undone(slots))
    skips = torch.as_tensor(flag, dtype=torch.float32, device=old.device)
    before = old.params, old.optimizer, old.step, undone(slots)
    after = new.params, new.optimizer, new.step, new.slots
    params, optimizer, step, kept = unless_overflow(skips, before, after)
    return new.replace(params=params, optimizer=optimizer, step=step, slots=kept)


def _where_counted(old: TrainState, new: TrainState, total: Tensor) -> TrainState:
    """Return `new`, with all that an update changes as it was where the total weight is 0."""
    before = old.params, old.optimizer, old.step, old.scale, settled(old.slots)
    after = new.params, new.optimizer, new.step, new.scale, new.slots
    empty = (total == 0).to(torch.float32)
    params, optimizer, step, scale, slots = unless_overflow(empty.to(old.device), before, after)
    return new.replace(params=params, optimizer=optimizer, step=step, scale=scale, slots=slots)


def _skips(state: TrainState) -> bool:
    """Whether the optimizer skips an overflowing update by itself, without a host read.

    Not if hooks or transforms would see a step: a skipped update is none, so the host must know.
    """
    if any(transforms_of(state.setup, point) for point in ("reduced", "update", "updated")):
        return False
    rule = state.setup.optimizer
    seen = any(is_seen(bound.instance) for bound in rule.of_torch)
    return not seen and rule.skips(fulls_of(state), state.optimizer)


def _kept(state: TrainState) -> tuple[Buffers, Any]:
    """The parameters and the optimizer state of a skipped update: the old ones, used up as ever."""
    held: Any = (state.params, state.optimizer)
    return take_over(held) if donates(state) else held


def _where_finite(
    state: TrainState, gradients: Buffers, found: Tensor, running: Running
) -> tuple[Buffers, Any]:
    """Compute the update by formulas; keep the old values where there was an overflow."""
    # Zeros in the place of infinities: what is not chosen must have finite derivatives, too.
    zeroed = (torch.where(found != 0, torch.zeros_like(g), g) for g in gradients.flats)
    finite = Buffers(flats=tuple(zeroed), placement=gradients.placement)
    made: Any = _advance(state, running, finite, general=True)
    return unless_overflow(found, (state.params, state.optimizer), made)


def _advance(
    state: TrainState,
    running: Running,
    gradients: Buffers,
    *,
    general: bool,
    told: tuple[Tensor | None, Tensor | None] | None = None,
    unused: Sequence[int] = (),
) -> tuple[Buffers, Any]:
    """Run the optimizer, and what transforms do around and after it, on this rank's shards.

    Then make the parameters whole again. told: (found_inf, grad_scale), for an optimizer that
    `skips`.
    """
    setup, layout = state.setup, state.setup.layout
    owned = donates(state)
    held, optimizer = state.params, state.optimizer
    if owned:  # from here on the old state is used up
        held, optimizer = take_over(held), take_over(optimizer)
    fulls = [held.flats[i] for i in layout.trainable]
    whole, part = setup.params, setup.optimizer_state
    splits = part is not whole
    shards = [cut(setup, full, whole, part) for full in fulls] if splits else fulls
    options: dict[str, Any] = {"differentiable": general, "owned": owned}
    if not setup.offload.neutral:
        options["device"] = state.device
    if unused:
        options["unused"] = frozenset(layout.leaves[i].path for i in unused)
    if (owners := owners_of(setup)) is not None:
        options["owners"] = owners.at(fulls if setup.stage in (1, 2) else (), state.device)
    if told is not None:
        options["found_inf"], options["grad_scale"] = told
    placed = state.replace(params=held, optimizer=optimizer)
    stepping = Stepping(placed, running, shards, options)
    try:
        new, optimizer = stepping.made(gradients)
    except BaseException:
        undo_take_over((state.params, state.optimizer), (held, optimizer))
        stepping.undo()
        raise
    if splits and setup.axis.size > 1:
        with about(lambda: layout.paths(layout.trainable)):
            if owned:  # the shards were written where they stand
                wanted = [full for full in fulls if full.numel()]
                gather_parts_in_place(setup, wanted, part, whole)
                new = fulls
            else:
                new = gather_parts(setup, new, part, whole)
    flats = list(held.flats)
    for i, flat in zip(layout.trainable, new, strict=True):
        flats[i] = flat
    return Buffers(flats=tuple(flats), placement=held.placement), optimizer
