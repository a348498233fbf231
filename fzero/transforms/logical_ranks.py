"""A gradient call of logical ranks: one after another on the rank that carries them.

each rank carries one     its pass, with its reduction beside the backward (`machine/reduce`)
some carry several        a pass each, in a window; rows -> nodes of the tree -> one exchange
a loss communicates       the same with whole parameters, this rank's as virtual ranks

A call is made once for each logical rank of this rank, with its part of the arguments, its own
generators and its own number. What comes back is what one rank of L ranks would get: the mean of
the losses, by the tree, and the state with the mean of the gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.collectives import fold_rows, gather_rows, run_together
from fzero.context.current_rank import has_no_values, is_abstract
from fzero.context.rng import of_devices, seeded
from fzero.errors import LayoutError, PhaseError
from fzero.errors.check import is_count
from fzero.machine.offload import offloaded
from fzero.machine.reduce import Nodes
from fzero.ranks.mesh import Axis, Carried, MetInLoss, Runs, ambient, carried_here, carrying
from fzero.state import NAMESPACE, Buffers, Placement, Setup, TrainState, progress
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.logical import fold_in
from fzero.state.slots import Slot
from fzero.state.train_state import GivenCall, Weight, weighted_by_some
from fzero.transforms.accumulate import InAxes, check_axes, parts_of
from fzero.transforms.accumulate_grad import accumulated, mean_of_nodes, part_of_update, waiting
from fzero.transforms.autograd import Result, with_full
from fzero.transforms.backward_pass import (
    PassForm,
    agree,
    functional_of,
    passes_of,
    raises_together,
    serving,
)
from fzero.transforms.models import flatten_states

# The arguments and the weight of a call for each logical rank that a rank carries.

EachWeight = Weight | Sequence[Weight] | Callable[..., Weight]
"""The weight of a call; of several logical ranks one for each, or what gives it for a part."""

ALIGNED = 64
"""Bytes that torch aligns the memory of tensors to."""


def call_given(
    name: str, setup: Setup, weight: Any, in_axes: InAxes, sizes: Sequence[int] | None
) -> GivenCall:
    """Return what a user says of a call; of one of logical ranks whether they have weights.

    Raises `LayoutError` for what cannot be a weight, axes or sizes of a call on this rank.
    """
    if setup.logical is None:
        if sizes is not None or in_axes != 0:
            given = f"in_axes={in_axes!r}" if sizes is None else f"sizes={sizes!r}"
            raise LayoutError(
                f"{name}: {given}, and the state has no logical ranks.",
                cause="an option of logical ranks, whose parts of the arguments are cut; another "
                "rank's part is its own.",
                fix="make the state with logical_ranks=, or leave it out; fzero.accumulate cuts a "
                "batch into micro-batches.",
            )
        return GivenCall(name, weight)
    count = len(setup.carried(setup.axis.rank))
    check_axes(in_axes, name)
    good = isinstance(sizes, list | tuple) and len(sizes) == count
    if sizes is not None and not (good and all(is_count(size, 0) for size in sizes)):
        raise LayoutError(
            f"{name}: sizes={sizes!r}.",
            cause="sizes of all logical ranks, or of another rank.",
            fix=f"give the number of rows of each logical rank that is here, {count} ints.",
        )
    for one in _weights(name, weight, count) if not callable(weight) else ():
        GivenCall(name, one)
    return GivenCall(name, None if weight is None else 1.0)


def _weights(name: str, weight: Any, count: int) -> Sequence[Any]:
    if weight is None:
        return ()
    if isinstance(weight, list | tuple) or (isinstance(weight, Tensor) and weight.ndim == 1):
        given = [*weight]
    elif count == 1:
        given = [weight]
    else:
        given = []
    if len(given) != count:
        seen = f"{len(given)} weights" if given else f"weight={weight!r}"
        raise LayoutError(
            f"{name}: {seen} for the {count} logical ranks of this rank.",
            cause="the weight of the whole batch of this rank, whose parts have weights of their "
            "own.",
            fix="give one for each, weight=[w_0, w_1, ...], or a function of its part of the "
            "arguments: weight=lambda batch: batch['mask'].sum().",
        )
    return given


def each_call(
    name: str,
    fn: Callable[..., Any],
    setup: Setup,
    arguments: tuple[Any, Any],
    weight: EachWeight | None,
    in_axes: InAxes,
    sizes: Sequence[int] | None,
) -> list[tuple[Any, Any, Weight | None]]:
    """Return (args, kwargs, weight) of the call of each logical rank that is here."""
    count = len(setup.carried(setup.axis.rank))
    args, kwargs = arguments
    parts: Any = parts_of(fn, args, kwargs, count, in_axes, name=name, sizes=sizes)
    parts = [optree.tree_map(_as_alone, part, namespace=NAMESPACE) for part in parts]
    if weight is None:
        return [(*part, None) for part in parts]
    if not callable(weight):
        given = _weights(name, weight, count)
        return [(*part, one) for part, one in zip(parts, given, strict=True)]
    found = []
    for args, kwargs in parts:
        one = weight(*args, **kwargs)
        GivenCall(name, one)
        found.append((args, kwargs, one))
    return found


def _as_alone(x: Any) -> Any:
    """Return a tensor where it would be if its rank had it alone: at the start of its memory.

    What a kernel adds up first may depend on where a tensor starts.
    """
    if type(x) is not Tensor or not x.is_floating_point() or has_no_values(x) or not x.numel():
        return x
    starts_there = x.device.type != "cpu" or x.data_ptr() % ALIGNED == 0
    return x if starts_there else x.clone()


# The random numbers of a logical rank: a function of the seed and of the place in the run.


def generators_of(
    seed: int, update: int, call: int, logical_rank: int, device: torch.device
) -> AbstractContextManager[None]:
    """Return a block in which torch's generators are those of a logical rank.

    They are set by fold_in(seed, update, call, logical_rank): that of the CPU, and that of `device`
    if it is a CUDA device. When the block ends, also by an exception, they are as they were before
    it. What is recomputed in a backward (`remat`, torch.utils.checkpoint) draws the same numbers
    again, in the block or after it: a recomputation sets the state that its forward began with.

    Args:
        seed: of the run.
        update: how many updates were made before.
        call: which gradient call of this update it is, from 0.
        logical_rank: which logical rank runs, from 0.
        device: of the state.

    Raises:
        LayoutError: for a number that `fold_in` does not take.

    Example:
        >>> import torch
        >>> with generators_of(0, update=7, call=0, logical_rank=3, device=torch.device("cpu")):
        ...     first = torch.rand(1)
        >>> with generators_of(0, update=7, call=0, logical_rank=3, device=torch.device("cpu")):
        ...     print(torch.equal(torch.rand(1), first))
        True
    """
    return seeded(fold_in(seed, update, call, logical_rank), device)


@contextmanager
def drawn_in_losses_alone(state: TrainState) -> Iterator[None]:
    """Raise `PhaseError` at the end of a step of logical ranks that has moved torch's generators.

    A loss puts them back. What else draws does it for the rows of all logical ranks of this rank
    together, so the numbers of a row depend on how many ranks there are.
    """
    if state.setup.logical is None or is_abstract():
        yield
        return
    generators = of_devices(state.device)
    before = [one.get_state() for one in generators]
    yield
    for one, then in zip(generators, before, strict=True):
        if not torch.equal(one.get_state(), then):
            raise PhaseError(
                f"a step with logical_ranks={state.setup.logical.ranks} drew from torch's "
                f"generator of {one.device} outside of its losses: on another number of ranks its "
                "rows would get other numbers.",
                cause="noise on the batch, or a model in train mode, before grad_and_reduce; noise "
                "on gradients after it.",
                fix="draw in the loss that grad_and_reduce is given, or in the data set or "
                "collate_fn of fzero.data.batches, where the numbers are those of the logical "
                "rank. What is the same for all ranks: generator=torch.Generator().manual_seed("
                "fzero.fold_in(seed, int(state.step))).",
            )


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
    if len(found) > 1 and any(logical is not None for logical, _ in found):
        seen = " and ".join(f"{logical} on {size} ranks" for logical, size in found)
        raise PhaseError(
            f"states of {seen} under one loss.",
            cause="models that were made with other options.",
            fix="make all of them with the same logical_ranks= and seed=, on the same mesh.",
        )
    return states[0].setup


def call_logical_ranks(
    call: Call,
    states: Sequence[TrainState],
    learns: Sequence[bool],
    weights: Sequence[Weight | None],
    form: PassForm | None = None,
) -> tuple[list[TrainState], Result]:
    """Return the states with the mean gradient of all logical ranks, and what the calls gave.

    form: of their passes; None for those of gradient calls.

    The value is the mean over all of them, by the weights of this rank's logical ranks if they have
    some, and `aux` has a first dim of those of this rank.
    """
    chosen = [one for one, by in zip(states, learns, strict=True) if by]
    setup, first = setup_of(chosen), chosen[0]
    logical, several = setup.logical, setup.carries_several
    assert logical is not None
    ranks = setup.carried(setup.axis.rank)

    rows, results = [Rows(one) for one in states] if several else [], list[Result]()
    new = list[TrainState]()
    with raises_together(setup.axis):
        try:
            for place in range(len(ranks)):
                with in_turn(first, place):
                    made, result = call(place, [one.view(place) for one in rows] or states)
                results.append(result)
                for row, view in zip(rows, made, strict=False):
                    row.end(place, row.took(place, 0, view))
                new = [] if several else made
                del made
        except MetInLoss:
            if not several:
                raise
            rows, results = [], []  # what they held is free
        if several and not rows:
            rows, results = _all_at_once(call, states, setup, partial(_drawn, first))
    if several or any(one.window.is_open for one in states):
        all_come("which are several on some ranks" if several else "in a window", states, form)
    known = [torch.as_tensor(w, dtype=torch.float64) for w in weights if w is not None]
    values = torch.stack([one.value for one in results])
    by = torch.stack([w.to(values.device) for w in known]) if known else None
    value = _mean(values, setup.axis, logical.ranks, by)
    joined = Result(grads=(), value=value, aux=stacked([one.aux for one in results]))
    return [one.made(1) for one in rows] if several else new, joined


@contextmanager
def in_turn(state: TrainState, place: int) -> Iterator[None]:
    """In this block one logical rank of this rank runs, with its own generators; others wait."""
    logical, ranks = state.setup.logical, state.setup.carried(state.setup.axis.rank)
    assert logical is not None
    runs = Runs.FIRST_IN_TURN if state.setup.carries_several else Runs.IN_TURN
    carried = Carried(logical.ranks, ranks, ranks[place], runs)
    with carrying(carried), _drawn(state, ranks[place]):
        yield


def _drawn(state: TrainState, logical_rank: int) -> AbstractContextManager[None]:
    """Return a block with the generators of a logical rank in the next call."""
    assert state.setup.logical is not None
    return generators_of(
        state.setup.logical.seed,
        update=int(state.step),
        call=state.progress.backwards,
        logical_rank=logical_rank,
        device=state.device,
    )


def all_come(how: str, states: Sequence[TrainState], form: PassForm | None = None) -> None:
    """Wait for all ranks: this one serves the passes, of this form, of those that carry more."""
    gathers = any(one.setup.gathers_by_unit and one.setup.carries_several for one in states)
    form = form or functional_of(states, "grad_and_reduce")
    with serving(passes_of(states, form)[0] if gathers else []):
        agree(f"grad_and_reduce of logical ranks, {how}", states)


def _all_at_once(
    call: Call,
    states: Sequence[TrainState],
    setup: Setup,
    drawn: Callable[[int], AbstractContextManager[None]],
) -> tuple[list[Rows], list[Result]]:
    """Run all of them together, with whole parameters: their losses call collectives."""
    agree("grad_and_reduce of logical ranks, whose losses call collectives", states)
    assert setup.logical is not None
    ranks, fulls = setup.carried(setup.axis.rank), [with_full(one)[1] for one in states]
    rows, results = [Rows(one) for one in states], list[Result]()
    every = [[one.view(place) for one in rows] for place in range(len(ranks))]

    def run(place: int) -> tuple[list[TrainState], Result]:
        pairs = zip(every[place], fulls, strict=True)
        with drawn(ranks[place]):
            return call(place, [_whole(view, some) for view, some in pairs])

    carried = Carried(setup.logical.ranks, ranks)
    for place, (new, result) in enumerate(run_together(run, carried, setup.axis)):
        for one, view, made in zip(rows, every[place], new, strict=True):
            one.end(place, one.took(place, 0, _apart(made, view)))
        results.append(result)
    return rows, results


def parts_of_batch(
    setup: Setup, batch: Any, in_axes: Any, sizes: Sequence[int] | None
) -> list[Any]:
    """Return the part of a batch of each logical rank that this rank carries."""
    name = "engine.parts"
    axes = in_axes if isinstance(in_axes, int) else (in_axes,)
    call_given(name, setup, None, axes, sizes)
    if setup.logical is None:
        return [batch]
    each = each_call(name, lambda params, batch: None, setup, ((batch,), {}), None, axes, sizes)
    return [args[0] for args, _, _ in each]


def _whole(view: TrainState, fulls: Sequence[Tensor]) -> TrainState:
    """Return a logical rank's view with whole parameters, on an axis of its own."""
    setup = view.setup
    alone = dataclasses.replace(
        setup,
        stage=0,
        axis=Axis(name=setup.axis.name, size=1),
        offload=dataclasses.replace(setup.offload, params=None),
    )
    return view.replace(
        setup=alone,
        params=Buffers(flats=tuple(fulls), placement=alone.params),
        window=dataclasses.replace(view.window, gathered=()),
    )


