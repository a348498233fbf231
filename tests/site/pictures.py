"""Run docs/pictures.md and store the pictures that it draws: python -m tests.site.pictures."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from pathlib import Path

from tests.site.tables import ROOT

PAGE = ROOT / "docs" / "pictures.md"
STORED = ROOT / "docs" / "_static" / "pictures"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the blocks of the page, as one program, in a new folder; keep what it draws."""
    import matplotlib

    matplotlib.rcParams["savefig.dpi"] = 90
    STORED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec("\n".join(BLOCK.findall(PAGE.read_text(encoding="utf-8"))), {"__name__": "pictures"})
        for path in sorted(Path(folder).glob("*.png")):
            print(shutil.copy(path, STORED))


if __name__ == "__main__":
    main()
