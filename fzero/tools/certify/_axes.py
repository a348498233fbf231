"""The axes of the matrix as data: each value has its options for an engine and for a step.

A line in `AXES` adds a value, and with it a keyword of `fzero.certify` and of the command line.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero.errors import LayoutError
from fzero.machine.codecs import bf16, int8
from fzero.state.codec import Codec, Compress
from fzero.state.offload import Offload
from fzero.transforms import accumulate, autocast, clip, coalesce, compress, offload, scale_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDtypes:
    """The dtypes of a run: of the parameters, and the coarsest one that a number passes through."""

    dtype: torch.dtype
    low: torch.dtype
    autocast: torch.dtype | None = None
    masters: bool = True  # fp32 copies of 16-bit parameters


Options = Callable[["Cell"], Mapping[str, Any]]


def _no_options(cell: Cell) -> dict[str, Any]:
    return {}


def _unchanged(step: Any, cell: Cell) -> Any:
    return step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AxisValue:
    """One value of an axis, with the options that it sets."""

    name: str
    fact: Any = None  # what its name alone does not say: a number, a `Precision`, a dtype
    engine: Options = _no_options  # -> keywords of Engine
    wrap: Callable[[Any, Cell], Any] = _unchanged  # a transform around the functional step
    shard: Options = _no_options  # -> keywords of fzero.shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CertifyAxis:
    """An axis of the matrix: a cell has one value on each."""

    name: str  # the keyword
    head: str  # of its column
    values: tuple[AxisValue, ...]
    counts: bool = False  # any number from 1 on is a value, not only those that are listed

    def choose(self, given: Any) -> tuple[AxisValue, ...]:
        """Return the values of these names, or of one. Raises `LayoutError` for unknown names."""
        names = [given] if isinstance(given, str | int | Codec) else list(given)
        chosen = tuple(map(self._value, names))
        if chosen and len(chosen) == len({value.name for value in chosen}):
            return chosen
        raise LayoutError(
            f"certify: {self.name}={given!r}.",
            cause="no value, or one twice.",
            fix=f"choose from {self._known()}.",
        )

    def _value(self, given: Any) -> AxisValue:
        if isinstance(given, Codec) and self.name == "wires":
            return codec_value(str(given), given)
        name = str(given)
        for value in self.values:
            if value.name == name:
                return value
        if self.counts and name.isdecimal() and int(name) >= 1:
            return number_value(int(name))
        raise LayoutError(
            f"certify: {self.name} has no value {name!r}.",
            cause="a mistyped name, or an option that fzero does not have.",
            fix=f"choose from {self._known()}.",
        )

    def _known(self) -> str:
        names = ", ".join(value.name for value in self.values)
        names += ", or a codec" if self.name == "wires" else ""
        return f"{names}, or another count" if self.counts else names


def number_value(number: int) -> AxisValue:
    """Return the value for a number of ranks, or of micro-batches."""
    return AxisValue(name=str(number), fact=number)


def _both(name: str, options: Options, fact: Any = None) -> AxisValue:
    """Return a value with the same keywords for Engine and fzero.shard."""
    return AxisValue(name=name, fact=fact, engine=options, shard=options)


def codec_value(name: str, codec: Codec) -> AxisValue:
    """Return the value for gradients that cross ranks by a codec."""
    return AxisValue(
        name=name,
        fact=codec,
        engine=lambda _: {"compress": Compress(gradients=codec)},
        wrap=lambda step, _: compress(step, gradients=codec),
    )


def _stage(number: int) -> AxisValue:
    return _both(str(number), lambda _: {"stage": number}, number)


def _in_two_dims(cell: Cell) -> dict[str, Any]:
    """Return the options of a mesh: 2 replicas, or W replicas if W is odd."""
    world = cell.fact("worlds")
    return {"mesh": (world, 1) if world % 2 else (2, world // 2)}


def _on_disk(cell: Cell) -> dict[str, Any]:
    """Return the options to offload all that the stage allows to disk.

    The files are unlinked once they are open, so that none is left.
    """
    params = {"params": "disk"} if cell.fact("stages") == 3 else {}
    return {"optimizer": "disk", "gradients": "disk", "folder": tempfile.gettempdir(), **params}


_FULL, _SINGLE, _HALF = torch.float64, torch.float32, torch.bfloat16

# The transforms of a step are put around it in the order of the axes, `fzero.shard` last.
AXES = (
    CertifyAxis(
        name="drivers",
        head="driver",
        values=(AxisValue(name="step"), AxisValue(name="engine")),
    ),
    CertifyAxis(name="stages", head="stage", values=tuple(map(_stage, range(4)))),
    CertifyAxis(
        name="worlds", head="W", values=tuple(map(number_value, (1, 2, 3, 4))), counts=True
    ),
    CertifyAxis(
        name="micro_batches", head="N", values=tuple(map(number_value, (1, 2, 3))), counts=True
    ),
    CertifyAxis(
        name="precisions",
        head="precision",
        values=(
            AxisValue(name="fp64", fact=RunDtypes(dtype=_FULL, low=_FULL)),
            AxisValue(name="fp32", fact=RunDtypes(dtype=_SINGLE, low=_SINGLE)),
            AxisValue(name="bf16", fact=RunDtypes(dtype=_HALF, low=_HALF)),
            AxisValue(
                name="bf16-no-masters",
                fact=RunDtypes(dtype=_HALF, low=_HALF, masters=False),
                engine=lambda _: {"master_weights": False},
            ),
            AxisValue(
                name="autocast",
                fact=RunDtypes(dtype=_SINGLE, low=_HALF, autocast=_HALF),
                engine=lambda _: {"autocast": _HALF},
                wrap=lambda step, _: autocast(step, dtype=_HALF),
            ),
        ),
    ),
    CertifyAxis(
        name="clipping",
        head="clip",
        values=(
            AxisValue(name="off"),
            AxisValue(
                name="on",
                engine=lambda cell: {"max_norm": cell.max_norm},
                wrap=lambda step, cell: clip(step, max_norm=cell.max_norm),
            ),
        ),
    ),
    CertifyAxis(
        name="loss_scales",
        head="scale",
        values=(
            AxisValue(name="1"),
            AxisValue(
                name="1024",
                engine=lambda _: {"loss_scale": 1024.0},
                wrap=lambda step, _: scale_loss(step, 1024.0),
            ),
        ),
    ),
    CertifyAxis(
        name="windows",
        head="window",
        values=(
            AxisValue(name="each"),  # every backward is reduced by itself
            AxisValue(name="coalesce", wrap=lambda step, _: coalesce(step)),
            AxisValue(
                name="accumulate",
                engine=lambda cell: {
                    "gradient_accumulation_steps": cell.fact("micro_batches"),
                    "average_micro_batches": True,
                },
                wrap=lambda step, cell: accumulate(step, steps=cell.fact("micro_batches")),
            ),
        ),
    ),
    CertifyAxis(
        name="buckets",
        head="bucket",
        values=(_both("64", lambda _: {"bucket_bytes": 64}), AxisValue(name="default")),
    ),
    CertifyAxis(
        name="offload",
        head="offload",
        values=(
            AxisValue(name="none"),
            AxisValue(
                name="disk",  # "cpu" changes nothing for a model that computes on a CPU
                engine=lambda cell: {"offload": Offload(**_on_disk(cell))},
                wrap=lambda step, cell: offload(step, **_on_disk(cell)),
            ),
        ),
    ),
    CertifyAxis(
        name="meshes",
        head="mesh",
        values=(
            AxisValue(name="flat"),
            _both("replicas", _in_two_dims),
            _both("replicas-all", lambda cell: {**_in_two_dims(cell), "optimizer_over": "all"}),
        ),
    ),
    CertifyAxis(
        name="reductions",
        head="reduce",
        values=(
            AxisValue(name="mean"),
            _both("sum", lambda _: {"reduce_op": "sum"}),
        ),
    ),
    CertifyAxis(
        name="wires",
        head="wire",
        values=(
            AxisValue(name="own"),
            _both("predivided", lambda _: {"gradient_predivide_factor": 2.0}),
            codec_value("bf16", bf16()),
            codec_value("int8", int8()),
        ),
    ),
    CertifyAxis(
        name="rules",
        head="rule",
        values=(
            AxisValue(name="given"),
            AxisValue(name="matrix", fact=functools.partial(torch.optim.Adafactor, lr=2.0**-6)),
        ),
    ),
    CertifyAxis(
        name="ragged",
        head="ragged",
        values=(AxisValue(name="off"), AxisValue(name="on")),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """A combination of options: one value on every axis."""

    values: tuple[AxisValue, ...]  # in the order of AXES
    max_norm: float | None = None  # None where nothing is clipped

    @property
    def at(self) -> dict[str, str]:
        """The name of the value on each axis."""
        return {axis.name: value.name for axis, value in zip(AXES, self.values, strict=True)}

    def fact(self, name: str) -> Any:
        """The `fact` of the value on axis `name`."""
        return next(v.fact for axis, v in zip(AXES, self.values, strict=True) if axis.name == name)

    @property
    def weighs(self) -> bool:
        """Whether each micro-batch has a weight: where options of the cell do not refuse one."""
        means = self.at["reductions"] == "mean" and self.at["windows"] != "accumulate"
        return (
            self.at["ragged"] == "on"
            and means
            and getattr(self.fact("wires"), "memory", False) is False
        )

    def engine_options(self) -> dict[str, Any]:
        """The keywords of `Engine(module, optimizer, ...)`."""
        return {key: x for value in self.values for key, x in value.engine(self).items()}

    def shard_options(self) -> dict[str, Any]:
        """The keywords of `fzero.shard(step, ...)`."""
        return {key: x for value in self.values for key, x in value.shard(self).items()}

    def around(self, step: Any) -> Any:
        """The step in every transform of the cell but `shard`."""
        for value in self.values:
            step = value.wrap(step, self)
        return step


def restricted(given: Mapping[str, Any]) -> list[tuple[AxisValue, ...]]:
    """Return the values of each axis, restricted on those axes that `given` names."""
    known = [axis.name for axis in AXES]
    for name in given:
        if name not in known:
            raise LayoutError(
                f"certify: there is no axis {name!r}.",
                cause="a mistyped keyword.",
                fix=f"the axes are {', '.join(known)}.",
            )
    return [axis.choose(given[axis.name]) if axis.name in given else axis.values for axis in AXES]
