"""The shape of the house, read from the syntax of its files: arrow of imports, caps, ASCII.

docs/architecture.md has the picture. A part of the package is the first name after `fzero.`: a
module or a folder. A new part fails here until it is given its place in the tables below.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The straight way: a part imports parts of the rows above its own, and itself.
LEVELS = (
    ("errors", "_ambient", "_torch_globals"),
    (
        "_autocast",
        "_check",
        "_columns",
        "_compiled",
        "_units",
        "_launch",
        "_module_copy",
        "virtual",
    ),
    ("_groups", "_modes"),
    ("axis",),
    ("mesh",),
    ("state",),
    ("options",),
    ("homes", "packing", "placeholder", "quantize"),
    ("_memory",),
    ("collectives", "partition"),
    ("functional", "machine", "optim"),
    ("transforms",),
    ("adapter", "tools", "trace"),
    ("certify", "compile", "plan"),
    ("diff",),
)
# Beside the way: these see what is up to the row of `partition`, and only a TOP part sees them.
SIDE = ("checkpoint", "plot")
TOP = ("__init__", "__main__", "doctor", "integrations")
# adapter/deepspeed has DeepSpeed's save_checkpoint and load_checkpoint. diff takes states of other
# worlds apart as a checkpoint does. plot draws traces.
ALSO = {"adapter": {"checkpoint"}, "diff": {"checkpoint"}, "plot": {"trace"}}

# The doctor calls torch's own collectives to say what is wrong with them.
COMMUNICATING = {"collectives", "doctor"}
COLLECTIVE = re.compile(
    r"(all_gather|all_reduce|all_to_all|reduce|reduce_scatter|gather|scatter|broadcast|barrier"
    r"|monitored_barrier|send|recv|isend|irecv|batch_isend_irecv|_coalescing_manager)(_\w+)?"
)
COMMUNICATION = ("torch.distributed.", "torch.ops.c10d", "torch.ops._c10d", "torch.ops._dtensor")

MAX_FILE_LINES = 330
MAX_FUNCTION_LINES = 45  # lines with code: no docstring, comment or blank
MAX_FIELDS = 9

PACKAGE = sorted((ROOT / "fzero").rglob("*.py"))
HOUSE = PACKAGE + sorted(
    path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(module: str) -> str:
    """Return the part that `fzero.part.more` belongs to; the package itself is `__init__`."""
    return [*module.split("."), "__init__"][1]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def allowed(part: str) -> set[str]:
    """Return the parts that `part` may import."""
    everything = {name for row in LEVELS for name in row} | set(SIDE) | set(TOP)
    if part in TOP:
        return everything
    if part in SIDE:
        row = next(i for i, row in enumerate(LEVELS) if "partition" in row) + 1
    else:
        row = next((i for i, row in enumerate(LEVELS) if part in row), None)
        if row is None:
            pytest.fail(
                f"{part!r} has no place in the tables of tests/test_imports.py: give it one"
            )
    return {name for names in LEVELS[:row] for name in names} | {part} | ALSO.get(part, set())


def imported_modules(tree: ast.AST, module: str) -> Iterator[str]:
    """Yield the dotted name of all that is imported in a module, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_parts(tree: ast.AST, module: str) -> set[str]:
    known = {name for row in LEVELS for name in row} | set(SIDE) | set(TOP)
    names = [name for name in imported_modules(tree, module) if name.split(".")[0] == "fzero"]
    parts = set()
    for name in names:
        part = part_of(name)
        is_name_of_init = name.count(".") == 1 and part not in known and not _exists(part)
        parts.add("__init__" if is_name_of_init else part)
    return parts


def _exists(part: str) -> bool:
    return (ROOT / "fzero" / part).exists() or (ROOT / "fzero" / f"{part}.py").exists()


