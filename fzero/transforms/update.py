"""`apply_gradients`: reduced gradients -> the optimizer -> new parameters, placed as before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.collectives import about
from fzero.machine.offload import to_device, write_back
from fzero.machine.owners import owners_of
from fzero.machine.packing import cut, gather_parts, gather_parts_in_place
from fzero.optim.precision import work_tensors
from fzero.optim.step_hooks import as_one_step, is_seen
from fzero.state import NAMESPACE, Buffers, Setup, TrainState, buffers, progress
from fzero.state.points import Points
from fzero.state.setup import MASTERS
from fzero.state.slots import settled
from fzero.transforms.backward_pass import Agreed, agree, reduce_agreed, refused, require_held
from fzero.transforms.donation import check_alive, donates, returned, take_over, undo_take_over
from fzero.transforms.leaf_slices import Prepared, fulls_of, given_back, is_general, pieces_of
from fzero.transforms.models import S, call_of_states, flatten_states
from fzero.transforms.points import (
    Running,
    keeps_before,
    reduced,
    stepped_by_path,
    stepping,
    transforms_of,
    updated,
)
from fzero.transforms.recipe import begun, recipe_of

# The step of a rule on this rank's shards, with what transforms do around it and after it.


def rule_options(
    setup: Setup, fulls: Sequence[Tensor], device: torch.device, unused: Sequence[int]
) -> dict[str, Any]:
    """Return what a rule is told of where it runs."""
    options: dict[str, Any] = {}
    if setup.is_offloaded:
        options["device"] = device
    if unused:
        options["unused"] = frozenset(setup.layout.leaves[i].path for i in unused)
    if setup.layout.options.block > 1:
        options["apart"] = True
    if (owners := owners_of(setup)) is not None:
        options["owners"] = owners.at(fulls if setup.stage in (1, 2) else (), device)
    return options


class Stepping:
    """One step of the rule of a state, whose parameters and optimizer may be `owned`: written to.

    Where transforms act around it or after it nothing is written before all of them have returned:
    one that raises leaves the state as it was.

    running: the update, whose state has the slots. shards: what a rank has of the flats that learn.
    options: of the rule's `advance`.
    """

    def __init__(
        self,
        state: TrainState,
        running: Running,
        shards: Sequence[Tensor],
        options: dict[str, Any],
    ) -> None:
        self._state, self._running = state, running
        self._shards, self._optimizer = list(shards), state.optimizer
        self._acts = any(transforms_of(state.setup, point) for point in ("update", "updated"))
        self._writes = bool(options["owned"]) and self._acts
        self._options = {**options, "owned": options["owned"] and not self._acts}

    def made(self, gradients: Buffers) -> tuple[list[Tensor], Any]:
        """Return this rank's shards after the step, and the rule's state."""
        if not self._acts:
            return self._advance(gradients)
        running, state = self._running, self._state
        before = self._shards, self._optimizer
        running.put(running.state.replace(params=state.params, optimizer=state.optimizer))
        if keeps_before(state.setup):
            running.before = stepped_by_path(state)[1]

        def rule(grads: Buffers) -> list[Tensor]:
            self._shards, self._optimizer = self._advance(grads)
            return self._work()

        stepped = stepping(running, rule)(gradients)
        self._put(updated(running, stepped))
        made = self._shards, self._optimizer
        return _written(before, made) if self._writes else made

    def _advance(self, gradients: Buffers) -> tuple[list[Tensor], Any]:
        rule, setup = self._state.setup.optimizer, self._state.setup
        new, optimizer = rule.advance(
            self._shards, gradients.flats, self._optimizer, pieces_of(setup), **self._options
        )
        return list(new), optimizer

    def _work(self) -> list[Tensor]:
        """Return what the rule has stepped: masters, where there are any."""
        masters = self._state.setup.optimizer.slots(self._optimizer).get(MASTERS, ())
        return work_tensors(self._shards, masters) if masters else list(self._shards)

    def _put(self, new: Sequence[Tensor]) -> None:
        """Let what transforms have made take the place of what was stepped, masters and shards."""
        masters: dict[int, Tensor] = {}
        for k, (now, after) in enumerate(zip(self._work(), new, strict=True)):
            if after is now:
                continue
            shard = self._shards[k]
            if now is not shard:
                masters[id(now)] = to_device(after, now.device, now.dtype)
            self._shards[k] = to_device(after, shard.device, shard.dtype)
        if masters:
            self._optimizer = optree.tree_map(
                lambda x: masters.get(id(x), x), self._optimizer, namespace=NAMESPACE
            )


def _written(before: Any, after: Any) -> Any:
    """Return `after` in the memory of `before`: of each tensor that has one there."""
    old, old_spec = optree.tree_flatten(before, none_is_leaf=True, namespace=NAMESPACE)
    new, spec = optree.tree_flatten(after, none_is_leaf=True, namespace=NAMESPACE)
    if old_spec != spec:  # a rule that keeps more after its first step
        (shards, _), (mine, optimizer) = before, after
        return _written((shards, None), (mine, None))[0], optimizer
    with torch.no_grad():
        made = [_in_memory_of(x, y) for x, y in zip(old, new, strict=True)]
    return optree.tree_unflatten(spec, made)


def _in_memory_of(old: Any, new: Any) -> Any:
    tensors = isinstance(old, Tensor) and isinstance(new, Tensor)
    if not tensors or old is new or (old.shape, old.dtype) != (new.shape, new.dtype):
        return new
    write_back(old, new)
    return old


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
    said = agree(call_of_states("apply_gradients", treespec), due, updates=True)
    require_held(said, "apply_gradients", treespec)
    if error := refused(states, treespec, said):
        raise error
    rest = iter(said)
    made = [_apply(one, rest) for one in states]
    returned(made, name="apply_gradients", given=states)
    new: Any = optree.tree_unflatten(treespec, made)
    return new


def _apply(state: TrainState, said: Iterator[Agreed]) -> TrainState:
    if state.setup.policy.defer_update:
        return state.replace(progress=progress.defer_update(state.progress))
    return update(reduce_agreed(state, next(said)))[0]


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
    running = _decided(begun(state))

    def all_of_it() -> tuple[TrainState, Tensor | None]:
        if begin is not None:
            running.old = begin()
            running.put(running.old.replace(slots=running.state.slots))
        new, norm = _updated(running, unused)
        if end is not None:
            end(new)
        return new, norm

    if running.kept or running.general:  # the latter torch.optim refuses
        return all_of_it()
    shown = running.overflow if running.by_rule else None
    return as_one_step(state.setup.optimizer.of_torch, all_of_it, found_inf=shown)


def _decided(state: TrainState) -> Running:
    """Return an update that begins: whether it is made, as far as that is known."""
    means = buffers.require_reduced(state.gradients)
    general = is_general(state, means.flats)
    running = Running(state, state, general, Prepared(means))
    for decides in recipe_of(state).decides:
        decides(running, means)
    running.read(lambda: _leaves_out(state))
    return running


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


def _updated(running: Running, unused: Sequence[int]) -> tuple[TrainState, Tensor | None]:
    state, recipe = running.old, recipe_of(running.old)
    after = progress.saw_update(state.progress)
    running.ready = Prepared(buffers.require_reduced(state.gradients))
    try:
        for units in recipe.units:
            running.ready = units(running, running.ready)
        reduced(running)
        for hands_on in recipe.ready:
            running.ready = hands_on(running, running.ready)
        if running.skipped is not False:
            running.leave_out(running.skipped)
        params, optimizer = _stepped(running, unused)
    except BaseException:
        given_back(state, running.ready)
        raise
    new = state.replace(
        params=params,
        optimizer=optimizer,
        gradients=Buffers(),
        progress=after,
        setup=state.setup.idle,
        slots=settled(running.state.slots, running.lost()),
        window=progress.after_update(state.window),
    )
    new = running.selected(new)
    for change in recipe_of(new).updated:
        new = change(running, new)
    return new, running.ready.norm


def _stepped(running: Running, unused: Sequence[int]) -> tuple[Buffers, Any]:
    """Return parameters and optimizer after the rule; the old ones if the update is skipped."""
    state, ready = running.old, running.ready
    gradients = ready.gradients
    if running.kept:
        for text in dict.fromkeys(one.says for one in running.skips if one.known and one.says):
            warnings.warn(text, UserWarning, stacklevel=4)
        held: Any = (state.params, state.optimizer)
        return take_over(held) if donates(state) else held  # used up as ever
    if running.general and (overflow := running.overflow) is not None:
        # Zeros in the place of infinities: what is not chosen must have finite derivatives, too.
        zeroed = (torch.where(overflow != 0, torch.zeros_like(g), g) for g in gradients.flats)
        gradients = Buffers(flats=tuple(zeroed), placement=gradients.placement)
    told = (running.overflow, ready.grad_scale) if running.by_rule else None
    return _advance(running, gradients, told=told, unused=unused)


def _advance(
    running: Running,
    gradients: Buffers,
    *,
    told: tuple[Tensor | None, Tensor | None] | None = None,
    unused: Sequence[int] = (),
) -> tuple[Buffers, Any]:
    """Run the optimizer, and what transforms do around and after it, on this rank's shards.

    Then make the parameters whole again. told: (found_inf, grad_scale), for an optimizer that looks
    for an overflow itself.
    """
    state = running.old
    setup, layout = state.setup, state.setup.layout
    owned = donates(state)
    held, optimizer = state.params, state.optimizer
    if owned:  # from here on the old state is used up
        held, optimizer = take_over(held), take_over(optimizer)
    fulls = [held.flats[i] for i in layout.trainable]
    whole, part = setup.params, setup.optimizer_state
    splits = part is not whole
    shards = [cut(setup, full, whole, part) for full in fulls] if splits else fulls
    options = rule_options(setup, fulls, state.device, unused)
    options |= {"differentiable": running.general, "owned": owned}
    if told is not None:
        options["found_inf"], options["grad_scale"] = told
    placed = state.replace(params=held, optimizer=optimizer)
    step = Stepping(placed, running, shards, options)
    try:
        new, optimizer = step.made(gradients)
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
