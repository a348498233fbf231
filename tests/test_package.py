"""What a user gets with `import fzero`: names, version, types, and nothing that was not asked."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import fzero

ROOT = Path(__file__).parent.parent


def test_dir_shows_the_public_names_and_no_module_behind_them() -> None:
    assert set(dir(fzero)) == {*fzero.__all__, "__version__"}


def test_every_function_and_class_of_the_package_is_public() -> None:
    modules = {name for name in fzero.__all__ if isinstance(getattr(fzero, name), ModuleType)}
    bound = {
        name
        for name, value in vars(fzero).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert bound == set(fzero.__all__) - modules
    assert modules == {"adapter", "checkpoint", "codecs", "data", "optim", "plot", "state"}


def test_a_file_of_graphs_is_gone_and_the_error_says_what_takes_its_place() -> None:
    way = r"export is gone(.*)\nUsual cause: (.*)runs code(.*)\nFix: fzero.compile\(step\) at"
    with pytest.raises(AttributeError, match=way):
        fzero.export  # noqa: B018
    assert not hasattr(fzero, "export") and getattr(fzero, "export", None) is None
    with pytest.raises(ImportError, match="cannot import name 'export'"):
        from fzero import export  # noqa: F401
    with pytest.raises(TypeError, match="exported"):
        fzero.compile(lambda state: (state, None), exported="step.json")  # type: ignore
    with pytest.raises(AttributeError, match="module 'fzero' has no attribute 'exprot'"):
        fzero.exprot  # noqa: B018
    assert not hasattr(fzero, "exports")


def test_every_module_can_be_asked_for_a_name_that_it_lacks() -> None:
    found = [sys.modules[name] for name in sorted(sys.modules) if name.split(".")[0] == "fzero"]
    assert len(found) > 50
    assert not [one.__name__ for one in found if hasattr(one, "no_such_name")]


def fresh(program: str) -> list[str]:
    """Run a program in an interpreter of its own; return the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


NOT_FOR_A_STEP = [
    "fzero.adapter",
    "fzero.checkpoint",
    "fzero.data",
    "fzero.integrations",
    "fzero.tools",
    "hypothesis",
    "matplotlib",
    "safetensors",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.profiler",
]


def test_import_loads_nothing_that_a_step_does_not_need() -> None:
    program = "import torch, sys; of_torch = {*sys.modules}; import fzero"
    loaded = fresh(f"{program}; print(*({{*sys.modules}} - of_torch))")
    assert "fzero.transforms.shard" in loaded
    assert "torch.distributed._functional_collectives" in loaded
    loaded.remove("fzero.adapter.deepspeed")  # an alias, as `fzero.plan` is
    roots = tuple(f"{name}." for name in NOT_FOR_A_STEP)
    assert [name for name in loaded if f"{name}.".startswith(roots)] == []
    assert len([name for name in loaded if name.startswith("fzero.")]) <= 262
    assert len(loaded) <= 302


@pytest.mark.parametrize(
    ("uses", "loaded"),
    [
        ("dir(fzero), hasattr(fzero, 'no'), fzero.reshard", ["checkpoint"]),
        (
            "fzero.integrations.deepspeed.initialize, fzero.adapter.Engine",
            ["adapter", "checkpoint", "integrations"],
        ),
        ("fzero.plot.partition_map, fzero.plan.of_step, fzero.bisect", ["checkpoint", "tools"]),
    ],
)
def test_the_parts_are_loaded_by_their_first_use(uses: str, loaded: list[str]) -> None:
    parts = "('adapter', 'checkpoint', 'integrations', 'tools')"
    found = f"*[part for part in {parts} if f'fzero.{{part}}' in sys.modules]"
    program = f"import sys, fzero; {uses}; print({found}, *{{'matplotlib'}} & {{*sys.modules}})"
    assert fresh(program) == loaded


