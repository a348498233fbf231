"""The stored pictures are those that today's code draws, by what they are drawn from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tests.site.pictures import DATA, HASHES, STORED, hashes, page_in


def test_the_stored_pictures_are_of_todays_code(tmp_path: Path) -> None:
    page = page_in(tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in STORED.glob("*.png")} == DATA.keys()
    stored = json.loads(HASHES.read_text(encoding="utf-8"))
    assert stored == hashes(page), "draw them again: python -m tests.site.pictures"
    page["memory"] = dataclasses.replace(page["memory"], title="another")
    other = hashes(page)
    assert [name for name in DATA if other[name] != stored[name]] == ["memory.png"]
