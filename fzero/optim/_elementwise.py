"""Rules that would be wrong on shards are found by a trial, when a state is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fzero.errors import LayoutError
from fzero.optim._base import Base

SMALL = (4, 6)
LARGE = 130  # some rules factor matrices of 128 and more only
RANKS = (((0, 5),), ((5, 14),), ((14, 15), (15, 24)))  # of each rank, its flats, in 24ths
SIZES = (1.0, 1e3, 1e-2)  # of the gradients of each step: so that a clip in the rule has an effect

Rule = Callable[[list[Tensor], list[list[Tensor]]], tuple[list[Tensor], list[float]]]
"""(parameters, for each step their gradients) -> what each parameter was changed by, and the
numbers that the rule keeps for all of them together."""


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
        "...); clip with fzero.clip or max_norm, and not inside of the optimizer. A rule for one "
        "matrix at a time (Muon, LAMB) runs with whole_parameters=True.",
    )


def require_leafwise(optimizer: Base) -> None:
    """Raise `LayoutError` for an optimizer whose leaves are not updated alone as together.

    Args:
        optimizer: as in `require_elementwise`.

    Raises:
        LayoutError: for a rule that looks at several leaves at once, or is random; for a foreign
            pair that is not elementwise; for state of another shape than its parameter.

    Example:
        >>> import torch
        >>> from fzero.optim import from_torch
        >>> matrices = {"w": torch.ones(2, 3)}
        >>> require_leafwise(from_torch(torch.optim.Muon).bind(matrices))
    """
    if optimizer.leafwise:
        return
    raise LayoutError(
        f"{optimizer!r} with whole_parameters=True: it does not update each parameter alone, and "
        "a rank has only some of them.",
        cause="a norm over all parameters (a clip in the rule, Prodigy), random numbers, state of "
        "another shape than its parameter (Adafactor, Shampoo), or a foreign (init, update) pair.",
        fix="use stage 0 or one rank; clip with fzero.clip or max_norm; write a rule for matrices "
        "as a torch.optim optimizer, and give it to fzero.optim.from_torch.",
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

    Example:
        >>> small_shape([50_000, 768]), small_shape([64, 3, 7, 7]), small_shape([])
        ((130, 130), (64, 3, 2, 2), (1,))
    """
    small = [min(size, most if dim < 2 else 2) for dim, size in enumerate(shape)]
    return tuple(max(size, 1) for size in small) or (1,)


def is_leafwise(rule: Rule, device: torch.device, shape: Sequence[int] = SMALL) -> bool:
    """Whether two small leaves are updated together as each of them is alone."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    pair = [numbers_of(shape, k).to(device, dtype) for k in (0, 1)]
    steps = [
        [numbers_of(shape, 2 * k + j).to(device, dtype) * s for j in (2, 3)]
        for k, s in enumerate(SIZES)
    ]

    def run(which: list[int]) -> tuple[list[Tensor], list[float]]:
        with seeded(device):
            return rule(
                [pair[i].clone() for i in which], [[gs[i].clone() for i in which] for gs in steps]
            )

    (both, numbers), *alone = run([0, 1]), run([0]), run([1])
    each = [x for changes, _ in alone for x in changes]
    return all(_near(numbers, own, _tolerance(device)) for _, own in alone) and all(
        _same(x, y, p) for x, y, p in zip(both, each, pair, strict=True)
    )


def is_elementwise(rule: Rule, device: torch.device, shape: Sequence[int] = SMALL) -> bool:
    """Whether flat shards are updated as they are inside of a small leaf, up to rounding.

    The shards are those of three ranks, each of which runs the rule alone.
    """
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    matrix = numbers_of(shape, 0).to(device, dtype)
    steps = [numbers_of(shape, 1 + k).to(device, dtype) * size for k, size in enumerate(SIZES)]
    with seeded(device):
        (change,), numbers = rule([matrix.clone()], [[g.clone()] for g in steps])
    whole = change.flatten()
    cut = torch.zeros_like(whole)
    numel = whole.numel()
    for parts_of_24 in RANKS:
        cuts = [(a * numel // 24, b * numel // 24) for a, b in parts_of_24]
        spans = [(a, b) for a, b in cuts if a < b]
        if not spans:
            continue
        params = [matrix.flatten()[a:b].clone() for a, b in spans]
        grads = [[g.flatten()[a:b].clone() for a, b in spans] for g in steps]
        try:
            with seeded(device), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a rule for matrices, which are none here
                parts, own = rule(params, grads)
        except Exception:  # a rule for matrices says in its own way that a flat tensor is none
            return False
        if not _near(numbers, own, _tolerance(device)):
            return False
        for (a, b), part in zip(spans, parts, strict=True):
            cut[a:b] = part
    return _same(whole, cut, matrix)


def _same(whole: Tensor, parts: Tensor, values: Tensor) -> bool:
    """Whether two changes of some values are equal up to rounding."""
    whole, parts = whole.nan_to_num(), parts.nan_to_num()
    size = whole.abs().max().item()
    rounding = 16 * torch.finfo(whole.dtype).eps * (size + values.abs().max().item())
    apart = (whole - parts).abs().max().item()
    return apart <= rounding or apart < size * _tolerance(whole.device)


def _tolerance(device: torch.device) -> float:
    return 1e-9 if device.type == "cpu" else 1e-4


def _near(some: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    if len(some) != len(others):
        return False
    a, b = (torch.tensor(xs, dtype=torch.float64) for xs in (some, others))
    return torch.allclose(a, b, rtol=tolerance, atol=0, equal_nan=True)


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
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
