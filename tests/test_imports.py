"""Who may import whom, read from the syntax of the files.

docs/architecture.md has the picture. A room of the package is the first name after `fzero.`. A new
room fails here until it is given its place in the table below.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A room imports rooms that stand before it, and itself.
ROOMS = (
    "errors",
    "context",
    "ranks",
    "state",
    "data",
    "options",
    "collectives",
    "machine",
    "optim",
    "transforms",
    "checkpoint",
    "adapter",
    "integrations",
    "tools",
    "__init__",
    "__main__",
)
# `fzero.adapter.initialize` is where users know it; what it does lives in integrations/deepspeed.
ALSO = {
    "fzero.adapter": {"integrations"},
}

COMMUNICATING = ("fzero.collectives.",)
COLLECTIVE = re.compile(
    r"(all_gather|all_reduce|all_to_all|reduce|reduce_scatter|gather|scatter|broadcast|barrier"
    r"|monitored_barrier|send|recv|isend|irecv|batch_isend_irecv|_coalescing_manager)(_\w+)?"
)
COMMUNICATION = ("torch.distributed.", "torch.ops.c10d", "torch.ops._c10d", "torch.ops._dtensor")

PACKAGE = sorted((ROOT / "fzero").rglob("*.py"))


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _not_empty(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {path: wrong for path, wrong in found.items() if wrong}


def room_of(module: str) -> str:
    """Return the room that `fzero.room.more` belongs to; the package itself is `__init__`."""
    return [*module.split("."), "__init__"][1]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def allowed(module: str) -> set[str]:
    """Return the rooms that `module` may import."""
    room = room_of(module)
    if room not in ROOMS:
        pytest.fail(f"{room!r} has no place in the table of tests/test_imports.py: give it one")
    return {*ROOMS[: ROOMS.index(room) + 1]} | ALSO.get(module, set())


def imported_modules(tree: ast.AST, module: str) -> Iterator[str]:
    """Yield the dotted name of all that is imported in a module, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_rooms(tree: ast.AST, module: str) -> set[str]:
    names = [name for name in imported_modules(tree, module) if name.split(".")[0] == "fzero"]
    rooms = set()
    for name in names:
        room = room_of(name)
        is_name_of_init = name.count(".") == 1 and room not in ROOMS and not _exists(room)
        rooms.add("__init__" if is_name_of_init else room)
    return rooms


def _exists(room: str) -> bool:
    return (ROOT / "fzero" / room).exists() or (ROOT / "fzero" / f"{room}.py").exists()


def private_imports(tree: ast.AST, module: str) -> list[str]:
    """Return the private modules, and private names, of other rooms that a module imports."""
    found = []
    for name in imported_modules(tree, module):
        parts = name.split(".")
        if parts[0] == "fzero" and room_of(name) != room_of(module):
            found += [name] if any(part.startswith("_") for part in parts[2:]) else []
    return sorted(found)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of two modules or more that import each other, around any number of them."""
    reached = {start: _reached(graph, start) for start in graph}
    sets = {
        frozenset({start, *(other for other in reached[start] if start in reached[other])})
        for start in graph
        if start in reached[start]
    }
    return sorted(sorted(one) for one in sets)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def graph_of_modules() -> dict[str, set[str]]:
    """Return what each module imports, also where only types are checked, but for its parents."""
    names = {module_of(path).removesuffix(".__init__"): path for path in PACKAGE}
    graph = {}
    for name, path in names.items():
        inside = f"{name}.__init__" if path.name == "__init__.py" else name
        found = {one for one in imported_modules(_tree(path), inside)}
        found |= {one.rpartition(".")[0] for one in found}
        graph[name] = {one for one in found & set(names) if not f"{name}.".startswith(f"{one}.")}
    return graph


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


def test_there_is_a_package_to_check() -> None:
    assert {"fzero/__init__.py", "fzero/errors/__init__.py"} <= {_id(path) for path in PACKAGE}


def test_imports_follow_the_arrow() -> None:
    against = {}
    for path in PACKAGE:
        module = module_of(path).removesuffix(".__init__")
        against[_id(path)] = sorted(imported_rooms(_tree(path), module) - allowed(module))
    assert _not_empty(against) == {}, "these files may not import these rooms"


def test_no_room_imports_what_is_private_in_another() -> None:
    private = {_id(path): private_imports(_tree(path), module_of(path)) for path in PACKAGE}
    assert _not_empty(private) == {}


def test_no_modules_import_each_other() -> None:
    assert circles(graph_of_modules()) == []


def test_no_two_classes_have_one_name() -> None:
    found = Counter(
        node.name
        for path in PACKAGE
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, times in found.items() if times > 1] == []


def test_no_public_function_hides_a_package() -> None:
    import fzero

    rooms = {path.parent.name for path in PACKAGE if path.parent.parent == ROOT / "fzero"}
    hidden = {name for name in rooms & set(fzero.__all__) if callable(getattr(fzero, name))}
    assert hidden == set()


def test_only_collectives_communicate() -> None:
    others = [path for path in PACKAGE if not module_of(path).startswith(COMMUNICATING)]
    assert _not_empty({_id(path): collective_uses(_tree(path)) for path in others}) == {}


# The checks themselves, on sources that they must refuse, and on some that they must not.


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("state.hooks", "from fzero.machine.partition import pack", {"machine"}),
        ("state.hooks", "from ..collectives import all_gather", {"collectives"}),
        ("state.hooks", "def f():\n    import fzero.transforms.shard as s", {"transforms"}),
        ("state.hooks", "from . import window\nfrom fzero import errors", set()),
        ("state.hooks", "if TYPE_CHECKING:\n    from fzero.adapter import Engine", {"adapter"}),
        ("transforms.shard", "from fzero import shard", {"__init__"}),
        ("transforms.shard", "from fzero.tools.doctor import examine", {"tools"}),
        ("machine.fake", "import fzero.machine.partition, fzero.transforms.a", {"transforms"}),
        ("tools.main", "from fzero.checkpoint import save", set()),
        ("adapter.engine", "import numpy\nfrom fzero.transforms import shard", set()),
        ("adapter.engine", "from fzero.integrations.deepspeed import initialize", {"integrations"}),
    ],
)
def test_the_arrow_check_sees(module: str, source: str, wrong: set[str]) -> None:
    module = f"fzero.{module}"
    assert imported_rooms(ast.parse(source), module) - allowed(module) == wrong


def test_a_room_without_a_place_is_refused() -> None:
    with pytest.raises(pytest.fail.Exception, match="'newcomer' has no place"):
        allowed("fzero.newcomer.of_today")


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("from fzero.state._record import record", ["fzero.state._record.record"]),
        ("from fzero.state import _record", ["fzero.state._record"]),
        ("import fzero.state._record as r", ["fzero.state._record"]),
        ("from fzero.adapter._events import Events\nfrom fzero.state import record", []),
    ],
)
def test_the_check_of_private_imports_sees(source: str, private: list[str]) -> None:
    assert private_imports(ast.parse(source), "fzero.adapter.engine") == private


def test_the_check_of_circles_sees() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": set()}
    assert circles(graph) == [["b", "c"]]


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
