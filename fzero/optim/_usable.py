"""Which optimizers of torch.optim can step shards, and what a rule needs to update an element.

It needs this element alone, its matrix, or all parameters. Known are the classes of torch.optim and
of fzero; of others `needs=` says it, or an experiment.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from fzero.errors import LayoutError, PhaseError, explain
from fzero.optim._base import Base

Needs = Literal["element", "matrix"] | None
"""What a rule reads to update an element: it alone, or its whole parameter; None: not declared."""

_ELEMENTS = ("SGD", "ASGD", "Rprop", "RMSprop", "Adagrad", "Adadelta")
_ELEMENTS += ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")
_KNOWN: dict[type, Needs] = {getattr(torch.optim, name): "element" for name in _ELEMENTS}
_KNOWN |= {torch.optim.Adafactor: "matrix", torch.optim.Muon: "matrix"}


def known_needs(kind: type) -> Needs:
    """Return what a class of torch.optim or of fzero needs; None for any other, subclasses too.

    Example:
        >>> known_needs(torch.optim.Muon), known_needs(torch.optim.AdamW)
        ('matrix', 'element')
    """
    return "matrix" if kind.__module__.startswith("fzero.optim.") else _KNOWN.get(kind)


def require_elementwise(optimizer: Base) -> None:
    """Raise `LayoutError` for an optimizer whose shards are not updated as the whole would be.

    A rule that is neither known nor declared is run on leaves shaped as the parameters, but small
    (`small_shape`), and on their elements as they lie flat, by the cut test: some steps, with
    gradients of very different sizes. fzero's own rules are elementwise by construction.

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
        raise not_elementwise(optimizer)


def not_elementwise(optimizer: object) -> LayoutError:
    """Return the error for a rule that needs whole parameters, and has parts of them."""
    return LayoutError(
        f"{optimizer!r} is not elementwise: tried on small parameters, it makes other updates of "
        "the whole than of its parts, and a rank has parts of the parameters.",
        cause="a norm, a mean over a dim, a matrix product, a test of the shape or random "
        "numbers in the rule (LAMB, Adafactor, Muon, a clip in a chain), or a number that it "
        "finds from all parameters (Prodigy, D-Adaptation).",
        fix="use stage 0 or one rank; or an elementwise optimizer (SGD, Adam, AdamW, Lion, "
        "...); clip with fzero.clip or max_norm, and not inside of the optimizer.",
    )


def require_leafwise(optimizer: Base) -> None:
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
        "may be updated alone, and needs='matrix' that each parameter may.",
    )


def not_alone(rule: str, needs: str) -> LayoutError:
    """Return the error for a rule that is said to need its own parameter alone, and sees others."""
    return LayoutError(
        f"from_torch({rule}, needs={needs!r}): tried on two small parameters, it makes other "
        "updates of both together than of each alone.",
        cause="a rule that looks at all parameters at once: a norm of all gradients or a clip in "
        "it, a list that it joins, a number that it finds from all (Prodigy).",
        fix="leave needs= out, and use stage 0 or one rank; clip with fzero.clip or max_norm, and "
        "not inside of the optimizer.",
    )


def not_elements(rule: str) -> LayoutError:
    """Return the error for a class that is declared to need elements alone, and looks at more."""
    return LayoutError(
        f"from_torch({rule}, needs='element'): {rule} looks at whole matrices, or at more of them "
        "than single elements.",
        cause="a rule for matrices of torch.optim; or, tried on small parameters, it makes other "
        "updates of parts than of the whole: a mean, a norm, rows, the shape, the number of "
        "elements.",
        fix="leave needs= out, or say needs='matrix': the owner of each parameter steps the whole "
        "of it, at every stage.",
    )


def warn_of_chance(rule: str) -> None:
    """Warn of a rule of elements that draws random numbers."""
    text = explain(
        f"from_torch({rule}, needs='element'): {rule} draws random numbers.",
        cause="stochastic rounding, or noise, from torch's generators: each rank draws for its own "
        "part, so that the bits are others at each stage and on each number of ranks.",
        fix="nothing, if its mean is what counts; fzero.optim.adamw and from_torch have "
        "stochastic_rounding=True, which is the same everywhere.",
    )
    warnings.warn(text, UserWarning, stacklevel=2)


def not_streamed(optimizer: object) -> LayoutError:
    """Return the error for a rule that needs all parameters at once, and has some."""
    return LayoutError(
        f"{type(optimizer).__name__} is stepped one bucket at a time here, and does not update "
        "each parameter alone.",
        cause="a rule that looks at all parameters (a clip in it, Prodigy), with offload, a "
        "state_dtype or stochastic_rounding.",
        fix="leave these out; clip with fzero.clip or max_norm, and not inside of the optimizer.",
    )


