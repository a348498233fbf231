"""What an engine's user has in `p.grad`: a stand-in for each gradient, and who has that.

a backward brings gradients      each `p.grad` is a stand-in, of this generation
the user reads, edits, drops     the generation answers, and notes what ranks are to compare
an update, zero_grad()           the stand-ins go, and the generation ends
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.adapter.hooks import in_backward
from fzero.adapter.param_grad import ShardedGrad, without_graph
from fzero.collectives import gather_many
from fzero.errors import LayoutError, PhaseError
from fzero.machine.offload import change
from fzero.machine.packing import LeafRange, hashed, leaf_ranges
from fzero.machine.placeholder import Memoryless
from fzero.state import Buffers, Setup, TrainState
from fzero.state.layout import as_bits, as_complex, as_real, stored_dtype
from fzero.state.progress import without_use
from fzero.transforms.loss_scale import without_scale
from fzero.transforms.recipe import mean_of, times_factor


class StandIns:
    """The stand-in of each parameter that learns, in its `p.grad` while the engine holds gradients.

    A stand-in stays in `p.grad` while a backward runs: autograd adds the new gradient to it, and
    the engine takes that. So it is still there after a backward that raised, and zero_grad() then
    drops the gradients that the engine held before.

    They are of one generation of the gradients: where those are dropped, others take their places.

    standing: whether stand-ins are in their places.
    """

    def __init__(self, driver: Any) -> None:
        self._driver, setup = driver, driver.state.setup
        self._addresses = addresses_of(setup, [leaf for _, leaf in driver.params.learning])
        self._begin_generation()

    def _begin_generation(self) -> None:
        leaves = self._driver.state.setup.layout.leaves
        self.gradients = made = GradGeneration(self._driver, self._addresses)
        self._begun = self.standing = False
        self._graph = False  # whether a backward of create_graph=True has brought some
        self._of = {
            id(p): (p, ShardedGrad(p, number, leaves[leaf].path, made))
            for number, (p, leaf) in enumerate(self._driver.params.learning)
        }

    def stand(self) -> None:
        """Put the stand-ins in their places: the engine holds gradients now."""
        self._begun = self.standing = True
        self.gradients.arrived()
        for p, held in self._of.values():
            p.grad = held
        if self._graph:
            with torch.enable_grad():
                self._without_graph([one for _, one in self._of.values() if not one.requires_grad])

    def _without_graph(self, values: Iterable[Tensor]) -> None:
        """Let a loss of these values of gradients raise where it is differentiated."""
        leads: Any = _NoGraph.apply(torch.zeros(()), *(p for p, _ in self._of.values()))
        for x in values:
            _NoGraph.apply(x, leads)

    def read(self, values: Tensor) -> Tensor:
        """Return values of gradients, a copy; after create_graph=True a loss of them raises."""
        values = values.clone()
        if self._graph and torch.is_grad_enabled():
            self._without_graph([values])
        return values

    def stand_for(self, p: Tensor, task: int) -> None:
        """Put the stand-in of one parameter in its place: its gradient was taken, or refused.

        task: the graph task that brought it.
        """
        self._begun = True
        self._graph = self._graph or torch.is_grad_enabled()
        p.grad = held = self._of[id(p)][1]
        held.stand_for(task)

    def drop(self) -> None:
        """Take the stand-ins away, whatever is there. The state has the gradients still."""
        self.forget()
        for p, _ in self._of.values():
            p.grad = None

    def forget(self) -> None:
        """The user has taken the stand-ins away, or set all of them to zero: those stay."""
        stay = len(self.gradients.zeroed) == len(self._of)
        self.standing = False
        if self._begun and not stay:
            self.gradients.end(self._driver.state)
            self._begin_generation()
        else:
            self.gradients.forget()

    def stand_again(self, leaf: str) -> None:
        """A gradient was written: the stand-ins of this leaf are there, if others are."""
        for p, held in self._of.values() if self.standing else ():
            if held.path == leaf:
                p.grad = held
                self.gradients.removed.discard(held.number)

    # What the user did to `p.grad`.

    @property
    def touched(self) -> bool:
        """Whether the user has put anything else there, or set any to zero."""
        every = self._of.values()
        return bool(self.gradients.zeroed) or any(
            p.grad is not (held if self.standing else None) for p, held in every
        )

    def taken(self) -> dict[int, Tensor]:
        """Return the tensors that the user has put into `p.grad`, by the id of p; take them out."""
        given = {}
        for key, (p, held) in self._of.items():
            if p.grad is not None and p.grad is not held:
                given[key], p.grad = p.grad.detach(), held if self.standing else None
        return given

    def write(self, p: Tensor, gradient: Tensor) -> None:
        """Write what the user has put into `p.grad`. A collective for the first one."""
        self._of[id(p)][1].copy_(gradient)

    def dropped(self, first: Tensor | None = None) -> bool:
        """Whether the user has set every `p.grad` to None, or to zero; those of some: see `remove`.

        `first` is a parameter that autograd has written to since: it counts as one set to None.
        Raises `LayoutError` for a tensor that was put there, and would be lost.
        """
        if not self.standing:
            return False
        others = [(p, p.grad, held) for p, held in self._of.values() if p.grad is not held]
        for p, gradient, held in others:
            if gradient is not None and p is not first:
                raise _replaced(
                    held,
                    "by a tensor before a backward",
                    cause="p.grad = g, and a backward that would add to it, or a hook, before "
                    "engine.step() or engine.full_gradients() has taken it.",
                    fix="write p.grad.copy_(g), or engine.set_full_gradient(path, g), the same on "
                    "every rank; engine.zero_grad() throws all gradients away, this one, too.",
                )
        gone = self.gradients.zeroed.union(held.number for _, _, held in others)
        if len(gone) == len(self._of) > 0:
            return True
        for _, _, held in others:
            self.gradients.remove(held)
        return False

    def are_gone(self, *, zeroed: bool) -> bool:
        """Whether every `p.grad` is None where stand-ins were; or `zeroed`, where that counts."""
        gone = self.gradients.zeroed if zeroed else ()
        return self.standing and all(
            p.grad is None or held.number in gone for p, held in self._of.values()
        )

    def require_none_replaced(self) -> None:
        """Raise `LayoutError` if a step pre hook has put something else into a `p.grad`."""
        for p, held in self._of.values() if self.standing else ():
            if p.grad is not held:
                raise _replaced(
                    held,
                    "in a step pre hook",
                    cause="p.grad = None, optimizer.zero_grad() or p.grad = g in the hook.",
                    fix="write to the gradient in place (p.grad.mul_(x), clipping by torch's own "
                    "functions), or by engine.set_full_gradient(path, value).",
                )


def _replaced(held: ShardedGrad, how: str, *, cause: str, fix: str) -> LayoutError:
    return LayoutError(f"p.grad of {held.path} was replaced {how}.", cause=cause, fix=fix)


class _NoGraph(torch.autograd.Function):
    """Stands between the parameters and a gradient of a backward with create_graph=True."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, *_: Tensor) -> Tensor:
        ctx.mark_dirty(held)
        return held

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise without_graph()