def imported_for_checkers(package: ModuleType) -> dict[str, str]:
    """Return {name: the module it is in} of what a package imports where types are checked."""
    return {
        alias.name: str(line.module)
        for node in ast.parse(Path(str(package.__file__)).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "typing.TYPE_CHECKING"
        for line in node.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }


def test_type_checkers_see_what_is_imported_later_and_nothing_else() -> None:
    seen = imported_for_checkers(fzero)
    later = fresh("import fzero; print(*({*fzero.__all__} - {*vars(fzero)}))")
    assert set(later) | {"integrations", "tools"} == set(seen)
    assert all(getattr(fzero, name) is at(module, name) for name, module in seen.items())


@pytest.mark.parametrize("package", [fzero.integrations, fzero.tools], ids=lambda one: one.__name__)
def test_a_room_has_the_modules_that_type_checkers_see(package: ModuleType) -> None:
    every = imported_for_checkers(package)
    seen = {name for name, module in every.items() if module == package.__name__}
    records = {name: module for name, module in every.items() if name not in seen}
    assert seen
    assert all(getattr(package, name) is at(module, name) for name, module in records.items())
    found = ", ".join(f"room.{name}.__name__" for name in seen)
    names = fresh(f"import {package.__name__} as room; print({found})")
    assert names == [f"{package.__name__}.{name}" for name in seen]
    room = Path(str(package.__file__)).parent
    folders = {path.parent.name for path in room.glob("*/__init__.py")}
    assert folders <= seen <= folders | {path.stem for path in room.glob("*.py")}


def test_the_records_of_tools_say_where_they_have_moved_to() -> None:
    seen = imported_for_checkers(fzero.tools)
    records = [name for name, module in seen.items() if module != "fzero.tools"]
    assert len(records) == 8
    for name in records:
        assert not hasattr(fzero, name)
        assert name not in fzero.__all__
        with pytest.raises(AttributeError, match=rf"Fix: fzero\.tools\.{name}\.$"):
            getattr(fzero, name)


def at(module: str, name: str) -> Any:
    """Return what `from module import name` binds."""
    return getattr(importlib.import_module(module), name)


def test_a_module_under_its_older_name_does_not_take_the_place_of_a_function() -> None:
    program = """
import sys, fzero
assert "fzero.tools" not in sys.modules
import fzero.plan, fzero.tools.trace, fzero.trace
from fzero.plan import Plan
from fzero.tools.plan import plan
assert fzero.plan is plan and fzero.tools.plan.Plan is Plan
assert callable(fzero.trace) and fzero.trace is fzero.tools.trace.trace
assert sys.modules["fzero.plan"] is sys.modules["fzero.tools.plan"]
import fzero.adapter.deepspeed
assert fzero.adapter.deepspeed.initialize is fzero.adapter.initialize
names = {}
exec("from fzero.plot import *", names)
print("partition_map" in names, hasattr(fzero.plot, "no_such_name"))
"""
    assert fresh(program) == ["True", "False"]


def test_what_is_imported_later_is_pickled_by_its_name() -> None:
    for name, module in imported_for_checkers(fzero).items():
        value = getattr(fzero, name)
        if isinstance(value, type | FunctionType):
            assert pickle.loads(pickle.dumps(value)) is value, f"{module}.{name}"


def test_the_version_has_one_source() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+", fzero.__version__)
    assert "version" not in pyproject["project"]
    assert pyproject["tool"]["hatch"]["version"]["path"] == "fzero/__init__.py"
    citation = (ROOT / "CITATION.cff").read_text()  # a copy: what cites it reads no Python
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [fzero.__version__]


def test_the_package_says_that_it_is_typed() -> None:
    assert files("fzero").joinpath("py.typed").is_file()


def test_an_interpreter_is_found_that_only_a_version_manager_has(tmp_path: Path) -> None:
    """Its shim on the PATH is there and refuses to run."""
    mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
    shim = tmp_path / "shims" / f"python{mine}"
    kept = tmp_path / "pyenv" / "versions" / f"{mine}.9" / "bin" / "python3"
    for file in (shim, kept):
        file.parent.mkdir(parents=True)
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    kept.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    kept.chmod(0o755)
    there = {"PATH": f"{shim.parent}:/bin:/usr/bin", "HOME": str(tmp_path)}

    def find(version: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / ".ci" / "find-python"), version]
        env = there | {"PYENV_ROOT": str(kept.parents[3])}
        return subprocess.run(command, env=env, capture_output=True, text=True)

    found = Path(find(mine).stdout.strip())
    assert found.is_file() and found != shim
    missing = find("2.99")
    assert missing.returncode == 1 and "2.99" in missing.stderr


def test_sources_are_ascii() -> None:
    folders = ("fzero", "tests", "examples", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 500
    odd = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    }
    assert odd == set()
