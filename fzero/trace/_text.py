"""A trace as text, in the manner of a jaxpr: short, with collectives that stand out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from fzero.trace._record import Op, Value

_PHASES = ("forward", "backward", "update")
_MANY = 4
"""From how many pointwise ops in a row they are one line: a compiler makes one kernel of them."""


def text(title: str, inputs: Sequence[Value], ops: Sequence[Op], outputs: Sequence[Value]) -> str:
    """Return the lines. Views have none: who reads one is shown to read what it is a view of."""
    lines = [title, "inputs"]
    lines += [f"    {value.name}:{value} = {value.path}" for value in inputs]
    seen = _bases(ops)
    needed = _needed(ops, seen) | {seen.get(value.name, value.name) for value in outputs}
    for phase in _PHASES:
        some = [op for op in ops if op.phase == phase and op.kind != "view"]
        lines += [phase, *_lines(some, seen, needed)] if some else []
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


def _needed(ops: Sequence[Op], seen: dict[str, str]) -> set[str]:
    """The values that are read in another line than they are made in."""
    shown = [op for op in ops if op.kind != "view"]
    found: set[str] = set()
    for run in runs(shown):
        made = {value.name for op in run for value in op.gives}
        found |= {seen.get(name, name) for op in run for name in op.reads} - made
    return found


def _lines(ops: Sequence[Op], seen: dict[str, str], needed: set[str]) -> Iterator[str]:
    for run in runs(ops):
        yield _line(run[0], seen) if len(run) == 1 else _fused(run, seen, needed)


def _line(op: Op, seen: dict[str, str]) -> str:
    gives = " ".join(f"{value.name}:{value}" for value in op.gives)
    reads = " ".join(_named(op.reads, seen))
    if op.is_collective:
        return f"  * {gives} = {op.name} {reads}   <{op.detail}> {op.wire_bytes:,} bytes sent"
    return f"    {gives} = {op.name} {reads}".rstrip()


def _fused(some: Sequence[Op], seen: dict[str, str], needed: set[str]) -> str:
    """Some pointwise ops as one: what they read from outside, and give to others."""
    made = {value.name: value for op in some for value in op.gives}
    gives = [value for name, value in made.items() if name in needed]
    shown = " ".join(f"{value.name}:{value}" for value in gives)
    reads = [
        name for name in _named((n for op in some for n in op.reads), seen) if name not in made
    ]
    return f"    {shown} = {len(some)} pointwise ops {' '.join(reads)}"


def _named(names: Iterable[str], seen: dict[str, str]) -> list[str]:
    return list(dict.fromkeys(seen.get(name, name) for name in names))


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