class GradGeneration:
    """The gradients from the backward that brings the first to what drops them, for stand-ins.

    A stand-in that somebody keeps belongs to its generation. When that has ended, it shows what it
    showed last, as a gradient of torch does after `zero_grad()`, or raises: never the next
    gradient. The buffers that the state lets go are then held for as long as a stand-in is.

    driver: of the engine. The garbage collector does not look into `p.grad`, so it is held weakly,
    and nothing else leads to the engine or its optimizer.
    edits: how often they have changed. zeroed, removed: the numbers of those that somebody has set
    to zero, and to None.
    """

    def __init__(self, driver: Any, addresses: Sequence[GradientAddress]) -> None:
        self._driver, self._addresses = weakref.ref(driver), addresses
        self.device, self.stage = driver.state.device, driver.state.stage
        self._layout, self._is_alone = driver.state.setup.layout, driver.axis.size == 1
        self._ended = False
        self._kept: TrainState | None = None  # with what they were when they ended
        self._are_reduced, self.edits = False, 0
        self._written: list[tuple[str, str, Sequence[Any]]] = []
        self._norms: dict[float, dict[int, Tensor]] = {}
        self.zeroed, self.removed = set[int](), set[int]()

    def arrived(self) -> None:
        """A backward has brought others: what is known of them holds no more."""
        self._are_reduced, self.removed = False, set[int]()
        self.changed()

    def changed(self) -> None:
        """They are others now: what is known of them holds no more."""
        self._norms, self.zeroed = {}, set[int]()
        self.edits += 1

    def forget(self) -> None:
        """There are none any more, so nothing was written to them."""
        self._written = []
        self.arrived()

    def end(self, state: TrainState) -> None:
        """They are dropped from a state; what was not reduced, or was scaled in place, is lost."""
        groups = [state.setup.layout.groups[index] for index in state.setup.layout.trainable]
        there = bool(state.gradients.flats) and all(
            flat.numel() or not group.shard_numel
            for group, flat in zip(groups, state.gradients.flats, strict=True)
        )
        if there and not _waits(state):
            nothing = Buffers(flats=(torch.empty(0, device=state.device),))
            self._kept = state.replace(params=nothing, optimizer=())
        self._ended = True

    def current(self, path: str) -> GradGeneration:
        """Return these gradients, to ask for one; drop them first if the user has dropped them.

        Raises `PhaseError` if nobody has them.
        """
        if not self._ended:
            driver = self._open()
            if not in_backward() and driver.stand_ins.are_gone(zeroed=False):
                driver.drop_if_user_did()
        if self._ended and self._kept is None:
            raise PhaseError(
                f"a gradient of {path} from before it was dropped or used.",
                cause="a p.grad that was kept over zero_grad() or step(). It was never reduced, as "
                "in a window; or the update has scaled it in place (max_norm, a loss scale).",
                fix="take a copy while it is there: engine.full_gradient(path), or p.grad.clone() "
                "at stage 0.",
            )
        return self

    def _open(self) -> Any:
        """Return the driver. Raises `PhaseError` if its engine was closed, or is gone."""
        driver = self._driver()
        if driver is None:
            raise PhaseError(
                "p.grad is the stand-in of an engine that is gone.",
                cause="the engine was made in a function, and nothing holds it any more.",
                fix="keep the engine for as long as its module, or a p.grad that was kept, is "
                "used; or close() it.",
            )
        driver.require_not_closed()
        return driver

    @property
    def shows(self) -> bool:
        """Whether each rank has all elements."""
        return self.stage == 0

    @property
    def at_hand(self) -> bool:
        """Whether this rank has all of them, and nothing waits to be reduced."""
        driver = self._driver()
        if driver is None or driver.closed or not self.shows:
            return False
        if self._ended:
            return self._kept is not None
        return driver.state.gradients.held and not _waits(driver.state)

    @property
    def summary(self) -> str:
        """What was written to `p.grad` since the update, for ranks to compare; usually nothing.

        Factors are compared to three digits: other hardware may sum a norm in another order. Of
        operands with more elements digests are compared.
        """
        if not self._written:
            return ""
        read: dict[int, str] = {}
        digest = 0
        for path, name, numbers in self._written:
            for x in numbers:
                if id(x) not in read:  # one factor is that of all parameters: it is read once
                    value: Any = x.item() if isinstance(x, Tensor) else x
                    read[id(x)] = f"{value:.3g}" if isinstance(value, float) else f"{value}"
            text = f"{path} {name} {[read[id(x)] for x in numbers]}"
            digest = zlib.crc32(text.encode(), digest)
        path, name, numbers = self._written[-1]
        last = f"{name}({', '.join(read[id(x)] for x in numbers)}) of {path}"
        return f", p.grad written {len(self._written)} times, last by {last} ({digest:08x})"

    # What stand-ins ask for.

    def require_no_window(self, name: str) -> None:
        """Raise `PhaseError` inside a window, where gradients are not reduced."""
        if not self._ended:
            self._open().require_not(name, "window")

    def norm(self, held: ShardedGrad, order: float) -> Tensor:
        """Return the norm of a gradient. A collective for the first one, which computes all."""
        if order not in self._norms:
            name = f"p.grad.norm({order:g})"
            with torch.inference_mode(False), torch.no_grad():
                if (state := self._kept) is None:
                    state = self._reduced(name)
                else:
                    self._open().call(f"{name} of an earlier gradient")
                self._norms[order] = norms_of(state, order)
        address = self._addresses[held.number]
        norm = self._norms[order][address.here.leaf].clone()
        return norm if address.leads else torch.zeros_like(norm)

    def range(self, held: ShardedGrad) -> tuple[int, int]:
        """Return which elements of a gradient this rank has: the first, and the one behind."""
        here = self._addresses[held.number].here
        by = 2 if self._layout.leaves[here.leaf].dtype.is_complex else 1
        return here.start // by, here.stop // by

    def piece(self, held: ShardedGrad, name: str) -> Tensor:
        """Return those, as an update would use them: [n], a copy. A collective."""
        return self._addresses[held.number].piece(self._to_edit(name))

    def values(self, held: ShardedGrad) -> Tensor:
        """Return all elements of a gradient, a copy in the parameter's dtype. Stage 0."""
        state = self._open().state if self._kept is None else self._kept
        require_unweighted(state)
        with torch.inference_mode(False), torch.no_grad():
            state = state if self.at_hand else self._reduced("reading p.grad")
            return self._addresses[held.number].piece(state).view(held.leaf_shape).to(held.dtype)

    def compared(self, operands: Sequence[Any]) -> list[Any]:
        """Return what ranks compare of the operands of an operator: numbers, and digests."""
        if self._is_alone:
            return []
        given = [x.compared if isinstance(x, ShardedGrad) else (x,) for x in operands]
        every = [x for some in given for x in some if not isinstance(x, Memoryless)]
        return [hashed(x) if isinstance(x, Tensor) and x.numel() != 1 else x for x in every]

    def write(
        self, held: ShardedGrad, name: str, operands: Sequence[Any], run: Callable[[Tensor], Tensor]
    ) -> None:
        """Make this rank's elements of a gradient what `run` makes of them. A collective."""
        self._require_live(held, name)
        address, state = self._addresses[held.number], self._to_edit(name)
        made = as_real(run(address.piece(state))).reshape(-1)
        if address.leads:
            kept, home = (
                as_held(state, made),
                address.here.of(state.gradients.flats[address.number]),
            )
            change(home, state.device, lambda home: home.copy_(kept))
        elif made.any():
            raise held.refusal(f"{name}, of a second parameter on one memory")
        self._note(held, name, operands)
        self.zeroed.discard(held.number)

    def zero(self, held: ShardedGrad) -> None:
        """Set a gradient to zero; where all of them are, the engine drops them."""
        self._require_live(held, "zero_")
        self._clear(held, "zero_", unused=0)
        self.zeroed.add(held.number)

    def remove(self, held: ShardedGrad) -> None:
        """A `p.grad` was set to None, and others were not: the update does not use it."""
        if held.number not in self.removed:
            self._clear(held, "= None", unused=as_bits([self._addresses[held.number].here.leaf]))
            self.removed.add(held.number)

    def _clear(self, held: ShardedGrad, how: str, *, unused: int) -> None:
        driver, address = self._open(), self._addresses[held.number]
        self._note(held, how, ())

        def cleared(state: TrainState) -> TrainState:
            layout, pending = state.setup.layout, state.window.pending
            if state.gradients.held:
                own = address.here.of(state.gradients.flats[address.number])
                change(own, state.device, Tensor.zero_)
            if pending.held:
                begin = layout.groups[address.index].offsets[address.here.position]
                numel = layout.leaves[address.here.leaf].numel
                own = pending.flats[address.number][begin : begin + numel]
                change(own, state.device, Tensor.zero_)
            return state.replace(progress=without_use(state.progress, unused))

        if address.leads:
            with torch.inference_mode(False), torch.no_grad():
                driver.put_each(cleared)

    def _note(self, held: ShardedGrad, name: str, operands: Sequence[Any]) -> None:
        self._written.append((held.path, name, operands))
        self._norms = {}
        self.edits += 1

    def _require_live(self, held: ShardedGrad, name: str) -> None:
        if self._ended:
            raise PhaseError(
                f"p.grad.{name} of an earlier gradient of {held.path}, which was dropped since.",
                cause="a p.grad that was kept over zero_grad() or step(); p.grad is another one "
                "now.",
                fix="write to p.grad as it is now, or to a copy: at stage 0 g.clone(), at each "
                "stage engine.full_gradient(path) while the engine has it.",
            )

    def _to_edit(self, name: str) -> TrainState:
        state = self._open().state
        if self._kept is not None:
            return self._kept
        reduced = self._are_reduced and not state.window.is_open
        return state if reduced else self._reduced(f"p.grad.{name}")

    def _reduced(self, name: str) -> TrainState:
        state = self._open().with_gradients(name)
        self._are_reduced = True
        return state


