"""`Optimizer`: a rule with options by leaf, on any list of tensors that stands for shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError, PhaseError
from fzero.machine.offload import cloned
from fzero.machine.rows import Blocks
from fzero.machine.threads import even_spans, threads_on
from fzero.optim._apart import Apart, Parted, parted
from fzero.optim._base import OfPrecision
from fzero.optim._encoded import begun, in_portions, leaves_of_flats, not_differentiable
from fzero.optim._formula import Chosen, Span, elements_of, step_by_formula
from fzero.optim._piece import Piece, pieces_in, whole_leaves
from fzero.optim._precision import Precision
from fzero.optim._rules import Rule, Scaled, has_kernel
from fzero.optim._stream import Flats, Portion, Slots, counted, step_flats
from fzero.optim.masters import Place, make_masters, stay, work_tensors
from fzero.optim.recorded import lacks_value, lr_by_op
from fzero.state import NAMESPACE, record, static
from fzero.state.layout import Leaf
from fzero.state.setup import MASTERS, ParamGroups, SavedNames

_TORCH_NAMES = {"decoupled": "decoupled_weight_decay"}  # where torch.optim has another name

LeafTest = Callable[[Leaf], bool]
Schedule = Callable[[int], float]


@record
class OptimizerState:
    """The optimizer state of this rank, parallel to the list of flats that `init` was given."""

    count: Tensor  # [] int64 on the CPU (with a loss scale, on its device): updates; never reset
    moments: tuple[tuple[Tensor, ...], ...]  # one tuple for each moment of the rule
    masters: tuple[Tensor, ...]  # fp32 copies of 16-bit parameters; of others, empty
    steps: tuple[Tensor, ...] = ()  # updates of the leaves that are apart, as `count` is
    apart: Apart = static(default=())  # (path, 1 + index in `steps`); all others took every update


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(OfPrecision):
    """An elementwise update rule, its options, and the leaves that have other options.

    `init(params)` and `update(grads, state, params)` are the pure pair that optax and TorchOpt
    have, on any pytree; `advance` is what fzero calls on this rank's flat shards.
    """

    counts_by_leaf = True

    rule: Rule
    options: tuple[tuple[str, Any], ...]
    overrides: tuple[tuple[LeafTest, tuple[tuple[str, Any], ...]], ...] = ()
    precision: Precision = field(default_factory=Precision)

    @property
    def divides(self) -> bool:
        """Whether it divides by a state: by a mean of squared gradients."""
        return "exp_avg_sq" in self.rule.moments

    @property
    def squares(self) -> Mapping[str, bool]:
        """Return {slot: whether it is never negative}."""
        return {slot: slot == "exp_avg_sq" for slot in self.rule.moments}

    def codec_of(self, leaf: Leaf, slot: str) -> Blocks | None:
        """Return what a slot of a leaf is encoded by; None where it is kept in numbers."""
        return self.precision.codec_of(leaf, slot, squares=slot == "exp_avg_sq")

    def init(
        self, params: Any, pieces: Sequence[Piece] = (), *, place: Place = stay, owners: Any = None
    ) -> OptimizerState:
        """Return the state for `params`: zero moments, fp32 masters of 16-bit leaves.

        `owners`: of a rule for matrices, which keeps its moments in the flats all the same.

        `place` moves each of these tensors, as soon as it is made, to where it is stored.
        """
        flats = optree.tree_leaves(params, namespace=NAMESPACE)
        if any(p.is_complex() for p in flats):
            raise LayoutError(
                f"{self!r}: init() got a complex parameter.",
                cause="the rule used by itself: in a state complex parameters are real views.",
                fix="give torch.view_as_real(p) and torch.view_as_real(g).",
            )
        masters = make_masters(flats, [self.precision.master_weights] * len(flats), place)
        kept = [self.precision.kept(p.dtype) if p.numel() else p.dtype for p in flats]
        leaves = {} if self.precision.encoding is None else leaves_of_flats(flats, pieces)
        moments = tuple(
            tuple(
                place(begun(self.codec_of(leaves[i], name) if i in leaves else None, p, 0.0, k))
                for i, (p, k) in enumerate(zip(flats, kept, strict=True))
            )
            for name in self.rule.moments
        )
        return OptimizerState(
            count=torch.zeros((), dtype=torch.int64), moments=moments, masters=masters
        )

    def update(self, grads: Any, state: OptimizerState, params: Any) -> tuple[Any, OptimizerState]:
        """Return (updates, state'): params + updates are the new parameters. Pure."""
        flats, gs, pieces, treespec = whole_leaves(grads, params)
        by_formula = self.precision.encoding is None
        new, state = self.advance(flats, gs, state, pieces, differentiable=by_formula)
        updates = [n - p for n, p in zip(new, flats, strict=True)]
        return optree.tree_unflatten(treespec, updates), state

    def advance(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: OptimizerState,
        pieces: Sequence[Piece],
        *,
        differentiable: bool = False,
        owned: bool = False,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
        device: torch.device | None = None,
        unused: frozenset[str] = frozenset(),
        apart: bool = False,
    ) -> tuple[list[Tensor], OptimizerState]:
        """Return (params', state').

        `pieces` says which elements belong to which leaf; it is needed only where options differ
        by leaf, and to round by chance. With `owned`, params and state are overwritten; else they
        stay as they are. `found_inf` and `grad_scale`: see `skips`. `device`: where to compute, if
        anything lives elsewhere; by default where the parameters are. `unused`: paths of leaves
        that stay as they are, with all that is kept for them. `apart`: flats are whole blocks, and
        what is made of a block depends on nothing else.
        """
        now = parted(state.apart, unused, lambda path: 0, 1 + len(state.steps))
        if differentiable or not has_kernel(params):
            if self.precision.encoding is not None:
                raise not_differentiable(self)
            return self._by_formula(params, grads, state, pieces, device, now)
        if not owned:
            copy = torch.clone if device is None else cloned  # where it lives
            params = [copy(p) for p in params]
            state = optree.tree_map(copy, state, namespace=NAMESPACE)
        after = after_update(state, now, found_inf)
        # A skipped step does not use its number, so that it may be a wrong one then.
        numbers = [int(x) if found_inf is None else x for x in (after.count, *after.steps)]
        flats = Flats(params, grads, state.masters, self._slots(state))
        if self.precision.encoding is not None:
            flats, pieces = in_portions(flats, pieces, self.codec_of, unused)
        step_flats(
            flats,
            partial(self._by_kernel, pieces, state.count, numbers, now, apart),
            precision=self.precision,
            device=device,
            scaled=Scaled(found_inf, grad_scale),
            owned=owned,
            pieces=pieces,
            count=state.count,
        )
        return list(params), after

    def _by_kernel(
        self,
        pieces: Sequence[Piece],
        count: Tensor,
        numbers: Sequence[Any],
        now: Parted,
        apart: bool,
        portion: Portion,
    ) -> Slots:
        own = pieces_in(pieces, portion.indices)
        chosen = self._by_options(portion.work, own, count, now)
        threads = threads_on(portion.work[0].device) if apart and portion.work else 1
        for options, spans, counted_by in (_even(one, threads) for one in chosen):
            every = (portion.work, portion.grads, *portion.slots.values())
            work, gs, *slots = (elements_of(some, spans) for some in every)
            alike = len(set(counted_by)) == 1
            number = numbers[counted_by[0]] if alike else [numbers[k] for k in counted_by]
            self.rule.kernel(work, gs, tuple(slots), number, options, portion.scaled)
        return portion.slots

    def _slots(self, state: OptimizerState) -> Slots:
        return dict(zip(self.rule.moments, state.moments, strict=True))

    def slots(self, state: OptimizerState) -> Mapping[str, Sequence[Tensor]]:
        """Return the moments by the rule's names for them, and the masters."""
        return {**self._slots(state), MASTERS: state.masters}

    def counted(self, state: OptimizerState, paths: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return how many updates the leaves at `paths` took."""
        counts, numbers = (state.count, *state.steps), dict(state.apart)
        return {"step": {path: counts[numbers.get(path, 0)] for path in paths}}

    def recounted(
        self,
        state: OptimizerState,
        paths: Sequence[str],
        counters: Mapping[str, Mapping[str, Tensor]],
        *,
        count: int | None = None,
        unstepped: Collection[str] = (),
    ) -> OptimizerState:
        """Return the state whose leaves took counters["step"][path] updates; see `with_steps`."""
        return with_steps(state, {p: int(counters["step"][p]) for p in paths}, count)

    def skips(self, params: Sequence[Tensor], state: OptimizerState) -> bool:
        """Whether `advance` takes `found_inf` and `grad_scale`: its kernels are fused ones."""
        return has_kernel(params) and self.rule.skips(work_tensors(params, state.masters))

    def _by_formula(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: OptimizerState,
        pieces: Sequence[Piece],
        device: torch.device | None,
        now: Parted,
    ) -> tuple[list[Tensor], OptimizerState]:
        if self.precision.stochastic_rounding:
            raise _not_rounded(self)
        counts = [state.count, *state.steps]
        counts += [counts[source] for source in now.sources]
        new, moments, masters = step_by_formula(
            self.rule,
            Flats(params, grads, state.masters, self._slots(state)),
            self._by_options(params, pieces, state.count, now),
            precision=self.precision,
            device=device,
            counts=counts,
        )
        after = after_update(state, now, None)
        return new, replace(after, moments=moments, masters=masters)

    def _by_options(
        self, work: Sequence[Tensor], pieces: Sequence[Piece], count: Tensor, now: Parted
    ) -> list[Chosen]:
        """Return the spans to update, grouped by options, with the counter of each span."""
        if not (self.overrides and pieces) and not now.apart:
            everything = [(i, 0, w.numel()) for i, w in enumerate(work)]
            options = at(dict(self.options), count)
            return [Chosen(options, everything, [0] * len(everything))] if everything else []
        spans: dict[int, list[Span]] = {}
        counted_by: dict[int, list[int]] = {}
        numbers = dict(now.apart)
        for piece in pieces:
            number, which = numbers.get(piece.leaf.path, 0), self._override_of(piece.leaf)
            if number not in now.still:
                spans.setdefault(which, []).append((piece.index, piece.start, piece.stop))
                counted_by.setdefault(which, []).append(number)
        options = {k: at({**dict(self.options), **self._changes(k)}, count) for k in spans}
        return [Chosen(options[k], spans[k], counted_by[k]) for k in spans]

    def describe(self, leaves: Sequence[Leaf], step: Tensor | int | None = None) -> list[str]:
        """Return the lines that ranks compare: the options, and those of leaves with other options.

        A schedule is compared by its value at `step`.
        """
        lines = [f"optimizer {self!r}, {self.precision}"]
        for number, (_, changes) in enumerate(() if leaves else self.overrides):
            shown = ", ".join(f"{key}={_shown(value)}" for key, value in changes)
            lines.append(f"options {number} of some leaves: {shown}")
        if step is not None and not lacks_value(step):
            given = [dict(self.options), *(dict(changes) for _, changes in self.overrides)]
            schedules = [options for options in given if callable(options.get("lr"))]
            lines += [f"lr({int(step)}) = {at(options, step)['lr']}" for options in schedules]
        for leaf in leaves:
            changes = self._changes(self._override_of(leaf))
            if leaf.trainable and changes:
                shown = ", ".join(f"{key}={_shown(value)}" for key, value in changes.items())
                lines.append(f"optimizer of {leaf.path}: {shown}")
        return lines

    def saved_names(self, state: OptimizerState, leaves: Sequence[Leaf]) -> SavedNames:
        """Return the names of the rule and of its moments in a checkpoint."""
        moments = enumerate(self.rule.moments)
        return SavedNames(rule=self.rule.name, parts={f"moments[{k}]": m for k, m in moments})

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return one group for each set of options, in the order of the leaves that have them."""
        which = [self._override_of(leaf) if leaf.trainable else None for leaf in leaves]
        sets = list(dict.fromkeys(k for k in which if k is not None))
        options = [at({**dict(self.options), **self._changes(k)}, step) for k in sets]
        return ParamGroups(
            of_leaf=tuple(-1 if k is None else sets.index(k) for k in which),
            options=tuple({_TORCH_NAMES.get(k, k): x for k, x in o.items()} for o in options),
        )

    def _override_of(self, leaf: Leaf) -> int:
        return next((k for k, (test, _) in enumerate(self.overrides) if test(leaf)), -1)

    def _changes(self, which: int) -> dict[str, Any]:
        return dict(self.overrides[which][1]) if which >= 0 else {}

    def __repr__(self) -> str:
        shown = [f"{key}={_shown(value)}" for key, value in self.options]
        shown += [f"groups={len(self.overrides)}"] if self.overrides else []
        return f"{self.rule.name}({', '.join(shown)})"


def _even(chosen: Chosen, threads: int) -> Chosen:
    """Return the same elements in spans of which each thread gets whole blocks."""
    if threads == 1:
        return chosen
    spans, counted_by = list[Span](), list[int]()
    for (index, start, stop), number in zip(chosen.spans, chosen.counted_by, strict=True):
        cut = [(index, *span) for span in even_spans(start, stop, threads)]
        spans += cut
        counted_by += [number] * len(cut)
    return Chosen(chosen.options, spans, counted_by)


def after_update(state: OptimizerState, now: Parted, found_inf: Tensor | None) -> OptimizerState:
    """Return the state with the counters after an update; one skipped by `found_inf` adds 0."""
    counts = [state.count, *state.steps]
    counts += [counts[source].clone() for source in now.sources]
    after = [x if k in now.still else counted(x, found_inf) for k, x in enumerate(counts)]
    return replace(state, count=after[0], steps=tuple(after[1:]), apart=now.apart)


def with_steps(
    state: OptimizerState, steps: Mapping[str, int], count: int | None
) -> OptimizerState:
    """Return the state in which the leaf at each path took steps[path] updates.

    count: the updates of the whole state; None: unchanged. It is raised to the largest of `steps`.
    """
    made = max([int(state.count) if count is None else count, *steps.values()])
    numbers: dict[int, int] = {}
    apart = [
        (path, numbers.setdefault(n, 1 + len(numbers))) for path, n in steps.items() if n != made
    ]
    return replace(
        state,
        count=torch.full_like(state.count, made),
        steps=tuple(torch.full_like(state.count, n) for n in numbers),
        apart=tuple(apart),
    )


DIFFERENTIABLE = (
    "To differentiate or map it, give an (init, update) pair whose update closes over it: (lambda "
    "params: (), lambda grads, state, params: ([-lr * g for g in grads], state))."
)


def at(options: dict[str, Any], count: Tensor | int) -> dict[str, Any]:
    """Return the options with the learning rate that they have after `count` updates."""
    lr = options["lr"]
    if not callable(lr):
        return options
    if lacks_value(count):
        return {**options, "lr": lr_by_op(options["lr"], count)}
    step = int(count)
    now: Any = lr(step)
    if isinstance(now, Tensor) and now.requires_grad:
        raise LayoutError(
            f"the schedule gave lr({step}) = {now!r}, which requires grad.",
            cause="a rate that is learned: what a schedule gives becomes a number, and the "
            "derivative by it would be 0.",
            fix=f"for a number, return now.item(). {DIFFERENTIABLE}",
        )
    try:
        return {**options, "lr": float(now)}
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"the schedule gave lr({step}) = {now!r}.",
            cause="a schedule without a return, or one that steps an object.",
            fix="give a function of the number of updates so far that returns a number.",
        ) from error


def _shown(value: Any) -> str:
    """Return `value` as text that is equal on every rank: a function as its name, no address."""
    if is_dataclass(value):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


def copied(state: Any) -> Any:
    """Return the same state in memory of its own, each tensor where it lived."""
    return optree.tree_map(cloned, state, namespace=NAMESPACE)


def _not_rounded(optimizer: Optimizer) -> PhaseError:
    return PhaseError(
        f"an update by {optimizer!r} with stochastic_rounding was to be differentiated.",
        cause="torch.func, a trace, or parameters or gradients with a graph, around "
        "apply_gradients; what is rounded by chance has no derivative.",
        fix="leave stochastic_rounding out, and use master_weights=True.",
    )
