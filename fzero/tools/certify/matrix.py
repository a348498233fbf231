"""The matrix of `certify` as data: its axes, its cells, and the report of what they gave.

A line in `AXES` adds a value, and with it a keyword of `fzero.certify` and of the command line.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fzero import transforms
from fzero.errors import LayoutError
from fzero.machine.codecs import bf16, cast, int8
from fzero.ranks.mesh import Mesh
from fzero.state.codec import Codec, Compress
from fzero.state.setup import Offload
from fzero.tools.columns import ShownAsText, columns

CHECKS = ("loss", "gradient", "norm", "update")

# Axes.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDtypes:
    """The dtypes of a run: of the parameters, and the coarsest one that a number passes through."""

    dtype: torch.dtype
    low: torch.dtype
    autocast: torch.dtype | None = None
    masters: bool = True  # fp32 copies of 16-bit parameters


@dataclass(frozen=True, slots=True, eq=False)
class AxisValue:
    """One value of an axis, with the options that it sets: keywords of `Engine`."""

    name: str
    fact: Any = None  # what its name alone does not say: a number, a `RunDtypes`, a codec
    options: Mapping[str, Any] | Callable[[Cell], Mapping[str, Any]] = field(default_factory=dict)


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
        chosen = tuple(map(self._value, [given] if one else given))
        if chosen and len(chosen) == len({value.name for value in chosen}):
            return chosen
        raise self._unknown(f"{self.name}={given!r}", "no value, or one twice.")

    def _value(self, given: Any) -> AxisValue:
        if isinstance(given, Codec) and self.name == "wires":
            return _codec(str(given), given)
        if isinstance(given, Mapping | Mesh) and self.name == "meshes":
            mesh = given if isinstance(given, Mesh) else Mesh(given)
            name = " x ".join(f"{axis} {size}" for axis, size in mesh.axes)
            copies = f", copies along {' and '.join(mesh.replicate)}" if mesh.replicate else ""
            return AxisValue(name + copies, mesh, {"mesh": mesh})
        name = str(given)
        for value in self.values:
            if value.name == name:
                return value
        if self.counts and name.isdecimal() and int(name) >= 1:
            return number_value(int(name))
        cause = "a mistyped name, or an option that fzero does not have."
        raise self._unknown(f"{self.name} has no value {name!r}", cause)

    def _unknown(self, seen: str, cause: str) -> LayoutError:
        known = ", ".join(value.name for value in self.values)
        known += {"wires": ", or a codec", "meshes": ", or names and sizes"}.get(self.name, "")
        known += ", or another count" * self.counts
        return LayoutError(f"certify: {seen}.", cause=cause, fix=f"choose from {known}.")


def number_value(number: int) -> AxisValue:
    """Return the value for a number of ranks, or of micro-batches."""
    return AxisValue(str(number), number)


def _codec(name: str, codec: Codec) -> AxisValue:
    """Return the value for gradients that cross ranks by a codec."""
    return AxisValue(name, codec, {"compress": Compress(gradients=codec)})


def _in_two_dims(cell: Cell) -> dict[str, Any]:
    """Return the options of a mesh: 2 replicas, or W replicas if W is odd."""
    world = cell.fact("worlds")
    return {"mesh": (world, 1) if world % 2 else (2, world // 2)}


def _on_disk(cell: Cell) -> dict[str, Any]:
    """Return the options to offload all that the stage allows to disk.

    The files are unlinked once they are open, so that none is left.
    """
    params = "disk" if cell.fact("stages") == 3 else None
    folder = tempfile.gettempdir()
    return {"offload": Offload(optimizer="disk", gradients="disk", params=params, folder=folder)}


_HALF = torch.bfloat16
_PRECISIONS = (
    AxisValue("fp64", RunDtypes(dtype=torch.float64, low=torch.float64)),
    AxisValue("fp32", RunDtypes(dtype=torch.float32, low=torch.float32)),
    AxisValue("bf16", RunDtypes(dtype=_HALF, low=_HALF)),
    AxisValue(
        "bf16-no-masters",
        RunDtypes(dtype=_HALF, low=_HALF, masters=False),
        {"master_weights": False},
    ),
    AxisValue(
        "autocast",
        RunDtypes(dtype=torch.float32, low=_HALF, autocast=_HALF),
        {"autocast": _HALF},
    ),
)
_CLIPPING = (AxisValue("off"), AxisValue("on", None, lambda cell: {"max_norm": cell.max_norm}))
_SCALES = (AxisValue("1"), AxisValue("1024", None, {"loss_scale": 1024.0}))
_WINDOWS = (
    AxisValue("each"),  # every backward is reduced by itself
    AxisValue("coalesce", None, {"coalesce": True}),
    AxisValue(
        "accumulate",
        None,
        lambda cell: {
            "gradient_accumulation_steps": cell.fact("micro_batches"),
            "average_micro_batches": True,
        },
    ),
)
_MESHES = (
    AxisValue("flat"),
    AxisValue("replicas", None, _in_two_dims),
    AxisValue("replicas-all", None, lambda cell: {**_in_two_dims(cell), "optimizer_over": "all"}),
)
_WIRES = (
    AxisValue("own"),
    AxisValue("predivided", None, {"gradient_predivide_factor": 2.0}),
    _codec("bf16", bf16()),
    _codec("int8", int8()),
)
_CARRIERS = (
    AxisValue("all"),  # each rank is itself
    AxisValue(
        "fewer",
        None,
        lambda cell: {"logical_ranks": cell.logical, "seed": 0} if cell.logical else {},
    ),
)
_STAGES = tuple(AxisValue(str(n), n, {"stage": n}) for n in range(4))
_BUCKETS = (AxisValue("64", None, {"bucket_bytes": 64}), AxisValue("default"))
# "cpu" changes nothing for a model that computes on a CPU
_OFFLOAD = (AxisValue("none"), AxisValue("disk", None, _on_disk))
_REDUCTIONS = (AxisValue("mean"), AxisValue("sum", None, {"reduce_op": "sum"}))
_RULES = (
    AxisValue("given"),
    AxisValue("matrix", functools.partial(torch.optim.Adafactor, lr=2.0**-6)),
)

AXES = (
    CertifyAxis("drivers", "driver", (AxisValue("step"), AxisValue("engine"))),
    CertifyAxis("stages", "stage", _STAGES),
    CertifyAxis("worlds", "W", tuple(map(number_value, (1, 2, 3, 4))), counts=True),
    CertifyAxis("micro_batches", "N", tuple(map(number_value, (1, 2, 3))), counts=True),
    CertifyAxis("precisions", "precision", _PRECISIONS),
    CertifyAxis("clipping", "clip", _CLIPPING),
    CertifyAxis("loss_scales", "scale", _SCALES),
    CertifyAxis("windows", "window", _WINDOWS),
    CertifyAxis("buckets", "bucket", _BUCKETS),
    CertifyAxis("offload", "offload", _OFFLOAD),
    CertifyAxis("meshes", "mesh", _MESHES),
    CertifyAxis("reductions", "reduce", _REDUCTIONS),
    CertifyAxis("wires", "wire", _WIRES),
    CertifyAxis("rules", "rule", _RULES),
    CertifyAxis("carriers", "carriers", _CARRIERS),
    CertifyAxis("ragged", "ragged", (AxisValue("off"), AxisValue("on"))),
)


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "autocast": lambda step, dtype: transforms.autocast(step, dtype=dtype),
    "max_norm": lambda step, norm: transforms.clip(step, max_norm=norm),
    "loss_scale": transforms.scale_loss,
    "coalesce": lambda step, _: transforms.coalesce(step),
    "gradient_accumulation_steps": lambda step, n: transforms.accumulate(step, steps=n),
    "offload": lambda step, x: transforms.offload(step, folder=x.folder, **x.homes),
    "compress": lambda step, x: transforms.compress(step, gradients=x.gradients),
    "master_weights": lambda step, _: step,  # of the optimizer
    "average_micro_batches": lambda step, _: step,  # as `accumulate` does
}
"""What of the options is no keyword of `fzero.shard`: put around a step in this order."""


def restricted(given: Mapping[str, Any]) -> dict[str, tuple[AxisValue, ...]]:
    """Return the values of each axis, restricted on those axes that `given` names."""
    known = [axis.name for axis in AXES]
    for name in given:
        if name not in known:
            raise LayoutError(
                f"certify: there is no axis {name!r}.",
                cause="a mistyped keyword.",
                fix=f"the axes are {', '.join(known)}.",
            )
    return {a.name: a.choose(given[a.name]) if a.name in given else a.values for a in AXES}


# Cells.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """A combination of options: one value on every axis."""

    values: Mapping[str, AxisValue]  # by axis, in the order of AXES
    max_norm: float | None = None  # None where nothing is clipped
    logical: int | None = None  # how many logical ranks the run has; None: ranks are themselves

    @property
    def at(self) -> dict[str, str]:
        """The name of the value on each axis."""
        return {axis: value.name for axis, value in self.values.items()}

    def fact(self, axis: str) -> Any:
        """The `fact` of the value on an axis."""
        return self.values[axis].fact

    @property
    def carries(self) -> bool:
        """Whether fewer ranks carry the logical ranks: several, whose sums no codec encodes."""
        wire = self.fact("wires")
        is_cast = wire is None or isinstance(wire, cast)
        return self.at["carriers"] == "fewer" and is_cast and self.fact("worlds") > 1

    @property
    def weighs(self) -> bool:
        """Whether each micro-batch has a weight: where options of the cell do not refuse one."""
        at = self.at
        able = at["reductions"] == "mean" and at["windows"] != "accumulate"
        able &= getattr(self.fact("wires"), "memory", False) is False
        return able and at["ragged"] == "on"

    def options(self) -> dict[str, Any]:
        """The keywords of `Engine(module, optimizer, ...)`, and `coalesce`."""
        found: dict[str, Any] = {"coalesce": False}
        for value in self.values.values():
            found |= value.options(self) if callable(value.options) else value.options
        return found

    def sharded(self, step: Any, shard: Callable[..., Any]) -> Any:
        """The step in every transform of the cell, `shard` with its options last."""
        options = self.options()
        if not options["coalesce"]:
            del options["coalesce"]
        for name in [name for name in TRANSFORMS if name in options]:
            step = TRANSFORMS[name](step, options.pop(name))
        return shard(step, **options)


def covering(sizes: Sequence[int], strength: int) -> list[tuple[int, ...]]:
    """Return rows of value indices that have each combination of `strength` axes' values.

    Greedy: a row begins with a combination that is missing, and gets on each other axis the value
    that covers most of what is missing. With strength = len(sizes) it is the product.

    Args:
        sizes: how many values each axis has.
        strength: on how many axes together, at least 1.

    Source: Cohen et al., "The AETG System: An Approach to Testing Based on Combinatorial Design",
    IEEE TSE 23(7), 1997, section 3.

    Example:
        >>> rows = covering((2, 2, 2), 2)
        >>> len(rows), len({(a, b) for a, b, _ in rows})
        (4, 4)
    """
    strength, every = min(strength, len(sizes)), range(len(sizes))
    missing: dict[Any, None] = {}  # ((axis, value), ...), ordered: the rows are always the same
    for axes in itertools.combinations(every, strength):
        for values in itertools.product(*(range(sizes[axis]) for axis in axes)):
            missing[tuple(zip(axes, values, strict=True))] = None
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in sorted(set(every) - row.keys(), key=lambda a: -sizes[a]):
            partners = [*itertools.combinations(sorted(row.items()), strength - 1)]
            gains = [
                sum(tuple(sorted([*others, (axis, value)])) in missing for others in partners)
                for value in range(sizes[axis])
            ]
            ties = [value for value, gain in enumerate(gains) if gain == max(gains)]
            row[axis] = ties[len(rows) % len(ties)]  # in turn, so that no value is in most rows
        for combination in itertools.combinations(sorted(row.items()), strength):
            missing.pop(combination, None)
        rows.append(tuple(row[axis] for axis in every))
    return sorted(rows)


# The report.


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDifference:
    """A number that differs from that of the one-process step by more than its bound."""

    update: int  # counted from 1
    rank: int
    parameter: str  # its path; "" for a loss or a norm
    index: tuple[int, ...]  # of the element that differs most
    found: float
    wanted: float
    bound: float  # what was allowed; 0 for bit for bit

    def __str__(self) -> str:
        where = f"{self.parameter}{list(self.index) if self.index else ''}"
        off = abs(self.found - self.wanted)
        allowed = f"allowed: {self.bound:.1e}" if self.bound else "all bits must be equal"
        return (
            f"update {self.update}, rank {self.rank}{', ' if where else ''}{where}: "
            f"{self.found:.15g} and not {self.wanted:.15g}, off by {off:.2e} ({allowed})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result for one quantity of a cell, over all updates, ranks and parameters."""

    what: str  # "loss", "gradient", "norm" or "update"
    compared: bool = False  # False if the driver does not report it
    bound: float = 0.0  # the largest that was allowed, relative to the largest number; 0: bits
    difference: CellDifference | None = None  # the first; None if all agree


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The result of one cell, with its value on each axis.

    It has `checks`, or an `error` (what a rank raised), or it is `unsupported` (why, in a line: the
    factory raised NotImplementedError, or one process cannot compute it). With `checks`, the
    `error` says that ranks have other bits of one parameter.
    """

    at: dict[str, str]  # axis -> value
    checks: tuple[Check, ...] = ()
    error: str = ""
    unsupported: str = ""

    @property
    def passed(self) -> bool:
        """Whether all agrees; an unsupported cell neither passes nor fails."""
        return not self.failed and not self.unsupported

    @property
    def failed(self) -> bool:
        """Whether something differs or was raised."""
        return bool(self.error) or any(check.difference for check in self.checks)

    @property
    def exact(self) -> bool:
        """Whether gradients and parameters were compared bit for bit."""
        bounds = [check.bound for check in self.checks if check.what in ("gradient", "update")]
        return bool(bounds) and not any(bounds)

    def agrees(self, what: str) -> bool | None:
        """Whether "loss", "gradient", "norm" or "update" agrees; None if it was not compared."""
        found = {check.what: check for check in self.checks if check.compared}
        return found[what].difference is None if what in found else None

    def verdict(self, what: str) -> str:
        """Return the check in a few characters: "=", its bound, "DIFFERS" or "-"."""
        agrees = self.agrees(what)
        if agrees is False:
            return "DIFFERS"
        if self.error or agrees is None:
            return "ERROR" if self.error else "-"
        bound = next(check.bound for check in self.checks if check.what == what)
        return f"{bound:.0e}" if bound else "="

    def describe(self) -> str:
        """Return the values on all axes, and a line for each difference or error."""
        lines = [", ".join(f"{name} {value}" for name, value in self.at.items())]
        lines += [f"  {c.what}: {c.difference}" for c in self.checks if c.difference]
        lines += ["  " + line for line in (self.error or self.unsupported).splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(ShownAsText):
    """The matrix. `print(report)` is its table; it is true if cells passed and none failed."""

    name: str  # of the model
    coverage: str  # which cells of the product there are
    cells: tuple[CellResult, ...]

    def __bool__(self) -> bool:
        return not self.failures and any(cell.passed for cell in self.cells)

    @property
    def failures(self) -> tuple[CellResult, ...]:
        """The cells in which something differs or was raised."""
        return tuple(cell for cell in self.cells if cell.failed)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        more = [{"passed": cell.passed, "exact": cell.exact} for cell in self.cells]
        cells = [asdict(cell) | also for cell, also in zip(self.cells, more, strict=True)]
        return {"name": self.name, "coverage": self.coverage, "cells": cells, "passed": bool(self)}

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The header and the cells as text: axes that vary, then the checks."""
        varying = [a for a in AXES if len({cell.at[a.name] for cell in self.cells}) > 1]
        rows = [
            [cell.at[axis.name] for axis in varying]
            + ["not supported" if cell.unsupported else cell.verdict(what) for what in CHECKS]
            for cell in self.cells
        ]
        return [axis.head for axis in varying] + [*CHECKS], rows

    def summary(self) -> str:
        """How many cells there are, and how they ended."""
        ran = [cell for cell in self.cells if not cell.unsupported]
        good = [cell for cell in ran if cell.passed]
        text = f"{len(good)} of {len(ran)} cells give the step of one process"
        text += f", {sum(cell.exact for cell in good)} of them bit for bit."
        skipped = len(self.cells) - len(ran)
        return text + (f" {skipped} are not supported." if skipped else "")

    def table(self) -> str:
        """Return it as text in columns, with what differs below."""
        fixed = [
            f"{axis.head} {self.cells[0].at[axis.name]}"
            for axis in AXES
            if len({cell.at[axis.name] for cell in self.cells}) == 1
        ]
        header, rows = self.rows()
        lines = [f"{self.name}: {self.coverage}"]
        lines += [f"In all cells: {', '.join(fixed)}."] if fixed else []
        lines += ["", *columns([header, *rows]), "", _LEGEND, ""]
        lines += [cell.describe() for cell in self.failures]
        reasons = Counter(cell.unsupported for cell in self.cells if cell.unsupported)
        lines += [f"not supported, {count} cells: {why}" for why, count in reasons.items()]
        return "\n".join([*lines, self.summary()])


_LEGEND = (
    "=: equal bit for bit, as all sums are exact. A number: equal within that times the largest\n"
    "number of the model, what re-ordered sums may change in this precision. -: not told."
)
