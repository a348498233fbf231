"""`Encoding`: which states of an elementwise rule are kept encoded, and by what."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError, explain
from fzero.errors.check import is_count, require
from fzero.machine.rows import Blocks
from fzero.state.codec import Codec
from fzero.state.encoded import is_by_rows
from fzero.state.layout import BLOCK

_REACH = 1e-4  # of the largest of a block: the square of a gradient that is a hundredth of it


@dataclass(frozen=True, slots=True)
class Encoding:
    """Which states of an optimizer are kept encoded, and of which leaves: a `state_dtype`.

    A codec alone as `state_dtype` is short for `Encoding(codec)`.

    Args:
        codecs: a codec of `fzero.codecs` with blocks, or one's own that has `block`, for every
            state of floats; squares, which are never negative and by whose roots an update divides,
            are encoded by its `of_squares()`. Or a mapping, {"exp_avg": codec, ...}: states that it
            does not name are kept as they are.
        smallest: leaves of fewer elements are kept as they are.

    Raises:
        LayoutError: for what is no codec, or one without blocks; of a rule, for the name of a state
            that it does not keep, and for a codec that loses the sign of a state that has one.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.

    Example:
        >>> import fzero
        >>> codec = fzero.codecs.dynamic8(stochastic=True)
        >>> fzero.optim.adamw(1e-3, state_dtype=Encoding(codec, smallest=1024)).block
        256
    """

    codecs: Codec | Mapping[str, Codec]
    smallest: int = 4096

    def __post_init__(self) -> None:
        """Try each codec on a block."""
        named = self.codecs if isinstance(self.codecs, Mapping) else {"": self.codecs}
        require("state_dtype", self.codecs, lambda _: bool(named), '{"exp_avg": codec, ...}')
        for name, codec in named.items():
            _require_blocks(f"state_dtype[{name!r}]" if name else "state_dtype", codec)
        good = is_count(self.smallest)
        require("Encoding: smallest", self.smallest, lambda _: good, "an int of 1 or more")

    @property
    def block(self) -> int:
        """The elements of which leaves and shards consist: whole blocks of every codec."""
        some = self.codecs.values() if isinstance(self.codecs, Mapping) else (self.codecs,)
        return lcm(BLOCK, *(Blocks(x).block for one in some for x in (one, one.of_squares())))

    def of(self, slot: str, *, squares: bool) -> Blocks | None:
        """Return what encodes a slot; None: nothing."""
        if isinstance(self.codecs, Mapping):
            codec = self.codecs.get(slot)
            return None if codec is None else Blocks(codec)
        return Blocks(self.codecs.of_squares() if squares else self.codecs)

    def require_fits(self, rule: str, squares: Mapping[str, bool]) -> None:
        """Raise `LayoutError` where a rule keeps no state of a name, or one that loses its sign.

        squares: {slot of the rule: whether it is never negative}.
        """
        named = set[str](self.codecs if isinstance(self.codecs, Mapping) else ())
        for slot in sorted(named - squares.keys()):
            raise LayoutError(
                f"state_dtype[{slot!r}]: {rule} keeps no state of that name.",
                cause="a misspelt name, or one of another rule, which would be ignored.",
                fix=f"name one of {sorted(squares)}." if squares else "leave it out.",
            )
        for slot in (slot for slot, never_negative in squares.items() if not never_negative):
            codec = self.of(slot, squares=False)
            if codec is not None and _loses_sign(codec):
                raise LayoutError(
                    f"state_dtype: {slot} of {rule} by {codec.codec}, which keeps no negative "
                    "numbers.",
                    cause="a codec for means of squares, as of exp_avg_sq, for a state of both "
                    "signs, half of which would be lost.",
                    fix=f'give {{"{slot}": fzero.codecs.dynamic8()}} for it; a codec of all '
                    "states is used by its of_squares() where they are never negative.",
                )

    def warn_of_zeros(self, squares: Mapping[str, bool]) -> None:
        """Warn of a codec that makes zeros of squares by whose roots an update divides."""
        for slot in (slot for slot, never_negative in squares.items() if never_negative):
            codec = self.of(slot, squares=True)
            if codec is None or not _makes_zeros(codec):
                continue
            text = explain(
                f"state_dtype={self.codecs}: of {slot}, a mean of squared gradients that is "
                f"{_REACH} of the largest of its block is kept as 0.",
                cause="levels that are evenly spaced: an update divides by the root of it, so by "
                "eps alone.",
                fix=f'give {{"{slot}": fzero.codecs.dynamic8(signed=False), ...}}, or let its '
                "`of_squares()` return such a codec.",
            )
            warnings.warn(text, UserWarning, stacklevel=3)


def encoding_of(state_dtype: Any) -> Encoding | None:
    """Return the encoding that an option means; None where it means another thing."""
    if isinstance(state_dtype, Codec | Mapping):
        return Encoding(state_dtype)
    return state_dtype if isinstance(state_dtype, Encoding) else None


def _loses_sign(codec: Blocks) -> bool:
    """Whether of negative numbers none is received as one."""
    below = torch.linspace(-1.0, -0.5, codec.block)
    return bool((codec.numbers(codec.row_of(below)) >= 0).all())


def _makes_zeros(codec: Blocks) -> bool:
    """Whether small numbers beside a large one are received as 0."""
    squares = torch.full((codec.block,), _REACH)
    squares[0] = 1.0
    return not codec.numbers(codec.row_of(squares))[1:].all()


def _require_blocks(what: str, codec: Any) -> None:
    """Raise `LayoutError` for what is no codec, or does not encode blocks as it says."""
    require(what, codec, lambda x: isinstance(x, Codec), "a codec of fzero.codecs, or one's own")
    if not is_count(getattr(codec, "block", None)):
        raise LayoutError(
            f"{what}={codec}: it has no `block`.",
            cause="a codec of rows of any length: where ranks cut a state, it would be another.",
            fix="use fzero.codecs.dynamic8() or int8(), a torch.dtype such as torch.bfloat16; of "
            "your own codec, say in `block` of how many elements a row is encoded by itself.",
        )
    x = torch.cat([torch.linspace(-1.0, 1.0, codec.block), torch.zeros(codec.block)])
    try:
        found = (blocks := Blocks(codec)).numbers(blocks.row_of(x))
        wrong = _wrong(codec, x, found)
    except Exception as error:
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if wrong:
        raise LayoutError(
            f"{what}={codec} cannot encode blocks of {codec.block}: {wrong}.",
            cause="a codec that lacks a function, encodes along other than the last dim, divides "
            "by a scale of 0, or draws random numbers.",
            fix="see fzero.codecs.Codec: each row [n] of x [.., n] is encoded by itself.",
        )


def _wrong(codec: Any, x: Tensor, found: Tensor) -> str:
    """Return what is wrong with two blocks, the second one of zeros, and what they became."""
    if found.shape != x.shape:
        return f"{len(x)} elements are decoded to {[*found.shape]}"
    if not found.isfinite().all():
        return "numbers between -1 and 1, or zeros, are decoded to infinities or NaN"
    if not is_by_rows(codec, x.view(2, -1)):
        return "a block has other bytes by itself, or the next time, or is decoded to other values"
    return ""


StateDtype = torch.dtype | Codec | Mapping[str, Codec] | Encoding | None
"""In which dtype an optimizer keeps its states, or by which codecs."""
