"""The gradients of an engine as its user has them in `p.grad`: stand-ins, and what they answer."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.adapter._held import HeldGradient
from fzero.collectives import gather_many
from fzero.errors import LayoutError, PhaseError
from fzero.machine.offload import change
from fzero.machine.packing import LeafRange, leaf_ranges
from fzero.state import Setup, TrainState, progress
from fzero.state.layout import as_bits, as_complex, stored_dtype
from fzero.transforms.scaled import times_scale, without_scale
from fzero.transforms.update import share

if TYPE_CHECKING:
    from fzero.adapter.driver import Driver


class Gradients:
    """The stand-ins of an engine's parameters, and what somebody does to them.

    A stand-in stays in `p.grad` while a backward runs: autograd adds the new gradient to it, and
    the engine takes that. So it is still there after a backward that raised, and zero_grad() then
    drops the gradients that the engine held before.

    learning: the parameter objects that learn, each with the leaf that it is. reduced: (driver,
    name of a call) -> the state, with all gradients reduced; a collective.
    """

    def __init__(
        self,
        driver: Driver,
        learning: Sequence[tuple[Tensor, int]],
        reduced: Callable[[Driver, str], TrainState],
    ) -> None:
        setup = driver.state.setup
        self.device, self.shows = driver.state.device, setup.stage == 0
        # A stand-in lives where the garbage collector does not look: it leads to no engine.
        self._driver, self._call = weakref.ref(driver), reduced
        self._leaves = [leaf for _, leaf in learning]
        paths = [setup.layout.leaves[leaf].path for leaf in self._leaves]
        self._learning = [
            (p, HeldGradient(p, number, paths[number], self))
            for number, (p, _) in enumerate(learning)
        ]
        self._of = {id(p): held for p, held in self._learning}
        # Several objects on one memory are one leaf: the first one has its gradient.
        self._leading = {leaf: i for i, leaf in reversed([*enumerate(self._leaves)])}
        self._standing = False
        self._zeroed: set[int] = set()
        self._written: list[tuple[str, str, Sequence[Any]]] = []
        self._norms: dict[float, dict[int, Tensor]] = {}
        self._are_reduced = False
        self._ranges: dict[int, tuple[int, int, LeafRange]] = {}

    def dropped(self, first: Tensor | None = None) -> bool:
        """Whether the user has set every `p.grad` to None, or to zero.

        `first` is a parameter that autograd has written to since: it counts as one set to None.
        Raises `LayoutError`, until that is mended, if some were replaced (a gradient written by
        hand would be lost) or set to None.
        """
        if not self._standing:
            return False
        others = [(p, p.grad, held) for p, held in self._learning if p.grad is not held]
        for p, gradient, held in others:
            if gradient is not None and p is not first:
                raise LayoutError(
                    f"p.grad of {held.path} was replaced by a tensor.",
                    cause="a gradient written by hand, or by another backward engine.",
                    fix="write engine.set_full_gradient(path, value), the same on every rank; "
                    "engine.zero_grad() throws all gradients away, this one, too.",
                )
        if not others:
            return len(self._zeroed) == len(self._learning) > 0
        replaced = {id(p) for p, _, _ in others}
        if any(id(p) not in replaced and h.number not in self._zeroed for p, h in self._learning):
            raise LayoutError(
                f"p.grad of {others[0][2].path} was set to None, and those of other parameters "
                "were not.",
                cause="an optimizer's zero_grad() of some of the parameters.",
                fix="drop all of them with engine.zero_grad(), set some to zero with "
                "p.grad.zero_(), or freeze a part with requires_grad_(False) before the backward.",
            )
        return True

    def require_taken(self) -> None:
        """Raise `LayoutError` for a `p.grad` that no backward has brought: it would be lost."""
        for p, held in () if self._standing else self._learning:
            if p.grad is not None and p.grad is not held:
                raise LayoutError(
                    f"p.grad of {held.path} is a tensor that the engine has not got by a backward.",
                    cause="a gradient written by hand, or one from before the engine was made.",
                    fix="write engine.set_full_gradient(path, value) after a backward, the same on "
                    "every rank; engine.zero_grad() throws this one away.",
                )

    @property
    def gone(self) -> bool:
        """Whether every `p.grad` is None, or zero, where stand-ins were."""
        zeroed = self._zeroed
        return self._standing and all(
            p.grad is None or h.number in zeroed for p, h in self._learning
        )

    def drop(self) -> None:
        """Take the stand-ins away, whatever is there."""
        self.forget()
        for p, _ in self._learning:
            p.grad = None

    def forget(self) -> None:
        """The user has taken the stand-ins away."""
        self._standing = False
        self._written = []
        self.changed()

    def stand_for(self, p: Tensor, task: int) -> None:
        """Put the stand-in of one parameter in its place: its gradient was taken, or refused.

        task: the graph task that brought it.
        """
        p.grad = held = self._of[id(p)]
        held.stand_for(task)

    def stand(self) -> None:
        """Put the stand-ins in their places: the engine holds gradients now."""
        self._standing, self._are_reduced = True, False
        self.changed()
        for p, held in self._learning:
            p.grad = held

    def changed(self) -> None:
        """The gradients are others now: what is known of them holds no more."""
        self._norms = {}
        self._zeroed = set()

    @property
    def said(self) -> str:
        """What was written to `p.grad` since the update, for ranks to compare; usually nothing.

        Factors are compared to three digits: other hardware may sum a norm in another order.
        """
        if not self._written:
            return ""
        read: dict[int, str] = {}
        digest = 0
        for path, name, numbers in self._written:
            for x in numbers:
                if id(x) not in read:  # one factor is that of all parameters: it is read once
                    read[id(x)] = f"{x.item():.3g}" if isinstance(x, Tensor) else f"{x}"
            text = f"{path} {name} {[read[id(x)] for x in numbers]}"
            digest = zlib.crc32(text.encode(), digest)
        path, name, numbers = self._written[-1]
        last = f"{name}({', '.join(read[id(x)] for x in numbers)}) of {path}"
        return f", p.grad written {len(self._written)} times, last by {last} ({digest:08x})"

    # What stand-ins answer.

    def norm(self, held: HeldGradient, order: float) -> Tensor:
        """Return the norm of a gradient: that of all of them is computed at the first request."""
        if order not in self._norms:
            with torch.inference_mode(False), torch.no_grad():
                self._norms[order] = self._norms_of(self._reduced(f"p.grad.norm({order:g})"), order)
        norm = self._norms[order][self._leaves[held.number]].clone()
        return norm if self._leads(held) else torch.zeros_like(norm)

    def write(self, held: HeldGradient, name: str, numbers: Sequence[Any]) -> None:
        """Change this rank's part of a gradient by numbers, which must be those of all ranks."""
        with torch.inference_mode(False), torch.no_grad():
            state = self._open.state
            if not self._are_reduced or state.window.is_open:
                state = self._reduced(f"p.grad.{name}")
            number, index, where = self._range(state.setup, self._leaves[held.number])
            self._written.append((held.path, name, tuple(numbers)))
            self._norms = {}
            self._zeroed.discard(held.number)
            if not self._leads(held) or where.start == where.stop:
                return
            used = numbers
            if name.startswith("clamp"):
                used = [as_held(state, index, x) for x in numbers]
            piece = where.of(state.gradients.flats[number])
            write = getattr(Tensor, name)
            change(piece, state.device, lambda x: write(x, *used))

    def zero(self, held: HeldGradient) -> None:
        """Set a gradient to zero; where all of them are, the engine drops them."""
        driver = self._open
        self._written.append((held.path, "zero_", ()))
        self._norms = {}
        self._zeroed.add(held.number)
        if not self._leads(held):
            return
        leaf = self._leaves[held.number]

        def zeroed(state: TrainState) -> TrainState:
            for piece in self._pieces(state, leaf):
                piece.zero_()
            return state.replace(progress=progress.saw_zero(state.progress, as_bits([leaf])))

        with torch.inference_mode(False), torch.no_grad():
            driver.put_each(zeroed)

    def values(self, held: HeldGradient) -> Tensor:
        """Return a gradient as an update would use it, in the dtype of the parameter."""
        with torch.inference_mode(False), torch.no_grad():
            state = self._open.state if self.at_hand else self._reduced("reading p.grad")
            number, _, where = self._range(state.setup, self._leaves[held.number])
            piece = where.of(state.gradients.flats[number])
            leaf = state.setup.layout.leaves[self._leaves[held.number]]
            whole = leaf.of(without_scale(state, piece) * share(state))
            return (whole if self._leads(held) else torch.zeros_like(whole)).to(held.dtype)

    @property
    def at_hand(self) -> bool:
        """Whether this rank has all of the gradients, and nothing waits to be reduced."""
        driver = self._driver()
        if driver is None or driver.closed or not self.shows:
            return False
        waits = driver.state.window.is_open or driver.state.window.pending.held
        return driver.state.gradients.held and not waits

    @property
    def _open(self) -> Driver:
        driver = self._driver()
        if driver is None:
            raise PhaseError(
                "p.grad is the stand-in of an engine that is gone.",
                cause="the engine was made in a function, and nothing holds it any more.",
                fix="keep the engine for as long as its module is used, or close() it.",
            )
        driver.require_not_closed()
        return driver

    def _reduced(self, name: str) -> TrainState:
        state = self._call(self._open, name)
        self._are_reduced = True
        return state

    def _leads(self, held: HeldGradient) -> bool:
        """Whether it has the gradient of its leaf: of several objects on one memory the first."""
        return self._leading[self._leaves[held.number]] == held.number

    def _norms_of(self, state: TrainState, order: float) -> dict[int, Tensor]:
        """The norm of the gradient of every leaf, on every rank. One collective."""
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
            total = total * share(state)
        stored = [stored_dtype(layout.leaves[i].dtype) for i in learning]
        dtypes = [torch.promote_types(dtype, torch.float32) for dtype in stored]
        return {
            leaf: norm.to(dtype) for leaf, norm, dtype in zip(learning, total, dtypes, strict=True)
        }

    def _range(self, setup: Setup, leaf: int) -> tuple[int, int, LeafRange]:
        """Return the number of a leaf's group, the group, and what this rank's part has of it."""
        if not self._ranges:
            layout, part = setup.layout, setup.part(setup.gradients, setup.axis.rank)
            for number, index in enumerate(layout.trainable):
                nothing = {i: LeafRange(0, i, 0, 0, 0) for i in layout.groups[index].leaves}
                here = {one.leaf: one for one in leaf_ranges(layout, index, part)}
                for i, one in (nothing | here).items():
                    self._ranges[i] = (number, index, one)
        return self._ranges[leaf]

    def _pieces(self, state: TrainState, leaf: int) -> Iterator[Tensor]:
        """What this rank holds of the gradient of a leaf: reduced, and not yet."""
        number, index, where = self._range(state.setup, leaf)
        if state.gradients.held:
            yield where.of(state.gradients.flats[number])
        pending, group = state.window.pending, state.setup.layout.groups[index]
        if pending.held:
            begin = group.offsets[group.leaves.index(leaf)]
            yield pending.flats[number][begin : begin + state.setup.layout.leaves[leaf].numel]


def as_held(state: TrainState, index: int, bound: Any) -> Any:
    """A bound of what an update uses, as one of what the state holds of a group."""
    factor = 1 / share(state)
    if bound is None or (state.scale is None and factor == 1.0):
        return bound
    dtype = state.setup.accumulate_dtype(index)
    given = torch.as_tensor(bound, dtype=dtype, device=state.device) * factor
    return times_scale(state, [given])[0]
