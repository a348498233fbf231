"""Put what the stages of run.sh left in a folder into one Markdown file.

    python benchmarks/gpu/merge.py benchmarks/results/gpu-run benchmarks/results

Needs nothing but Python: it also runs where there is no GPU, on files that were brought there.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ORDER = ("gpu-smoke", "gpu-cuda-bf16-w1", "gpu-cuda-masters-w1", "gpu-cuda-bf16-w2")


def tests_section(path: Path) -> str:
    """How many tests passed, failed and were skipped, and the first line of each failure."""
    verdicts: Counter[str] = Counter()
    failures = []
    seconds = 0.0
    for case in ElementTree.parse(path).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        kind = "failed" if bad is not None else "passed"
        kind = "skipped" if case.find("skipped") is not None else kind
        verdicts[kind] += 1
        seconds += float(case.get("time", 0.0))
        if bad is not None:
            words = " ".join((bad.get("message") or "").split())
            failures.append(f"- `{case.get('name')}`: {words[:300]}")
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(verdicts.items()))
    return "\n".join([f"# {path.stem}\n", f"{counts}; {seconds:.0f} s.\n", *failures, ""])


def merge(folder: Path, out: Path) -> Path:
    """Write one file, named after the machine and day of the newest part.

    Raises:
        SystemExit: the folder has no part.
    """
    parts = {path.name.split("_")[0]: path for path in sorted(folder.glob("gpu-*_*.md"))}
    results = sorted(folder.glob("gpu-tests*.xml"))
    if not parts and not results:
        raise SystemExit(
            f"{folder} has no report of a stage.\nFix: run benchmarks/gpu/run.sh smoke."
        )
    names = [name for name in ORDER if name in parts]
    names += [name for name in parts if name not in ORDER]
    sections = [parts[name].read_text() for name in names[:1]]
    sections += [tests_section(path) for path in results]
    sections += [parts[name].read_text() for name in names[1:]]
    newest = max(parts.values(), key=lambda path: path.name.split("_")[-1], default=None)
    suffix = "_".join(newest.stem.split("_")[1:]) if newest else "tests"
    path = out / f"gpu_{suffix}.md"
    path.write_text("\n".join(sections))
    return path


if __name__ == "__main__":
    print(merge(Path(sys.argv[1]), Path(sys.argv[2])))