def collective_uses(tree: ast.AST) -> list[str]:
    """Return every use of a communicating name of torch, by whatever alias, or by getattr."""
    aliases = _aliases(tree)

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return aliases.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return ""

    found = set()
    for node in ast.walk(tree):
        name = dotted(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args[1:]:
            literal = node.args[1]
            if node.func.id == "getattr" and isinstance(literal, ast.Constant):
                name = f"{dotted(node.args[0])}.{literal.value}"
        # an operator has its overload behind its name, torch.ops.c10d.allreduce_.default
        if name.startswith(COMMUNICATION) and any(map(COLLECTIVE.fullmatch, name.split(".")[2:])):
            found.add(name)
    return sorted(found)


def _aliases(tree: ast.AST) -> dict[str, str]:
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                aliases[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


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


def test_there_is_a_package_to_check() -> None:
    assert {"fzero/__init__.py", "fzero/errors.py"} <= {_id(path) for path in PACKAGE}


@pytest.mark.parametrize("path", PACKAGE, ids=_id)
def test_imports_follow_the_arrow(path: Path) -> None:
    module = module_of(path)
    part = part_of(module)
    against = imported_parts(ast.parse(path.read_text()), module) - allowed(part)
    assert not against, f"{_id(path)} is in {part!r}, which may not import {sorted(against)}"


@pytest.mark.parametrize("path", PACKAGE, ids=_id)
def test_only_collectives_communicate(path: Path) -> None:
    if part_of(module_of(path)) not in COMMUNICATING:
        assert collective_uses(ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", HOUSE, ids=_id)
def test_files_functions_and_records_are_small_and_ascii(path: Path) -> None:
    assert broken_caps(path.read_text(encoding="utf-8")) == []


FIELDS = "".join(f"    a{i}: int\n" for i in range(10))

# The checks themselves, on sources that they must refuse, and on some that they must not.


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("state.hooks", "from fzero.partition import pack", {"partition"}),
        ("state.hooks", "from ..collectives import all_gather", {"collectives"}),
        ("state.hooks", "def f():\n    import fzero.transforms.shard as s", {"transforms"}),
        ("state.hooks", "from . import window\nfrom fzero import errors", set()),
        ("state.hooks", "if TYPE_CHECKING:\n    from fzero.adapter import Engine", {"adapter"}),
        ("transforms.shard", "from fzero import shard", {"__init__"}),
        ("transforms.shard", "from fzero.doctor.info import show", {"doctor"}),
        ("plot.fake", "import fzero.partition, fzero.transforms.a", {"transforms"}),
        ("doctor.main", "import fzero, fzero.plot\nfrom fzero.checkpoint import save", set()),
        ("adapter.engine", "import numpy\nfrom fzero.transforms import shard", set()),
    ],
)
def test_the_arrow_check_sees(part: str, source: str, wrong: set[str]) -> None:
    module = f"fzero.{part}"
    assert imported_parts(ast.parse(source), module) - allowed(part_of(module)) == wrong


def test_a_part_without_a_place_is_refused() -> None:
    with pytest.raises(pytest.fail.Exception, match="'newcomer' has no place"):
        allowed("newcomer")


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import torch.distributed as dist\nf = dist.all_reduce", ["torch.distributed.all_reduce"]),
        ("from torch import distributed as d\nd.send(x, 1)", ["torch.distributed.send"]),
        (
            "from torch.distributed import all_gather_into_tensor as g\ng(y, x)",
            ["torch.distributed.all_gather_into_tensor"],
        ),
        (
            "import torch.distributed as dist\nf = getattr(dist, 'reduce_scatter_single', None)",
            ["torch.distributed.reduce_scatter_single"],
        ),
        (
            "import torch\ntorch.ops._c10d_functional.all_reduce(x)",
            ["torch.ops._c10d_functional.all_reduce"],
        ),
        ("import torch\ntorch.distributed.get_rank()\nx.scatter(0, i, y)", []),
        ("from fzero.collectives import all_reduce\nall_reduce(x)", []),
    ],
)
def test_the_communication_check_sees(source: str, uses: list[str]) -> None:
    assert collective_uses(ast.parse(source)) == uses


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
