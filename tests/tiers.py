"""What a push runs, and what waits for the night.

`make test` runs a few cases of each test function: rows in which every value of each argument
occurs (every pair, where `sparse(2)` asks for it), and of these as many as take PUSH_S seconds, but
at least one. A function of which one case takes longer than LONG_S waits, unless it is marked
`smoke`. `make nightly` runs all, and writes to tests/costs.json what each function took, and the
digests of what some read. So a function that is new, or has more rows than the night has seen,
runs them on a push, and so does one whose module names TIER_INPUTS that have changed since.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.covering import Axes, few

ROOT = Path(__file__).parent.parent
COSTS = ROOT / "tests" / "costs.json"
PUSH_S = 0.6  # of each test function, on a push
LONG_S = 2.0  # a case that takes longer waits for the night


def choose(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what waits for the night."""
    costs = json.loads(COSTS.read_text()) if COSTS.exists() else {"functions": {}, "inputs": {}}
    functions: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        functions[function_of(item)].append(item)
    for name, cases in functions.items():
        count, seconds = costs["functions"].get(name, (0, 0.0))
        module = cases[0].getparent(pytest.Module)
        inputs = getattr(module.obj, "TIER_INPUTS", ()) if module else ()
        rows = _rows(cases)
        if (
            count >= len(rows)
            and not cases[0].get_closest_marker("smoke")
            and all(costs["inputs"].get(path) == digest(path) for path in inputs)
        ):
            most = 0 if seconds > LONG_S else max(1, round(PUSH_S / max(seconds, 0.001)))
            rows = random.Random(name).sample(rows, min(most, len(rows)))
        chosen = {*map(id, rows)}
        for case in cases:
            if id(case) not in chosen:
                case.add_marker(pytest.mark.slow)


def name_of(item: pytest.Item) -> str:
    """Return the name of a test, without the group that pytest-xdist adds to it."""
    grouped = item.get_closest_marker("xdist_group") and item.nodeid.rpartition("@")[0]
    return grouped or item.nodeid


def function_of(item: pytest.Item) -> str:
    """Return the name of a test without the values of its arguments."""
    return name_of(item).partition("[")[0]


def _rows(cases: list[Any]) -> list[Any]:
    """Return cases in which every value of each argument, or all of `sparse`'s many, occur."""
    cases = [case for case in cases if not case.get_closest_marker("slow")]
    if len(cases) < 2 or not all(hasattr(case, "callspec") for case in cases):
        return cases
    mark = cases[0].get_closest_marker("sparse")
    return [cases[n] for n in few([*map(arguments, cases)], *(mark.args if mark else ()))]


def arguments(case: pytest.Function) -> dict[str, Any]:
    """What each `parametrize` gave a case, compared by identity: values need no hash.

    Arguments of one `parametrize` are one axis, unless they are of `covered`.
    """
    params = case.callspec.params
    names = (mark.args[0] for mark in case.iter_markers("parametrize"))
    axes: list[Sequence[str]] = []
    for given in names:
        together = given.split(",") if isinstance(given, str) else given
        axes += [(name,) for name in given] if isinstance(given, Axes) else [together]
    return {str(axis): tuple(id(params[name.strip()]) for name in axis) for axis in axes}


@functools.cache
def digest(path: str) -> str:
    """Return the digest of a file, or of all files of a folder that git does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", path]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    total = hashlib.sha256()
    for name in sorted(names.splitlines()):
        if (ROOT / name).is_file():  # else it was removed, and not committed yet
            total.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return total.hexdigest()[:16]
