"""`adamw`, `sgd`, `adam`, `lion`: an `Optimizer` of flats that are shards.

sgd, adam, ...   the rules by name, with the defaults and the numbers of torch.optim
Optimizer        what a rule keeps, and its update
    kernels      fused ones of torch, in place on the flats
    formulas     the same numbers out of place, which torch.func maps; or one op of a graph
no_optimizer     for a model that is only read
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from fzero.errors import LayoutError, PhaseError
from fzero.errors.check import called_as, is_number
from fzero.machine.blocks import Blocks
from fzero.machine.offload import cloned, to_device
from fzero.machine.partition import named_leaves
from fzero.machine.tree_sum import even_spans, threads_on
from fzero.optim.encoded_moments import (
    Flats,
    Portion,
    Slots,
    begun,
    counted,
    in_portions,
    leaves_of_flats,
    step_flats,
)
from fzero.optim.per_leaf_step_counts import Apart, Parted, parted
from fzero.optim.precision import (
    Place,
    Precision,
    StateDtype,
    make_masters,
    precision_of,
    stay,
    work_tensors,
)
from fzero.optim.recorded import is_one_op, lacks_value, lr_by_op, update_by_op
from fzero.optim.rules import ADAM, LION, MOMENTUM, SGD, Rule, Scaled, has_kernel
from fzero.state import NAMESPACE, record, static
from fzero.state.layout import Leaf
from fzero.state.setup import MASTERS, ParamGroups, SavedNames
from fzero.state.stateful_update import Piece as Piece
from fzero.state.stateful_update import StatefulUpdate as StatefulUpdate

LeafTest = Callable[[Leaf], bool]
Schedule = Callable[[int], float]
Groups = Sequence[tuple[LeafTest, Mapping[str, Any]]]


@called_as("sgd(0.1, momentum=0.9)")
def sgd(
    lr: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay_mask: LeafTest | None = None,
    groups: Groups = (),
    master_weights: bool = True,
    state_dtype: StateDtype = None,
    stochastic_rounding: bool = False,
) -> Optimizer:
    """p' = p - lr b,  b = momentum b + g + weight_decay p  (b = g without momentum).

    See `adamw` for the keyword options that all optimizers share.

    Example:
        >>> import torch
        >>> opt = sgd(0.5)
        >>> p, g = [torch.tensor([1.0])], [torch.tensor([2.0])]
        >>> opt.update(g, opt.init(p), p)[0]
        [tensor([-1.])]
    """
    options = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
    check_tests("sgd", decay_mask, groups)
    with_momentum = momentum or any(changes.get("momentum") for _, changes in groups)
    rule = MOMENTUM if with_momentum else SGD
    precision = master_weights, state_dtype, stochastic_rounding
    return _optimizer("sgd", rule, options, (decay_mask, groups), precision)


@called_as("adam(3e-4)")
def adam(
    lr: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_mask: LeafTest | None = None,
    groups: Groups = (),
    master_weights: bool = True,
    state_dtype: StateDtype = None,
    stochastic_rounding: bool = False,
) -> Optimizer:
    """m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2,  p' = p - lr m^ / (sqrt(v^) + eps).

    m^, v^ are m, v over 1 - b^t. `weight_decay` is added to the gradient (L2). Source: Kingma
    and Ba, "Adam", arXiv 1412.6980, algorithm 1. See `adamw` for the shared options.
    """
    options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=False)
    precision = master_weights, state_dtype, stochastic_rounding
    return _optimizer("adam", ADAM, options, (decay_mask, groups), precision)


@called_as("adamw(3e-4, weight_decay=0.1)")
def adamw(
    lr: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decay_mask: LeafTest | None = None,
    groups: Groups = (),
    master_weights: bool = True,
    state_dtype: StateDtype = None,
    stochastic_rounding: bool = False,
) -> Optimizer:
    """Adam with p <- (1 - lr weight_decay) p before the step. Same numbers as torch's AdamW.

    Args:
        lr: a number, or a schedule (updates made so far) -> number (see `fzero.optim.schedules`).
        betas: (b1, b2), how much of the means of g and g^2 an update keeps.
        eps: is added to the root of the mean of g^2.
        weight_decay: 0 for none. This and all that follow are options of every optimizer here.
        decay_mask: (leaf) -> whether weight decay applies to it; `leaf` has path, shape, dtype.
        groups: ((leaf) -> bool, {option: value}) pairs; the first that matches sets those options.
        master_weights: keep fp32 copies of 16-bit parameters and update those (4 bytes an element).
        state_dtype: of the moments: torch.bfloat16 halves them, torch.float32 is for 16-bit
            parameters without masters. They are computed with as the parameters are. None: no
            other dtype. A codec of blocks (`fzero.codecs.int8()`, `dynamic8()`, one's own) keeps
            them encoded, a byte an element: an update decodes a bounded piece of them, steps it in
            fp32, and encodes it again. See `fzero.optim.Encoding`.
        stochastic_rounding: bf16 parameters without masters are updated in fp32, and rounded up
            with the probability of what is cut off: so a sum of small updates is right in the
            mean. The chance is a function of path, element and number of the update, the same on
            any ranks.

    Returns:
        The optimizer, for `fzero.init` and `step.init`.

    Raises:
        LayoutError: for an option of another kind.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.

    Example:
        >>> adamw(3e-4, decay_mask=lambda leaf: len(leaf.shape) >= 2).rule.moments
        ('exp_avg', 'exp_avg_sq')
    """
    options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=True)
    precision = master_weights, state_dtype, stochastic_rounding
    return _optimizer("adamw", ADAM, options, (decay_mask, groups), precision)


@called_as("lion(1e-4)")
def lion(
    lr: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    decay_mask: LeafTest | None = None,
    groups: Groups = (),
    master_weights: bool = True,
    state_dtype: StateDtype = None,
    stochastic_rounding: bool = False,
) -> Optimizer:
    """p' = (1 - lr weight_decay) p - lr sign(b1 m + (1-b1) g),  m' = b2 m + (1-b2) g.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675,
    algorithm 2. See `adamw` for the shared options.
    """
    options = dict(lr=lr, weight_decay=weight_decay, betas=betas)
    precision = master_weights, state_dtype, stochastic_rounding
    return _optimizer("lion", LION, options, (decay_mask, groups), precision)


def _optimizer(
    name: str,
    rule: Rule,
    options: dict[str, Any],
    chosen: tuple[LeafTest | None, Groups],
    precision: tuple[bool, StateDtype, bool],
) -> Optimizer:
    """Return the optimizer that the function `name` makes of its options, checked.

    chosen: (decay_mask, groups). precision: (master_weights, state_dtype, stochastic_rounding).
    """
    made = Optimizer(
        rule=rule,
        precision=precision_of(name, *precision),
        options=tuple(plain_numbers(options).items()),
        overrides=overrides_of(name, options, *chosen),
    )
    if made.precision.encoding is not None:
        made.precision.encoding.require_fits(name, made.squares)
    return made


def overrides_of(
    name: str, options: dict[str, Any], decay_mask: LeafTest | None, groups: Groups
) -> tuple[tuple[LeafTest, tuple[tuple[str, Any], ...]], ...]:
    """Return (test of leaves, their options), checked; the first that fits.

    name: of the function that the user has called, for errors.
    """
    check_tests(name, decay_mask, groups)
    check_options(name, options)
    overrides: list[tuple[LeafTest, tuple[tuple[str, Any], ...]]] = []
    for test, changes in groups:
        unknown = sorted(set(changes) - set(options))
        if unknown:
            raise bad_option(name, f"group option {unknown[0]!r}", f"use one of {sorted(options)}")
        check_options(name, {**options, **changes})
        changes = plain_numbers(changes)
        if decay_mask is not None:  # the group's options, then the mask on top of them
            undecayed = tuple({**changes, "weight_decay": 0.0}.items())
            overrides.append((_Undecayed(test, decay_mask), undecayed))
        overrides.append((test, tuple(changes.items())))
    if decay_mask is not None:
        overrides.append((_Undecayed(None, decay_mask), (("weight_decay", 0.0),)))
    return tuple(overrides)


@dataclass(frozen=True, slots=True)
class _Undecayed:
    """Whether `test` takes a leaf (None: any), and `decay_mask` keeps it from decay."""

    test: LeafTest | None
    decay_mask: LeafTest

    def __call__(self, leaf: Leaf) -> bool:
        return (self.test is None or self.test(leaf)) and not self.decay_mask(leaf)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise `LayoutError` for the first option that is no number in its range."""
    lr = options["lr"]
    for key, value in options.items():
        several = value if isinstance(value, tuple | list) else [value]
        if any(isinstance(x, Tensor) for x in several):
            raise LayoutError(
                f"optim.{name}: {key} is a tensor.",
                cause="an option that is to be differentiated or mapped (torch.func, a "
                "meta-gradient), or a number that was left in a tensor; options of a rule are "
                "fixed numbers, equal on all ranks.",
                fix=f"for a number, pass float({key}). {DIFFERENTIABLE}",
            )
    if not callable(lr) and not _at_least_zero(lr):
        fix = "use a number >= 0 or a schedule step -> number"
        raise bad_option(name, f"lr={lr!r}", fix, lr)
    for key in ("weight_decay", "eps"):
        if key in options and not _at_least_zero(options[key]):
            raise bad_option(name, f"{key}={options[key]!r}", "use a number >= 0", options[key])
    if "betas" in options:
        betas = options["betas"]
        if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(map(_rate, betas))):
            raise bad_option(name, f"betas={betas!r}", "use two numbers in [0, 1)")
    if "momentum" in options:
        momentum = options["momentum"]
        if not _rate(momentum):
            raise bad_option(name, f"momentum={momentum!r}", "use a number in [0, 1)", momentum)
        if options["nesterov"] and not momentum:
            raise bad_option(name, "nesterov=True with momentum=0", "set momentum, e.g. 0.9")


