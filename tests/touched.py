"""Which tests a change touches: a map from the functions of fzero/ to the tests that run them.

    python -m pytest -p tests.touched --map tests/map.json # makes the map; `make nightly` does
    python -m tests.touched [REVISION] [-- OPTIONS]        # runs what a diff touches: `make quick`

The diff is that of the working tree to REVISION; where none is given, to HEAD, or to the commit
before it if nothing has changed since. For each function that it changes, the tests of the map that
run few other functions come first. Where the map does not know a function, those of the files that
import its file are taken, and the smoke sets of all rooms. Changed tests are run themselves.

The map knows what runs in the process of a test. What runs in ranks of their own is in the smoke
set of the real processes (the mark `smoke`).
"""

from __future__ import annotations

import argparse
import ast
import collections
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.tiers import name_of

ROOT = Path(__file__).parent.parent
MAP = ROOT / "tests" / "map.json"
MOST = 300  # tests of one diff
FOR_A_FUNCTION = 12  # tests that the map keeps of each function
FOR_A_ROOM = 8  # tests of a smoke set


class Map(NamedTuple):
    """Tests, for each function of each file the numbers of those that run it, and a smoke set."""

    tests: list[str]
    runs: dict[
        str, dict[str, list[int]]
    ]  # file -> function -> numbers of tests, the narrowest first
    smoke: list[int]

    @staticmethod
    def read() -> Map:
        """Return the map that the last night has written, or an empty one."""
        return Map(**json.loads(MAP.read_text())) if MAP.exists() else Map([], {}, [])


# Which tests a diff touches.


def main(arguments: Sequence[str]) -> int:
    """Run what the diff touches, and return pytest's status."""
    parser = argparse.ArgumentParser(prog="make quick ARGS=...", description=__doc__)
    parser.add_argument("revision", nargs="?", help="compare with this commit")
    mine = [*itertools.takewhile(lambda argument: argument != "--", arguments)]
    revision = parser.parse_args(mine).revision or ("HEAD" if _git("diff", "HEAD") else "HEAD~1")
    lines = changed(_git("diff", "--unified=0", revision))
    for name in _git("ls-files", "--others", "--exclude-standard").splitlines():
        lines[name] = {1}  # git does not know it yet, and no test of the map runs it
    files, tests = chosen(lines, Map.read())
    print(f"{len(tests)} tests in {len(files)} files are touched by the changes since {revision}.")
    if not files:
        return 0
    names = ROOT / ".pytest_cache" / "touched.json"
    names.parent.mkdir(exist_ok=True)
    names.write_text(json.dumps(tests))
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup"]
    command += ["-p", "tests.touched", "--touched", str(names), *arguments[len(mine) + 1 :], *files]
    return subprocess.run(command, cwd=ROOT).returncode


def changed(diff: str) -> dict[str, set[int]]:
    """Return for each file that is there after a diff the numbers of the lines that it changes."""
    lines: dict[str, set[int]] = {}
    for line in diff.splitlines():
        if line.startswith("+++ "):
            name = line[4:].removeprefix("b/")
        elif (hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)) and name != "/dev/null":
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(name, set()).update(range(first, first + max(count, 1)))
    return lines


def chosen(lines: dict[str, set[int]], known: Map) -> tuple[list[str], list[str]]:
    """Return the files to collect, and the tests of the map to run in them.

    A file of tests that has changed is run whole: its name is among the tests, too.
    """
    whole = [name for name in lines if re.fullmatch(r"tests/(.*/)?test_\w+\.py", name)]
    wanted: list[list[int]] = []
    unknown = any(
        name.startswith("tests/") and name.endswith(".py") and name not in whole for name in lines
    )
    for name, numbers in lines.items():
        if not (name.startswith("fzero/") and name.endswith(".py")):
            continue
        runs = known.runs.get(name, {})
        for function in functions_at((ROOT / name).read_text(), numbers):
            if function in runs:
                wanted.append(runs[function])
            else:
                unknown = True
                wanted += _of_importers(name, known)
    if unknown:
        wanted.append(known.smoke)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*wanted))
    numbers = [*dict.fromkeys(number for number in in_turn if number is not None)][:MOST]
    tests = [known.tests[number] for number in numbers]
    files = {*whole, *(test.partition("::")[0] for test in tests)}
    if any(name.startswith("fzero/") for name in lines) or unknown:
        files |= set(_with_smoke())
    files |= {f for name in lines for f in BESIDE.get(name.partition("/")[0], ())}
    return sorted(file for file in files if (ROOT / file).exists()), [*tests, *whole]


# What tests files that no test imports.
BESIDE = {
    "docs": ("tests/test_docs.py", "tests/test_words.py"),
    "README.md": ("tests/test_docs.py", "tests/test_words.py"),
    "examples": ("tests/test_examples_small.py",),
    "notebooks": ("tests/test_notebooks.py",),
    "pyproject.toml": ("tests/test_package.py",),
}


def functions_at(source: str, numbers: Iterable[int]) -> list[str]:
    """Return the functions, by qualified name, in which lines stand; "" for those in none."""
    spans = [*_functions(ast.parse(source))]
    found = {}
    for number in numbers:
        within = [name for name, first, last in spans if first <= number <= last]
        found[within[-1] if within else ""] = None
    return [*found]


