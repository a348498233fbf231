"""A trace as text, in the manner of a jaxpr: short, with collectives that stand out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from fzero.trace._record import Kernel, Op, Value

_PHASES = ("forward", "backward", "update")
_MANY = 4
"""From how many pointwise ops in a row they are one line: a compiler makes one kernel of them."""


def text(title: str, inputs: Sequence[Value], ops: Sequence[Op], outputs: Sequence[Value]) -> str:
    """Return the lines. Views have none: who reads one is shown to read what it is a view of."""
    lines = [title, "inputs"]
    lines += [f"    {value.name}:{value} = {value.path}" for value in inputs]
    seen, every = _bases(ops), kernels(inputs, ops, outputs)
    for phase in _PHASES:
        some = [kernel for kernel in every if kernel.ops[0].phase == phase]
        lines += [phase, *map(_line, some)] if some else []
    lines += ["outputs"]
    lines += [f"    {value.path} = {seen.get(value.name, value.name)}" for value in outputs]
    return "\n".join([*lines, _counts(ops)])


def _bases(ops: Sequence[Op]) -> dict[str, str]:
    """By the name of a view, the value that it is a view of."""
    base: dict[str, str] = {}
    for op in ops:
        if op.kind == "view" and op.reads:
            first = base.get(op.reads[0], op.reads[0])
            base.update((value.name, first) for value in op.gives)
    return base


def runs(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """The ops of each line: a run of many pointwise ones, or one op."""
    for pointwise, some in groupby(ops, key=lambda op: op.kind == "pointwise"):
        run = list(some)
        if pointwise and len(run) >= _MANY:
            yield run
        else:
            yield from ([op] for op in run)


def kernels(
    inputs: Sequence[Value], ops: Sequence[Op], outputs: Sequence[Value]
) -> tuple[Kernel, ...]:
    """Return what runs at once, in the order of the program; no views."""
    seen = _bases(ops)
    shown = [op for op in ops if op.kind != "view"]
    phases = [list(some) for _, some in groupby(shown, key=lambda op: op.phase)]
    found = [tuple(run) for some in phases for run in runs(some)]
    needed = {seen.get(value.name, value.name) for value in outputs}
    for run in found:
        made = {value.name for op in run for value in op.gives}
        needed |= {seen.get(name, name) for op in run for name in op.reads} - made
    size = {value.name: value.nbytes for value in inputs}
    size.update((value.name, value.nbytes) for op in ops for value in op.gives)
    return tuple(_kernel(run, seen, needed, size) for run in found)


def _kernel(
    run: tuple[Op, ...], seen: dict[str, str], needed: set[str], size: dict[str, int]
) -> Kernel:
    made = {value.name: value for op in run for value in op.gives}
    gives = [value for name, value in made.items() if len(run) == 1 or name in needed]
    reads = dict.fromkeys(name for op in run for name in op.reads)
    reads = {name: seen.get(name, name) for name in reads if seen.get(name, name) not in made}
    # An expanded view has more elements than there are in memory. A constant has no size here.
    moved = sum(min(size.get(name, 0), size.get(whole, 0)) for name, whole in reads.items())
    return Kernel(
        ops=run,
        reads=tuple(dict.fromkeys(reads.values())),
        gives=tuple(gives),
        nbytes=moved + sum(value.nbytes for value in gives),
    )


def _line(kernel: Kernel) -> str:
    op, reads = kernel.ops[0], " ".join(kernel.reads)
    gives = " ".join(f"{value.name}:{value}" for value in kernel.gives)
    if op.is_collective:
        return f"  * {gives} = {op.name} {reads}   <{op.detail}> {op.wire_bytes:,} bytes sent"
    return f"    {gives} = {kernel.name} {reads}".rstrip()


def _counts(ops: Sequence[Op]) -> str:
    sent = sum(op.wire_bytes for op in ops)
    collectives = sum(op.is_collective for op in ops)
    shown = sum(op.kind != "view" for op in ops)
    flops = sum(op.flops for op in ops)
    peak = max((op.live_bytes for op in ops), default=0)
    return (
        f"{shown} ops, {flops:,} FLOPs; {collectives} collectives, {sent:,} bytes sent; "
        f"{peak:,} bytes alive at most"
    )