def _apart(made: TrainState, view: TrainState) -> TrainState:
    """Return what came of a view with whole parameters, with those and the ranks of the view."""
    kept = dataclasses.replace(made.window, gathered=view.window.gathered)
    return made.replace(setup=view.setup, params=view.params, window=kept, schedule=view.schedule)


class Rows:
    """What the logical ranks of this rank bring to one state, one after another: a row each.

    In a window of the user's they are added up there, [k, W l]. Else the row of each call becomes
    a part of a node of the tree.
    """

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.waits = state.window.is_open
        self._ranks = state.setup.carried(state.setup.axis.rank)
        assert state.setup.logical is not None
        self._everywhere = state.setup.logical.ranks // state.setup.axis.size
        self._nodes: list[Nodes] = []  # of each call
        self._rows: list[Tensor] = []  # of a window of the user's, [k, W l] of each group
        self._slots: list[dict[str, Slot]] = []
        self._nonfinite, self._used = state.progress.nonfinite, state.progress.used
        self.weighted = state.setup.reduction.weighted
        self._unweighted = False  # whether a logical rank made calls without weights
        self._now = state.replace(slots=_slots(state, own=False))

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
            slots={
                **self._now.slots,
                **{
                    name: dataclasses.replace(one, value=one.value[place])
                    for name, one in _slots(state, own=True).items()
                },
            },
            setup=dataclasses.replace(setup, policy=policy),
        )

    def took(self, place: int, call: int, made: TrainState) -> TrainState:
        """Take what a backward has brought to a view; return the state that goes on in its place.

        call: how many of this logical rank's came before.
        """
        if self.waits:
            return made
        if call == len(self._nodes):
            self._nodes.append(Nodes(made.setup, made.device))
        flats = made.window.pending.flats
        self._nodes[call].push(dict(zip(made.setup.layout.trainable, flats, strict=True)), place)
        return made.replace(
            window=dataclasses.replace(made.window, pending=progress.CLOSED.pending)
        )

    def end(self, place: int, made: TrainState) -> None:
        """A logical rank is done: keep what it leaves."""
        weighted = made.setup.reduction.weighted
        self.weighted = self.weighted or weighted
        called = made.progress.backwards > self.state.progress.backwards
        self._unweighted = self._unweighted or (called and not weighted)
        if self.weighted and self._unweighted:
            raise weighted_by_some("a logical rank", "another one")
        self._nonfinite = self._nonfinite or made.progress.nonfinite
        self._used |= made.progress.used
        self._slots.append(_slots(made, own=True))
        if self.waits and made.window.pending.held:
            flats, count = made.window.pending.flats, len(self._ranks)
            self._rows = self._rows or [x.new_zeros(count, *x.shape) for x in flats]
            for rows, flat in zip(self._rows, flats, strict=True):
                rows[place] = flat
        if place >= self._everywhere:  # what other ranks have served is known to this one alone
            made = made.replace(schedule=self._now.schedule)
        self._now = made.replace(
            slots=_slots(made, own=False),
            window=dataclasses.replace(made.window, pending=progress.CLOSED.pending),
        )

    def made(self, calls: int, *, weighted: bool = False) -> TrainState:
        """Return the state that has all of it. A collective, unless it waits in a window.

        calls: how many the logical rank made that made the most. weighted: whether those of another
        rank had weights: where all of this one made none, it goes by that.
        """
        state, now = self.state, self._now
        counted = dataclasses.replace(
            now.progress,
            backwards=state.progress.backwards + calls,
            reductions=state.progress.reductions,
            nonfinite=self._nonfinite,
            used=self._used,
        )
        joined: dict[str, Slot] = {}  # zeros of one that has none, for it made no call
        for name, one in {name: one for some in self._slots for name, one in some.items()}.items():
            zeros = dataclasses.replace(one, value=torch.zeros_like(one.value))
            values = [some.get(name, zeros).value for some in self._slots]
            joined[name] = dataclasses.replace(one, value=torch.stack(values))
        setup = dataclasses.replace(now.setup, policy=state.setup.policy)
        weighted = self.weighted or (weighted and not self._unweighted)
        new = now.replace(
            setup=setup.with_weights(weighted) if weighted else setup,
            slots={**now.slots, **joined},
            progress=counted,
        )
        if self.waits:
            offload, pending = state.setup.offload, state.window.pending
            if self._rows:
                flats = tuple(offloaded(offload.gradients, x, offload) for x in self._rows)
                pending = Buffers(flats=flats, placement=Placement.PARTIAL)
            return new.replace(window=dataclasses.replace(now.window, pending=pending))
        if not calls:
            return new.replace(window=state.window)
        new = new.replace(window=progress.pop(state.window)[0])
        for call in range(calls):
            nodes = self._nodes[call : call + 1] or [Nodes(new.setup, new.device)]
            flats = mean_of_nodes(new, nodes[0])
            new = accumulated(new, part_of_update(new, flats, reduced=True))
            new = new.replace(progress=progress.saw_reduction(new.progress))
        self._nodes.clear()
        return new


