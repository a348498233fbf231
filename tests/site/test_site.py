"""What the site says is what the code has: tables, the reference, links. And it can be built."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import fzero
from fzero.__main__ import _parser
from tests.site.browser import NAME, sizes
from tests.site.tables import BEGIN, END, ROOT, documents, with_tables

TIER_INPUTS = ("docs",)  # tests/tiers.py: a push that changes them runs these tests

DOCS = ROOT / "docs"
TOOLS = (ROOT / "fzero" / "tools" / "__init__.py").read_text()
PAGES = [path for path in DOCS.rglob("*.md") if "_build" not in path.parts]
TARGET = re.compile(r"^\.\. auto(?:class|exception|function|data|module):: (\S+)$", re.MULTILINE)
SAME = re.compile(r"^- `(fzero\.\S+)` is `(fzero\.\S+)`$", re.MULTILINE)
PARTS = ("state", "optim", "adapter", "integrations.deepspeed", "checkpoint", "data", "plot")
RECORDS = (
    "certify",
    "trace",
    "plan",
)  # parts with records that a function of fzero returns


def reference() -> str:
    return "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))


def look_up(name: str) -> Any:
    return functools.reduce(getattr, name.split(".")[1:], fzero)


def public_names(module: str) -> list[str]:
    """The names that the `__init__` of a part gives again, `from x import name as name`."""
    hasattr(importlib.import_module(module), "__all__")  # a second name is imported now
    path = sys.modules[module].__file__
    assert path is not None
    found = [
        alias.name
        for node in ast.parse(Path(path).read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]
    assert len(found) >= 3
    return [f"{module}.{name}" for name in found]


@pytest.mark.parametrize("path", list(documents()), ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == with_tables(text, documents()[path]()), "run: python -m tests.site.tables"


def test_the_reference_has_every_public_name_and_no_other() -> None:
    text = reference()
    same = dict(SAME.findall(text))
    listed = [*TARGET.findall(text), *same]
    wanted = {f"fzero.{name}" for name in fzero.__all__}
    seen = re.findall(r"^    from fzero\.tools\.\w+ import \w+ as (\w+)$", TOOLS, re.MULTILINE)
    wanted.update(f"fzero.tools.{name}" for name in seen)
    for part in PARTS:
        wanted.update(public_names(f"fzero.{part}"))
    wanted.update(f"fzero.codecs.{name}" for name in fzero.codecs.__all__)
    wanted -= {"fzero.codecs", "fzero.adapter.deepspeed", *(f"fzero.{part}" for part in PARTS)}
    records = {name for part in RECORDS for name in public_names(f"fzero.{part}")}
    records |= {f"fzero.doctor.{name}" for name in fzero.tools.doctor.__all__}
    assert len(listed) == len(set(listed))
    assert (wanted - set(listed), set(listed) - wanted - records) == (set(), set())
    for name, other in same.items():
        assert look_up(name) is look_up(other) and other in listed


def test_every_command_is_on_its_page() -> None:
    commands = next(a for a in _parser()._actions if a.choices)
    assert commands.choices is not None
    text = (DOCS / "command_line.md").read_text()
    assert all(f"| `python -m fzero {name}` |" in text for name in commands.choices)


def test_every_transform_has_a_page_and_a_row() -> None:
    from tests.site.support import TRANSFORMS

    index = (DOCS / "transforms" / "index.md").read_text()
    pages = {path.stem for path in (DOCS / "transforms").glob("*.md")} - {"index"}
    assert pages == set(TRANSFORMS)
    assert all(f"| [`{name}`]({name}.md) |" in index for name in pages)
    keywords = re.findall(r"`Engine\((\w+)=\)`", index)
    assert len(keywords) == 9
    assert set(keywords) <= set(inspect.signature(fzero.adapter.Engine).parameters)


def test_every_link_leads_to_a_page() -> None:
    missing = []
    for path in (ROOT / "README.md", *PAGES):
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?://)([^)#\s]+)[^)]*\)", text):
            # notebooks are copied into the site when it is built
            places = (path.parent / link, ROOT / "notebooks" / Path(link).name)
            missing += [] if any(place.exists() for place in places) else [(path.name, link)]
    assert missing == []


def slug(heading: str) -> str:
    """The anchor that a Git host, and the site, give to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_anchor_of_a_link_is_a_heading_of_its_page() -> None:
    missing = []
    for path in (ROOT / "README.md", *PAGES):
        text = path.read_text(encoding="utf-8")
        for link, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", text):
            page = (path.parent / link).read_text(encoding="utf-8") if link else text
            headings = map(slug, re.findall(r"^#+ (.+?)\s*$", page, re.MULTILINE))
            missing += [] if anchor in headings else [(path.name, f"{link}#{anchor}")]
    assert missing == []


