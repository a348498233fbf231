"""Run docs/pictures.md and store the pictures that it draws: python -m tests.site.pictures.

Beside them `drawn.json` has a hash of what each was drawn from: the data of today's code, and
the code that draws. A test compares them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.site.tables import ROOT

PAGE = ROOT / "docs" / "pictures.md"
STORED = ROOT / "docs" / "_static" / "pictures"
HASHES = STORED / "drawn.json"
DRAWING = ROOT / "fzero" / "tools" / "plot"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

DATA: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "partition.png": lambda page: [one.to_dict() for one in page["maps"]],
    "memory.png": lambda page: page["memory"].to_dict(),
    "stages.png": lambda page: [*(one.to_dict() for one in page["memories"]), page["kept"]],
}
"""What each picture is drawn from, of the names that the page has bound."""


def page_in(folder: str | Path) -> dict[str, Any]:
    """Run the blocks of the page, as one program, in a folder; return the names that it binds."""
    page: dict[str, Any] = {"__name__": "pictures"}
    with contextlib.chdir(folder):
        torch.manual_seed(0)
        exec("\n".join(BLOCK.findall(PAGE.read_text(encoding="utf-8"))), page)
    return page


def hashes(page: Mapping[str, Any]) -> dict[str, str]:
    """Return the hash of each picture: of its data, and of the code of the room that draws."""
    code = hashlib.sha256()
    for path in sorted(DRAWING.glob("*.py")):
        code.update(path.name.encode() + path.read_bytes())
    found = {}
    for name, data in DATA.items():
        text = json.dumps(_rounded(data(page)), sort_keys=True, default=str)
        found[name] = hashlib.sha256(code.digest() + text.encode()).hexdigest()[:16]
    return found


def _rounded(x: Any) -> Any:
    """Return data with floats of nine digits: a sum in another order is the same picture."""
    if isinstance(x, float):
        return float(f"{x:.9g}")
    if isinstance(x, Mapping):
        return {str(key): _rounded(value) for key, value in x.items()}
    return [_rounded(one) for one in x] if isinstance(x, list | tuple) else x


def main() -> None:
    """Draw the pictures of the page in a new folder; keep them, and the hashes beside them."""
    import matplotlib

    matplotlib.rcParams["savefig.dpi"] = 90
    STORED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = page_in(folder)
        for path in sorted(Path(folder).glob("*.png")):
            print(shutil.copy(path, STORED))
    HASHES.write_text(json.dumps(hashes(page), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