def plain_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with a float or an int in the place of each number of a subclass of these.

    numpy's float64 is one. Others may compute with something else than their value, and a recorded
    update holds values.

    Example:
        >>> import numpy as np
        >>> plain_numbers({"lr": np.float64(0.5), "betas": (np.float64(0.5), 0), "nesterov": True})
        {'lr': 0.5, 'betas': (0.5, 0), 'nesterov': True}
    """

    def plain(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(map(plain, value))
        if callable(value) or isinstance(value, bool) or not is_number(value):
            return value
        return float(value) if isinstance(value, float) else int(value)

    return {key: plain(value) for key, value in options.items()}


def check_tests(name: str, decay_mask: Any, groups: Any) -> None:
    """Raise `LayoutError` unless the mask is a test of leaves, and groups are pairs with one."""
    if decay_mask is not None and not callable(decay_mask):
        raise bad_option(name, f"decay_mask={decay_mask!r}", "use leaf -> whether it decays")

    def is_group(group: Any) -> bool:
        pair = isinstance(group, tuple | list) and len(group) == 2
        return pair and callable(group[0]) and isinstance(group[1], Mapping)

    if not (isinstance(groups, tuple | list) and all(map(is_group, groups))):
        raise bad_option(name, f"groups={groups!r}", "use [(leaf -> bool, {option: value}), ...]")


def bad_option(name: str, seen: str, fix: str, value: object = None) -> LayoutError:
    """Return the error for an option that cannot be; `value` is what was given, if that is one."""
    cause = "a mistyped option."
    if isinstance(value, str):
        cause = "a text in the place of a number: YAML reads 1e-3 (without a dot) as a text."
        fix = f"{fix}; float({value!r}) makes one of a text"
    return LayoutError(f"optim.{name}: {seen} is not possible.", cause=cause, fix=f"{fix}.")


def _at_least_zero(value: Any) -> bool:
    return is_number(value) and value >= 0


def _rate(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


_TORCH_NAMES = {"decoupled": "decoupled_weight_decay"}  # where torch.optim has another name


@record
class OptimizerState:
    """The optimizer state of this rank, parallel to the list of flats that `init` was given."""

    count: Tensor  # [] int64 on the CPU (with a loss scale, on its device): updates; never reset
    moments: tuple[tuple[Tensor, ...], ...]  # one tuple for each moment of the rule
    masters: tuple[Tensor, ...]  # fp32 copies of 16-bit parameters; of others, empty
    steps: tuple[Tensor, ...] = ()  # updates of the leaves that are apart, as `count` is
    apart: Apart = static(default=())  # (path, 1 + index in `steps`); all others took every update


class OfPrecision(StatefulUpdate):
    """An optimizer with a precision, which may encode what it keeps."""

    __slots__ = ()

    precision: Precision

    @property
    def block(self) -> int:
        """Of how many elements leaves and shards consist, for what it keeps."""
        return self.precision.block

    def kind_of(self, path: str, numel: int) -> Hashable:
        """Return what leaves of one flat have in common: all slots of it are kept alike."""
        return self.group_of(path), self.precision.encodes(numel)


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
        ps, gs, pieces, treespec = whole_leaves(grads, params)

        def flat(some: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(x.reshape(-1) for x in some)

        def shaped(some: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(x.view(old.shape) for x, old in zip(some, like, strict=True))

        given = replace(state, moments=tuple(map(flat, state.moments)), masters=flat(state.masters))
        by_formula = self.elementwise and self.precision.encoding is None
        new, after = self.advance(flat(ps), flat(gs), given, pieces, differentiable=by_formula)
        updates = [n - p for n, p in zip(shaped(new, ps), ps, strict=True)]
        after = replace(
            after,
            moments=tuple(map(shaped, after.moments, state.moments)),
            masters=shaped(after.masters, state.masters),
        )
        return optree.tree_unflatten(treespec, updates), after

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
                raise not_differentiable(
                    f"{self!r} with encoded states",
                    "an encoding has no derivative; or a device without fused kernels",
                    "leave state_dtype=codec out there: state_dtype=None keeps states that have "
                    "one.",
                )
            return self._by_formula(params, grads, state, pieces, device, now)
        if not owned:
            copy = torch.clone if device is None else partial(cloned, device=device)
            params = [copy(p) for p in params]
            state = copied(state, copy)
        after = after_update(state, now, found_inf)
        # A skipped step does not use its number, so that it may be a wrong one then.
        numbers = [int(x) if found_inf is None else x for x in (after.count, *after.steps)]
        flats = Flats(params, grads, state.masters, self._slots(state))
        if self.precision.encoding is not None:
            flats, pieces = in_portions(flats, pieces, self.codec_of, unused)

        def run(portion: Portion) -> Slots:
            own = pieces_in(pieces, portion.indices)
            threads = threads_on(portion.work[0].device) if apart and portion.work else 1
            for options, spans in self._by_options(portion.work, own, state.count, now):
                if threads > 1:  # each gets whole blocks
                    spans = [
                        ((i, *x), k) for (i, a, b), k in spans for x in even_spans(a, b, threads)
                    ]
                every = (portion.work, portion.grads, *portion.slots.values())
                work, gs, *slots = (elements_of(some, [x for x, _ in spans]) for some in every)
                number: Any = [numbers[k] for _, k in spans]
                if len({k for _, k in spans}) == 1:
                    number = number[0]
                self.rule.kernel(work, gs, tuple(slots), number, options, portion.scaled)
            return portion.slots

        step_flats(
            flats,
            run,
            precision=self.precision,
            device=device,
            scaled=Scaled(found_inf, grad_scale),
            owned=owned,
            pieces=pieces,
            count=state.count,
        )
        return list(params), after

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
        """Return the state whose leaves took counters["step"][path] updates.

        count: the updates of the whole state, at least the most of a leaf; None: unchanged.
        """
        steps = {path: int(counters["step"][path]) for path in paths}
        made = max([int(state.count) if count is None else count, *steps.values()])
        numbers: dict[int, int] = {}
        apart = [
            (path, numbers.setdefault(n, 1 + len(numbers)))
            for path, n in steps.items()
            if n != made
        ]
        return replace(
            state,
            count=torch.full_like(state.count, made),
            steps=tuple(torch.full_like(state.count, n) for n in numbers),
            apart=tuple(apart),
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
        device: torch.device | None,
        now: Parted,
    ) -> tuple[list[Tensor], OptimizerState]:
        """Return (params', state'), each where, and in the dtype in which, it was."""
        if self.precision.stochastic_rounding:
            raise not_differentiable(
                f"{self!r} with stochastic_rounding",
                "what is rounded by chance has no derivative",
                "leave stochastic_rounding out, and use master_weights=True.",
            )
        stepped = [self.precision.stepped(p.dtype) for p in params]

        def here(some: Sequence[Tensor]) -> list[Tensor]:
            pairs = zip(some, stepped, strict=True)
            return [to_device(x, device or x.device, dtype) for x, dtype in pairs]

        work = here(work_tensors(params, state.masters))
        grads, moments = here(grads), [here(some) for some in state.moments]
        counts = [state.count, *state.steps]
        counts += [counts[source] for source in now.sources]
        by_op = is_one_op(self.rule, [*work, *grads])
        parts: list[list[_Part]] = [[] for _ in work]
        for options, spans in self._by_options(params, pieces, state.count, now):
            for number in dict.fromkeys(k for _, k in spans):
                own = [span for span, k in spans if k == number]
                ps, gs, *ms = (elements_of(some, own) for some in (work, grads, *moments))
                if by_op:
                    new_ps, new_ms = update_by_op(self.rule, ps, gs, ms, counts[number], options)
                else:
                    # A tensor, so that a traced step does not freeze it; fp64, as Python's are.
                    count, every = (counts[number] + 1).double(), zip(ps, gs, *ms, strict=True)
                    rule = self.rule.formula
                    made = [rule(p, g, tuple(some), count, options) for p, g, *some in every]
                    new_ps = [p for p, _ in made]
                    new_ms = [[some[k] for _, some in made] for k in range(len(ms))]
                for k, (i, start, _) in enumerate(own):
                    parts[i].append((start, new_ps[k], tuple(some[k] for some in new_ms)))
        joined = [
            _joined(part, w, [some[i] for some in moments])
            for i, (part, w) in enumerate(zip(parts, work, strict=True))
        ]
        new = [n.to(p.device, p.dtype) for p, (n, _) in zip(params, joined, strict=True)]
        after = replace(
            after_update(state, now, None),
            moments=tuple(
                tuple(n[k].to(m.device, m.dtype) for (_, n), m in zip(joined, some, strict=True))
                for k, some in enumerate(state.moments)
            ),
            masters=tuple(
                n.to(m.device) if m.numel() else m
                for (n, _), m in zip(joined, state.masters, strict=True)
            ),
        )
        return new, after

    def _by_options(
        self, work: Sequence[Tensor], pieces: Sequence[Piece], count: Tensor, now: Parted
    ) -> list[tuple[dict[str, Any], list[tuple[Span, int]]]]:
        """Return the spans to update, grouped by options, each with the number of its counter."""
        if not (self.overrides and pieces) and not now.apart:
            everything = [((i, 0, w.numel()), 0) for i, w in enumerate(work)]
            return [(at(dict(self.options), count), everything)] if everything else []
        spans: dict[int, list[tuple[Span, int]]] = {}
        numbers = dict(now.apart)
        for piece in pieces:
            number, which = numbers.get(piece.leaf.path, 0), self._override_of(piece.leaf)
            if number not in now.still:
                span = piece.index, piece.start, piece.stop
                spans.setdefault(which, []).append((span, number))
        options = {k: at({**dict(self.options), **self._changes(k)}, count) for k in spans}
        return [(options[k], some) for k, some in spans.items()]

    def describe(self, leaves: Sequence[Leaf], step: Tensor | int | None = None) -> list[str]:
        """Return the lines that ranks compare: the options, and those of leaves with other options.

        A schedule is compared by its value at `step`.
        """
        lines = [f"optimizer {self!r}, {self.precision}"]
        for number, (_, changes) in enumerate(() if leaves else self.overrides):
            text = ", ".join(f"{key}={shown(value)}" for key, value in changes)
            lines.append(f"options {number} of some leaves: {text}")
        if step is not None and not lacks_value(step):
            given = [dict(self.options), *(dict(changes) for _, changes in self.overrides)]
            schedules = [options for options in given if callable(options.get("lr"))]
            lines += [f"lr({int(step)}) = {at(options, step)['lr']}" for options in schedules]
        for leaf in leaves:
            changes = self._changes(self._override_of(leaf))
            if leaf.trainable and changes:
                text = ", ".join(f"{key}={shown(value)}" for key, value in changes.items())
                lines.append(f"optimizer of {leaf.path}: {text}")
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
        parts = [f"{key}={shown(value)}" for key, value in self.options]
        parts += [f"groups={len(self.overrides)}"] if self.overrides else []
        return f"{self.rule.name}({', '.join(parts)})"


def after_update(state: OptimizerState, now: Parted, found_inf: Tensor | None) -> OptimizerState:
    """Return the state with the counters after an update; one skipped by `found_inf` adds 0."""
    counts = [state.count, *state.steps]
    counts += [counts[source].clone() for source in now.sources]
    after = [x if k in now.still else counted(x, found_inf) for k, x in enumerate(counts)]
    return replace(state, count=after[0], steps=tuple(after[1:]), apart=now.apart)


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


def copied(state: Any, copy: Callable[[Tensor], Tensor] = cloned) -> Any:
    """Return the same state in memory of its own, each tensor where it lived."""
    return optree.tree_map(copy, state, namespace=NAMESPACE)


Span = tuple[int, int, int]
"""(number of a flat, start, stop)."""


_Part = tuple[int, Tensor, tuple[Tensor, ...]]
"""(start, values, those of each moment): of one flat."""


def elements_of(flats: Sequence[Tensor], spans: Sequence[Span]) -> list[Tensor]:
    """Return the elements of each span: views, or a flat itself if it is all of it."""
    return [
        flats[i] if stop - start == flats[i].numel() else flats[i].view(-1)[start:stop]
        for i, start, stop in spans
    ]


def _joined(
    parts: list[_Part], work: Tensor, moments: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Put the parts of one flat together, in order, with what this update leaves as it is."""

    def kept(start: int, stop: int) -> _Part:
        held, *more = (x.view(-1)[start:stop] for x in (work, *moments))
        return start, held, tuple(more)

    found: list[_Part] = [] if parts else [(0, work, tuple(moments))]
    at = 0
    for part in sorted(parts, key=lambda part: part[0]):
        found += [kept(at, part[0])] if at < part[0] else []
        found.append(part)
        at = part[0] + part[1].numel()
    found += [kept(at, work.numel())] if parts and at < work.numel() else []
    if len(found) == 1:
        return found[0][1], found[0][2]
    every = zip(*(part[2] for part in found), strict=True)
    return torch.cat([part[1] for part in found]), tuple(torch.cat(list(some)) for some in every)


