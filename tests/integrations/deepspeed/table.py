"""The tables of docs/deepspeed_config.md, made of names.json.

python -m tests.integrations.deepspeed.table      writes them
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fzero.integrations.deepspeed._config_keys import KEYS, NAMES, RENAMED, Key

DOCUMENT = Path(__file__).parents[3] / "docs" / "deepspeed_config.md"
BEGIN, END = "<!-- The tables below are made of the code. -->", "<!-- End of the tables. -->"


def tables() -> str:
    """Return the tables, in Markdown."""
    used = [key for key in KEYS.values() if key.kind]
    return "\n".join(
        [
            "## Keys that are used",
            "",
            _table(("key", "default", "here"), [_used(key) for key in used]),
            "## Keys that are harmless",
            "",
            "Any value is taken: it changes nothing here.",
            "",
            _table(("key", "default", "why"), _rows("harmless")),
            "## Keys that must have DeepSpeed's default",
            "",
            _table(("key", "default", "in the place of another value"), _rows("refused")),
            "## Sections that must be off",
            "",
            _table(("section", "off", "in its place"), _rows("off")),
            "## Other names",
            "",
            _table(("name", "stands for"), [_renamed(name) for name in RENAMED]),
        ]
    ).rstrip()


def with_tables(text: str) -> str:
    """Return the document with the tables in their place."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _rows(use: str) -> list[tuple[str, ...]]:
    keys = [key for key in KEYS.values() if key.use == use]
    return [(f"`{key.path}`", _default(key), key.says) for key in keys]


def _used(key: Key) -> tuple[str, ...]:
    says = f"`Engine({key.says}=)`" if key.use == "option" else key.says
    return f"`{key.path}`", _default(key), says


def _default(key: Key) -> str:
    if key.use == "off":
        switch, off = key.default
        return "left out" if switch is None else f"`{switch}` = {_shown(off)}"
    return _shown(key.default)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if value == sys.maxsize:
        return "sys.maxsize"
    if isinstance(value, bool):
        return str(value).lower()
    return (
        f"{value:g}" if isinstance(value, float) else f"{value:,}" if value != str(value) else value
    )


def _renamed(name: str) -> tuple[str, ...]:
    shown = ": true is cpu, false is none" if name in NAMES["renamed_switches"] else ""
    return f"`{name}`", f"`{RENAMED[name]}`{shown}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
