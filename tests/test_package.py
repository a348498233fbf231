"""What a user gets with `import fzero`: names, version, types, and nothing that was not asked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

import fzero

ROOT = Path(__file__).parent.parent


def test_dir_shows_the_public_names_and_no_module_behind_them() -> None:
    assert set(dir(fzero)) == {*fzero.__all__, "__version__"}


def test_every_function_and_class_of_the_package_is_public() -> None:
    held = {
        name
        for name, value in vars(fzero).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    modules = {name for name in fzero.__all__ if isinstance(getattr(fzero, name), ModuleType)}
    assert held == set(fzero.__all__) - modules
    assert modules == {"adapter", "checkpoint", "codecs", "optim", "plot", "state"}


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


def test_the_parts_are_there_after_import_and_matplotlib_is_not() -> None:
    look = "import sys, fzero; fzero.plot.partition_map, fzero.checkpoint.save"
    done = subprocess.run(
        [sys.executable, "-c", f"{look}; print('matplotlib' in sys.modules)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "False\n", done.stderr


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