SHELL = re.compile(
    r"^    (?!#)(?:\w+=\S+ )*(?:make|pip|python|torchrun|srun|kill) .*\s#", re.MULTILINE
)


def test_no_command_has_a_comment_behind_it() -> None:
    """In an interactive zsh it is no comment: its words are arguments."""
    texts = {p.name: p.read_text(encoding="utf-8") for p in (*ROOT.glob("*.md"), *PAGES)}
    assert {name: x for name, text in texts.items() if (x := SHELL.findall(text))} == {}


def test_every_page_is_in_the_contents() -> None:
    found = set()
    for path in PAGES:
        for tree in re.findall(r"^```{toctree}\n(.*?)^```", path.read_text(), re.M | re.S):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            found |= {(path.parent / f"{name}.md").resolve() for name in names}
    missing = [path.relative_to(DOCS).as_posix() for path in PAGES if path.resolve() not in found]
    assert missing == ["index.md"], "put the page into a toctree, of docs/index.md for instance"


def build(folder: Path, *options: str, timeout_s: float) -> None:
    pytest.importorskip("myst_nb")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-E", "-b", "html", *options]
    done = subprocess.run(
        [*command, str(DOCS), str(folder)], capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def broken_links(site: Path) -> list[tuple[str, str]]:
    """The links within a built site whose page or anchor is not there, with their pages."""
    texts = {path: path.read_text(encoding="utf-8") for path in site.resolve().rglob("*.html")}
    anchors = {path: {"", *re.findall(r'\bid="([^"]+)"', text)} for path, text in texts.items()}
    missing = []
    for path, text in texts.items():
        for link, anchor in re.findall(r'<a\b[^>]* href="(?!\w+:)([^"#?]*)#?([^"]*)"', text):
            to = (path.parent / link).resolve() if link else path
            good = unquote(anchor) in anchors[to] if to in anchors else to.is_file()
            missing += [] if good else [(path.relative_to(site.resolve()).as_posix(), anchor)]
    return missing


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    build(tmp_path, "-D", "nb_execution_mode=off", timeout_s=280)
    state = (tmp_path / "reference" / "state.html").read_text()
    assert "All ranks: those of" in state  # a docstring of a property, whole
    # the outputs that are stored with a notebook
    assert (tmp_path / "notebooks" / "01_one_step.html").read_text().count("<img") >= 2
    assert broken_links(tmp_path) == []
    assert "copy.js" in (tmp_path / "quickstart.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_site_is_built_with_what_its_cells_show(tmp_path: Path) -> None:
    build(tmp_path, timeout_s=1400)
    page = (tmp_path / "reference" / "transforms.html").read_text()
    assert "GPipe" in page and "fzero.accumulate" in page
    assert "cells give the step of one process" in (tmp_path / "invariance.html").read_text()
    assert (tmp_path / "notebooks" / "01_one_step.html").read_text().count("<img") >= 2
    for page, width in itertools.product(("concepts", "performance"), (1366, 1440) if NAME else ()):
        seen = sizes(tmp_path / f"{page}.html", width)
        assert seen["text"] <= seen["contents"] <= seen["page"] <= seen["window"] == width


@pytest.mark.parametrize("address", ["", "https://host/owner/fzero/blob/main"])
def test_the_readme_of_the_wheel_has_no_relative_link(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface: Any = types.ModuleType("interface")  # what builds a wheel need not be here
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location("readme", ROOT / ".ci" / "readme.py")
    assert spec is not None and spec.loader is not None
    readme: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    text = readme.with_links((ROOT / "README.md").read_text(encoding="utf-8"), address)
    assert re.findall(r"\]\((?!https://)", text) == []
    assert text.count(f"]({address}/docs/") >= 20 if address else "[FAQ]" not in text