def require_elementwise(optimizer: StatefulUpdate) -> None:
    """Raise `LayoutError` for an optimizer whose shards are not updated as the whole would be.

    A rule that is neither known nor declared steps leaves shaped as the parameters, but small, and
    their elements as they lie flat, in the cut test: with gradients of very different sizes.
    fzero's own rules are elementwise by construction.

    Args:
        optimizer: of any kind that `as_optimizer` gives; one from `from_torch` is bound already.

    Raises:
        LayoutError: for a rule with a norm, a mean over a dim, a matrix product or random
            numbers in it.

    Example:
        >>> import torch
        >>> from fzero.optim import as_optimizer
        >>> def update(grads, state, params):
        ...     norm = torch.stack([g.norm() for g in grads]).norm()
        ...     return [-g / norm for g in grads], state
        >>> require_elementwise(as_optimizer((lambda params: (), update)))
        Traceback (most recent call last):
        fzero.errors.LayoutError: pair(update) is not elementwise: ...
    """
    if not optimizer.elementwise:
        raise LayoutError(
            f"{optimizer!r} is not elementwise: tried on small parameters, it makes other updates "
            "of the whole than of its parts, and a rank has parts of the parameters.",
            cause="a norm, a mean over a dim, a matrix product, a test of the shape or random "
            "numbers in the rule (LAMB, Adafactor, Muon, a clip in a chain), or a number that it "
            "finds from all parameters (Prodigy, D-Adaptation).",
            fix="use stage 0 or one rank; or an elementwise optimizer (SGD, Adam, AdamW, Lion, "
            "...); clip with fzero.clip or max_norm, and not inside of the optimizer.",
        )


