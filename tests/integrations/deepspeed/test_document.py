"""docs/deepspeed_config.md says what the code does."""

from __future__ import annotations

import contextlib
import io
import re

from tests.integrations.deepspeed.table import DOCUMENT, with_tables


def test_the_tables_of_the_document_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert text == with_tables(text), "run: python -m tests.integrations.deepspeed.table"


def test_the_example_of_the_document_prints_what_it_says() -> None:
    example, printed = re.findall(r"```(?:python)?\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[:2]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, str(DOCUMENT), "exec"), {})
    assert out.getvalue() == printed
