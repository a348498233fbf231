"""The axes of the matrix as data: each value has its options for an engine and for a step.

A line in `AXES` adds a value, and with it a keyword of `fzero.certify` and of the command line.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero.errors import LayoutError
from fzero.machine.codecs import bf16, cast, int8
from fzero.ranks.mesh import Mesh
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


@dataclass(frozen=True, slots=True, eq=False)
class AxisValue:
    """One value of an axis, with the options that it sets."""

    name: str
    fact: Any = None  # what its name alone does not say: a number, a `Precision`, a dtype
    engine: Options = _no_options  # -> keywords of Engine
    wrap: Callable[[Any, Cell], Any] = _unchanged  # a transform around the functional step
    shard: Options = _no_options  # -> keywords of fzero.shard


@dataclass(frozen=True, slots=True, eq=False)
class CertifyAxis:
    """An axis of the matrix: a cell has one value on each."""

    name: str  # the keyword
    head: str  # of its column
    values: tuple[AxisValue, ...]
    counts: bool = False  # any number from 1 on is a value, not only those that are listed

    def choose(self, given: Any) -> tuple[AxisValue, ...]:
        """Return the values of these names, or of one. Raises `LayoutError` for unknown names."""
        one = isinstance(given, str | int | Codec | Mapping | Mesh)
        names: list[Any] = [given] if one else list(given)
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
        if isinstance(given, Mapping | Mesh) and self.name == "meshes":
            return mesh_value(given if isinstance(given, Mesh) else Mesh(given))
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
        names += {"wires": ", or a codec", "meshes": ", or names and sizes"}.get(self.name, "")
        return f"{names}, or another count" if self.counts else names


def number_value(number: int) -> AxisValue:
    """Return the value for a number of ranks, or of micro-batches."""
    return AxisValue(str(number), number)


def _both(name: str, options: Options, fact: Any = None) -> AxisValue:
    """Return a value with the same keywords for Engine and fzero.shard."""
    return AxisValue(name, fact, options, shard=options)


def codec_value(name: str, codec: Codec) -> AxisValue:
    """Return the value for gradients that cross ranks by a codec."""
    return AxisValue(
        name,
        codec,
        lambda _: {"compress": Compress(gradients=codec)},
        lambda step, _: compress(step, gradients=codec),
    )


def mesh_value(mesh: Mesh) -> AxisValue:
    """Return the value for a mesh of named axes."""
    name = " x ".join(f"{axis} {size}" for axis, size in mesh.axes)
    copies = f", copies along {' and '.join(mesh.replicate)}" if mesh.replicate else ""
    return _both(name + copies, lambda _: {"mesh": mesh}, mesh)


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


def _precision(
    name: str, dtype: torch.dtype, engine: Options = _no_options, **more: Any
) -> AxisValue:
    return AxisValue(name, RunDtypes(dtype=dtype, **{"low": dtype, **more}), engine)


_HALF = torch.bfloat16
_PRECISIONS = (
    _precision("fp64", torch.float64),
    _precision("fp32", torch.float32),
    _precision("bf16", _HALF),
    _precision("bf16-no-masters", _HALF, lambda _: {"master_weights": False}, masters=False),
    AxisValue(
        "autocast",
        RunDtypes(dtype=torch.float32, low=_HALF, autocast=_HALF),
        lambda _: {"autocast": _HALF},
        lambda step, _: autocast(step, dtype=_HALF),
    ),
)
_CLIPPING = (
    AxisValue("off"),
    AxisValue(
        "on",
        engine=lambda cell: {"max_norm": cell.max_norm},
        wrap=lambda step, cell: clip(step, max_norm=cell.max_norm),
    ),
)
_SCALES = (
    AxisValue("1"),
    AxisValue(
        "1024",
        engine=lambda _: {"loss_scale": 1024.0},
        wrap=lambda step, _: scale_loss(step, 1024.0),
    ),
)
_WINDOWS = (
    AxisValue("each"),  # every backward is reduced by itself
    AxisValue("coalesce", wrap=lambda step, _: coalesce(step)),
    AxisValue(
        "accumulate",
        engine=lambda cell: {
            "gradient_accumulation_steps": cell.fact("micro_batches"),
            "average_micro_batches": True,
        },
        wrap=lambda step, cell: accumulate(step, steps=cell.fact("micro_batches")),
    ),
)
_OFFLOAD = (
    AxisValue("none"),
    AxisValue(
        "disk",  # "cpu" changes nothing for a model that computes on a CPU
        engine=lambda cell: {"offload": Offload(**_on_disk(cell))},
        wrap=lambda step, cell: offload(step, **_on_disk(cell)),
    ),
)
_MESHES = (
    AxisValue("flat"),
    _both("replicas", _in_two_dims),
    _both("replicas-all", lambda cell: {**_in_two_dims(cell), "optimizer_over": "all"}),
)
_WIRES = (
    AxisValue("own"),
    _both("predivided", lambda _: {"gradient_predivide_factor": 2.0}),
    codec_value("bf16", bf16()),
    codec_value("int8", int8()),
)
_CARRIERS = (
    AxisValue("all"),  # each rank is itself
    _both("fewer", lambda cell: cell.of_logical_ranks),
)
_MATRIX = AxisValue("matrix", functools.partial(torch.optim.Adafactor, lr=2.0**-6))

# The transforms of a step are put around it in the order of the axes, `fzero.shard` last.
AXES = (
    CertifyAxis("drivers", "driver", (AxisValue("step"), AxisValue("engine"))),
    CertifyAxis("stages", "stage", tuple(map(_stage, range(4)))),
    CertifyAxis("worlds", "W", tuple(map(number_value, (1, 2, 3, 4))), counts=True),
    CertifyAxis("micro_batches", "N", tuple(map(number_value, (1, 2, 3))), counts=True),
    CertifyAxis("precisions", "precision", _PRECISIONS),
    CertifyAxis("clipping", "clip", _CLIPPING),
    CertifyAxis("loss_scales", "scale", _SCALES),
    CertifyAxis("windows", "window", _WINDOWS),
    CertifyAxis(
        "buckets", "bucket", (_both("64", lambda _: {"bucket_bytes": 64}), AxisValue("default"))
    ),
    CertifyAxis("offload", "offload", _OFFLOAD),
    CertifyAxis("meshes", "mesh", _MESHES),
    CertifyAxis(
        "reductions", "reduce", (AxisValue("mean"), _both("sum", lambda _: {"reduce_op": "sum"}))
    ),
    CertifyAxis("wires", "wire", _WIRES),
    CertifyAxis("rules", "rule", (AxisValue("given"), _MATRIX)),
    CertifyAxis("carriers", "carriers", _CARRIERS),
    CertifyAxis("ragged", "ragged", (AxisValue("off"), AxisValue("on"))),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """A combination of options: one value on every axis."""

    values: tuple[AxisValue, ...]  # in the order of AXES
    max_norm: float | None = None  # None where nothing is clipped
    logical: int | None = None  # how many logical ranks the run has; None: ranks are themselves

    @property
    def at(self) -> dict[str, str]:
        """The name of the value on each axis."""
        return {axis.name: value.name for axis, value in zip(AXES, self.values, strict=True)}

    def fact(self, name: str) -> Any:
        """The `fact` of the value on axis `name`."""
        return next(v.fact for axis, v in zip(AXES, self.values, strict=True) if axis.name == name)

    @property
    def carries(self) -> bool:
        """Whether fewer ranks carry the logical ranks: several, whose sums no codec encodes."""
        wire = self.fact("wires")
        is_cast = wire is None or isinstance(wire, cast)
        return self.at["carriers"] == "fewer" and is_cast and self.fact("worlds") > 1

    @property
    def of_logical_ranks(self) -> dict[str, Any]:
        """The options of logical ranks, if the run has them."""
        return {} if self.logical is None else {"logical_ranks": self.logical, "seed": 0}

    def carried_by(self, ranks: int) -> Cell:
        """Return the cell on this number of ranks, with the logical ranks that it has."""
        values = [
            number_value(ranks) if axis.name == "worlds" else value
            for axis, value in zip(AXES, self.values, strict=True)
        ]
        return replace(self, values=tuple(values))

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