def _waits(state: TrainState) -> bool:
    return state.window.is_open or state.window.pending.held


# Where the gradient of each parameter is in a state: its elements, and the norms of all.


class GradientAddress(NamedTuple):
    """Where the gradient of one parameter object is in a state."""

    leads: bool  # of several objects on one memory, which are one leaf, the first has its gradient
    number: int  # of its group among those that learn
    index: int  # of its group
    here: LeafRange  # what this rank's part has of it

    def piece(self, state: TrainState) -> Tensor:
        """This rank's elements of it as an update would use them: [n], a copy."""
        found = used(state, self.here.of(state.gradients.flats[self.number]))
        found = found if self.leads else torch.zeros_like(found)
        is_complex = state.setup.layout.leaves[self.here.leaf].dtype.is_complex
        return as_complex(found) if is_complex else found


def used(state: TrainState, gradient: Tensor) -> Tensor:
    """A gradient that a state holds as an update uses it: a copy."""
    made = mean_of(state).of(without_scale(state, gradient))
    return made.clone() if made is gradient else made


def as_held(state: TrainState, gradient: Tensor) -> Tensor:
    """The other way round: a copy."""
    made = times_factor(state, [mean_of(state).back(gradient)])[0]
    return made.clone() if made is gradient else made


def addresses_of(setup: Setup, learning: Sequence[int]) -> list[GradientAddress]:
    """Return where the gradients of these leaves are, one for each parameter object."""
    layout, part = setup.layout, setup.part(setup.gradients, setup.axis.rank)
    first = {leaf: i for i, leaf in reversed([*enumerate(learning)])}
    where: dict[int, tuple[int, int, LeafRange]] = {}
    for number, index in enumerate(layout.trainable):
        here = {one.leaf: one for one in leaf_ranges(layout, index, part)}
        for position, leaf in enumerate(layout.groups[index].leaves):
            nothing = LeafRange(position, leaf, 0, 0, 0)
            where[leaf] = number, index, here.get(leaf, nothing)
    return [GradientAddress(first[leaf] == i, *where[leaf]) for i, leaf in enumerate(learning)]


