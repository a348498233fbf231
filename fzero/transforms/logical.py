"""A gradient call of logical ranks: one after another on the rank that carries them.

each rank carries one     its pass, with its reduction beside the backward (`machine/route`)
some carry several        a pass each, in a window; rows -> nodes of the tree -> one exchange

A call is made once for each logical rank of this rank, with its part of the arguments, its own
generators and its own number. What comes back is what one rank of L ranks would get: the mean of
the losses, by the tree, and the state with the mean of the gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.collectives import fold_rows, gather_rows, performer_of
from fzero.errors import LayoutError, PhaseError
from fzero.machine.nodes import Nodes
from fzero.machine.offload import offloaded
from fzero.ranks.mesh import Carried, carrying
from fzero.state import NAMESPACE, Buffers, Placement, Setup, TrainState, progress, window
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.form import Slot
from fzero.transforms._differentiate import Result
from fzero.transforms._passes import passes_of
from fzero.transforms.agree import agree
from fzero.transforms.announcement import functional_of
from fzero.transforms.generators import generators_of
from fzero.transforms.receive import add_means, mean_of_nodes, part_of_update, waiting

Call = Callable[[int, Sequence[TrainState]], tuple[list[TrainState], Result]]
"""(which of this rank's logical ranks, states) -> the states with its gradient, its result."""


def carried_by(setup: Setup) -> Carried | None:
    """Return the logical ranks of a state, of which none runs; None if it has none."""
    if setup.logical is None:
        return None
    return Carried(setup.logical.ranks, setup.carried(setup.axis.rank))


def setup_of(states: Sequence[TrainState]) -> Setup:
    """Return the setup that says which logical ranks a call of some states has: of the first.

    Raises `PhaseError` if they have other ones.
    """
    found = {(one.setup.logical, one.setup.axis.size) for one in states}
    if len(found) > 1:
        seen = " and ".join(f"{logical} on {size} ranks" for logical, size in found)
        raise PhaseError(
            f"states of {seen} under one loss.",
            cause="models that were made with other options.",
            fix="make all of them with the same logical_ranks= and seed=, on the same mesh.",
        )
    return states[0].setup


def call_logical_ranks(
    call: Call, states: Sequence[TrainState], learns: Sequence[bool]
) -> tuple[list[TrainState], Result]:
    """Return the states with the mean gradient of all logical ranks, and what the calls gave.

    The value is the mean over all of them, and `aux` has a first dim of those of this rank.
    """
    chosen = [one for one, by in zip(states, learns, strict=True) if by]
    setup = setup_of(chosen)
    run = _RowRun if setup.carries_several else _OneRun
    return run(call, states, chosen[0]).made()


class _OneRun:
    """A call in which each rank carries one logical rank."""

    def __init__(self, call: Call, states: Sequence[TrainState], first: TrainState) -> None:
        self.call, self.states, self.first = call, list(states), first
        self.setup = first.setup
        assert self.setup.logical is not None
        self.logical = self.setup.logical
        self.ranks = self.setup.carried(self.setup.axis.rank)

    def made(self) -> tuple[list[TrainState], Result]:
        """Return the states, and the result of all logical ranks."""
        with self._told():
            new, result = self._of(0, self.states)
        if any(one.window.is_open for one in self.states):
            self._come("in a window")
        return new, self._joined([result])

    def _of(self, place: int, states: Sequence[TrainState]) -> tuple[list[TrainState], Result]:
        rank = self.ranks[place]
        first = self.first
        drawn = generators_of(
            self.logical.seed,
            update=int(first.step),
            call=first.progress.backwards,
            logical_rank=rank,
            device=first.device,
        )
        with carrying(Carried(self.logical.ranks, self.ranks, rank)), drawn:
            return self.call(place, states)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the other ranks, which go on to a round, of an error that they do not know of."""
        try:
            yield
        except BaseException:
            performer = performer_of(self.setup.axis)
            if performer is not None and not performer.protocol.known:
                performer.fail()
            raise

    def _come(self, how: str) -> None:
        """Wait for all ranks: this one serves the gathers of those that carry more."""
        gathers = any(one.setup.gathers_by_unit for one in self.states)
        serves = gathers and self.setup.carries_several
        serving = passes_of(self.states, functional_of(self.states))[0] if serves else []
        try:
            agree(f"grad_and_reduce of logical ranks, {how}", self.states)
        finally:
            for one in serving:
                one.close()

    def _joined(self, results: Sequence[Result]) -> Result:
        rows = torch.stack([one.value for one in results])
        aux = [one.aux for one in results]
        return Result(grads=(), value=self._mean(rows), aux=_stacked(aux))

    def _mean(self, rows: Tensor) -> Tensor:
        return mean_of_rows(rows, self.setup)


class _RowRun(_OneRun):
    """A call in which some ranks carry several logical ranks."""

    def made(self) -> tuple[list[TrainState], Result]:
        """Return the states, and the result of all logical ranks."""
        rows = [_Rows(one, self.ranks) for one in self.states]
        results = []
        with self._told():
            for place in range(len(self.ranks)):
                new, result = self._of(place, [one.view(place) for one in rows])
                for one, made in zip(rows, new, strict=True):
                    one.put(place, made)
                results.append(result)
                del new
        self._come("which are several on some ranks")
        return [one.made() for one in rows], self._joined(results)


class _Rows:
    """What the logical ranks of this rank bring to one state: a row of a window each."""

    def __init__(self, state: TrainState, ranks: range) -> None:
        own = _own_slots(state)
        others = {name: one for name, one in state.slots.items() if name not in own}
        self.state, self.ranks, self._now = state, ranks, state.replace(slots=others)
        self.waits = state.window.is_open
        self.nodes = None if self.waits else Nodes(state.setup, state.device)
        self.rows: list[Sequence[Tensor]] = []
        self.slots: list[dict[str, Slot]] = []
        self.nonfinite = state.progress.nonfinite

    def view(self, place: int) -> TrainState:
        """Return the state as one logical rank has it, with an open window."""
        state, setup = self.state, self.state.setup
        pending = state.window.pending
        if pending.held:
            row = [flat[place] for flat in pending.flats]
            if not self.waits:  # they are reduced with what comes
                held = Buffers(flats=tuple(row), placement=Placement.PARTIAL)
                alone = state.replace(window=dataclasses.replace(state.window, pending=held))
                row = [*waiting(alone).values()]
            pending = Buffers(flats=tuple(row), placement=Placement.PARTIAL)
        policy = setup.policy
        if not self.waits:
            policy = dataclasses.replace(policy, grad_scale=1.0)  # times it when they are reduced
        if state.window.pending.held:
            policy = dataclasses.replace(policy, donate=False)  # the caller's, if another raises
        kept = dataclasses.replace(
            state.window,
            pending=pending,
            gathered=self._now.window.gathered,
            is_open=True,
            length=state.window.length if self.waits else 0,
        )
        return self._now.replace(
            window=kept,
            progress=state.progress,
            slots={**self._now.slots, **_slots_at(state, place)},
            setup=dataclasses.replace(setup, policy=policy),
        )

    def put(self, place: int, made: TrainState) -> None:
        """Take what a logical rank has brought."""
        self.nonfinite = self.nonfinite or made.progress.nonfinite
        self.slots.append(_own_slots(made))
        flats = made.window.pending.flats
        if self.nodes is None:
            self._put_row(place, flats)
        else:
            self.nodes.push(dict(zip(made.setup.layout.trainable, flats, strict=True)))
        others = {name: one for name, one in made.slots.items() if name not in self.slots[-1]}
        self._now = made.replace(
            slots=others, window=dataclasses.replace(made.window, pending=window.CLOSED.pending)
        )

    def _put_row(self, place: int, flats: Sequence[Tensor]) -> None:
        if self.state.setup.offload.gradients is not None:
            self.rows.append(flats)
            return
        if not self.rows:
            self.rows = [[x.new_empty(len(self.ranks), *x.shape) for x in flats]]
        for rows, flat in zip(self.rows[0], flats, strict=True):
            rows[place] = flat

    def made(self) -> TrainState:
        """Return the state that has all of it. A collective, unless it waits in a window."""
        state, now = self.state, self._now
        new = now.replace(
            setup=state.setup,
            slots={**now.slots, **_joined_slots(self.slots)},
            progress=dataclasses.replace(now.progress, nonfinite=self.nonfinite),
        )
        if self.nodes is None:
            pending = Buffers(flats=self._pending(), placement=Placement.PARTIAL)
            return new.replace(window=dataclasses.replace(now.window, pending=pending))
        new = new.replace(
            window=window.pop(state.window)[0],
            progress=progress.saw_reduction(new.progress),
        )
        flats = mean_of_nodes(new, self.nodes)
        return add_means(new, part_of_update(new, flats, reduced=True))

    def _pending(self) -> tuple[Tensor, ...]:
        offload = self.state.setup.offload
        if offload.gradients is None:
            return tuple(self.rows[0])
        columns = zip(*self.rows, strict=True)
        return tuple(offloaded(offload.gradients, torch.stack(some), offload) for some in columns)


# Values.


def mean_of_rows(rows: Tensor, setup: Setup) -> Tensor:
    """Return the mean over all logical ranks of a row for each, [k, *t] -> [*t], on every rank.

    A collective on several ranks. 16-bit floats are added up in fp32.
    """
    assert setup.logical is not None
    places = setup.logical.ranks
    every = gather_rows(rows, setup.axis, places)
    wide = every.float() if every.dtype in SIXTEEN_BIT else every
    return (fold_rows(wide) / places).to(rows.dtype)


def _stacked(auxes: Sequence[Any]) -> Any:
    """Return what the losses of logical ranks gave beside their values, with a first dim of them.

    Numbers become tensors; what is neither must be equal.
    """
    specs = [optree.tree_structure(aux, namespace=NAMESPACE) for aux in auxes]
    if any(spec != specs[0] for spec in specs):
        raise LayoutError(
            "grad_and_reduce: the losses of two logical ranks gave aux of other structures.",
            cause="aux that depends on the data.",
            fix="return the same structure each time.",
        )
    return optree.tree_map(_stacked_leaf, *auxes, namespace=NAMESPACE)


def _stacked_leaf(*leaves: Any) -> Any:
    head = leaves[0]
    if isinstance(head, Tensor):
        if len({x.shape for x in leaves}) == 1:
            return torch.stack(leaves)
        seen = f"tensors {sorted({tuple(x.shape) for x in leaves})}"
    elif isinstance(head, bool | int | float):
        return torch.tensor(leaves)
    elif all(x == head for x in leaves):
        return head
    else:
        seen = f"{head!r:.60} and others"
    raise LayoutError(
        f"grad_and_reduce: aux has {seen} of the logical ranks of this rank.",
        cause="aux that differs by logical rank: outputs of batches of other sizes, or texts.",
        fix="return tensors of one shape, such as sums and counts, or numbers.",
    )


# Slots of which each logical rank has its own.


def _own_slots(state: TrainState) -> dict[str, Slot]:
    found = state.slots.items()
    return {name: one for name, one in found if one.form.placement is Placement.PARTIAL}


def _slots_at(state: TrainState, place: int) -> dict[str, Slot]:
    return {
        name: dataclasses.replace(one, value=one.value[place])
        for name, one in _own_slots(state).items()
    }


def _joined_slots(slots: Sequence[dict[str, Slot]]) -> dict[str, Slot]:
    return {
        name: dataclasses.replace(one, value=torch.stack([some[name].value for some in slots]))
        for name, one in slots[0].items()
    }
