"""Compare two traces op by op: of two ranks, two stages, with and without a transform."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from fzero.tools.trace._calls import CalledOp, Constant, Operand
from fzero.tools.trace._record import Op
from fzero.tools.trace._text import MOST, few, fitted, some_paths


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """The ops in which two programs differ. Empty, and false, if they do the same.

    Each line is an op with what it reads and the shapes that it gives, as in a unified diff: "- "
    for the first program alone, "+ " for the second one alone.
    """

    lines: tuple[str, ...]
    first: tuple[Op | None, Op | None]  # that differ; None: the program ends there

    @property
    def equal(self) -> bool:
        """Whether both do the same."""
        return not self.lines

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __str__(self) -> str:
        return "\n".join(map(fitted, self.lines)) or "the same"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """An op that is no view, or an output.

    key: what two ops have alike that may be the same: all but which op has made what they read.
    read: those ops, as numbers of lines; None for what no op of the program has made.
    """

    key: tuple[Any, ...]
    read: tuple[int | None, ...]
    text: str
    full: str  # with the names of values, for lines that differ in nothing else
    op: Op | None


class ComparedProgram(NamedTuple):
    """One of two programs; a call for each op, then for each output."""

    title: str
    ops: Sequence[Op]
    calls: Sequence[CalledOp]


def collectives_of(program: ComparedProgram) -> ComparedProgram:
    """Return the collectives of a program: with their constants, without what made their inputs."""
    calls = [
        CalledOp(op=call.op, arguments=tuple(x for x in call.arguments if isinstance(x, Constant)))
        for op, call in zip(program.ops, _calls(program), strict=False)
        if op.is_collective
    ]
    return program._replace(ops=[op for op in program.ops if op.is_collective], calls=calls)


def _calls(program: ComparedProgram) -> Sequence[CalledOp]:
    return program.calls or [CalledOp(op=op.name) for op in program.ops]


def compare_ops(a: ComparedProgram, b: ComparedProgram) -> TraceDiff:
    """Compare ops with their constants, what each reads, through which views, and what comes out.

    Lines are first brought together by what they are alone. Two that are together are the same op
    if what they read was made by ops that are together.
    """
    lines = _lines(a), _lines(b)
    if _reads_others(*lines, _together(*lines)) or _keys(lines[0]) != _keys(lines[1]):
        return _difference(*_told_apart(*lines), titles=(a.title, b.title))
    return TraceDiff((), (None, None))


def _keys(lines: Sequence[_Line]) -> list[tuple[Any, ...]]:
    return [line.key for line in lines]


def _together(a: Sequence[_Line], b: Sequence[_Line]) -> dict[int, int]:
    """Return the lines of b that stand beside those of a in the longest common parts."""
    if _keys(a) == _keys(b):
        return {i: i for i in range(len(a))}
    blocks = SequenceMatcher(None, _keys(a), _keys(b), autojunk=False).get_matching_blocks()
    return {i + k: j + k for i, j, size in blocks for k in range(size)}


def _reads_others(
    a: Sequence[_Line], b: Sequence[_Line], together: dict[int, int]
) -> list[tuple[int, int]]:
    """Return the lines that stand together and read what does not, though each has a partner."""
    partners = set(together.values())
    return [
        (i, j)
        for i, j in together.items()
        if any(
            x is not None and x in together and y in partners and together[x] != y
            for x, y in zip(a[i].read, b[j].read, strict=True)
        )
    ]


def _told_apart(a: list[_Line], b: list[_Line]) -> tuple[list[_Line], list[_Line]]:
    """Return the lines, with other keys for those that stand together and are not the same."""
    for i, j in _reads_others(a, b, _together(a, b)):
        a[i] = replace(a[i], key=("first", i), text=a[i].full)
        b[j] = replace(b[j], key=("second", j), text=b[j].full)
    keys = defaultdict[str, set[Any]](set)
    for line in chain(a, b):
        keys[line.text].add(line.key)
    of_many = {text for text, some in keys.items() if len(some) > 1}
    named = ([replace(x, text=x.full) if x.text in of_many else x for x in some] for some in (a, b))
    first, second = named
    return first, second


def _difference(a: list[_Line], b: list[_Line], titles: tuple[str, str]) -> TraceDiff:
    matcher = SequenceMatcher(None, _keys(a), _keys(b), autojunk=False)
    found = [f"--- {titles[0]}", f"+++ {titles[1]}"]
    for some in matcher.get_grouped_opcodes(1):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = some[0], some[-1]
        found.append(f"@@ -{i1 + 1},{i2 - i1} +{j1 + 1},{j2 - j1} @@")
        for tag, i, end, j, stop in some:
            if tag == "equal":
                found += [f" {line.text}" for line in a[i:end]]
            else:
                found += [f"-{line.text}" for line in a[i:end]]
                found += [f"+{line.text}" for line in b[j:stop]]
    at = next((i, j) for tag, i, _, j, _ in matcher.get_opcodes() if tag != "equal")
    first = tuple(some[k].op if k < len(some) else None for some, k in zip((a, b), at, strict=True))
    return TraceDiff(tuple(found), (first[0], first[1]))


def _lines(program: ComparedProgram) -> list[_Line]:
    calls = _calls(program)
    made: dict[str, tuple[int, int]] = {}  # the line of each value, and which result it is
    names: dict[str, str] = {}
    lines: list[_Line] = []
    outputs = [None] * (len(calls) - len(program.ops))
    for op, call in zip((*program.ops, *outputs), calls, strict=True):
        if op is not None:
            if op.kind == "view":
                continue
            made.update((value.name, (len(lines), i)) for i, value in enumerate(op.gives))
            names.update((value.name, op.name) for value in op.gives)
        lines.append(_line(op, call, made, names))
    return lines


def _line(
    op: Op | None, call: CalledOp, made: dict[str, tuple[int, int]], names: dict[str, str]
) -> _Line:
    reads = [x for x in call.arguments if isinstance(x, Operand)]
    of = [made.get(x.origin[1]) if x.origin[0] == "value" else None for x in reads]
    gives = " ".join(map(str, op.gives)) if op else ""
    detail = op.detail if op and op.is_collective else ""
    inputs = tuple(
        (names.get(x.origin[1]) if at else x.origin, at[1] if at else None, *x[2:])
        for x, at in zip(reads, of, strict=True)
    )
    constants = tuple((i, x.key) for i, x in enumerate(call.arguments) if isinstance(x, Constant))
    texts = [_text(op, call, names, gives, full=full) for full in (False, True)]
    return _Line(
        key=(call.op, constants, inputs, gives, detail),
        read=tuple(at[0] if at else None for at in of),
        text=texts[0],
        full=texts[1],
        op=op,
    )


def _text(op: Op | None, call: CalledOp, names: dict[str, str], gives: str, *, full: bool) -> str:
    if op is not None and op.is_collective:
        axis, colon, paths = op.detail.partition(": ")
        about = op.detail if full else f"{axis}{colon}{some_paths(paths.split(', '))}"
        return f"* {op.name} -> {gives}   <{about}>"
    words = [_word(x, names, full=full) for x in call.arguments]
    values = [w for w, x in zip(words, call.arguments, strict=True) if isinstance(x, Operand)]
    if not full and len(values) > MOST:
        words = [few(values), *(x.text for x in call.arguments if isinstance(x, Constant))]
    name = call.op if op is None or full else op.name
    result = f" -> {gives}" if op else ""
    return f"  {' '.join(filter(None, (name, *words)))}{result}"


def _word(x: Operand | Constant, names: dict[str, str], *, full: bool) -> str:
    """Return what an op reads, as people can tell: by the op that made it, or by its path."""
    if isinstance(x, Constant):
        return x.key if full else x.text
    kind, name = x.origin
    word = {"value": names.get(name, name), "constant": f"<{name}>"}.get(kind, name)
    if full:
        return f"{x.name}:{word}{_view(x)}"
    return f"{word}{'' if _is_plain(x) else _view(x)}"


def _is_plain(x: Operand) -> bool:
    """Whether it has its elements in the order in which they are in memory, from the first."""
    dense = [prod(x.shape[i + 1 :]) if n != 1 else 0 for i, n in enumerate(x.shape)]
    return x.start == 0 and not x.flips and (0 in x.shape or list(x.strides) == dense)


def _view(x: Operand) -> str:
    """Return which elements of its origin a value has: as the arguments of torch.as_strided."""
    shape, strides = (",".join(map(str, some)) for some in (x.shape, x.strides))
    start = f", byte {x.start}" if x.start else ""
    return f"[{shape}; strides {strides}{start}{' ' * bool(x.flips)}{x.flips}]"
