"""Print a trace like a jaxpr, with a mark at collectives."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby

from fzero.tools.trace._calls import CalledOp, Constant, Operand
from fzero.tools.trace._record import Op, Value

_PHASES = ("forward", "backward", "update")
_COLUMN = 68  # of the module names
_WIDTH = 100
MOST = 6
"""Of more values a line has the first and the last ones."""


def text(
    title: str,
    inputs: Sequence[Value],
    ops: Sequence[Op],
    outputs: Sequence[Value],
    calls: Sequence[CalledOp],
) -> str:
    """Return a line for each op and collective, with its module behind "#".

    Parameters are shown by their paths, whatever buffer they are in, and other views as parts of a
    value, "x[1]"; numbers stand among the values, as the op has them. Omitted are views, constants
    filled with one number, empty buffers, and inputs that the step returns unchanged. What is
    longer than 100 columns goes on in the next line.
    """
    constant, listed = _constants(ops, calls)
    names, hidden = _shown(inputs, ops, constant)
    lines = [title, "inputs", *_listed([value for value in inputs if value.nbytes])]
    lines += ["constants", *listed] if listed else []
    called = dict(zip(map(id, ops), calls, strict=False))
    for phase in _PHASES:
        some = [
            op for op in ops if op.phase == phase and op.kind != "view" and id(op) not in hidden
        ]
        every = [_line(op, called.get(id(op)), names) for op in some]
        lines += [phase, *every] if some else []
    same = {(value.name, value.path) for value in inputs}
    changed = [value for value in outputs if (value.name, value.path) not in same]
    lines += ["outputs"]
    for path, some in groupby(changed, key=lambda value: value.path.rsplit("[", 1)[0]):
        values = [names.get(value.name, value.name) for value in some]
        lines.append(f"    {path} = {few(values)}")
    return "\n".join(map(fitted, [*lines, _counts(ops)]))


def fitted(line: str) -> str:
    """Return a line, of 100 columns at most: what is behind them goes on in the next one.

    Example:
        >>> fitted("    a = " + "b " * 99).splitlines()[1][:16]
        '            b b '
    """
    if len(line) <= _WIDTH:
        return line
    mark = line[0] if line[0] in "+- " else ""  # of a difference; of a trace a space
    rest = line.removeprefix(mark)
    begin = rest[: len(rest) - len(rest.lstrip())]
    parts = textwrap.wrap(
        " ".join(rest.split()),
        _WIDTH,
        initial_indent=mark + begin,
        subsequent_indent=mark + " " * (12 - len(mark)),
        break_on_hyphens=False,
    )
    return "\n".join(parts)


def _constants(ops: Sequence[Op], calls: Sequence[CalledOp]) -> tuple[dict[str, str], list[str]]:
    """Return one name for each constant tensor, {its names: that one}, and a line for each."""
    bases = _bases(ops)
    first: dict[str, str] = {}
    names: dict[str, str] = {}
    for x in (x for call in calls for x in call.arguments if isinstance(x, Operand)):
        kind, digest = x.origin
        if kind == "constant":
            name = bases.get(x.name, x.name)
            names[name] = first.setdefault(digest, name)
    return names, [f"    {name}:{key.replace(' ', ' = ')}" for key, name in first.items()]


def _listed(inputs: Sequence[Value]) -> list[str]:
    """Return a line for each input, and one for all buffers of a kind except parameters."""
    lines = []
    for path, group in groupby(inputs, key=lambda value: value.path.rsplit("[", 1)[0]):
        some = list(group)
        about = [value.holds or (value.parameter,) for value in some]
        if len(some) == 1 or any(map(any, about)):
            for value, paths in zip(some, about, strict=True):
                names = f"   <{some_paths(paths)}>" if any(paths) else ""
                lines.append(f"    {value.name}:{value} = {value.path}{names}")
        else:
            lines.append(f"    {few([f'{value.name}:{value}' for value in some])} = {path}")
    return lines


def _shown(
    inputs: Sequence[Value], ops: Sequence[Op], constants: Mapping[str, str]
) -> tuple[dict[str, str], set[int]]:
    """Return the texts of values that no line computes, and the ids of ops that have no line."""
    shown = {value.name: value.parameter for value in inputs if value.parameter}
    shown |= constants
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
    return shown, hidden


_FILLS = {
    f"{prefix}{name}{suffix}": name
    for name in ("ones", "zeros")
    for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
}


def few(words: Sequence[str], most: int = MOST) -> str:
    """Return some words; of many, the first and the last ones and how many there are."""
    if len(words) <= most:
        return " ".join(words)
    return " ".join([*words[: most // 2], "...", words[-1], f"({len(words)} values)"])


def some_paths(paths: Sequence[str], most: int = 4) -> str:
    """Return the paths of parameters; of many, the first two and how many more there are."""
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


def _line(op: Op, call: CalledOp | None, names: Mapping[str, str]) -> str:
    gives = few([f"{value.name}:{value}" for value in op.gives])
    if op.is_collective:
        reads = few(list(dict.fromkeys(names.get(name, name) for name in op.reads)))
        axis, colon, paths = op.detail.partition(": ")
        about = f"{axis}{colon}{some_paths(paths.split(', '))}"
        return f"  * {gives} = {op.name} {reads}   <{about}> {op.wire_bytes:,} bytes sent"
    words = _words(op, call, names)
    line = f"    {gives} = {' '.join([op.name, *words])}"
    return f"{line:<{_COLUMN}}  # {op.detail}" if op.detail else line


def _words(op: Op, call: CalledOp | None, names: Mapping[str, str]) -> list[str]:
    """Return the values and numbers of an op in order, of many values a few; keywords last."""
    arguments = call.arguments if call else ()
    texts = [x.text for x in arguments if isinstance(x, Constant) and x.text]
    named = [text for text in texts if "=" in text]
    values = [x.name for x in arguments if isinstance(x, Operand)] or op.reads
    if len(values) > MOST or call is None:
        return [few([names.get(name, name) for name in values]), *texts]
    words = (x.text if isinstance(x, Constant) else names.get(x.name, x.name) for x in arguments)
    return [*(word for word in words if word and word not in named), *named]


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