# Values.


def mean_of_rows(rows: Tensor, setup: Setup) -> Tensor:
    """Return the mean over all logical ranks of a row for each, [k, *t] -> [*t], on every rank.

    A collective on several ranks. 16-bit floats are added up in fp32. Where all rows are equal the
    mean is that number, which a division by another number than a power of two may miss.
    """
    assert setup.logical is not None
    return _mean(rows, setup.axis, setup.logical.ranks)


def logical_mean(tree: Any, state: Any = None, *, weight: Any = None) -> Any:
    """Return the mean over all logical ranks of what each has, the same on every rank.

    For the aux of a loss, such as new buffers: `buffers = fzero.logical_mean(aux)`, in a step with
    `logical_ranks=`. For losses of an engine's loop, and whatever is computed outside of a step,
    give it the state. A collective.

    Args:
        tree: a pytree of tensors [k, *t], a row for each logical rank of this rank, as
            `grad_and_reduce` gives aux, and `torch.stack` makes of the losses of a loop.
        state: whose logical ranks they are, `engine.state`; left out, those of the step. Without
            `logical_ranks=` each rank is one.
        weight: of each row, [k]: then the mean is sum(w x) / sum(w), in which a row of weight 0
            counts for nothing, also if it is NaN. `order.sizes()` for means over rows.

    Returns:
        The pytree of tensors [*t]: of floating ones the mean, by one tree whatever the number of
        ranks; of others, such as counts, the row of logical rank 0.

    Raises:
        PhaseError: in a loss, and without a state outside of a step with logical ranks.
        LayoutError: for a leaf that has not a row for each logical rank of this rank.

    Example:
        >>> import torch, fzero
        >>> def step_fn(state, x):
        ...     loss = lambda p, x: ((p * x).sum(), x.sum())
        ...     state, (_, sums) = fzero.grad_and_reduce(loss, state, has_aux=True)(x)
        ...     return fzero.apply_gradients(state), fzero.logical_mean(sums)
        >>> step = fzero.shard(step_fn, stage=2, logical_ranks=2)
        >>> state = step.init(torch.ones(1), fzero.optim.sgd(1.0))
        >>> step(state, torch.tensor([[1.0], [2.0]]))[1]
        tensor(1.5000)
        >>> fzero.logical_mean(torch.tensor([1.0, 4.0]), state, weight=[2, 1])
        tensor(2.)
    """
    carried, axis = carried_here(), ambient()
    in_loss = carried is not None and carried.rank is not None
    if state is not None and not in_loss:
        setup = flatten_states("logical_mean", state)[0][0].setup
        axis = setup.axis.mesh or setup.axis
        carried = carried_by(setup) or Carried(axis.size, range(axis.rank, axis.rank + 1))
    if carried is None or in_loss:
        where = "in a loss" if in_loss else "outside of a step with logical ranks"
        raise PhaseError(
            f"logical_mean {where}.",
            cause="a call in a loss or in a turn of engine.parts(), or one in a loop around steps.",
            fix="in a step give it the aux of grad_and_reduce; after a loop over engine.parts() "
            "logical_mean(torch.stack(losses), engine.state); outside of a step the state, too.",
        )
    count = len(carried.ranks)

    def require(x: Any) -> None:
        if not isinstance(x, Tensor) or not x.ndim or len(x) != count:
            seen = f"shape {[*x.shape]}" if isinstance(x, Tensor) else f"{x!r:.60}"
            raise LayoutError(
                f"logical_mean got {seen}, and this rank has {count} logical ranks.",
                cause="a value of this rank, or what was averaged already.",
                fix="give the aux of grad_and_reduce, which has a first dim of them, or "
                "torch.stack([...]) of a value of each.",
            )

    weights = None if weight is None else torch.as_tensor(weight, dtype=torch.float64)
    if weights is not None:
        require(weights)

    def one(x: Tensor) -> Tensor:
        require(x)
        if x.is_floating_point() or x.is_complex():
            return _mean(x, axis, carried.size, weights)
        return gather_rows(x, axis, carried.size)[0]

    return optree.tree_map(one, tree, namespace=NAMESPACE)


