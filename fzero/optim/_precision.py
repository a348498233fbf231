"""In which dtypes an optimizer steps and keeps what it has, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fzero.errors import LayoutError
from fzero.errors.check import check_flags, require
from fzero.machine.rows import Blocks
from fzero.optim._encoding import Encoding, encoding_of
from fzero.state.buffers import SIXTEEN_BIT
from fzero.state.codec import cast
from fzero.state.communication import Reduction
from fzero.state.layout import Leaf, stored_dtype
from fzero.state.setup import MASTERS

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The dtypes of one parameter that learns, and of what is made of it."""

    param: torch.dtype
    precision: Precision
    divides: bool  # whether the optimizer divides by a state: by means of squared gradients
    accumulate: torch.dtype | None = None  # in which its gradients add up; None: as by default
    communication: torch.dtype | None = None  # in which they cross ranks; None: that of `param`


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A combination that would train wrong, or where an option would do nothing."""

    when: Callable[[Numbers], bool]
    seen: str  # with the fields of the `Numbers`, and `rounding` and `state`
    cause: str
    fix: str


REFUSED = (
    Refused(
        when=lambda n: n.precision.state_dtype not in (None, _BF16, _FP32),
        seen="state_dtype={state}",
        cause="optimizer states in fp16 underflow: the square of a gradient of 1e-4 is 0 there; "
        "other dtypes cannot be stepped.",
        fix="use state_dtype=torch.bfloat16, torch.float32, or None.",
    ),
    Refused(
        when=lambda n: (
            n.param is torch.float64
            and (n.precision.state_dtype or n.precision.encoding) is not None
        ),
        seen="state_dtype={state} for parameters in {param}",
        cause="one state_dtype for a model in fp64.",
        fix="leave state_dtype out: states are as precise as what is stepped.",
    ),
    Refused(
        when=lambda n: n.param is _FP16 and n.divides and n.precision.kept(n.param) is _FP16,
        seen="means of squared gradients in fp16, of parameters in fp16 without masters",
        cause="master_weights=False: squares underflow in fp16, and an update divides by them.",
        fix="use master_weights=True, or state_dtype=torch.float32.",
    ),
    Refused(
        when=lambda n: n.precision.stochastic_rounding and n.precision.master_weights,
        seen="stochastic_rounding with master_weights",
        cause="fp32 masters keep what rounding would lose: there is nothing to round by chance.",
        fix="use master_weights=False with it, or leave stochastic_rounding out.",
    ),
    Refused(
        when=lambda n: n.precision.stochastic_rounding and n.param is _FP16,
        seen="stochastic_rounding for parameters in {param}",
        cause="a model in fp16, whose small numbers are not spaced as rounding by chance needs it.",
        fix="use bf16 (module.bfloat16()), or leave stochastic_rounding out.",
    ),
    Refused(
        when=lambda n: n.accumulate is _FP16 and n.param is not _FP16,
        seen="accumulate_dtype={accumulate} for parameters in {param}",
        cause="gradients reach beyond 65504, where fp16 ends, and so do their sums.",
        fix="use accumulate_dtype=torch.bfloat16 or torch.float32, or None: fp32 for 16-bit "
        "parameters.",
    ),
    Refused(
        when=lambda n: n.param is _BF16 and n.communication is _FP16,
        seen="compress: gradients=cast({communication}) for parameters in {param}",
        cause="gradients in bf16 reach far beyond 65504, where fp16 ends.",
        fix="use codecs.bf16(), or cast to torch.float32.",
    ),
)
"""What may not be combined. All else may: any masters, states, accumulation and communication."""


def require_combination(path: str, numbers: Numbers) -> None:
    """Raise `LayoutError` if the dtypes of the parameter at `path` do not go together."""
    precision = numbers.precision
    shown: dict[str, Any] = {
        "param": numbers.param,
        "state": precision.encoding or precision.state_dtype,
        "accumulate": numbers.accumulate,
        "communication": numbers.communication,
    }
    for row in REFUSED:
        if row.when(numbers):
            raise LayoutError(
                f"{path}: {row.seen.format(**shown)}.",
                cause=row.cause,
                fix=row.fix.format(**shown),
            )


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
    precision, codec = getattr(optimizer, "precision", None), reduction.codec
    if precision is None:
        return
    if precision.encoding is not None and optimizer.divides:
        precision.encoding.warn_of_zeros(optimizer.squares)
    learning = {stored_dtype(leaf.dtype): leaf for leaf in leaves if leaf.trainable}
    for dtype, leaf in learning.items():
        numbers = Numbers(
            param=dtype,
            precision=precision,
            divides=optimizer.divides,
            accumulate=reduction.accumulate_dtype,
            communication=codec.dtype if isinstance(codec, cast) else None,
        )
        require_combination(leaf.path, numbers)
    if precision.stochastic_rounding and learning and _BF16 not in learning:
        raise LayoutError(
            f"stochastic_rounding, and parameters in {[str(dtype) for dtype in learning]}.",
            cause="a model that was not converted: only bf16 is rounded by chance.",
            fix="convert it (module.bfloat16()), or leave stochastic_rounding out.",
        )
