"""Write the tables of docs/ that are made of code or of measurements.

python -m tests.site.tables      writes them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- The tables below are made by tests/site. -->", "<!-- End of the tables. -->"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def with_tables(text: str, tables: str) -> str:
    """Return a document with the tables in their place."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables.strip()}\n\n{END}{rest.partition(END)[2]}"


def documents() -> dict[Path, Callable[[], str]]:
    """Return what makes the tables of each document."""
    from tests.site import invariance, performance, support

    return {
        ROOT / "docs" / "invariance.md": invariance.tables,
        ROOT / "README.md": performance.short,
        ROOT / "docs" / "performance.md": performance.headline,
        ROOT / "benchmarks" / "results" / "README.md": performance.archive,
        ROOT / "docs" / "support.md": support.tables,
    }


if __name__ == "__main__":
    for path, tables in documents().items():
        path.write_text(with_tables(path.read_text(encoding="utf-8"), tables()), encoding="utf-8")