def _mean(rows: Tensor, axis: Axis, places: int, weights: Tensor | None = None) -> Tensor:
    """Return the mean, or sum(w x) / sum(w), in fp64: a row of weight 0 counts for nothing."""
    if weights is None:
        every = gather_rows(rows, axis, places)
        wide = every.float() if every.dtype in SIXTEEN_BIT else every
        mean = (fold_rows(wide) / places).to(rows.dtype)
        return torch.where((every == every[0]).all(0), every[0], mean)
    dtype = torch.promote_types(rows.dtype, torch.float64)
    flat = rows.to(dtype).flatten(1) if rows.ndim > 1 else rows.to(dtype)[:, None]
    both = torch.cat([flat, weights.to(rows.device, dtype)[:, None]], 1)
    every = gather_rows(both, axis, places)
    x, w = every[:, :-1], every[:, -1:]
    total, first = fold_rows(w), x[(w[:, 0] != 0).int().argmax()]
    mean = fold_rows(torch.where(w == 0, 0, x * w)) / total
    same = ((x == first) | (w == 0)).all(0) & (total != 0)
    return torch.where(same, first, mean).to(rows.dtype).reshape(rows.shape[1:])


def stacked(auxes: Sequence[Any], name: str = "grad_and_reduce") -> Any:
    """Return what the losses of logical ranks gave beside their values, with a first dim of them.

    Numbers become tensors; what is neither must be equal.
    """
    specs = [optree.tree_structure(aux, namespace=NAMESPACE) for aux in auxes]
    if any(spec != specs[0] for spec in specs):
        raise LayoutError(
            f"{name}: two logical ranks gave aux of other structures.",
            cause="aux that depends on the data.",
            fix="return the same structure each time.",
        )
    return optree.tree_map(partial(_stacked_leaf, name), *auxes, namespace=NAMESPACE)


def _stacked_leaf(name: str, *leaves: Any) -> Any:
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
        f"{name}: aux has {seen} of the logical ranks of this rank.",
        cause="aux that differs by logical rank: outputs of batches of other sizes, or texts.",
        fix="return tensors of one shape, such as sums and counts, or numbers.",
    )


def _slots(state: TrainState, *, own: bool) -> dict[str, Slot]:
    """Return the slots of which each logical rank has its own, or those that all have in common."""
    found = state.slots.items()
    return {k: one for k, one in found if (one.form.placement is Placement.PARTIAL) == own}