def require_leafwise(optimizer: StatefulUpdate) -> None:
    """Raise `LayoutError` for an optimizer whose leaves are not updated alone as together.

    Args:
        optimizer: as in `require_elementwise`.

    Raises:
        LayoutError: for a rule that looks at several leaves at once, or is random; for a foreign
            pair that is not elementwise.

    Example:
        >>> import torch
        >>> from fzero.optim import from_torch
        >>> matrices = {"w": torch.ones(2, 3)}
        >>> require_leafwise(from_torch(torch.optim.Muon).bind(matrices))
    """
    if optimizer.leafwise:
        return
    raise LayoutError(
        f"{optimizer!r} is not elementwise, and does not update each parameter alone: tried on "
        "small parameters, it makes other updates of all of them than of each; and a rank has "
        "parts of them.",
        cause="a norm over all parameters (a clip in the rule, Prodigy), random numbers, or a "
        "foreign (init, update) pair that is not elementwise.",
        fix="use stage 0 or one rank; clip with fzero.clip or max_norm, and not inside of the "
        "optimizer; write a rule for matrices as a torch.optim optimizer, and give it to "
        "fzero.optim.from_torch. Of a random rule from_torch(..., needs='element') says that parts "
        "may be updated alone, and needs='leaf' that each parameter may.",
    )


