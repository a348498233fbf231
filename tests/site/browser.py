"""How wide a page of the site is in a browser, where Chromium is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAME = next(
    (name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), ""
)
_SCRIPT = """<script>addEventListener("load", () => {
const right = (name) => document.querySelector(name).getBoundingClientRect().right;
document.title = "SIZES" + JSON.stringify({
  window: innerWidth, page: document.documentElement.scrollWidth,
  text: right(".content"), contents: right(".toc-drawer")});
})</script></body>"""
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom")
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")


def sizes(page: Path, width: int) -> dict[str, Any]:
    """Return where the text and the right column of a page end, in a window of `width` pixels."""
    copy = page.with_name(f"measured-{page.name}")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", _SCRIPT), encoding="utf-8")
    command = [NAME, *_OPTIONS, *_QUIET, f"--window-size={width},900", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    copy.unlink()
    found = re.search(r"SIZES(\{.*?\})", done.stdout)
    assert found, done.stderr
    return json.loads(found.group(1).replace("&quot;", '"'))
