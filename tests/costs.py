"""What each test takes: wall and CPU seconds, those of the processes that it starts included.

    python -m pytest -p tests.costs --costs costs.jsonl tests/gloo
    python -m tests.costs costs.jsonl            # a table by family, file and test
    python -m tests.costs costs.jsonl --keep     # tests/costs.json, by which tests/tiers.py chooses

A line of the file is `[test, outcome, wall_s, cpu_s]`. The CPU seconds of a test are those that its
process, the processes below it, and those that ended meanwhile took between its set-up and its
tear-down; ranks that are reused by the next test (tests/ranks) count where they run.
"""

from __future__ import annotations

import ast
import collections
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers import COSTS, ROOT, digest, name_of

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--costs FILE`."""
    parser.addoption("--costs", help="append what each test takes to this file, as JSON lines")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure one test, from its set-up to its tear-down."""
    began_s, cpu_began_s = time.perf_counter(), _cpu_s(os.getpid())
    try:
        return (yield)
    finally:
        took_s, cpu_s = time.perf_counter() - began_s, _cpu_s(os.getpid()) - cpu_began_s
        if path := item.config.getoption("--costs"):
            with Path(path).open("a") as file:
                outcome = item.stash.get(_outcome, "passed")
                file.write(
                    json.dumps([name_of(item), outcome, round(took_s, 3), round(cpu_s, 2)]) + "\n"
                )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep the worst outcome of the three phases of a test, and print a failure at once."""
    report = yield
    if report.outcome != "passed":
        item.stash[_outcome] = report.outcome
    if report.failed and (path := item.config.getoption("--costs")):
        with Path(path).with_suffix(".failed").open("a") as file:
            file.write(f"{item.nodeid} ({report.when})\n{report.longreprtext}\n\n")
    return report


_outcome = pytest.StashKey[str]()


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, of its children that ended, and of those that live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return 0.0  # it ended meanwhile: its parent has its seconds
    return sum(map(int, fields[11:15])) / _TICKS_PER_S + sum(map(_cpu_s, children))


def _table(path: Path) -> Iterator[str]:
    """Return the lines of the table: families, then the forty files that take the most."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for title, depth, count in ("family", 2, None), ("file", None, 40), ("test", 0, 40):
        sums: collections.defaultdict[str, list[float]] = collections.defaultdict(lambda: [0, 0, 0])
        for test, _, wall_s, cpu_s in rows:
            file = test.partition("::")[0]
            name = test if depth == 0 else "/".join(file.split("/")[:depth])
            sums[name] = [a + b for a, b in zip(sums[name], (1, wall_s, cpu_s), strict=True)]
        yield f"{'tests':>7} {'wall_s':>9} {'cpu_s':>9}  {title}"
        largest = sorted(sums.items(), key=lambda item: -item[1][1])[:count]
        yield from (
            f"{int(n):7d} {wall:9.1f} {cpu:9.1f}  {name}" for name, (n, wall, cpu) in largest
        )
    yield f"{len(rows):7d} {sum(r[2] for r in rows):9.1f} {sum(r[3] for r in rows):9.1f}  all"


def _keep(path: Path) -> None:
    """Write for each test function the number of its cases and the mean of their seconds."""
    cases: dict[str, dict[str, float]] = {}
    for test, _, wall_s, cpu_s in map(json.loads, path.read_text().splitlines()):
        function = test.partition("[")[0]
        cases.setdefault(function, {})[test] = max(wall_s, cpu_s)
    functions = {
        name: [len(took), round(sum(took.values()) / len(took), 3)]
        for name, took in sorted(cases.items())
    }
    texts = (path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    found = (re.search(r"^TIER_INPUTS = (\(.*\))", text, re.M) for text in texts)
    inputs = {name for one in found if one is not None for name in ast.literal_eval(one[1])}
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(both)}" for name, both in functions.items()
    )
    digests = json.dumps({i: digest(i) for i in sorted(inputs)})
    COSTS.write_text(f'{{"inputs": {digests},\n"functions": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    if "--keep" in sys.argv:
        _keep(Path(sys.argv[1]))
    else:
        print(*_table(Path(sys.argv[1])), sep="\n")
