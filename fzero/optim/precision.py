"""In which dtypes an optimizer steps and keeps what it has, and which of them go together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor

from fzero.errors import LayoutError, explain
from fzero.errors.check import check_flags, is_count, require
from fzero.machine.blocks import Blocks
from fzero.machine.offload import wait_for_copies
from fzero.optim.rules import Scaled
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.codec import Codec, cast, is_by_rows
from fzero.state.layout import BLOCK, Leaf, stored_dtype
from fzero.state.setup import MASTERS, Reduction
from fzero.state.stateful_update import Place as Place
from fzero.state.train_state import TrainState

_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How an optimizer holds parameters of 16 bits, and its states.

    Attributes:
        master_weights: fp32 copies of 16-bit parameters, which are stepped in their place.
        state_dtype: of the optimizer's states; None: that in which the parameter is stepped.
        stochastic_rounding: bf16 parameters without masters are stepped in fp32, and rounded up or
            down by chance, so that small updates are not lost.
        encoding: by which codecs the states are kept; they are stepped in fp32 then.
    """

    master_weights: bool = True
    state_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    encoding: Encoding | None = None

    @property
    def streams(self) -> bool:
        """Whether flats are stepped in copies, in other dtypes than they are kept in."""
        return self.stochastic_rounding or (self.state_dtype or self.encoding) is not None

    @property
    def block(self) -> int:
        """Of how many elements leaves and shards consist."""
        return 1 if self.encoding is None else self.encoding.block

    def encodes(self, numel: int) -> bool:
        """Whether states of a leaf of so many elements are encoded."""
        return self.encoding is not None and numel >= self.encoding.smallest

    def codec_of(self, leaf: Leaf, slot: str, *, squares: bool) -> Blocks | None:
        """Return what encodes a slot of a leaf; None: nothing."""
        if self.encoding is None or slot == MASTERS or not self.encodes(prod(leaf.shape)):
            return None
        return self.encoding.of(slot, squares=squares)

    def stepped(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which parameters of `dtype` are stepped."""
        wide = self.master_weights or self.stochastic_rounding or self.state_dtype is _FP32
        wide = wide or self.encoding is not None
        return _FP32 if dtype in SIXTEEN_BIT and wide else dtype

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the states of a parameter of `dtype`."""
        return self.state_dtype or self.stepped(dtype)


def precision_of(name: str, master_weights: Any, state_dtype: Any, rounding: Any) -> Precision:
    """Return the record of the options of an optimizer; raise `LayoutError` for another kind."""
    flags = {"master_weights": master_weights, "stochastic_rounding": rounding}
    check_flags(**{f"{name}: {key}": value for key, value in flags.items()})
    encoding = encoding_of(state_dtype)
    good = encoding is not None or state_dtype is None or isinstance(state_dtype, torch.dtype)
    wanted = "a torch.dtype, a codec, {slot: codec}, a fzero.optim.Encoding, or None"
    require(f"{name}: state_dtype", state_dtype, lambda _: good, wanted)
    return Precision(
        master_weights=master_weights,
        state_dtype=None if encoding is not None else state_dtype,
        stochastic_rounding=rounding,
        encoding=encoding,
    )


def require_precision(optimizer: Any, leaves: Iterable[Leaf], reduction: Reduction) -> None:
    """Raise `LayoutError` for the first leaf that learns in dtypes that do not go together.

    A foreign optimizer has no precision of its own: its states are as it makes them.
    """
    parted = getattr(optimizer, "parted", None)
    for rule, own in () if parted is None else parted(list(leaves)):
        require_precision(rule, own, reduction)
    precision = getattr(optimizer, "precision", None)
    if precision is None:
        return
    if precision.encoding is not None and optimizer.divides:
        precision.encoding.warn_of_zeros(optimizer.squares)
    learning = {stored_dtype(leaf.dtype): leaf for leaf in leaves if leaf.trainable}
    for dtype, leaf in learning.items():
        for together, seen, cause, fix in _misfits(dtype, precision, reduction, optimizer.divides):
            if together:
                raise LayoutError(f"{leaf.path}: {seen}.", cause=cause, fix=fix)
    if precision.stochastic_rounding and learning and _BF16 not in learning:
        raise LayoutError(
            f"stochastic_rounding, and parameters in {[str(dtype) for dtype in learning]}.",
            cause="a model that was not converted: only bf16 is rounded by chance.",
            fix="convert it (module.bfloat16()), or leave stochastic_rounding out.",
        )


def _misfits(
    dtype: torch.dtype, precision: Precision, reduction: Reduction, divides: bool
) -> Iterator[tuple[bool, str, str, str]]:
    """Yield what may not be combined: (whether it is, what is seen, cause, fix).

    It would train wrong, or an option would do nothing. All else may be combined: any masters,
    states, accumulation and communication.

    dtype: of parameters. divides: whether the optimizer divides by means of squared gradients.
    """
    state, by_chance = precision.encoding or precision.state_dtype, precision.stochastic_rounding
    sums, codec = reduction.accumulate_dtype, reduction.codec
    yield (
        precision.state_dtype not in (None, _BF16, _FP32),
        f"state_dtype={state}",
        "optimizer states in fp16 underflow: the square of a gradient of 1e-4 is 0 there; other "
        "dtypes cannot be stepped.",
        "use state_dtype=torch.bfloat16, torch.float32, or None.",
    )
    yield (
        dtype is torch.float64 and state is not None,
        f"state_dtype={state} for parameters in {dtype}",
        "one state_dtype for a model in fp64.",
        "leave state_dtype out: states are as precise as what is stepped.",
    )
    yield (
        dtype is _FP16 and divides and precision.kept(dtype) is _FP16,
        "means of squared gradients in fp16, of parameters in fp16 without masters",
        "master_weights=False: squares underflow in fp16, and an update divides by them.",
        "use master_weights=True, or state_dtype=torch.float32.",
    )
    yield (
        by_chance and precision.master_weights,
        "stochastic_rounding with master_weights",
        "fp32 masters keep what rounding would lose: there is nothing to round by chance.",
        "use master_weights=False with it, or leave stochastic_rounding out.",
    )
    yield (
        by_chance and dtype is _FP16,
        f"stochastic_rounding for parameters in {dtype}",
        "a model in fp16, whose small numbers are not spaced as rounding by chance needs it.",
        "use bf16 (module.bfloat16()), or leave stochastic_rounding out.",
    )
    yield (
        sums is _FP16 and dtype is not _FP16,
        f"accumulate_dtype={sums} for parameters in {dtype}",
        "gradients reach beyond 65504, where fp16 ends, and so do their sums.",
        "use accumulate_dtype=torch.bfloat16 or torch.float32, or None: fp32 for 16-bit "
        "parameters.",
    )
    yield (
        dtype is _BF16 and isinstance(codec, cast) and codec.dtype is _FP16,
        f"compress: gradients=cast({_FP16}) for parameters in {dtype}",
        "gradients in bf16 reach far beyond 65504, where fp16 ends.",
        "use codecs.bf16(), or cast to torch.float32.",
    )


def require_ordered(name: str, leaves: Iterable[Leaf]) -> None:
    """Raise `LayoutError` where elements of gradients are to be bounded, and one is complex.

    Args:
        name: of the option or call that bounds them.
        leaves: of a state.

    Raises:
        LayoutError: naming the first complex leaf that learns.

    Example:
        >>> leaf = Leaf(path="w", shape=(2,), dtype=torch.complex64, trainable=True)
        >>> require_ordered("clip", [leaf])
        Traceback (most recent call last):
        fzero.errors.LayoutError: clip with the complex parameter w. ...
    """
    for leaf in leaves:
        if leaf.trainable and leaf.dtype.is_complex:
            raise LayoutError(
                f"{name} with the complex parameter {leaf.path}.",
                cause="complex numbers have no order; torch does not clamp them, either.",
                fix="bound the norm (max_norm, clip_grad_norm_); or make the parameter real, "
                "[*, 2], and use torch.view_as_complex(p) in the forward.",
            )


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
            if codec is None:
                continue
            below = torch.linspace(-1.0, -0.5, codec.block)
            if bool((codec.numbers(codec.row_of(below)) >= 0).all()):  # none comes back negative
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
            if codec is None:
                continue
            squares_of_block = torch.full((codec.block,), _REACH)  # small ones beside a large one
            squares_of_block[0] = 1.0
            if codec.numbers(codec.row_of(squares_of_block))[1:].all():
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
    x, wrong = torch.cat([torch.linspace(-1.0, 1.0, codec.block), torch.zeros(codec.block)]), ""
    try:
        found = (blocks := Blocks(codec)).numbers(blocks.row_of(x))
        if found.shape != x.shape:
            wrong = f"{len(x)} elements are decoded to {[*found.shape]}"
        elif not found.isfinite().all():
            wrong = "numbers between -1 and 1, or zeros, are decoded to infinities or NaN"
        elif not is_by_rows(codec, x.view(2, -1)):
            wrong = (
                "a block has other bytes by itself, or the next time, or is decoded to other values"
            )
    except Exception as error:
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if wrong:
        raise LayoutError(
            f"{what}={codec} cannot encode blocks of {codec.block}: {wrong}.",
            cause="a codec that lacks a function, encodes along other than the last dim, divides "
            "by a scale of 0, or draws random numbers.",
            fix="see fzero.codecs.Codec: each row [n] of x [.., n] is encoded by itself.",
        )


StateDtype = torch.dtype | Codec | Mapping[str, Codec] | Encoding | None
"""In which dtype an optimizer keeps its states, or by which codecs."""


def stay(x: Tensor) -> Tensor:
    """Return `x`: it lives where it was made."""
    return x


def make_masters(
    flats: Sequence[Tensor], wanted: Sequence[bool], place: Place = stay
) -> tuple[Tensor, ...]:
    """Return an fp32 copy of each 16-bit flat where it is wanted; of the others, empty."""
    wait_for_copies(flats)  # what lives in host memory is cast there
    return tuple(
        place(p.detach().float()) if want and p.dtype in SIXTEEN_BIT else p.new_empty(0)
        for p, want in zip(flats, wanted, strict=True)
    )


def masters_of(state: TrainState) -> Sequence[Tensor]:
    """Return the masters that a state holds, parallel to the groups that learn; () without any."""
    return state.setup.optimizer.slots(state.optimizer).get(MASTERS, ())


def work_tensors(flats: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """Return what the rule steps: the master of each flat that has one, else the flat itself."""
    return [m if m.numel() else p for p, m in zip(flats, masters, strict=True)]


def as_stepped(
    grads: Sequence[Tensor], work: Sequence[Tensor], scaled: Scaled, *, owned: bool
) -> tuple[list[Tensor], Scaled]:
    """Return gradients in the dtypes of what is stepped, and what the kernel has still to do.

    A kernel that divides by `grad_scale` writes to the gradients, so that those which are not
    `owned` are copied. Gradients that are stepped in 16 bits are divided here: those that fit into
    their own dtype with the scale on them may not fit into the narrower one.
    """
    scale = scaled.grad_scale
    if scale is not None and any(w.dtype in SIXTEEN_BIT for w in work):
        return [unscaled(g, scale).to(w.dtype) for g, w in zip(grads, work, strict=True)], Scaled(
            found_inf=scaled.found_inf
        )
    copies = scale is not None and not owned
    return [g.to(w.dtype, copy=copies) for g, w in zip(grads, work, strict=True)], scaled


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Return gradient / scale, in fp32 or wider: 16 bits may not hold it."""
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide * scale.double().reciprocal().to(wide.dtype)
