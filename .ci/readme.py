"""The README of the wheel: what a package index shows has no file beside it.

FZERO_ADDRESS, where the repository can be read on the web ("https://host/owner/fzero/blob/main"),
makes links to its files absolute; without an address they are their words alone.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


def with_links(text: str, address: str) -> str:
    """Return a text of Markdown in which no link is relative."""
    if not address:
        return LINK.sub(lambda found: "" if found[1] else found[2], text)
    raw = address.replace("/blob/", "/raw/")
    return LINK.sub(
        lambda found: f"{found[1]}[{found[2]}]({raw if found[1] else address}/{found[3]})", text
    )


class Readme(MetadataHookInterface):
    """Gives the wheel its README."""

    def update(self, metadata: dict[str, object]) -> None:
        """Set what `dynamic` in pyproject.toml leaves open."""
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        address = os.environ.get("FZERO_ADDRESS", "").rstrip("/")
        metadata["readme"] = {
            "content-type": "text/markdown", "text": with_links(text, address)
        }  # fmt: skip
