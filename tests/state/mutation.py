"""Which lines of the protocol no test of this folder needs: `python -m tests.state.mutation`.

Each mutant is one change of one function: a comparison turned round, a condition negated, one side
of `and` or `or` left out, an early return that does not come, a field of a changed record, an
effect or a task left out. The tests run in a child process with each of them; one that fails them
is caught. Those that are not are printed, and the ratio.

    python -m tests.state.mutation                   all of them, about twenty minutes
    python -m tests.state.mutation protocol residency   of these modules
    python -m tests.state.mutation --every 10        every tenth
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import CodeType, FunctionType, ModuleType
from typing import Any

ROOM = (
    "fzero.state.protocol",
    "fzero.state.residency",
    "fzero.state.replay",
    "fzero.state.rounds",
)

SECONDS = 30.0
"""Of the processor's time: a mutant that takes more goes round in a circle, and is caught."""

NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}


@dataclass(frozen=True)
class Mutant:
    """A change of one function of a module."""

    module: str
    function: str
    line: int
    what: str
    tree: ast.Module

    def __str__(self) -> str:
        """Where it is, and what it changes."""
        return (
            f"{self.module.removeprefix('fzero.state.')}:{self.line} {self.function}: {self.what}"
        )


def mutants(module: str) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    path = Path(str(importlib.import_module(module).__file__))
    tree = ast.parse(path.read_text())
    for where, name in _functions(tree):
        function = _at(tree, where)
        for steps, node in _nodes(function):
            for what, change in _changes(node):
                changed = copy.deepcopy(tree)
                change(_at(_at(changed, where), steps))
                ast.fix_missing_locations(changed)
                line = getattr(node, "lineno", function.lineno)
                yield Mutant(module, name, line, what, changed)


def _functions(tree: ast.Module) -> Iterator[tuple[list[Any], str]]:
    for i, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef):
            yield [("body", i)], node.name
        elif isinstance(node, ast.ClassDef):
            for j, inner in enumerate(node.body):
                if isinstance(inner, ast.FunctionDef):
                    yield [("body", i), ("body", j)], f"{node.name}.{inner.name}"


def _nodes(function: Any) -> Iterator[tuple[list[Any], Any]]:
    """Each node below a function, with the way to it."""
    todo: list[tuple[list[Any], Any]] = [([("body", i)], x) for i, x in enumerate(function.body)]
    while todo:
        steps, node = todo.pop(0)
        yield steps, node
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                todo.append(([*steps, (field, None)], value))
            elif isinstance(value, list):
                pairs = [(i, x) for i, x in enumerate(value) if isinstance(x, ast.AST)]
                todo += [([*steps, (field, i)], x) for i, x in pairs]


def _at(tree: Any, steps: list[Any]) -> Any:
    for field, i in steps:
        tree = getattr(tree, field) if i is None else getattr(tree, field)[i]
    return tree


# What changes.

Change = tuple[str, Callable[[Any], None]]


def _changes(node: Any) -> Iterator[Change]:
    match node:
        case ast.Compare():
            yield from _of_comparison(node)
        case ast.BoolOp(values=values):
            for i, value in enumerate(values):
                yield f"without {ast.unparse(value)!r}", _without("values", i)
        case ast.If(body=body):
            yield f"if not ({ast.unparse(node.test)})", _negate
            if isinstance(body[-1], ast.Return | ast.Continue | ast.Break):
                yield f"never {ast.unparse(body[-1])!r}", _never
        case ast.IfExp() | ast.comprehension(ifs=[_, *_]):
            yield "the condition negated", _negate
        case ast.Call(
            func=ast.Name(id="replaced" | "replace" | "Message") | ast.Attribute(attr="put")
        ):
            for i, keyword in enumerate(node.keywords):
                yield f"without the field {keyword.arg}", _without("keywords", i)
        case ast.Call(func=ast.Attribute(attr="then")):
            for i, task in enumerate(node.args):
                yield f"without the task {ast.unparse(task)!r}", _without("args", i)
        case ast.Return(value=ast.Tuple(elts=[_, ast.Tuple(elts=[_, *_]) as effects])):
            for i, effect in enumerate(effects.elts):
                yield f"without the effect {ast.unparse(effect)!r}", _without_effect(i)
        case (
            ast.AugAssign(op=ast.Add())
            | ast.Expr(value=ast.Call(func=ast.Attribute(attr="append")))
        ):
            yield f"without {ast.unparse(node)!r}", _nothing
        case ast.UnaryOp(op=ast.Not()):
            yield "without `not`", _without_not
        case _:
            return


def _of_comparison(node: ast.Compare) -> Iterator[Change]:
    for i, op in enumerate(node.ops):
        for table in (NEGATED, BOUNDARY):
            if type(op) in table:
                new = table[type(op)]

                def change(node: Any, i: int = i, new: type[ast.cmpop] = new) -> None:
                    node.ops[i] = new()

                yield f"{new.__name__} in {ast.unparse(node)!r}", change