def not_differentiable(
    rule: object,
    reason: str,
    fix: str = "use fzero.optim.sgd, adam, adamw or lion, which can be.",
) -> PhaseError:
    """Return the error for an update that can be neither differentiated nor recorded as a graph."""
    return PhaseError(
        f"an update by {rule} was to be differentiated or traced.",
        cause="torch.func around apply_gradients, parameters or gradients with a graph, or "
        f"fzero.trace, compile or prove of the step; {reason}.",
        fix=fix,
    )


def pieces_in(pieces: Sequence[Piece], indices: Sequence[int]) -> list[Piece]:
    """Return the pieces of some parameters, numbered as those are in `indices`.

    Example:
        >>> import torch
        >>> from fzero.state.layout import Leaf
        >>> leaf = Leaf(path="w", shape=(4,), dtype=torch.float32, trainable=True)
        >>> pieces_in([Piece(0, leaf, 0, 4), Piece(1, leaf, 0, 2)], [1])[0].index
        0
    """
    number = {index: k for k, index in enumerate(indices)}
    return [p._replace(index=number[p.index]) for p in pieces if p.index in number]


def masked(flats: Sequence[Tensor], mine: Collection[int]) -> list[Tensor]:
    """Return some of the flats in their places, and nothing in those of others."""
    return [flat if i in mine else flat.new_empty(0) for i, flat in enumerate(flats)]


