"""What the tests find of errors that are put into fzero/, one at a time.

    python -m tests.mutants --count 40 --seed 0 [--whole]      # `make mutants`

A mutant is one change of one function: another operator or comparison, a condition that is turned
round, a number that is one more, an argument or a call that is dropped. For each, those of the
tests run that the map has for its function (tests/touched.py) and the smoke set of real processes;
with `--whole` all files in which these tests stand, at night's strength. An error that no test
finds is printed as a diff: a test is missing, or the line does nothing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.touched import ROOT, Map, functions_at

COPIED = ("fzero", "tests", "examples", "docs", "README.md", "pyproject.toml")


class Mutant(NamedTuple):
    """A file of fzero, the function that is changed, and the file's text before and after."""

    file: str
    function: str
    before: str
    after: str

    def diff(self) -> str:
        """Return the change as lines."""
        lines = difflib.unified_diff(
            self.before.splitlines(),
            self.after.splitlines(),
            self.file,
            self.function,
            "",
            "",
            1,
            "",
        )
        return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print what is found of a sample of mutants."""
    parser = argparse.ArgumentParser(prog="make mutants ARGS=...", description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--whole", action="store_true", help="all tests of the files, slow ones too"
    )
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args(arguments)
    known = Map.read()
    sample = [*mutants(known, options.count, options.seed)]
    with ThreadPoolExecutor(options.at_once) as pool:
        found = [*pool.map(lambda mutant: is_found(mutant, known, options.whole), sample)]
    for mutant, is_it in zip(sample, found, strict=True):
        if not is_it:
            print(mutant.diff(), end="\n\n")
    print(f"{sum(found)} of {len(found)} mutants are found (seed {options.seed}).")
    return 0


def is_found(mutant: Mutant, known: Map, whole: bool) -> bool:
    """Return whether a test fails on a copy of the repository that has the mutant's file."""
    tests = [known.tests[number] for number in known.runs[mutant.file][mutant.function]]
    files = sorted({test.partition("::")[0] for test in tests})
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder, name)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        Path(folder, mutant.file).write_text(mutant.after)
        names = Path(folder, "touched.json")
        names.write_text(json.dumps([*tests, *(files if whole else ())]))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout", "120", *files]
        command += ["-p", "no:cacheprovider", "-p", "tests.touched", "--touched", str(names)]
        command += ["-m", "slow or not slow"] if whole else []
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, timeout=900
            )
        except subprocess.TimeoutExpired:
            return True
    return done.returncode != 0


def mutants(known: Map, count: int, seed: int) -> Iterator[Mutant]:
    """Yield mutants of functions that tests run, each function as likely as it has changes."""
    chance = random.Random(seed)
    places = [
        (file, number)
        for file in sorted(known.runs)
        if (ROOT / file).exists()
        for number in range(len(changes((ROOT / file).read_text())))
    ]
    for file, number in chance.sample(places, len(places)):
        if count == 0:
            return
        before = (ROOT / file).read_text()
        line, after = changes(before)[number]()
        function = functions_at(before, [line])[0]
        if after != before and known.runs[file].get(function):
            count -= 1
            yield Mutant(file, function, before, after)


def changes(source: str) -> list[Callable[[], tuple[int, str]]]:
    """Return the changes of a file: each gives its line, and the text of the file that has it."""
    tree, found = ast.parse(source), list[Callable[[], tuple[int, str]]]()
    for node in _run(tree):
        for other in _others(node):
            found.append(lambda node=node, other=other: (node.lineno, _put(source, node, other)))
    return found


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: none of annotations, of errors, or of texts."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(child, ast.Raise | ast.JoinedStr)
            if isinstance(child, ast.AST) and not is_text and name not in ("annotation", "returns"):
                yield from _run(child)


COMPARED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip


def _others(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of a node."""
    other = copy.copy(node)
    match node, other:
        case ast.Compare(ops=[op]), ast.Compare() if type(op) in COMPARED:
            other.ops = [COMPARED[type(op)]()]
            yield other
        case (ast.BinOp(op=op), ast.BinOp()) | (ast.BoolOp(op=op), ast.BoolOp()) if (
            type(op) in OPERATORS
        ):
            other.op = OPERATORS[type(op)]()
            yield other
        case ast.IfExp(), ast.IfExp():
            other.body, other.orelse = other.orelse, other.body
            yield other
        case ast.If(), _:
            yield ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        case ast.Constant(value=bool() as value), ast.Constant():
            other.value = not value
            yield other
        case ast.Constant(value=int() | float() as value), ast.Constant():
            other.value = value + 1
            yield other
        case ast.Expr(value=ast.Call()), _:
            yield ast.copy_location(ast.Pass(), node)
        case ast.Call(args=[_, *rest]), ast.Call() if rest or node.keywords:
            if node.keywords and all(keyword.arg for keyword in node.keywords):
                other.keywords = node.keywords[:-1]
                yield other


def _put(source: str, node: ast.AST, other: ast.AST) -> str:
    """Return the text with `other` where it says that it stands (else where `node` does)."""
    at: Any = other if isinstance(node, ast.If) else node
    lines = source.splitlines(keepends=True)
    first, last = at.lineno - 1, at.end_lineno - 1
    before = lines[first].encode()[: at.col_offset].decode()
    after = lines[last].encode()[at.end_col_offset :].decode()
    text = ast.unparse(other)
    text = (
        f"({text})" if isinstance(other, ast.expr) and not isinstance(other, ast.Constant) else text
    )
    return "".join([*lines[:first], before + text + after, *lines[last + 1 :]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
