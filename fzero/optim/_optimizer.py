"""`Optimizer`: a rule with options by leaf, on any list of tensors that stands for shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError, explain
from fzero.optim._masters import as_stepped, copy_back, make_masters, work_tensors
from fzero.optim._rules import Rule, Scaled, has_kernel
from fzero.partition import named_leaves
from fzero.state._record import NAMESPACE, record
from fzero.state.layout import Leaf
from fzero.state.setup import ParamGroups, SavedNames

_TORCH_NAMES = {"decoupled": "decoupled_weight_decay"}  # where torch.optim has another name

LeafTest = Callable[[Leaf], bool]
Schedule = Callable[[int], float]


@record
class OptimizerState:
    """What an optimizer carries: as this rank holds it, parallel to the list it was made for."""

    count: Tensor  # [] int64 on the CPU (with a loss scale, on its device): updates; never reset
    moments: tuple[tuple[Tensor, ...], ...]  # one tuple for each moment of the rule
    masters: tuple[Tensor, ...]  # fp32 copies of 16-bit parameters; of others, empty


class Piece(NamedTuple):
    """Elements `start` to `stop` of parameter `index`: a part with one set of options."""

    index: int
    leaf: Leaf
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An elementwise update rule, its options, and the leaves that have other options.

    `init(params)` and `update(grads, state, params)` are the pure pair that optax and TorchOpt
    have, on any pytree; `advance` is what fzero calls on this rank's flat shards.
    """

    rule: Rule
    options: tuple[tuple[str, Any], ...]
    overrides: tuple[tuple[LeafTest, tuple[tuple[str, Any], ...]], ...] = ()
    master_weights: bool = True

    @property
    def elementwise(self) -> bool:
        """Whether a part of a leaf may be updated alone: each rule is a formula of elements."""
        return True

    def group_of(self, path: str) -> int:
        """Return 0: options may differ inside of a flat buffer, so all leaves may share one."""
        return 0

    def bind(self, params: Any) -> Optimizer:
        """Return itself: the rule does not depend on which parameters there are."""
        return self

    def init(self, params: Any, pieces: Sequence[Piece] = ()) -> OptimizerState:
        """Return the state for `params`: zero moments, fp32 masters of 16-bit leaves."""
        flats = optree.tree_leaves(params, namespace=NAMESPACE)
        masters = make_masters(flats, [self.master_weights] * len(flats))
        work = work_tensors(flats, masters)
        moments = tuple(tuple(map(torch.zeros_like, work)) for _ in self.rule.moments)
        return OptimizerState(
            count=torch.zeros((), dtype=torch.int64), moments=moments, masters=masters
        )

    def update(self, grads: Any, state: OptimizerState, params: Any) -> tuple[Any, OptimizerState]:
        """Return (updates, state'): params + updates are the new parameters. Pure."""
        paths, flats, treespec = named_leaves(params)
        gs = optree.tree_leaves(grads, namespace=NAMESPACE)
        if len(gs) != len(flats):
            raise LayoutError(
                explain(
                    f"update() got {len(gs)} gradients for {len(flats)} parameters.",
                    cause="gradients of another model, or only of a part of it.",
                    fix="give gradients of the same structure as the parameters.",
                )
            )
        pieces = [_whole(i, path, p) for i, (path, p) in enumerate(zip(paths, flats, strict=True))]
        new, state = self.advance(flats, gs, state, pieces, differentiable=True)
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
    ) -> tuple[list[Tensor], OptimizerState]:
        """Return (params', state').

        `pieces` says which elements belong to which leaf; it is needed only where options differ
        by leaf. With `owned`, params and state are overwritten; else they stay as they are.
        `found_inf` and `grad_scale`: see `skips`.
        """
        if differentiable or not has_kernel(params):
            return self._by_formula(params, grads, state, pieces)
        count: Any = state.count
        if found_inf is not None:
            count = count.to(found_inf.device) + (1 - found_inf).to(count.dtype)
        else:
            count = count + 1
        if not owned:
            params = [p.clone() for p in params]
            state = copied(state)
        work = work_tensors(params, state.masters)
        gs, scaled = as_stepped(grads, work, Scaled(found_inf, grad_scale), owned=owned)
        # A skipped step does not use its number, so that it may be a wrong one then.
        number = int(count) if found_inf is None else count
        for options, chosen in self._by_options(work, pieces, state.count):
            slots = tuple([_cut(m, chosen) for m in state.moments])
            self.rule.kernel(_cut(work, chosen), _cut(gs, chosen), slots, number, options, scaled)
        copy_back(params, state.masters)
        return list(params), OptimizerState(
            count=count, moments=state.moments, masters=state.masters
        )

    def skips(self, params: Sequence[Tensor], state: OptimizerState) -> bool:
        """Whether `advance` takes `found_inf` and `grad_scale`: its kernels are fused ones."""
        return has_kernel(params) and self.rule.skips(work_tensors(params, state.masters))

    def _by_formula(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: OptimizerState,
        pieces: Sequence[Piece],
    ) -> tuple[list[Tensor], OptimizerState]:
        # A tensor, so that a traced step does not freeze it; fp64, as Python's own numbers are.
        count = (state.count + 1).double()
        work = work_tensors(params, state.masters)
        parts: list[list[tuple[int, Tensor, tuple[Tensor, ...]]]] = [[] for _ in work]
        for options, chosen in self._by_options(work, pieces, state.count):
            for span in chosen:
                i = span[0]
                p, g, *ms = _cut_all(span, work[i], grads[i].to(work[i].dtype), state.moments)
                parts[i].append((span[1], *self.rule.formula(p, g, tuple(ms), count, options)))
        joined = [
            _join(part) if part else (w, tuple(m[i] for m in state.moments))
            for i, (part, w) in enumerate(zip(parts, work, strict=True))
        ]
        new = [new.to(p.dtype) for p, (new, _) in zip(params, joined, strict=True)]
        moments = tuple(
            tuple(moved[k] for _, moved in joined) for k in range(len(self.rule.moments))
        )
        masters = tuple(
            n if m.numel() else m for (n, _), m in zip(joined, state.masters, strict=True)
        )
        return new, OptimizerState(count=state.count + 1, moments=moments, masters=masters)

    def _by_options(
        self, work: Sequence[Tensor], pieces: Sequence[Piece], count: Tensor
    ) -> list[tuple[dict[str, Any], list[tuple[int, int, int]]]]:
        """Group what is to be updated by its options: (options, [(index, start, stop)])."""
        if not (self.overrides and pieces):
            everything = [(i, 0, w.numel()) for i, w in enumerate(work)]
            return [(_at(dict(self.options), count), everything)] if everything else []
        chosen: dict[int, list[tuple[int, int, int]]] = {}
        for piece in pieces:
            which = self._override_of(piece.leaf)
            chosen.setdefault(which, []).append((piece.index, piece.start, piece.stop))
        found = []
        for which, spans in chosen.items():
            found.append((_at({**dict(self.options), **self._changes(which)}, count), spans))
        return found

    def describe(self, leaves: Sequence[Leaf], step: Tensor | int | None = None) -> list[str]:
        """What ranks compare: the options, and of each leaf that has other ones, those.

        Of a schedule they compare what it gives at `step`.
        """
        lines = [f"optimizer {self!r}"]
        if step is not None:
            given = [dict(self.options), *(dict(changes) for _, changes in self.overrides)]
            schedules = [options for options in given if callable(options.get("lr"))]
            lines += [f"lr({int(step)}) = {_at(options, step)['lr']}" for options in schedules]
        for leaf in leaves:
            changes = self._changes(self._override_of(leaf))
            if leaf.trainable and changes:
                shown = ", ".join(f"{key}={_shown(value)}" for key, value in changes.items())
                lines.append(f"optimizer of {leaf.path}: {shown}")
        return lines

    def saved_names(self, state: OptimizerState, leaves: Sequence[Leaf]) -> SavedNames:
        """What a checkpoint calls the rule and its moments."""
        moments = enumerate(self.rule.moments)
        return SavedNames(rule=self.rule.name, parts={f"moments[{k}]": m for k, m in moments})

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return one group for each set of options, in the order of the leaves that have them."""
        which = [self._override_of(leaf) if leaf.trainable else None for leaf in leaves]
        sets = list(dict.fromkeys(k for k in which if k is not None))
        options = [_at({**dict(self.options), **self._changes(k)}, step) for k in sets]
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


def _at(options: dict[str, Any], count: Tensor | int) -> dict[str, Any]:
    lr = options["lr"]
    if not callable(lr):
        return options
    step = int(count)
    now: Any = lr(step)
    try:
        return {**options, "lr": float(now)}
    except (TypeError, ValueError) as error:
        raise LayoutError(
            explain(
                f"the schedule gave lr({step}) = {now!r}.",
                cause="a schedule without a return, or one that steps an object.",
                fix="give a function of the number of updates so far that returns a number.",
            )
        ) from error


def _shown(value: Any) -> str:
    """Say what `value` is, alike on every rank: no address of a schedule."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


