"""What each field of the manifest can be. Pure."""

from __future__ import annotations

import re

from fzero.errors.json_form import ANYTHING, TEXTS, DictForm, integer, natural, text
from fzero.transforms.kept import FACTS, NUMBERS

DATA = re.compile(r"data-[0-9a-f]{16}")

PLACE = re.compile(r"[^=,]+=[0-9]+of[0-9]+(,[^=,]+=[0-9]+of[0-9]+)*")
"""The name of the folder of one place of a mesh."""


def _is_data(value: object) -> bool:
    return isinstance(value, str) and DATA.fullmatch(value) is not None


COMMIT_FORM = DictForm(must={"data": _is_data, "places": [text]})
"""The body of checkpoint-<axes>.json, which says what all places of a mesh have saved together."""

_CHUNK = (natural, integer(1, 2**63), text, natural, natural)
MANIFEST_FORM = DictForm(
    must={
        "origin": DictForm(
            must={
                "stage": integer(0, 4),
                "ranks": integer(1, 2**20),  # for each of which room may be made
                "torch": text,
                "optimizer": text,
            },
            may={**FACTS, "logical": text},
        ),
        "leaves": TEXTS,
        "slots": DictForm(others=TEXTS),
        "counters": NUMBERS,
        "module": DictForm(
            must={
                "buffers": DictForm(others=DictForm(must={"0": text}, others=text, names="[0-9]+")),
                "options": [ANYTHING],
            }
        ),
        "tensors": DictForm(others=DictForm(must={"dtype": text, "chunks": [_CHUNK]})),
        "data": _is_data,
        # No folder, not . and not ..
        "files": DictForm(
            others=(natural, integer(0, 2**32)),
            names="[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*",
        ),
        "extra": ANYTHING,
    },
    may={
        "tied": TEXTS,
        "kept": DictForm(
            others=DictForm(
                must={"form": text, "optional": lambda x: type(x) is bool, "values": TEXTS}
            )
        ),
    },
)
"""The body of checkpoint.json, without its format."""
