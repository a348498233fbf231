"""`engine.parts`: the logical ranks of a rank, one after another, each with its part of a batch.

    a part begins      its generators, its number, its buffers; several: the state as it has it
    a backward ends    several: its gradient becomes a row of that call
    the loop ends      several: the rows of all ranks become a mean
    an update          buffers become the mean over all logical ranks

A loop that is left before its end brings nothing, and `step()` says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from fzero.collectives import Performer, broadcast
from fzero.errors import AxisError, PhaseError
from fzero.machine.module_buffers import is_own
from fzero.ranks.mesh import Carried, carrying, running_on
from fzero.state import Setup
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
    driver.require_not("engine.parts()", "loop", "backward", "forward")
    setup = driver.state.setup
    # The others wait at the end of their loops.
    with raises_together(None if setup.logical is None else setup.axis):
        made = parts_of_batch(setup, batch, in_axes, sizes)
    return iter(made) if setup.logical is None else _each(driver, made)


def _each(driver: Any, made: Sequence[Any]) -> Iterator[Any]:
    driver.wait()
    driver.drop_if_user_did()
    driver.require_not("engine.parts()", "loop", "left loop")
    loops = driver.loops
    loop = loops.begin()
    try:
        for place, part in enumerate(made):
            loop.begin(place)
            yield part
            driver.drop_unfinished()
            loop.end()
        loops.end()
        loop.close()
        loops.forget()
    finally:
        if loops.left:
            loops.end()
            loop.leave()
            driver.events.abandon()
    driver.show_gradients()


class Loops:
    """The loops of an engine over its parts: the one that runs, and what is left of one.

    running: the pass of the engine. own: paths of buffers that each rank has for itself. left: one
    was left before its end, since gradients were thrown away. made: backwards of each logical rank
    since the update.
    """

    def __init__(self, running: Pass, module: nn.Module, own: Collection[str]) -> None:
        self.running = running
        self.open: Loop | None = None
        self.left = False
        self.made: dict[int, int] = {}
        has = running.states[0].setup.logical is not None
        self.buffers = _Buffers(module, own) if has else None

    def begin(self) -> Loop:
        """A loop begins; it counts as left until it is at its end."""
        self.open, self.left = Loop(self), True
        return self.open

    def end(self) -> None:
        """No loop runs."""
        self.open = None

    def forget(self) -> None:
        """No loop was left, or what it had brought was thrown away."""
        self.left = False


class Loop:
    """One loop: which logical rank runs, and what they have brought."""

    def __init__(self, loops: Loops) -> None:
        assert loops.buffers is not None
        self._running, self._made, self._buffers = loops.running, loops.made, loops.buffers
        self._first = self._running.states[0]
        if not self._first.progress.backwards:
            self._made.clear()
        setup = self._first.setup
        self._ranks = setup.carried(setup.axis.rank)
        self._rows = Rows(self._first) if setup.carries_several else None
        self._entered, self._drawn = ExitStack(), ExitStack()
        self._place = self._call = self._most = 0

    def begin(self, place: int) -> None:
        """A logical rank begins."""
        setup, rank = self._first.setup, self._ranks[place]
        assert setup.logical is not None
        self._place, self._call = place, 0
        self._made.setdefault(rank, self._first.progress.backwards)  # on any number of ranks
        if self._rows is not None:
            self._running.put(0, self._rows.view(place))
        self._buffers.load(rank)
        self._entered.enter_context(running_on(setup.axis))
        self._entered.enter_context(carrying(Carried(setup.logical.ranks, self._ranks, rank)))
        self._draw()

    def _draw(self) -> None:
        """Set the generators for the next call."""
        first, rank = self._first, self._ranks[self._place]
        assert first.setup.logical is not None
        self._drawn.close()
        self._drawn.enter_context(
            generators_of(
                first.setup.logical.seed,
                update=int(first.step),
                call=self._made[rank],
                logical_rank=rank,
                device=first.device,
            )
        )

    def took(self, before: int) -> None:
        """A backward is over. before: how many there were."""
        state = self._running.states[0]
        if state.progress.backwards == before:
            return
        if self._rows is not None:
            self._running.put(0, self._rows.took(self._place, self._call, state))
        self._call += 1
        self._made[self._ranks[self._place]] += 1
        self._draw()

    def end(self) -> None:
        """The logical rank is done."""
        self._most = max(self._most, self._call)
        self._drawn.close()
        self._entered.close()
        self._buffers.save(self._ranks[self._place])
        if (rows := self._rows) is None:
            return
        state = self._running.states[0]
        if state.window.pending.held and not rows.waits:
            if self._call or not self._first.window.pending.held:
                raise PhaseError(
                    "a backward inside of a forward, in a loop over engine.parts().",
                    cause="gradients that come outside of a backward of the loss.",
                    fix="leave logical_ranks= out, or make one backward of both.",
                )
            # What waited for a backward that did not come.
            state, self._most = rows.took(self._place, 0, state), max(self._most, 1)
        rows.end(self._place, state)

    def close(self) -> None:
        """All logical ranks of this rank are done: reduce what they have brought. A collective."""
        self._buffers.restore()
        if (rows := self._rows) is None:
            return
        name = f"the end of engine.parts() of engine {self._running.form.number}"
        numbers = lambda: [self._most, int(rows.weighted)]  # noqa: E731
        heard = self._running.performer.call_with(name, numbers)
        calls, weighted = (max(some) for some in zip(*heard, strict=True))
        self._running.put(0, rows.made(calls, weighted=bool(weighted)))

    def leave(self) -> None:
        """The loop was left: nothing of it counts, and other ranks are told."""
        self._drawn.close()
        self._entered.close()
        self._buffers.restore()
        if self._rows is not None:
            schedule = self._running.states[0].schedule
            self._running.put(0, self._first.replace(schedule=schedule))
        if not self._running.performer.protocol.known:
            with suppress(AxisError):
                self._running.performer.fail()


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
        self.restore(self._of.get(rank))

    @torch.no_grad()
    def save(self, rank: int) -> None:
        """Keep those that a logical rank has changed; let the module have those of the update."""
        kept = self._of.setdefault(rank, {})
        for path, x in self._here().items():  # batch_norm raises no version
            if not torch.equal(x, kept.get(path, self._first[path])):
                kept[path] = x.clone()
        self.restore()

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Let the module have those of the last update, or such `values` where there are any."""
        for path, now in self._here().items():
            wanted = (values or {}).get(path, self._first.get(path, now))
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
