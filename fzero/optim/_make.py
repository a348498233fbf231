"""The optimizers by name. Same defaults and numbers as torch.optim's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fzero.errors import LayoutError
from fzero.errors.check import called_as, is_number
from fzero.optim._encoding import StateDtype
from fzero.optim._optimizer import DIFFERENTIABLE, LeafTest, Optimizer, Schedule
from fzero.optim._precision import Precision, precision_of
from fzero.optim._rules import ADAM, LION, MOMENTUM, SGD, Rule
from fzero.state.layout import Leaf

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
    options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
    check_tests("sgd", decay_mask, groups)
    with_momentum = momentum or any(changes.get("momentum") for _, changes in groups)
    rule = MOMENTUM if with_momentum else SGD
    precision = precision_of("sgd", master_weights, state_dtype, stochastic_rounding)
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
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    options["decoupled"] = False
    precision = precision_of("adam", master_weights, state_dtype, stochastic_rounding)
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
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    options["decoupled"] = True
    precision = precision_of("adamw", master_weights, state_dtype, stochastic_rounding)
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
    options = {"lr": lr, "weight_decay": weight_decay, "betas": betas}
    precision = precision_of("lion", master_weights, state_dtype, stochastic_rounding)
    return _optimizer("lion", LION, options, (decay_mask, groups), precision)


def _optimizer(
    name: str,
    rule: Rule,
    options: dict[str, Any],
    chosen: tuple[LeafTest | None, Groups],
    precision: Precision,
) -> Optimizer:
    """Return the optimizer that the function `name` makes of its options, checked.

    chosen: (decay_mask, groups).
    """
    made = Optimizer(
        rule=rule,
        options=tuple(plain_numbers(options).items()),
        overrides=overrides_of(name, options, *chosen),
        precision=precision,
    )
    if precision.encoding is not None:
        precision.encoding.require_fits(name, made.squares)
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
            raise _is_a_tensor(name, key)
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


def _is_a_tensor(name: str, key: str) -> LayoutError:
    return LayoutError(
        f"optim.{name}: {key} is a tensor.",
        cause="an option that is to be differentiated or mapped (torch.func, a meta-gradient), or "
        "a number that was left in a tensor; options of a rule are fixed numbers, equal on all "
        "ranks.",
        fix=f"for a number, pass float({key}). {DIFFERENTIABLE}",
    )


def plain_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with a float or an int in the place of each number of a subclass of these.

    numpy's float64 is one. Others may compute with something else than their value, and a recorded
    update holds values.

    Example:
        >>> import numpy as np
        >>> plain_numbers({"lr": np.float64(0.5), "betas": (np.float64(0.5), 0), "nesterov": True})
        {'lr': 0.5, 'betas': (0.5, 0), 'nesterov': True}
    """
    return {key: _plain(value) for key, value in options.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if callable(value) or isinstance(value, bool) or not is_number(value):
        return value
    return float(value) if isinstance(value, float) else int(value)


def check_tests(name: str, decay_mask: Any, groups: Any) -> None:
    """Raise `LayoutError` unless the mask is a test of leaves, and groups are pairs with one."""
    if decay_mask is not None and not callable(decay_mask):
        raise bad_option(name, f"decay_mask={decay_mask!r}", "use leaf -> whether it decays")
    pairs = isinstance(groups, tuple | list) and all(map(_is_group, groups))
    if not pairs:
        raise bad_option(name, f"groups={groups!r}", "use [(leaf -> bool, {option: value}), ...]")


def bad_option(name: str, seen: str, fix: str, value: object = None) -> LayoutError:
    """Return the error for an option that cannot be; `value` is what was given, if that is one."""
    cause = "a mistyped option."
    if isinstance(value, str):
        cause = "a text in the place of a number: YAML reads 1e-3 (without a dot) as a text."
        fix = f"{fix}; float({value!r}) makes one of a text"
    return LayoutError(f"optim.{name}: {seen} is not possible.", cause=cause, fix=f"{fix}.")


def _is_group(group: Any) -> bool:
    pair = isinstance(group, tuple | list) and len(group) == 2
    return pair and callable(group[0]) and isinstance(group[1], Mapping)


def _at_least_zero(value: Any) -> bool:
    return is_number(value) and value >= 0


def _rate(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1
