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
from fzero.context.modes import in_transform, is_recorded, wants_graph
from fzero.machine.offload import at_home, change, offloaded, to_device
from fzero.machine.owners import owners_of
from fzero.machine.parts import cut, gather_parts, gather_parts_in_place
from fzero.optim import require_ordered
from fzero.state import Buffers, TrainState, buffers, progress
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.scale import multiplier
from fzero.transforms.agree import Agreed, agree, nonfinite, reduce_agreed, require_held
from fzero.transforms.donation import check_alive, donates, take_over, undo_take_over
from fzero.transforms.norm import clip_factor, norm_of
from fzero.transforms.observe import tell
from fzero.transforms.outer import after_local_update
from fzero.transforms.pieces import pieces_of
from fzero.transforms.scaled import (
    after_update,
    found_inf,
    unless_overflow,
    with_value,
    without_scale,
)
from fzero.transforms.states import S, flatten_states
from fzero.transforms.weights import NOTHING, divisor_of, share, total_weight
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


class _Ready(NamedTuple):
    """Gradients to step from."""

    gradients: Buffers
    factor: Any  # what those of the state were multiplied by, if it was `in_place`
    in_place: bool
    norm: Tensor | None  # before clipping, if they are clipped
    grad_scale: Tensor | None = None  # what the optimizer has still to divide by


def update(state: TrainState, unused: Sequence[int] = ()) -> tuple[TrainState, Tensor | None]:
    """Return the state after one update from its reduced gradients, and their norm if clipped.

    unused: leaves of the layout that are left as they are, with all that the optimizer keeps for
    them: the same on every rank. `step` and the optimizer's number of updates go on.

    Both drivers come here: no rank is asked, what waited is reduced. Raises `PhaseError` if there
    are no gradients. If the optimizer raises, the state is as it was.

    The host reads no overflow if the optimizer `skips`, or if the update is differentiated or
    traced; else it reads one number.
    """
    after = progress.saw_update(state.progress)
    state = with_value(state)
    total = total_weight(state)
    reduced = buffers.require_reduced(state.gradients)
    tell("reduced", state, (reduced, total))
    general = _is_general(state, reduced.flats)
    found = None if state.scale is None else found_inf(state, reduced, state.scale)
    skips = found is not None and not general and _skips(state)
    ready = _prepared(state, reduced, total, divides=skips)
    ready = tell("prepared", state, ready, default=ready)
    advance = partial(_advance, state, ready.gradients.flats, unused=unused)
    empty = total is not None and not general and not float(total)
    try:
        if empty:
            warnings.warn(NOTHING, UserWarning, stacklevel=2)
            params, optimizer = _kept(state)
        elif found is None or skips:
            told = (found, ready.grad_scale) if skips else None
            params, optimizer = advance(general=general, told=told)
        elif general:
            params, optimizer = _where_finite(state, ready.gradients.flats, found)
        elif bool(found):
            params, optimizer = _kept(state)
        else:
            params, optimizer = advance(general=False)
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
        **after_update(state, found),
    )
    if empty:
        new = new.replace(step=state.step, scale=state.scale)
    elif total is not None and general:
        new = _where_counted(state, new, total)
    new = after_local_update(new, general=general)
    new = tell("updated", new, found, default=new)
    return new if general else at_home(new), ready.norm


def _where_counted(old: TrainState, new: TrainState, total: Tensor) -> TrainState:
    """Return `new`, with all that an update changes as it was where the total weight is 0."""
    before = old.params, old.optimizer, old.step, old.scale
    after = new.params, new.optimizer, new.step, new.scale
    empty = (total == 0).to(torch.float32)
    params, optimizer, step, scale = unless_overflow(empty.to(old.device), before, after)
    return new.replace(params=params, optimizer=optimizer, step=step, scale=scale)


def _fulls(state: TrainState) -> list[Tensor]:
    return [state.params.flats[i] for i in state.setup.layout.trainable]


def _is_general(state: TrainState, gradients: Sequence[Tensor]) -> bool:
    """Whether the update is to be differentiated, mapped or traced."""
    fulls = _fulls(state)
    return in_transform() or is_recorded(fulls) or wants_graph([*fulls, *gradients])


def _skips(state: TrainState) -> bool:
    """Whether the optimizer skips an overflowing update by itself, without a host read."""
    return state.setup.optimizer.skips(_fulls(state), state.optimizer)


def _kept(state: TrainState) -> tuple[Buffers, Any]:
    """The parameters and the optimizer state of a skipped update: the old ones, used up as ever."""
    held: Any = (state.params, state.optimizer)
    return take_over(held) if donates(state) else held