def norms_of(state: TrainState, order: float) -> dict[int, Tensor]:
    """Return the norm of the gradient of every leaf that learns, on every rank. One collective."""
    setup, layout = state.setup, state.setup.layout
    found: dict[int, Tensor] = {}
    for number, index in enumerate(layout.trainable):
        flat = without_scale(state, state.gradients.flats[number])
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        for one in leaf_ranges(layout, index, setup.part(setup.gradients, setup.axis.rank)):
            own = one.of(wide)
            own = as_complex(own) if layout.leaves[one.leaf].dtype.is_complex else own
            found[one.leaf] = torch.linalg.vector_norm(own, order)
    nothing = torch.tensor(0.0 if order >= 0 else float("inf"), device=state.device)
    learning = [leaf for index in layout.trainable for leaf in layout.groups[index].leaves]
    row = torch.stack([found.get(leaf, nothing).double() for leaf in learning])
    rows = gather_many([row], setup.over(setup.gradients))[0].view(-1, len(learning))
    total = row
    if len(rows) > 1:
        total = rows.sum(0) if order == 0 else torch.linalg.vector_norm(rows, order, dim=0)
    if order != 0:
        total = mean_of(state).of(total)
    stored = [stored_dtype(layout.leaves[i].dtype) for i in learning]
    dtypes = [torch.promote_types(dtype, torch.float32) for dtype in stored]
    return {leaf: norm.to(dtype) for leaf, norm, dtype in zip(learning, total, dtypes, strict=True)}


def require_unweighted(state: TrainState) -> None:
    """Raise `PhaseError` where all ranks must be asked for what a gradient is divided by."""
    setup = state.setup
    if setup.reduction.weighted and setup.axis.size > 1:
        raise PhaseError(
            "p.grad was read; the gradients are sums of w g, and their total weight is known "
            "when all ranks are asked.",
            cause="engine.backward(loss, weight=), and code that looks at p.grad.",
            fix="engine.full_gradient(path), on every rank, divides by the total.",
        )