def copied(state: Any) -> Any:
    """Return the same state in memory of its own."""
    return optree.tree_map(torch.clone, state, namespace=NAMESPACE)


def _cut(tensors: Sequence[Tensor], spans: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    return [
        tensors[i] if stop - start == tensors[i].numel() else tensors[i].view(-1)[start:stop]
        for i, start, stop in spans
    ]


def _whole(i: int, path: str, p: Tensor) -> Piece:
    leaf = Leaf(path=path, shape=tuple(p.shape), dtype=p.dtype, trainable=True)
    return Piece(i, leaf, 0, p.numel())


def _cut_all(
    span: tuple[int, int, int], p: Tensor, g: Tensor, moments: tuple[tuple[Tensor, ...], ...]
) -> list[Tensor]:
    i, start, stop = span
    every = [p, g, *(m[i] for m in moments)]
    return every if stop - start == p.numel() else [x[start:stop] for x in every]


def _join(parts: list[tuple[int, Tensor, tuple[Tensor, ...]]]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Put the pieces of one tensor together again, in order."""
    parts = sorted(parts, key=lambda part: part[0])
    if len(parts) == 1:
        return parts[0][1], parts[0][2]
    moments = zip(*(part[2] for part in parts), strict=True)
    return torch.cat([part[1] for part in parts]), tuple(torch.cat(list(m)) for m in moments)
