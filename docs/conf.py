"""How Sphinx builds the site: `make docs`. Warnings are errors there."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
# Notebooks and code cells run in kernels of their own, in a copy of their folder: by this they find
# fzero, and the demo job's package in examples/.
_PATHS = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fzero  # noqa: E402

project = "fzero"
author = "the authors of fzero"
copyright = f"2026, {author}"
version = release = fzero.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_title = f"fzero {release}"
exclude_patterns = ["_build", "**/README.md"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # seconds for a cell, also on a machine that does other things
nb_merge_streams = True

smartquotes = False  # p' and "mean" mean what they say
default_role = "literal"  # the docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_preprocess_types = False


def copy_notebooks(app: Any) -> None:
    """Take the notebooks into the site: Sphinx reads nothing outside of its folder."""
    target = HERE / "notebooks"
    target.mkdir(exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copyfile(path, target / path.name)


# What reStructuredText would read as markup, and the docstrings mean as it stands.
_MARKUP = re.compile(r"[*|\\]|_(?=\W|$)")
_SPAN = re.compile(r"(`[^`\n]+`)")
_COLON = "\N{MODIFIER LETTER COLON}"  # stands for a colon, while napoleon reads
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example):\s*$")


def as_restructured_text(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Let a docstring mean in reStructuredText what it says as plain text.

    Markup characters outside of `code` and of examples are escaped; a block that is indented, and
    belongs to no section, is shown as it is (equations, pictures, tables of names).
    """
    done: list[str] = []
    section = literal = doctest = False
    for line in lines:
        bare = line.strip()
        indented = line.startswith(" ")
        if _SECTION.match(line):
            section, literal = True, False
        elif bare and not indented:
            section = literal = False
        if indented and not section and not literal and bare and (not done or not done[-1].strip()):
            done += ["::", ""]
            literal = True
        doctest = bare.startswith(">>>") or (doctest and bool(bare))
        done.append(line if literal or doctest else _escaped(line))
    if what in ("attribute", "data", "property") and done:
        done[0] = done[0].replace(":", _COLON)  # else napoleon takes what is before it for a type
    lines[:] = done


def with_its_colons(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Put the colons back that `as_restructured_text` has hidden from napoleon."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def _escaped(line: str) -> str:
    parts = _SPAN.split(line)
    return "".join(
        part
        if part.startswith("`") and part.endswith("`") and len(part) > 1
        else _MARKUP.sub(lambda found: "\\" + found.group(), part)
        for part in parts
    )


_BACK = re.compile(r'(id="([^"]+)">\n<a class="viewcode-back") href="([^"#]*)\.html#[^"]*"')


def with_links_back(app: Any, pagename: str, template: str, context: Any, doctree: Any) -> None:
    """Let each "[docs]" of a source page lead to the name under which it is documented.

    viewcode takes the module of the first one for all of a file, and lists modules without source.
    What has no anchor loses its link.
    """
    if pagename == "_modules/index":
        other = r'<li><a href="(?!fzero)[^"]*">[^<]*</a></li>\n'
        context["body"] = re.sub(other, "", context["body"])
    if not pagename.startswith("_modules/fzero"):
        return
    module = pagename.removeprefix("_modules/").replace("/", ".")
    documented = app.env.get_domain("py").objects

    def back(found: re.Match[str]) -> str:
        opened, name, link = found.groups()
        page = posixpath.normpath(posixpath.join(posixpath.dirname(pagename), link))
        names = [x for x in documented if x.endswith(f".{name}") and documented[x].docname == page]
        # Of several that of a package that the file is in.
        names.sort(key=lambda x: (not module.startswith(x.removesuffix(f".{name}")), len(x)))
        return f'{opened} href="{link}.html#{documented[names[0]].node_id}"' if names else opened

    context["body"] = _BACK.sub(back, context["body"])


def setup(app: Any) -> None:
    """Connect them: the docstrings before and after napoleon (500) reads their sections."""
    app.connect("html-page-context", with_links_back)
    app.connect("builder-inited", copy_notebooks)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)
    app.connect("autodoc-process-docstring", with_its_colons, priority=900)
