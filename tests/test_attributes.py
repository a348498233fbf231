"""No attribute of an object of fzero is set from outside of its class.

What may be set is listed with the reason: objects of torch and Python, public properties that have
a setter, and results that a function fills as it makes them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "fzero").rglob("*.py"))

MAY_BE_SET = {
    # torch's own objects
    ("adapter/optimizer_hooks.py", "self.optimizer.state"): "torch's optimizer: it asks the engine",
    ("optim/torch_probe.py", "idle.state"): "a copy of torch's optimizer, with nothing to step",
    ("optim/torch_probe.py", "small.state"): "a copy of torch's optimizer, which its own way makes",
    ("tools/compile/passes.py", "output.args"): "a node of torch.fx",
    # public properties with a setter
    ("checkpoint/_process_states.py", "self.engine.state"): "Engine.state",
    ("integrations/_shared.py", "engine.state"): "Engine.state",
    # a result that is filled as it is made
    ("tools/record/recorder.py", "engine.state"): "Engine.state",
    ("tools/record/replay.py", "self.engines[rank].state"): "Engine.state",
}
MADE = ("made", "new")  # a constructor fills what it makes
OF_TORCH = ("grad", "data")  # of any tensor


def targets(node: ast.Assign | ast.AugAssign) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def own_attributes(trees: dict[Path, ast.Module]) -> set[str]:
    """The names of attributes that any class of fzero sets on itself."""
    found = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                every = [node.target] if isinstance(node, ast.AnnAssign) else targets(node)
                for target in every:
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        found.add(target.attr)
    return found


def set_from_outside(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in targets(node):
                if not isinstance(target, ast.Attribute):
                    continue
                holder = ast.unparse(target.value)
                theirs = target.attr in OF_TORCH or target.attr not in own
                if holder not in ("self", "cls", "ctx", *MADE) and not theirs:
                    yield node.lineno, f"{holder}.{target.attr}"


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE}


def test_what_is_set_from_outside_is_what_may_be(trees: dict[Path, ast.Module]) -> None:
    own = own_attributes(trees)
    found = {
        (path.relative_to(ROOT / "fzero").as_posix(), name)
        for path, tree in trees.items()
        for _, name in set_from_outside(tree, own)
    }
    assert found - MAY_BE_SET.keys() == set()


def test_nothing_is_listed_that_is_gone(trees: dict[Path, ast.Module]) -> None:
    for path, name in MAY_BE_SET:
        assert name in (ROOT / "fzero" / path).read_text(encoding="utf-8")


def test_a_callback_that_is_set_on_an_object_is_found() -> None:
    tree = ast.parse("gatherer.on_written = told")
    assert [name for _, name in set_from_outside(tree, {"on_written"})] == ["gatherer.on_written"]
