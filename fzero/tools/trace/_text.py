"""Print a trace like a jaxpr, with a mark at collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile

from fzero.tools.trace._record import Kernel, Op, Value

_PHASES = ("forward", "backward", "update")
_COLUMN = 68  # of the module names
_MANY = 4
"""From how many pointwise ops in a row they are one line: a compiler makes one kernel of them."""


def text(title: str, inputs: Sequence[Value], ops: Sequence[Op], outputs: Sequence[Value]) -> str:
    """Return a line for each kernel and collective, with its module behind "#".

    Parameters are shown by their paths, whatever buffer they are in, and other views as parts of a
    value, "x[1]". Omitted are views, constants filled with one number, empty buffers, and inputs
    that the step returns unchanged.
    """
    names, hidden = _shown(inputs, ops)
    bases, every = _bases(ops), kernels(inputs, ops, outputs)
    lines = [title, "inputs", *_listed([value for value in inputs if value.nbytes])]
    for phase in _PHASES:
        some = [one for one in every if one.ops[0].phase == phase and not hidden(one)]
        lines += [phase, *(_line(one, names, bases) for one in some)] if some else []
    same = {(value.name, value.path) for value in inputs}
    changed = [value for value in outputs if (value.name, value.path) not in same]
    lines += ["outputs"]
    for path, some in groupby(changed, key=lambda value: value.path.rsplit("[", 1)[0]):
        values = [names.get(value.name, value.name) for value in some]
        lines.append(f"    {path} = {_few(values)}")
    return "\n".join([*lines, _counts(ops)])


def _listed(inputs: Sequence[Value]) -> list[str]:
    """Return a line for each input, and one for all buffers of a kind except parameters."""
    lines = []
    for path, group in groupby(inputs, key=lambda value: value.path.rsplit("[", 1)[0]):
        some = list(group)
        about = [value.holds or (value.parameter,) for value in some]
        if len(some) == 1 or any(map(any, about)):
            for value, paths in zip(some, about, strict=True):
                names = f"   <{_some(paths)}>" if any(paths) else ""
                lines.append(f"    {value.name}:{value} = {value.path}{names}")
        else:
            lines.append(f"    {_few([f'{value.name}:{value}' for value in some])} = {path}")
    return lines


def _shown(
    inputs: Sequence[Value], ops: Sequence[Op]
) -> tuple[dict[str, str], Callable[[Kernel], bool]]:
    """Return the texts of values that no line computes, and the kernels that have no line."""
    shown = {value.name: value.parameter for value in inputs if value.parameter}
    written = {name for op in ops if op.name.endswith("_") for name in op.reads[:1]}
    hidden: set[int] = set()
    for op in ops:
        fills = _FILLS.get(op.name)
        if fills and len(op.gives) == 1 and op.gives[0].name not in written:
            shown[op.gives[0].name] = fills
            hidden.add(id(op))
        for i, value in enumerate(op.gives):
            if value.parameter:
                shown[value.name] = value.parameter
            elif op.kind == "view" and op.reads:
                part = f"[{i}]" if len(op.gives) > 1 else op.detail
                shown[value.name] = shown.get(op.reads[0], op.reads[0]) + part
    return shown, lambda kernel: all(id(op) in hidden for op in kernel.ops)


_FILLS = {
    f"{prefix}{name}{suffix}": name
    for name in ("ones", "zeros")
    for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
}


def _few(words: Sequence[str], most: int = 6) -> str:
    if len(words) <= most:
        return " ".join(words)
    return " ".join([*words[: most // 2], "...", words[-1], f"({len(words)} values)"])


def _some(paths: Sequence[str], most: int = 4) -> str:
    rest = f" +{len(paths) - 2}" if len(paths) > most else ""
    return ", ".join(paths[: 2 if rest else most]) + rest


def _bases(ops: Sequence[Op]) -> dict[str, str]:
    """Return {name of a view: name of the viewed value}."""
    base: dict[str, str] = {}
    for op in ops:
        if op.kind == "view" and op.reads:
            first = base.get(op.reads[0], op.reads[0])
            base.update((value.name, first) for value in op.gives)
    return base


def runs(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """Return the ops of each line: consecutive pointwise ops together, others alone."""
    for pointwise, some in groupby(ops, key=lambda op: op.kind == "pointwise"):
        run = list(some)
        if pointwise and len(run) >= _MANY:
            yield run
        else:
            yield from ([op] for op in run)


def kernels(
    inputs: Sequence[Value], ops: Sequence[Op], outputs: Sequence[Value]
) -> tuple[Kernel, ...]:
    """Return the kernels of a program in its order, without views."""
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


def _line(kernel: Kernel, names: Mapping[str, str], bases: Mapping[str, str]) -> str:
    op, outside = kernel.ops[0], set(kernel.reads)
    read = (name for one in kernel.ops for name in one.reads)
    words = (names.get(name, name) for name in read if bases.get(name, name) in outside)
    reads = _few(list(dict.fromkeys(words)))
    gives = _few([f"{value.name}:{value}" for value in kernel.gives])
    if op.is_collective:
        axis, colon, paths = op.detail.partition(": ")
        about = f"{axis}{colon}{_some(paths.split(', '))}"
        return f"  * {gives} = {op.name} {reads}   <{about}> {op.wire_bytes:,} bytes sent"
    line = f"    {gives} = {kernel.name} {reads}".rstrip()
    module = _common([one.detail for one in kernel.ops])
    return f"{line:<{_COLUMN}}  # {module}" if module else line


def _common(modules: Sequence[str]) -> str:
    """Return the innermost module that contains all of these modules."""
    parts = [module.split(".") for module in dict.fromkeys(modules)]
    same = takewhile(lambda some: len(set(some)) == 1, zip(*parts, strict=False))
    return ".".join(some[0] for some in same)


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