def _where_finite(
    state: TrainState, gradients: Sequence[Tensor], found: Tensor
) -> tuple[Buffers, Any]:
    """Compute the update by formulas; keep the old values where there was an overflow."""
    # Zeros in the place of infinities: what is not chosen must have finite derivatives, too.
    finite = [torch.where(found != 0, torch.zeros_like(g), g) for g in gradients]
    made: Any = _advance(state, finite, general=True)
    return unless_overflow(found, (state.params, state.optimizer), made)


def _advance(
    state: TrainState,
    gradients: Sequence[Tensor],
    *,
    general: bool,
    told: tuple[Tensor | None, Tensor | None] | None = None,
    unused: Sequence[int] = (),
) -> tuple[Buffers, Any]:
    """Run the optimizer on this rank's shards, and make the parameters whole again.

    told: (found_inf, grad_scale), for an optimizer that `skips`.
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
    try:
        new, optimizer = setup.optimizer.advance(
            shards, gradients, optimizer, pieces_of(setup), **options
        )
    except BaseException:
        undo_take_over((state.params, state.optimizer), (held, optimizer))
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


def _prepared(state: TrainState, held: Buffers, total: Tensor | None, *, divides: bool) -> _Ready:
    """g factor, factor = share / scale min(1, max_norm / |g share / scale|); the norm if it clips.

    After weighted calls 1 / total takes the place of the share.

    In place where the gradients are used up anyway, and no element is bounded. If the optimizer
    `divides` and nothing is clipped, the scale is left to it.
    """
    max_norm, max_value = state.setup.policy.max_norm, state.setup.policy.max_value
    norm = None
    gradients, in_place, grad_scale = held, True, None
    factor: Any = 1.0
    by = multiplier(state.scale)
    if by is not None and divides and max_norm is None and max_value is None:
        grad_scale = by.scale
    elif by is not None:
        factor = by.scale.double().reciprocal()
        in_place = max_value is None and all(x.dtype not in SIXTEEN_BIT for x in held.flats)
        if in_place:
            gradients = scaled(state, held, factor)
        else:  # 16 bits may not hold them without the scale
            flats = tuple(without_scale(state, flat) for flat in held.flats)
            gradients = Buffers(flats=flats, placement=held.placement)
    if total is not None:
        division = torch.Tensor.div, torch.Tensor.div_
        gradients = _combined(state, gradients, division, partial(divisor_of, total))
        factor = factor / total
    rest: Any = 1.0 if total is not None else share(state)
    if max_value is not None:
        require_ordered("clip: max_value", state.setup.layout.leaves)
        gradients, in_place = _bounded(state, gradients, max_value / rest), False
    if max_norm is not None:
        norm = norm_of(state, gradients.flats, gradients.placement) * rest
        rest = rest * clip_factor(norm, max_norm)
    if isinstance(rest, Tensor) or rest != 1.0:
        gradients, factor = scaled(state, gradients, rest), factor * rest
    in_place = in_place and gradients is not held
    return _Ready(gradients, factor, in_place, norm, grad_scale)


def _bounded(state: TrainState, gradients: Buffers, bound: float) -> Buffers:
    """max(-bound, min(g, bound)), in new memory."""
    flats = tuple(to_device(flat, state.device).clamp(-bound, bound) for flat in gradients.flats)
    return Buffers(flats=flats, placement=gradients.placement)


def scaled(state: TrainState, gradients: Buffers, factor: Tensor | float) -> Buffers:
    """g factor, in place if the state donates."""

    def of(flat: Tensor) -> Any:
        return factor.to(flat.dtype) if isinstance(factor, Tensor) else factor

    return _combined(state, gradients, (torch.Tensor.mul, torch.Tensor.mul_), of)


def _combined(
    state: TrainState,
    gradients: Buffers,
    operations: tuple[Callable[..., Tensor], Callable[..., Tensor]],
    operand: Callable[[Tensor], Any],
) -> Buffers:
    """op(g, operand(g)), by the second of two operations, in place, if the state donates."""
    device, offload = state.device, state.setup.offload
    apart, in_place = operations
    if donates(state):
        owned: Buffers = take_over(gradients)
        for flat in owned.flats:
            change(flat, device, partial(in_place, other=operand(flat)))
        return owned
    general = _is_general(state, gradients.flats)
    home = None if general else offload.gradients
    flats = (apart(to_device(flat, device), operand(flat)) for flat in gradients.flats)
    return Buffers(
        flats=tuple(offloaded(home, flat, offload) for flat in flats), placement=gradients.placement
    )
