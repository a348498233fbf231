"""An odd manifest with a right checksum: refused by the name of the field, whatever it holds."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.checkpoint import CheckpointError, load, save
from fzero.errors import LayoutError
from tests.checkpoint.forge import body_of, edit, rewrite, seal
from tests.checkpoint.states import contents, snapshot
from tests.checkpoint.test_foreign import _refused, _state
from tests.strategies import same

FIELDS: dict[str, tuple[list[Any], str]] = {
    "counters/step": ([None, "7", -1, 1.5, float("nan"), 10**400, True, [], {}, 2**63], "step is"),
    "counters/optimizer/count": ([None, "7", -1, float("inf"), 10**400, True, []], "count is"),
    "counters/scale/scale": ([0.0, 1e39, float("nan"), "64"], "scale/scale is"),
    "counters/scale/good_updates": ([-1, 2**31, 1.0], "good_updates is"),
    "counters/scale/no_such": ([1], "has the name 'no_such'"),
    "origin/ranks": ([0, 10**12, "2"], "origin/ranks is"),
    "origin/optimizer": ([7], "origin/optimizer is"),
    "leaves": ([None, "7", [1], {"w": 7}], "leaves"),
    "slots": ([None, {"exp_avg": 7}, {"exp_avg": {"w": 7}}], "slots"),
    "module/buffers": ([[], {"mean": {}}, {"mean": {"0": 7}}, {"mean": {"x": "y"}}], "buffers"),
    "module/options": ([{}, [7]], "options"),
    "tensors": ([[], {"w": 7}, {"w": {"dtype": 7, "chunks": []}}], "tensors"),
    "extra": ([None, [1]], "extra is"),
    "more": ([1], "has the name 'more'"),
    "data": (
        ["/etc", "../elsewhere", "..", ".", "", "data-0123456789abcdef/../..", "data-x", 7, []],
        "data is",
    ),
    "files": ([[], {"x": [1]}, {"x": [-1, 0]}, {"x": [10**400, 0]}, {"x": ["1", 0]}], "files"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_field_is_refused_by_name(field: str, tmp_path: Path) -> None:
    save(tmp_path, _state())
    good, (values, match) = body_of(tmp_path), FIELDS[field]
    most, _, last = field.rpartition("/")
    for value in values:
        body = copy.deepcopy(good)
        functools.reduce(dict.__getitem__, filter(None, most.split("/")), body)[last] = value
        seal(tmp_path, body)
        _refused(tmp_path, f"damaged: .*checkpoint.json is no manifest: .*{match}")


@pytest.mark.parametrize("name", ["../x", "/x", "..", "a\\b"])
def test_files_have_plain_names(name: str, tmp_path: Path) -> None:
    save(tmp_path, _state())
    edit(tmp_path, lambda body: body["files"].update({name: [1, 2]}))
    _refused(tmp_path, "manifest/files has the name")


def test_fields_that_lack_are_refused(tmp_path: Path) -> None:
    save(tmp_path, _state())
    body = body_of(tmp_path)
    for key in body.keys() - {"kept", "tied"}:  # which checkpoints of before had not
        seal(tmp_path, {name: value for name, value in body.items() if name != key})
        _refused(tmp_path, "another format" if key == "format" else f"manifest lacks '{key}'")


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return found + [path for key, child in items for path in _paths(child, (*at, key))]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.data(), json_values)
def test_any_value_at_any_place_loads_or_is_refused_by_name(data: Any, value: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        path, state = Path(name), _state()
        save(path, state, extra={"epoch": 3})
        body = body_of(path)
        *most, last = data.draw(st.sampled_from(_paths(body)))
        where = body
        for key in most:
            where = where[key]
        where[last] = value
        seal(path, body)
        into = _state(stage=2)
        before = snapshot(into)
        try:
            loaded = load(path, into, rng=False)
        except (CheckpointError, LayoutError) as error:
            assert "Fix: " in str(error)
        else:
            found, wanted = contents(loaded), contents(state)
            counters = ("step", "count")  # another number of updates is a fair one
            same(
                {name: x for name, x in found.items() if name not in counters},
                {name: x for name, x in wanted.items() if name not in counters},
            )
        same(into, before)


@pytest.mark.parametrize(
    "text", ["", "7", "null", '{"crc32": 1}', "[" * 10**5, '{"a": ' * 10**5, "\ud800", "1" * 5000]
)
def test_other_files_of_that_name_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    _refused(tmp_path, "damaged: .*checkpoint.json is no manifest")


def test_a_folder_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").mkdir()
    _refused(tmp_path, "damaged: .*checkpoint.json is a folder, and no file")


@pytest.mark.parametrize(
    "text", ["", "{}", '{"torch": "AAAA", "python": [3, [1], null]}', '{"torch": 7, "python": 7}']
)
def test_odd_random_generators_are_refused(text: str, tmp_path: Path) -> None:
    save(tmp_path, _state())
    rewrite(tmp_path, "rng-00000.json", text.encode())
    _refused(tmp_path, "has no states of random generators")
    load(tmp_path, _state(), rng=False)