CLOSURE = "it evaluates the loss several times in a step, by a closure"
REFUSED = {
    torch.optim.LBFGS: CLOSURE,
    torch.optim.SparseAdam: "it takes sparse gradients; flat buffers have dense ones",
}


def require_usable(source: Any) -> None:
    """Raise `LayoutError` for what is no torch.optim class, instance or factory."""
    if isinstance(source, Optimizer):
        require_pure_class(type(source))
    elif isinstance(source, type) and issubclass(source, Optimizer):
        require_pure_class(source)
    elif isinstance(source, list | tuple | dict):
        raise LayoutError(
            f"{len(source)} optimizers in a {type(source).__name__}.",
            cause="an optimizer for each part of a module (DARTS, a GAN in one class).",
            fix="make one engine for each part, Engine(net.generator, optimizer_g, stage=2) and "
            "Engine(net.discriminator, optimizer_d, stage=2), and call net as ever: each step() "
            "updates its own. If both step at once, one optimizer with param groups does. For "
            "other rules by path, fzero.optim.partition.",
        )
    elif not callable(source) or isinstance(source, type):
        raise not_an_optimizer(f"{source!r}")


def require_pure_class(kind: type[Optimizer]) -> None:
    """Raise `LayoutError` for a class that is no function of parameters, gradients and state."""
    for refused, reason in REFUSED.items():
        if issubclass(kind, refused):
            raise LayoutError(
                f"{kind.__name__} cannot step shards of the parameters: {reason}.",
                cause="an optimizer that is no function of parameters and gradients.",
                fix="use an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, ...).",
            )
    if hasattr(kind, "eval"):
        raise LayoutError(
            f"{kind.__name__} has eval(), which changes the parameters by the optimizer's state.",
            cause="an optimizer without a schedule (schedule-free): it trains at one point and is "
            "to be evaluated at another; the state that leads there is sharded.",
            fix="use an optimizer whose parameters are what is to be evaluated; for an average of "
            "them, keep one beside the training (examples/ema.py).",
        )


def has_steps(instance: Optimizer) -> bool:
    """Whether an instance has state of a run: it made steps, or a state_dict was loaded into it."""
    return any(state.get("step", 1) != 0 for state in instance.state.values() if state)


def not_an_optimizer(seen: str) -> LayoutError:
    """Return the error for what is none of torch.optim."""
    return LayoutError(
        f"the optimizer is {seen}.",
        cause="an fzero.optim rule, a scheduler, or the name of an optimizer.",
        fix="pass a torch.optim optimizer, its class, or params -> optimizer: "
        "functools.partial(torch.optim.AdamW, lr=3e-4).",
    )


def name_of(factory: Any) -> str:
    """Return what a class, factory or instance is called, alike on every rank: no address."""
    if isinstance(factory, Optimizer):
        return type(factory).__name__
    function = getattr(factory, "func", factory)
    return getattr(function, "__qualname__", type(function).__name__)


def cannot_be_cut(instance: Optimizer, name: str) -> LayoutError:
    """Return the error for state that does not go with the elements."""
    return LayoutError(
        f"{type(instance).__name__} keeps {name} for a parameter, which is neither shaped as the "
        "parameter nor a count of updates.",
        cause="state that does not go with the elements: it cannot be cut into shards.",
        fix="use an optimizer that keeps tensors shaped as the parameters, and numbers.",
    )


def not_alike(
    instance: Optimizer, group: int, name: str, values: Mapping[tuple[int, ...], float]
) -> LayoutError:
    """Return the error for a counter that is another one for other parameters of a group."""
    seen = ", and ".join(f"{value} for one of shape {shape}" for shape, value in values.items())
    return LayoutError(
        f"{type(instance).__name__} keeps another {name} for other parameters of param group "
        f"{group}: {seen}.",
        cause="a rule that treats matrices in one way and the rest in another, in one param "
        "group, and notes which (timm's Muon).",
        fix="make param groups of their own, params=[{'params': matrices}, {'params': others}]: "
        "such a number is kept once for each group.",
    )


def not_differentiable(rule: object, reason: str) -> PhaseError:
    """Return the error for an update that can be neither differentiated nor recorded as a graph."""
    return PhaseError(
        f"an update by {rule!r} was to be differentiated or traced.",
        cause="torch.func around apply_gradients, parameters or gradients with a graph, or "
        f"fzero.trace, compile or prove of the step; {reason}.",
        fix="use fzero.optim.sgd, adam, adamw or lion, which can be.",
    )