def _without(field: str, i: int) -> Callable[[Any], None]:
    return lambda node: getattr(node, field).pop(i)


def _without_effect(i: int) -> Callable[[Any], None]:
    return lambda node: node.value.elts[1].elts.pop(i)


def _negate(node: Any) -> None:
    if isinstance(node, ast.comprehension):
        node.ifs[0] = ast.UnaryOp(ast.Not(), node.ifs[0])
    else:
        node.test = ast.UnaryOp(ast.Not(), node.test)


def _never(node: Any) -> None:
    node.test = ast.BoolOp(ast.And(), [node.test, ast.Constant(False)])


def _without_not(node: Any) -> None:
    node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)


def _nothing(node: Any) -> None:
    if isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    else:
        node.value = ast.IfExp(ast.Constant(True), ast.Tuple([], ast.Load()), node.value)


def nothing(module: str) -> Mutant:
    """Return the mutant that changes nothing: it must not be caught."""
    path = Path(str(importlib.import_module(module).__file__))
    return Mutant(module, "", 0, "nothing", ast.parse(path.read_text()))


# One mutant at a time.


def put_in(module: str, tree: ast.Module) -> None:
    """Let the functions of a module in this process be those of another tree."""
    code = compile(tree, str(importlib.import_module(module).__file__), "exec")
    for function in functions_of(module):
        function.__code__ = _code_of(code, function.__qualname__)


def functions_of(module: str) -> list[FunctionType]:
    """Every function and method that is defined in a module."""
    loaded = importlib.import_module(module)
    tree = ast.parse(Path(str(loaded.__file__)).read_text())
    return [_live(loaded, name) for _, name in _functions(tree)]


def _live(module: ModuleType, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    while not isinstance(found, FunctionType):
        names = ("fget", "func", "__wrapped__", "__func__")
        found = next(getattr(found, x) for x in names if getattr(found, x, None) is not None)
    return found


def _code_of(code: CodeType, name: str) -> CodeType:
    found = code
    for part in name.split("."):
        codes = (x for x in found.co_consts if isinstance(x, CodeType))
        found = next(x for x in codes if x.co_name == part)
    return found


def caught(mutant: Mutant, checks: Sequence[Callable[[], object]]) -> bool:
    """Whether one of these checks raises in a child process with the mutant."""
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            put_in(mutant.module, mutant.tree)
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)  # pytest-timeout has the other one
            for check in checks:
                check()
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return status != 0


def all_checks() -> list[Callable[[], object]]:
    """The tests of this folder, those first that take least time for what they catch."""
    import pytest

    from tests.state import test_law14

    here = Path(__file__).parent
    files = [str(here / f"test_{name}.py") for name in UNIT_TESTS]

    def unit_tests() -> None:
        plain = ["--assert=plain", "-W", "ignore"]  # this process has imported all of it
        if pytest.main(["-x", "-q", "-p", "no:cacheprovider", *plain, *files]):
            raise AssertionError

    few = [lambda kind=kind: test_law14.require_all(kind, 25) for kind in test_law14.SAMPLES]
    rest = [lambda kind=kind: test_law14.require_all(kind) for kind in test_law14.SAMPLES]
    return [*few, unit_tests, *rest]


UNIT_TESTS = ("broken_effects", "transitions", "pass", "replay")
"""Files of tests of the room beside the laws."""


def main(argv: Sequence[str]) -> None:
    """Print the mutants that no check catches, and the ratio."""
    parser = argparse.ArgumentParser(prog="python -m tests.state.mutation")
    parser.add_argument("modules", nargs="*", help="the last names of modules; all by default")
    parser.add_argument("--every", type=int, default=1, help="take every n-th")
    parser.add_argument("--first", type=int, default=0, help="from this one on")
    args = parser.parse_args(argv)
    chosen = [one for one in ROOM if not args.modules or one.rpartition(".")[2] in args.modules]
    every = [mutant for module in chosen for mutant in mutants(module)]
    some, checks, begin = every[args.first :: args.every], all_checks(), time.monotonic()
    Random(0).shuffle(some)  # a run that is stopped has seen some of everything
    if caught(nothing(chosen[0]), checks):
        raise SystemExit("the tests fail without a mutant")
    survivors = 0
    for number, mutant in enumerate(some, 1):
        if not caught(mutant, checks):
            survivors += 1
            print(mutant, flush=True)
        if number % 10 == 0 or number == len(some):
            ratio, seconds = 1 - survivors / number, time.monotonic() - begin
            seen = f"{number} mutants of {len(every)}, {survivors} not caught"
            print(f"{seen}: {ratio:.1%}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