def whole_leaves(
    grads: Any, params: Any
) -> tuple[list[Tensor], list[Tensor], list[Piece], optree.PyTreeSpec]:
    """Return the leaves of `params`, those of `grads`, a piece for each, and the structure.

    Raises `LayoutError` for another number of gradients.
    """
    paths, ps, treespec = named_leaves(params)
    gs = optree.tree_leaves(grads, namespace=NAMESPACE)
    if len(gs) != len(ps):
        raise LayoutError(
            f"update() got {len(gs)} gradients for {len(ps)} parameters.",
            cause="gradients of another model, or only of a part of it.",
            fix="give gradients of the same structure as the parameters.",
        )
    pieces = [
        Piece(i, Leaf(path=path, shape=tuple(p.shape), dtype=p.dtype, trainable=True), 0, p.numel())
        for i, (path, p) in enumerate(zip(paths, ps, strict=True))
    ]
    return ps, gs, pieces, treespec


_FEW = 64  # elements of a tensor whose values are shown


def shown(value: Any) -> str:
    """Return the text of an option, equal on all ranks: of an object or a function only its name.

    A schedule of `fzero.optim.schedules` has its numbers. A number on a device is read from there:
    the host waits.

    Example:
        >>> shown([0.5, torch.tensor(2.0)])
        '(0.5, tensor(2.0))'
    """
    schedule = callable(value) and is_dataclass(value) and not isinstance(value, type)
    if schedule or isinstance(value, bool | int | float | str | complex | None | torch.dtype):
        return repr(value)
    if isinstance(value, Tensor):
        read = not (value.is_meta or lacks_value(value)) and value.numel() <= _FEW
        return f"tensor({value.tolist()})" if read else f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown(x)}' for key, x in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shown, value))})"
    return getattr(value, "__qualname__", type(value).__qualname__)


