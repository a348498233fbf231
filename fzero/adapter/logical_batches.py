"""`engine.parts`: the logical ranks of a rank, one after another, each with its part of a batch.

    a part begins      its generators, its number, its buffers; several: the state as it has it
    a backward ends    several: its gradient becomes a row of that call
    the loop ends      several: the rows of all ranks become a mean
    an update          buffers become the mean over all logical ranks

A loop that is left before its end brings nothing, and `step()` says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from fzero.collectives import Performer, broadcast
from fzero.errors import AxisError, PhaseError
from fzero.machine.module_buffers import is_own
from fzero.ranks.mesh import Carried, carrying, running_on
from fzero.state import Setup, TrainState
from fzero.transforms.backward_pass import Pass, raises_together
from fzero.transforms.logical_ranks import (
    Rows,
    generators_of,
    mean_of_rows,
    parts_of_batch,
)


def parts(  # noqa: D417
    driver: Any, batch: Any, *, in_axes: Any = 0, sizes: Sequence[int] | None = None
) -> Iterator[Any]:
    """Yield the part of a batch of each logical rank that this rank carries, in order.

    In a turn of the loop `fzero.axis_index()`, `axis_size()`, torch's generators and the buffers of
    the module are those of the logical rank. Each turn has its own forwards and backwards, as many
    as the others; the update that follows is that of all logical ranks. Where each rank carries one
    its gradients are reduced beside the backward; else when the loop ends, which is a collective.
    Between two updates a logical rank goes on with its own buffers; at the update floating ones
    become the mean of all, others those of logical rank 0.

    The loop must come to its end: after a break or an exception `step()` raises until
    `zero_grad()`. It may stand in a window. Without logical ranks the batch is the one part.

    Args:
        batch: of this rank: a pytree of tensors, with the rows of its logical ranks in order.
        in_axes: which dim of them is cut, as in `torch.func.vmap`: an int, or a tree with the first
            levels of the batch; None for what each part gets whole.
        sizes: how many rows each of this rank's logical ranks has; default equal parts.

    Raises:
        LayoutError: for a batch that does not divide, and axes or sizes that do not fit.
        PhaseError: inside of another such loop, of a forward or a backward.

    Example:
        >>> import torch
        >>> from fzero.adapter import Engine
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> engine = Engine(model, optimizer, stage=2, logical_ranks=2)
        >>> for part in engine.parts(torch.tensor([[1.0, 0.0], [0.0, 1.0]])):
        ...     engine.backward(engine(part).sum())
        >>> engine.step(), model.weight.data
        (True, tensor([[0.7500, 0.7500]]))
    """
    driver.require_outside("engine.parts()")
    driver.require_no_forward("engine.parts()")
    setup = driver.state.setup
    # The others wait at the end of their loops.
    with raises_together(None if setup.logical is None else setup.axis):
        made = parts_of_batch(setup, batch, in_axes, sizes)
    return iter(made) if setup.logical is None else _each(driver, made)


def _each(driver: Any, made: Sequence[Any]) -> Iterator[Any]:
    driver.wait()
    driver.drop_if_user_did()
    loops = driver.loops
    loop, whole = loops.begin(), False
    try:
        for place, part in enumerate(made):
            loop.begin(place)
            yield part
            driver.drop_unfinished()
            loop.end()
        loops.end()
        loop.close()
        whole = True
    finally:
        if not whole:  # nothing of it counts, and other ranks are told
            loops.end(left=True)
            loop.leave()
            driver.events.abandon()
    driver.show_gradients()


class Loops:
    """The loops of an engine over its parts: the one that runs, and what is left of one.

    running: the pass of the engine. own: paths of buffers that each rank has for itself.
    """

    def __init__(self, running: Pass, module: nn.Module, own: Collection[str]) -> None:
        self._running = running
        self.open: Loop | None = None
        self.left = False  # one was left before its end, since gradients were thrown away
        self._made: dict[int, int] = {}  # backwards of each logical rank since the update
        has = running.states[0].setup.logical is not None
        self.buffers = _Buffers(module, own) if has else None

    def begin(self) -> Loop:
        """Begin a loop."""
        self.require_none("engine.parts()")
        self.require_whole("engine.parts()")
        if not self._running.states[0].progress.backwards:
            self._made.clear()
        assert self.buffers is not None
        self.open = Loop(self._running, self.buffers, self._made)
        return self.open

    def end(self, *, left: bool = False) -> None:
        """The loop has come to its end, or was `left`; or all gradients are thrown away."""
        self.open, self.left = None, left

    def require_open(self) -> None:
        """Raise `PhaseError` for a backward outside of a loop, where logical ranks are."""
        if self.buffers is not None and self.open is None:
            raise PhaseError(
                "a backward outside of engine.parts(), and the engine has logical ranks.",
                cause="engine(batch) with the batch of this rank, of which each logical rank has "
                "a part.",
                fix="write `for part in engine.parts(batch): engine.backward(engine(part))`.",
            )

    def require_none(self, name: str) -> None:
        """Raise `PhaseError` inside of a loop."""
        if self.open is not None:
            raise PhaseError(
                f"{name} inside of a loop over engine.parts().",
                cause="a call that is made once for all logical ranks, or a second loop.",
                fix="make it after the loop, which must come to its end.",
            )

    def require_settled(self, name: str) -> None:
        """Raise `PhaseError` while logical ranks have buffers of their own."""
        if self.buffers is not None and self.buffers.held:
            raise PhaseError(
                f"{name} between a loop over engine.parts() and step().",
                cause="each logical rank has buffers of its own, until the update.",
                fix="call it after engine.step().",
            )

    def require_whole(self, name: str) -> None:
        """Raise `PhaseError` after a loop that was left."""
        if self.left:
            raise PhaseError(
                f"{name} after a loop over engine.parts() that was left before its end.",
                cause="break, return, or an exception that was caught outside of the loop: some "
                "logical ranks have made no backward.",
                fix="call engine.zero_grad(), on every rank, and go on with the next batch.",
            )


class Loop:
    """One loop: which logical rank runs, and what they have brought."""

    def __init__(self, running: Pass, buffers: _Buffers, made: dict[int, int]) -> None:
        self._running, self._buffers, self._made = running, buffers, made
        self._first = running.states[0]
        setup = self._first.setup
        assert setup.logical is not None
        self._logical, self._axis = setup.logical, setup.axis
        self.ranks = setup.carried(setup.axis.rank)
        self._rows = Rows(self._first) if setup.carries_several else None
        self._entered, self._drawn = ExitStack(), ExitStack()
        self._place, self._call, self._most = -1, 0, 0

    @property
    def _state(self) -> TrainState:
        return self._running.states[0]

    def begin(self, place: int) -> None:
        """A logical rank begins."""
        self._place, self._call = place, 0
        if self._rows is not None:
            self._running.put(0, self._rows.view(place))
        rank = self.ranks[place]
        self._buffers.load(rank)
        self._entered.enter_context(running_on(self._axis))
        carried = Carried(self._logical.ranks, self.ranks, rank)
        self._entered.enter_context(carrying(carried))
        self._draw()

    def _draw(self) -> None:
        """Set the generators for the next call."""
        self._drawn.close()
        first, rank = self._first, self.ranks[self._place]
        before = self._made.get(rank, first.progress.backwards)  # its own, on any number of ranks
        self._drawn.enter_context(
            generators_of(
                self._logical.seed,
                update=int(first.step),
                call=before + self._call,
                logical_rank=rank,
                device=first.device,
            )
        )

    def took(self, before: int) -> None:
        """A backward is over. before: how many there were."""
        if self._state.progress.backwards == before:
            return
        if self._rows is not None:
            self._running.put(0, self._rows.took(self._place, self._call, self._state))
        self._call += 1
        self._draw()

    def end(self) -> None:
        """The logical rank is done."""
        rank = self.ranks[self._place]
        before = self._made.get(rank, self._first.progress.backwards)
        self._made[rank] = before + self._call
        self._most = max(self._most, self._call)
        self._exit()
        self._buffers.save(rank)
        if self._rows is not None:
            held = self._state.window.pending.held and not self._rows.waits
            if held and (self._call or not self._first.window.pending.held):
                raise PhaseError(
                    "a backward inside of a forward, in a loop over engine.parts().",
                    cause="gradients that come outside of a backward of the loss.",
                    fix="leave logical_ranks= out, or make one backward of both.",
                )
            state = self._state
            if held:  # what waited for a backward that did not come
                state, self._most = self._rows.took(self._place, 0, state), max(self._most, 1)
            self._rows.end(self._place, state)

    def _exit(self) -> None:
        self._drawn.close()
        self._entered.close()

    def close(self) -> None:
        """All logical ranks of this rank are done: reduce what they have brought. A collective."""
        self._buffers.restore()
        if self._rows is None:
            return
        performer = self._running.performer
        name = f"the end of engine.parts() of engine {self._running.form.number}"
        rows = self._rows
        heard = performer.call_with(name, lambda: [self._most, int(rows.weighted)])
        calls, weighted = (max(some) for some in zip(*heard, strict=True))
        self._running.put(0, rows.made(calls, weighted=bool(weighted)))

    def leave(self) -> None:
        """The loop was left."""
        self._exit()
        self._buffers.restore()
        if self._rows is not None:
            now = self._state
            self._running.put(0, self._first.replace(schedule=now.schedule))
        _tell(self._running.performer)


def _tell(performer: Performer) -> None:
    if not performer.protocol.known:
        with suppress(AxisError):
            performer.fail()


class _Buffers:
    """The buffers of a module, of which each logical rank has its own from one update to the next.

    Outside of a part the module has those of the last update.
    """

    def __init__(self, module: nn.Module, own: Collection[str]) -> None:
        self._module, self._own = module, own
        self._of: dict[int, dict[str, Tensor]] = {}  # of each logical rank, what it has changed
        self._first: dict[str, Tensor] = {}  # of the last update

    def _here(self) -> dict[str, Tensor]:
        found = self._module.named_buffers()
        return {path: x for path, x in found if not is_own(path, self._own)}

    @torch.no_grad()
    def load(self, rank: int) -> None:
        """Let the module have those of a logical rank."""
        if not self._first:
            self._first = {path: x.clone() for path, x in self._here().items()}
        self._put(self._of.get(rank, {}))

    @torch.no_grad()
    def save(self, rank: int) -> None:
        """Keep those that a logical rank has changed; let the module have those of the update."""
        kept = self._of.setdefault(rank, {})
        for path, x in self._here().items():  # batch_norm raises no version
            if not torch.equal(x, kept.get(path, self._first[path])):
                kept[path] = x.clone()
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Let the module have those of the last update."""
        self._put({})

    def _put(self, values: dict[str, Tensor]) -> None:
        for path, now in self._here().items():
            wanted = values.get(path, self._first.get(path, now))
            if not torch.equal(now, wanted):
                now.copy_(wanted)

    @property
    def held(self) -> bool:
        """Whether logical ranks have their own now."""
        return any(self._of.values())

    @torch.no_grad()
    def merge(self, setup: Setup, performer: Performer) -> None:
        """An update: floating ones become the mean, others those of logical rank 0.

        A collective.
        """
        here, ranks = self._here(), setup.carried(setup.axis.rank)
        if not here:
            return
        mine = {path for kept in self._of.values() for path in kept}
        changed = {path for some in performer.tell(sorted(mine)) for path in some}
        for path in sorted(changed):
            now = here[path]
            rows = [self._of.get(rank, {}).get(path, self._first.get(path, now)) for rank in ranks]
            if now.is_floating_point() or now.is_complex():
                now.copy_(mean_of_rows(torch.stack(rows), setup))
            else:
                now.copy_(broadcast([rows[0]], setup.axis, 0)[0])
        self._of, self._first = {}, {}
