"""The size of files, functions and records; and that the sources are ASCII."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAX_FILE_LINES = 330
MAX_FUNCTION_LINES = 45  # lines with code: no docstring, comment or blank
MAX_FIELDS = 9

HOUSE = [
    path
    for folder in ("fzero", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def broken_caps(source: str) -> list[str]:
    """Return what in a file is larger than the house allows, or not ASCII."""
    lines = source.splitlines()
    broken = [f"{len(lines)} lines"] if len(lines) > MAX_FILE_LINES else []
    numbered = enumerate(lines, 1)
    broken += [f"line {number}: not ASCII" for number, line in numbered if not line.isascii()]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = code_lines(node, lines)
            if length > MAX_FUNCTION_LINES:
                broken.append(f"{node.name}: {length} lines of code")
        if isinstance(node, ast.ClassDef) and is_record(node):
            fields = sum(
                isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
                for item in node.body
            )
            if fields > MAX_FIELDS:
                broken.append(f"{node.name}: {fields} fields")
    return broken


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    first = node.body[0]
    is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    doc = range(first.lineno, (first.end_lineno or 0) + 1) if is_doc else range(0)
    numbers = range(node.lineno, (node.end_lineno or 0) + 1)
    code = [lines[number - 1].strip() for number in numbers if number not in doc]
    return sum(bool(line) and not line.startswith("#") for line in code)


def is_record(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(mark).split("(")[0] for mark in (*node.decorator_list, *node.bases)]
    return any(mark.split(".")[-1] in {"dataclass", "record", "NamedTuple"} for mark in marks)


@pytest.mark.parametrize("path", HOUSE, ids=_id)
def test_files_functions_and_records_are_small_and_ascii(path: Path) -> None:
    assert broken_caps(path.read_text(encoding="utf-8")) == []


FIELDS = "".join(f"    a{i}: int\n" for i in range(10))


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        ("x = 1\n" * 331, ["331 lines"]),
        ("def f():\n" + "    x = 1\n" * 45, ["f: 46 lines of code"]),
        ('def f():\n    """D.\n\n    E.\n    """\n' + "    x = 1\n\n    # y\n" * 44, []),
        ("async def f(): 'caf\u00e9'", ["line 1: not ASCII"]),
        ("@record\nclass A:\n    x: ClassVar[int] = 1\n" + FIELDS, ["A: 10 fields"]),
        ("class A:\n" + FIELDS, []),
    ],
)
def test_the_cap_check_sees(source: str, broken: list[str]) -> None:
    assert broken_caps(source) == broken