@dataclass(frozen=True, slots=True)
class NoOptimizer(StatefulUpdate):
    """An optimizer without state that updates nothing: what `no_optimizer` returns."""

    def init(
        self, params: Sequence[Tensor], pieces: Sequence[Piece] = (), *, place: Any = None
    ) -> tuple[()]:
        """Return no state."""
        return ()

    def advance(
        self, params: Sequence[Tensor], grads: Any, state: Any, *args: Any, **options: Any
    ) -> tuple[list[Tensor], Any]:
        """Return ([], state) for no parameters; raise `PhaseError` if there are any."""
        if not params:
            return [], state
        raise without_optimizer()

    def describe(self, leaves: Sequence[Leaf], step: Any = None) -> list[str]:
        """Return the line that ranks compare."""
        return ["no optimizer"]

    def saved_names(self, state: Any, leaves: Sequence[Leaf]) -> SavedNames:
        """Return its name in a checkpoint."""
        return SavedNames(rule="no optimizer")

    def param_groups(self, leaves: Sequence[Leaf], step: int) -> ParamGroups:
        """Return no param group: no leaf is stepped."""
        return ParamGroups(of_leaf=(-1,) * len(leaves), options=())

    def __repr__(self) -> str:
        return "no optimizer"


def no_optimizer() -> NoOptimizer:
    """Return the optimizer of a model that is only read: a teacher, a reward model.

    `fzero.init` with it freezes every leaf: there are no gradients and no optimizer states, no
    gradient crosses ranks, and `apply_gradients` leaves the model as it is. Under one loss with
    states that learn it is read; a loss by which nothing else learns raises. A model that has
    gradients, and is never updated, is made with `fzero.optim.sgd(0.0)`.

    Returns:
        What `init` takes in the place of an optimizer.

    Example:
        >>> import torch, fzero
        >>> teacher = fzero.init([torch.ones(2)], fzero.optim.no_optimizer(), stage=3)
        >>> fzero.evaluate(lambda p, x: (p[0] * x).sum(), teacher)(3.0)
        tensor(6.)
    """
    return NoOptimizer()


def without_optimizer() -> PhaseError:
    """Return the error of a step without an optimizer."""
    return PhaseError(
        "step() of an engine without optimizer.",
        cause="Engine(module, stage=...) is for a model that is not trained.",
        fix="pass a torch.optim optimizer, its class or a factory.",
    )
