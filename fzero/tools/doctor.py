"""`python -m fzero doctor` and `info`: is this installation right, and what is it?

doctor  are collectives and their gradients right here? Each of them, under each transform, in each
        dtype, on 2 ranks of gloo which are started for it. A cell of the table is right: equal bit
        for bit to a formula of one process, on whole numbers that are exact in every dtype; wrong;
        zero: silently, where it must not be; refused: it raised; crashed or hung
info    versions, backends, devices and environment variables

The formula is differentiated by the same transform, on all ranks' inputs stacked in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import logging
import multiprocessing as mp
import os
import platform
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import collectives
from fzero.context.device import accelerator
from fzero.errors import AxisError
from fzero.tools.columns import columns

__all__ = ["CollectiveCell", "CollectiveSubject", "DoctorReport", "examine"]
SUMMARY = "examine collectives x transforms x dtypes on 2 ranks of this installation"
DESCRIPTION = (
    "Starts 2 ranks on gloo and runs every collective under every transform in every dtype, on "
    "whole numbers, with which all results are exact, and compares them with a formula of one "
    "process. Finds sums that are no sums, and gradients that are silently zero."
)
EPILOG = (
    "right: equal bit for bit. wrong, zero: not so, without an error. refused: it raises. The exit "
    "code is 1 if a cell is not right, 2 if no ranks can be started."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(given: dict[str, Any]) -> int:
    """Examine this installation, print the report; return 0 if it is sound, else 1."""
    report = examine()
    print(json.dumps(report.to_dict(), indent=1) if given.get("json") else report.text())
    return 0 if report else 1


# What is examined: collectives, transforms, dtypes.

WORLD = 2
FLOATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
DTYPES = FLOATS | {"int64": torch.int64, "int32": torch.int32, "int8": torch.int8}
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSubject:
    """A collective: `run` on rank r must return row r of a formula of all ranks' tensors, stacked.

    `run` is found by name in the process of each rank, so it is a function of a module.

    kind: "gather", [W, l] -> [W, W l]; "scatter", [W, W l] -> [W, l]; "reduce", [W, n] -> [W, n];
    "exchange" of chunks and "shift" to the next rank, which put nothing together.
    op: how "scatter" and "reduce" put ranks together: "sum", or "avg".

    Example:
        >>> import fzero
        >>> tail = CollectiveSubject(name="tail", run=fzero.psum_scatter, kind="scatter")
        >>> tail.formula(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
        tensor([[4.],
                [2.]])
    """

    name: str
    run: Map
    kind: str
    op: str = "sum"

    def formula(self, xs: Tensor) -> Tensor:
        """Return what all ranks must get of `xs`, the inputs of all."""
        if self.kind == "gather":
            return torch.stack([xs.reshape(-1, *xs.shape[2:])] * len(xs))
        if self.kind == "exchange":
            return xs.unflatten(1, (len(xs), -1)).transpose(0, 1).flatten(1, 2)
        if self.kind == "shift":
            return xs.roll(1, 0)
        whole = xs.sum(0) if self.op == "sum" else xs.mean(0)
        if self.kind == "scatter":
            return whole.reshape(len(xs), -1, *xs.shape[2:])
        return torch.stack([whole] * len(xs))


def _shift(x: Tensor) -> Tensor:
    return collectives.ppermute(x, [(rank, (rank + 1) % WORLD) for rank in range(WORLD)])


SUBJECTS = (
    CollectiveSubject(name="all_gather", run=collectives.all_gather, kind="gather"),
    CollectiveSubject(
        name="reduce_scatter (psum_scatter)", run=collectives.reduce_scatter, kind="scatter"
    ),
    CollectiveSubject(name="all_reduce (psum)", run=collectives.all_reduce, kind="reduce"),
    CollectiveSubject(name="pmean", run=collectives.pmean, kind="reduce", op="avg"),
    CollectiveSubject(name="all_to_all", run=collectives.all_to_all, kind="exchange"),
    CollectiveSubject(name="ppermute", run=_shift, kind="shift"),
)


class _Inputs(NamedTuple):
    """`x`, what the collective is given; `v`, a direction like it; `w`, weights like its result.

    Either of one rank, or of all ranks stacked, [W, ..].
    """

    x: Tensor
    v: Tensor
    w: Tensor


def _inputs(formula: Map) -> _Inputs:
    """Return whole numbers for all ranks, stacked, in float64: others on each rank, none is zero.

    They are so small that every number on the way, and so every result, is exact in 16 bits.
    """
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int, of: list[float]) -> Tensor:
        numbers = torch.tensor(of, dtype=torch.float64)
        return numbers[torch.randint(len(of), shape, generator=source)]

    x = draw(WORLD, 4 * WORLD, of=[-1, 1, 2, 3])
    v = draw(WORLD, 4 * WORLD, of=[-1, 1])
    return _Inputs(x, v, draw(*formula(x).shape, of=[1, 2]))


def _loss(run: Map, w: Tensor) -> Map:
    """L(x) = sum w A(x)^3: so that its gradient depends on x, and so does that of the gradient."""
    return lambda x: (w * run(x) ** 3).sum()


def _backward(run: Map, at: _Inputs) -> Tensor:
    """dL/dx, by autograd without torch.func."""
    x = at.x.clone().requires_grad_()
    return torch.autograd.grad(_loss(run, at.w)(x), x)[0]


def _grad_of_grad(run: Map, at: _Inputs) -> Tensor:
    """d(dL/dx . v)/dx."""
    gradient = torch.func.grad(_loss(run, at.w))
    return torch.func.grad(lambda x: (gradient(x) * at.v).sum())(at.x)


def _vmap_of_grad(run: Map, at: _Inputs) -> Tensor:
    """dL/dx at z x for z = 1, -1, 2: [n, 3]."""
    gradient = torch.func.grad(_loss(run, at.w))
    zs = torch.tensor([1, -1, 2]).to(at.x.dtype)
    return torch.func.vmap(lambda z: gradient(z * at.x), out_dims=-1)(zs)


# The same code runs on the formula and on each rank.
TRANSFORMS: dict[str, Callable[[Map, _Inputs], Tensor]] = {
    "value": lambda run, at: run(at.x),
    "backward": _backward,
    "grad": lambda run, at: torch.func.grad(_loss(run, at.w))(at.x),
    "grad(grad)": _grad_of_grad,
    "jvp": lambda run, at: torch.func.jvp(lambda x: at.w * run(x) ** 2, (at.x,), (at.v,))[1],
    "vmap(grad)": _vmap_of_grad,
    # By a graph that was traced with other numbers.
    "make_fx(grad)": lambda run, at: make_fx(torch.func.grad(_loss(run, at.w)))(
        torch.ones_like(at.x)
    )(at.x),
}

VERDICTS = ("right", "refused", "zero", "wrong", "crashed", "hung")
"""From good to bad: of several ranks the worst one counts."""
_Check = tuple[CollectiveSubject, str, str]  # the transform around it, the dtype of its input
_Found = tuple[str, str]  # one of `VERDICTS`, and unless it is "right" a description


@dataclass(frozen=True, slots=True)
class CollectiveCell:
    """One cell of the table: what was examined, the verdict, and what was seen of a fault."""

    collective: str
    transform: str
    dtype: str
    verdict: str
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The results; true if all of them are right. `text()` has the table."""

    cells: tuple[CollectiveCell, ...]

    def __bool__(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> tuple[CollectiveCell, ...]:
        """The cells that are not right."""
        return tuple(cell for cell in self.cells if cell.verdict != "right")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        head = {"torch": torch.__version__, "backend": "gloo", "ranks": WORLD}
        return {**head, "sound": bool(self), "cells": [asdict(cell) for cell in self.cells]}

    def text(self) -> str:
        """Return the table, the faults, and how many cells have which verdict.

        The table is at most 80 columns wide: a collective, below it its transforms, dtypes beside.
        """
        by_row: dict[tuple[str, str], dict[str, str]] = {}
        faults: dict[tuple[str, str, str, str], list[str]] = {}  # dtypes with one finding
        for cell in self.cells:
            by_row.setdefault((cell.collective, cell.transform), {})[cell.dtype] = cell.verdict
            if cell.verdict != "right":
                of = (cell.collective, cell.transform, cell.verdict, cell.seen)
                faults.setdefault(of, []).append(cell.dtype)
        heads = list(dict.fromkeys(cell.dtype for cell in self.cells))
        rows = [
            [f"  {transform}", *(row.get(head, "-") for head in heads)]
            for (_, transform), row in by_row.items()
        ]
        header, *lines = columns([["", *heads], *rows])
        table, before = [header], ""
        for (name, _), line in zip(by_row, lines, strict=True):
            table += [line] if name == before else [name, line]
            before = name
        counts = Counter(cell.verdict for cell in self.cells)
        told = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
        return "\n".join(
            [
                f"torch {torch.__version__}, gloo, {WORLD} ranks, CPU tensors",
                "",
                *table,
                "",
                *(
                    f"FAULT: {name}, {transform}, {' '.join(dtypes)}: {verdict}: {seen}"
                    for (name, transform, verdict, seen), dtypes in faults.items()
                ),
                f"fzero's collectives: {told}.",
                f"This installation {'is sound' if self else 'has FAULTS'}.",
            ]
        )


def examine(
    subjects: Sequence[CollectiveSubject] = SUBJECTS,
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    timeout_s: float = 60.0,
) -> DoctorReport:
    """Run every collective under every transform in every dtype, on ranks that are started for it.

    Args:
        subjects: the collectives, with their formulas. Without them, those of fzero.
        dtypes: of their inputs. Integers have no derivatives, and no mean.
        timeout_s: how long a check may take before it counts as hung.

    Returns:
        The report.

    Raises:
        AxisError: where ranks cannot start.
    """
    checks = [
        (subject, transform, dtype)
        for subject in subjects
        for transform in TRANSFORMS
        for dtype in dtypes
        if dtype in FLOATS or (transform == "value" and subject.op != "avg")
    ]
    found: list[_Found] = []
    while len(found) < len(checks):
        found += _on_new_ranks(checks[len(found) :], timeout_s)
    cells = (
        CollectiveCell(subject.name, transform, dtype, *one)
        for (subject, transform, dtype), one in zip(checks, found, strict=True)
    )
    return DoctorReport(cells=tuple(cells))


def _on_new_ranks(checks: Sequence[_Check], timeout_s: float) -> Iterator[_Found]:
    """Yield the finding of each check, in order, up to the first at which a rank crashes or hangs.

    The ranks are processes of this machine, and are killed at the end.
    """
    context = mp.get_context("spawn")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fzero-doctor-"))
        ranks = []
        for rank in range(WORLD):
            ours, theirs = context.Pipe(duplex=False)
            args = (rank, f"{folder}/store", timeout_s, checks, theirs)
            process = context.Process(target=_rank, args=args, daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            theirs.close()  # so that the pipe closes with the process
            ranks.append((process, ours))

        def answer(seconds: float) -> _Found:
            """Return the worst of the next findings of all ranks; how one ended that has none."""
            found = []
            for rank, (process, pipe) in enumerate(ranks):
                if not pipe.poll(seconds):
                    return "hung", f"rank {rank} gives no answer in {seconds:g} s"
                try:
                    found.append(pipe.recv())
                except (EOFError, OSError):
                    process.join(10)
                    return "crashed", f"rank {rank} ended with exit code {process.exitcode}"
            return max(found, key=lambda one: VERDICTS.index(one[0]))

        verdict, seen = answer(600.0)  # to import torch, and to find each other
        if verdict != "right":
            raise AxisError(
                f"{WORLD} ranks on gloo cannot start here: {seen}.",
                cause="a host name that leads to no address of this machine, or a sandbox "
                "without sockets.",
                fix="export GLOO_SOCKET_IFNAME=lo, and run it again.",
            )
        for _ in checks:
            verdict, seen = answer(timeout_s)
            yield verdict, seen
            if verdict in ("crashed", "hung"):
                return


def _rank(
    rank: int, store: str, timeout_s: float, checks: Sequence[_Check], pipe: Connection
) -> None:
    """Join the group, say so, and send the finding of each check."""
    warnings.simplefilter("ignore")  # what is deprecated in torch is not what is looked for
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        files = dist.FileStore(store, WORLD)
        wait = datetime.timedelta(seconds=2 * timeout_s)  # who asks gives up before
        dist.init_process_group("gloo", store=files, rank=rank, world_size=WORLD, timeout=wait)
    except Exception as error:
        pipe.send(("crashed", f"rank {rank}: {error}"))
        return
    pipe.send(("right", ""))
    for check in checks:
        pipe.send(_finding(*check, rank))
    dist.destroy_process_group()


def _finding(subject: CollectiveSubject, transform: str, dtype: str, rank: int) -> _Found:
    """Compare the result of this rank with the formula, bit for bit: all numbers are exact."""
    stacked, kind = _inputs(subject.formula), DTYPES[dtype]
    want = TRANSFORMS[transform](subject.formula, stacked)[rank].detach().to(kind)
    try:
        mine = _Inputs(*(t[rank].to(kind) for t in stacked))
        got = TRANSFORMS[transform](subject.run, mine).detach()
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return "refused", f"{type(error).__name__}: {first}"
    if got.dtype == kind and torch.equal(got, want):
        return "right", ""

    def some(x: Tensor) -> str:
        numbers = [f"{number + 0:g}" for number in x.flatten()[:4].tolist()]  # no -0
        return f"[{', '.join(numbers)}{', ...' if x.numel() > 4 else ''}]"

    if got.shape == want.shape and not got.any():
        return "zero", f"all zeros, and it must be {some(want)}"
    other = "" if got.dtype == kind else f"; its dtype is {str(got.dtype).removeprefix('torch.')}"
    return "wrong", f"rank {rank} gets {some(got)}, and it must be {some(want)}{other}"


# `python -m fzero info`.

REQUIRED = ("optree", "einops", "numpy", "typing_extensions")
BESIDE = ("matplotlib", "transformers", "accelerate", "deepspeed", "lightning", "triton")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# What is set of these changes how ranks find each other, wait, or compute.
VARIABLES = ("FZERO_", "NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES")


def environment() -> dict[str, Any]:
    """Return versions, backends, devices and variables as plain JSON values; null: it is absent.

    Example:
        >>> environment()["torch"]["version"] == torch.__version__
        True
    """

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    there = [name for name in known if dist.is_backend_available(name)]
    kind = accelerator()
    count = 0 if kind is None else torch.accelerator.device_count()
    properties = getattr(kind and torch.get_device_module(kind), "get_device_properties", None)
    devices = [properties(index) if properties else None for index in range(count)]
    launched = dist.is_torchelastic_launched()
    return {
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "packages": {name: version(name) for name in ("fzero", *REQUIRED)},
        "beside": {name: found for name in BESIDE if (found := version(name))},
        "backends": there,
        "cpu": {
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "gpus": [
            {
                "name": getattr(device, "name", f"{kind}:{index}"),
                "capability": f"{device.major}.{device.minor}" if kind == "cuda" else None,
                "memory_bytes": getattr(device, "total_memory", None),
            }
            for index, device in enumerate(devices)
        ],
        "nccl": ".".join(map(str, nccl.version())) if "nccl" in there and kind == "cuda" else None,
        "torchrun": {name: os.environ.get(name) for name in LAUNCHER} if launched else None,
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
    }


def environment_text(report: dict[str, Any]) -> str:
    """Return `report` as one entry a fact, in a block of code that an issue takes as it is.

    Example:
        >>> found = {"cpu": {"cores": 2, "memory_bytes": 2**34}, "gpus": [], "nccl": None}
        >>> print(environment_text(found))
        ```text
        cpu        cores 2, memory 16.0 GiB
        gpus       none
        nccl       none
        ```
    """

    def words(value: Any) -> str:
        if isinstance(value, dict):
            facts = (
                f"memory {one / 2**30:.1f} GiB" if key == "memory_bytes" else f"{key} {words(one)}"
                for key, one in value.items()
                if one is not None
            )
            return ", ".join(facts) or "none"
        if isinstance(value, list):
            return "; ".join(map(words, value)) or "none"
        return "none" if value is None else str(value)

    lines = (
        textwrap.fill(f"{name:<10} {words(value)}", 80, subsequent_indent=" " * 11)
        for name, value in report.items()
    )
    return "\n".join(["```text", *lines, "```"])


def show_environment(*, as_json: bool) -> None:
    """Print what `environment` returns."""
    report = environment()
    print(json.dumps(report, indent=2) if as_json else environment_text(report))
