"""Rules that would be wrong on shards are found by a trial, when a state is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fzero.context.modes import holds
from fzero.errors import LayoutError
from fzero.optim._base import Base

LARGE = 130  # some rules factor matrices of 128 and more only
RANKS = (((0, 5),), ((5, 14),), ((14, 15), (15, 24)))  # of each rank, its flats, in 24ths
SIZES = (1.0, 1e3, 1e-2)  # of the gradients of each step: so that a clip in the rule has an effect

Rule = Callable[[list[Tensor], list[list[Tensor]]], tuple[list[Tensor], list[float]]]
"""(parameters, for each step their gradients) -> what each parameter was changed by, and the
numbers that the rule keeps for all of them together."""
Part = tuple[int, tuple[int, int] | None]
"""(number of a leaf, from which to which of its elements): None for all, in its own shape."""


def require_elementwise(optimizer: Base) -> None:
    """Raise `LayoutError` for an optimizer whose shards are not updated as the whole would be.

    The rule is run on leaves shaped as the parameters, but small (`small_shape`), whole and cut as
    three ranks hold them: three steps, with gradients of very different sizes. fzero's own rules
    are elementwise by construction.

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
        "fzero.optim.from_torch. If the trial is wrong, from_torch(..., needs='element') says that "
        "parts may be updated alone, and needs='matrix', of a random rule, that each parameter "
        "may.",
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


def not_streamed(optimizer: object) -> LayoutError:
    """Return the error for a rule that needs all parameters at once, and has some."""
    return LayoutError(
        f"{type(optimizer).__name__} is stepped one bucket at a time here, and does not update "
        "each parameter alone.",
        cause="a rule that looks at all parameters (a clip in it, Prodigy), with offload, a "
        "state_dtype or stochastic_rounding.",
        fix="leave these out; clip with fzero.clip or max_norm, and not inside of the optimizer.",
    )


def small_shape(shape: Sequence[int], most: int = LARGE) -> tuple[int, ...]:
    """Return the shape of the leaf on which a rule for leaves of a shape is tried.

    It is square if the leaf is: factors of a matrix [n, m], which are [n, n] and [m, m], have the
    shape of the leaf itself only if n = m.

    Example:
        >>> small_shape([50_000, 768]), small_shape([64, 3, 7, 7]), small_shape([])
        ((131, 130), (64, 3, 2, 2), (1,))
    """
    small = [min(size, most if dim < 2 else 2) for dim, size in enumerate(shape)]
    if len(small) > 1 and small[0] == small[1] and shape[0] != shape[1]:
        small[0 if shape[0] > shape[1] else 1] += 1
    return tuple(max(size, 1) for size in small) or (1,)


def is_leafwise(rule: Rule, device: torch.device, shape: Sequence[int]) -> bool:
    """Whether two small leaves are updated together as each of them is alone."""
    return _agrees(rule, device, shape, [[(0, None)], [(1, None)]])


def sees_no_other(rule: Rule, device: torch.device, shape: Sequence[int]) -> bool:
    """Whether a leaf may be updated alone, as far as a trial tells: random rules are believed."""
    return is_leafwise(rule, device, shape) or _is_random(rule, device, shape)


def _is_random(rule: Rule, device: torch.device, shape: Sequence[int]) -> bool:
    """Whether a rule makes other updates with other random numbers."""
    x, g = (numbers_of(shape, seed).to(device, torch.float32) for seed in (0, 1))
    changes = []
    for drawn in (0, 1):
        with same_random_numbers(device):
            torch.rand(1000 * drawn, device=device)
            changes.append(rule([x.clone()], [[g.clone()]])[0][0])
    return not torch.equal(*changes)


def is_elementwise(rule: Rule, device: torch.device, shape: Sequence[int]) -> bool:
    """Whether flat shards are updated as they are inside of a small leaf, up to rounding.

    The shards are those of three ranks, each of which runs the rule alone.
    """
    numel = torch.Size(shape).numel()
    ranks = [[(a * numel // 24, b * numel // 24) for a, b in parts] for parts in RANKS]
    alone = [[(0, (a, b)) for a, b in spans if a < b] for spans in ranks]
    return _agrees(rule, device, shape, [parts for parts in alone if parts])


def _agrees(
    rule: Rule, device: torch.device, shape: Sequence[int], alone: Sequence[Sequence[Part]]
) -> bool:
    """Whether small leaves are updated together as in runs that have some parts of them each."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    count = 1 + max(leaf for parts in alone for leaf, _ in parts)
    leaves, *steps = (
        [size * numbers_of(shape, count * k + i).to(device, dtype) for i in range(count)]
        for k, size in enumerate((1.0, *SIZES))
    )

    def run(parts: Sequence[Part]) -> tuple[list[Tensor], list[float]]:
        values, *grads = ([_cut(x[leaf], span) for leaf, span in parts] for x in (leaves, *steps))
        with same_random_numbers(device):
            return rule(values, grads)

    together, numbers = run([(leaf, None) for leaf in range(count)])
    for parts in alone:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a rule for matrices, which are none here
                apart, own = run(parts)
        except Exception:  # a rule for matrices says in its own way that a flat tensor is none
            return False
        if not _near(numbers, own, _tolerance(device)):
            return False
        for (leaf, span), part in zip(parts, apart, strict=True):
            if not _same(_cut(together[leaf], span), part, together[leaf], leaves[leaf]):
                return False
    return True


def _cut(x: Tensor, span: tuple[int, int] | None) -> Tensor:
    return x.clone() if span is None else x.flatten()[slice(*span)].clone()


def _same(change: Tensor, part: Tensor, whole: Tensor, values: Tensor) -> bool:
    """Whether two changes are equal up to rounding, of a leaf that is changed by `whole`."""
    size = whole.nan_to_num().abs().max()
    rounding = 16 * torch.finfo(whole.dtype).eps * (size + values.abs().max())
    apart = (change.nan_to_num() - part.nan_to_num()).abs().max()
    return holds((apart <= rounding) | (apart < size * _tolerance(whole.device)))


def _tolerance(device: torch.device) -> float:
    return 1e-9 if device.type == "cpu" else 1e-4


def _near(some: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    if len(some) != len(others):
        return False
    a, b = (torch.tensor(xs, dtype=torch.float64) for xs in (some, others))
    return torch.allclose(a, b, rtol=tolerance, atol=0, equal_nan=True)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Random numbers are the same in each of these blocks, and go on as before after it."""
    on_gpu = device.type == "cuda"
    index = torch.cuda.current_device() if on_gpu and device.index is None else device.index
    with torch.random.fork_rng(devices=[index] if on_gpu else []):
        torch.default_generator.manual_seed(0)
        if on_gpu:
            torch.cuda.default_generators[index].manual_seed(0)
        yield


def numbers_of(shape: Sequence[int], seed: int) -> Tensor:
    """Fixed numbers between -3 and 3, none of them 0, alike on every machine, in fp64."""
    count = torch.arange(torch.Size(shape).numel())
    sizes = 3 * (0.5 + (7 * count + 5 * seed + 3).remainder(11).double()) / 11
    signs = 1 - 2 * (count + seed).remainder(3).remainder(2)
    return (sizes * signs).view(*shape)