def _functions(tree: ast.AST, before: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield name, first and last line of each outermost function, and of each method."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield before + node.name, first, node.end_lineno or first
        else:
            yield from _functions(
                node, f"{before}{node.name}." if isinstance(node, ast.ClassDef) else before
            )


def _of_importers(name: str, known: Map) -> list[list[int]]:
    """Return the tests of all functions of a file of fzero, and of the files that import it."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imports = re.compile(
        rf"^\s*(from {re.escape(module)} import|import {re.escape(module)}\b)", re.M
    )
    files = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fzero").rglob("*.py")
        if imports.search(path.read_text())
    ]
    return [tests for file in (name, *files) for tests in known.runs.get(file, {}).values()]


def _with_smoke() -> Iterator[str]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.smoke" in path.read_text():
            yield path.relative_to(ROOT).as_posix()


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


# The plugin: it keeps the tests that were chosen, or writes the map.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--touched FILE` and `--map FILE`."""
    parser.addoption("--touched", help="run only the tests whose names this file has")
    parser.addoption("--map", help="write who runs what to this file")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what was chosen: by name, by file, or by the mark `smoke`."""
    if not (path := config.getoption("--touched")):
        return
    names = {*json.loads(Path(path).read_text())}
    files = {name.partition("::")[0] for name in names}

    def keeps(item: pytest.Item) -> bool:
        name = name_of(item)
        file = name.partition("::")[0]
        return bool(name in names or file in names or item.get_closest_marker("smoke")) or (
            file not in files and file in BESIDE_FILES
        )

    config.hook.pytest_deselected(items=[item for item in items if not keeps(item)])
    items[:] = [item for item in items if keeps(item)]


BESIDE_FILES = {*itertools.chain.from_iterable(BESIDE.values())}


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch what runs, in each process that runs tests."""
    if config.getoption("--map"):
        config.pluginmanager.register(_Watch(config), "who-runs-what")


class _Watch:
    """Coverage with a context for each test; the process that began the tests joins the data."""

    def __init__(self, config: pytest.Config) -> None:
        import coverage

        self.path = Path(str(config.getoption("--map"))).resolve()
        self.data = self.path.with_suffix(".coverage")
        self.joins = not hasattr(config, "workerinput")
        self.coverage = coverage.Coverage(
            data_file=self.data, data_suffix=True, source=[str(ROOT / "fzero")]
        )
        if not (self.joins and config.getoption("numprocesses", None)):  # it runs tests
            self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(name_of(item))
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")

    @pytest.hookimpl(trylast=True)  # when the workers have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.coverage.current() is not None:
            self.coverage.stop()
            self.coverage.save()
        if self.joins:
            _write(self.path, self.data)


def _write(path: Path, data: Path) -> None:
    """Write the map of what the processes of the tests have seen, and remove their files."""
    import coverage

    joined = coverage.Coverage(data_file=data)
    joined.combine([str(path.parent)])
    found = joined.get_data()
    everything: dict[str, dict[str, set[str]]] = {}
    for name in sorted(found.measured_files()):
        seen = found.contexts_by_lineno(name)
        spans = [*_functions(ast.parse(Path(name).read_text()))]
        everything[Path(name).relative_to(ROOT).as_posix()] = {
            function: tests
            for function, first, last in spans
            if (tests := {t for n in range(first, last + 1) for t in seen.get(n, ()) if t})
        }
    breadth = collections.Counter(
        t for runs in everything.values() for ts in runs.values() for t in ts
    )
    tests = sorted(breadth)
    numbers = {test: number for number, test in enumerate(tests)}
    runs = {
        file: {f: [numbers[t] for t in _narrowest(ts, breadth)] for f, ts in functions.items()}
        for file, functions in everything.items()
    }
    smoke = [numbers[test] for test in _smoke(everything)]
    data.unlink(missing_ok=True)
    lines: dict[str, Any] = {
        "tests": tests,
        "runs": runs,
        "smoke": smoke,
    }
    path.write_text(json.dumps(lines, indent=None, separators=(",", ":")) + "\n")


def _narrowest(tests: set[str], breadth: collections.Counter[str]) -> list[str]:
    """Return some tests of a function: the narrowest first, of one test function after another."""
    cases: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: (breadth[test], test)):
        cases.setdefault(test.partition("[")[0], []).append(test)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*cases.values()))
    return [test for test in in_turn if test is not None][:FOR_A_FUNCTION]


def _smoke(everything: dict[str, dict[str, set[str]]]) -> Iterator[str]:
    """Yield a few tests of each folder of tests, which run the most functions together."""
    rooms: dict[str, dict[str, set[str]]] = {}
    for file, functions in everything.items():
        for function, tests in functions.items():
            for test in tests:
                room = "/".join(test.partition("::")[0].split("/")[:2])
                rooms.setdefault(room, {}).setdefault(test, set()).add(f"{file}:{function}")
    for room in sorted(rooms):
        runs = rooms[room]
        missing = set(itertools.chain.from_iterable(runs.values()))
        for _ in range(FOR_A_ROOM):
            best = max(runs, key=lambda test: (len(runs[test] & missing), test))
            if not runs[best] & missing:
                break
            yield best
            missing -= runs[best]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
