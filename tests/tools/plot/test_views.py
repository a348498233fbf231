"""Figure, HTML and text of the records: what they draw is what the data says."""

from __future__ import annotations

import html
import io
import sys
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import fzero
from fzero.tools.plot import (
    MissingExtraError,
    memory_timeline,
    partition_map,
    side_by_side,
)
from fzero.tools.plot.states import COLOURS, colour, legend_entries
from fzero.tools.trace import Op, Value
from tests.tools.plot.states import Case, stacked_states
from tests.tools.plot.traces import by_hand, traced

A, C = torch.arange(3, dtype=torch.float64), torch.arange(3, 6, dtype=torch.float64)
CASE = Case({"a<b>": A, "c": C}, 3, 2, 4096)  # two numbers on rank 0, one and padding on rank 1


def shown(kind: str) -> Any:
    """A record of each kind, of names that HTML has to escape."""
    gives = (Value(name="b", shape=(2,), dtype=torch.float32),)
    told: dict[str, Any] = {"phase": "forward", "reads": ("a",), "gives": gives}
    trace = by_hand([Op(name="all_gather <i>", kind="collective", wire_bytes=4, **told)])
    return {
        "map": lambda: partition_map(stacked_states(CASE)[0]),
        "memory": lambda: memory_timeline(trace),
    }[kind]()


PICTURES = ("map", "memory")


@pytest.mark.parametrize("kind", PICTURES)
def test_html_is_the_text_with_names_escaped(kind: str) -> None:
    found = shown(kind)
    text, page = repr(found), found._repr_html_()
    assert text == found.table()
    assert page == f"<pre>{html.escape(text)}</pre>"
    assert "a&lt;b&gt;" in page or "&lt;i&gt;" in page


def test_the_text_table_names_rank_placement_and_segments() -> None:
    lines = partition_map(stacked_states(CASE)[2]).table().splitlines()
    assert lines[0].split() == ["rank", "buffer", "placement", "elements", "segments"]
    assert lines[1].split() == ["0", "parameters", "sharded", "4", "a<b>[0:2]", "c[0:2]"]
    second = "1 gradients sharded 4 a<b>[2:3] padding[1] c[2:3] padding[1]"
    assert lines[5].split() == second.split()


def test_it_draws_on_given_axes() -> None:
    found = partition_map(stacked_states(CASE)[0])
    left, right = Figure().subplots(1, 2)
    assert found.draw(left) is left and left.get_legend() is not None
    assert memory_timeline(traced(3)).draw(right) is right


def test_names_that_are_gone_say_what_to_use() -> None:
    for name, use in (
        ("schedule_diff", r'trace.diff\(other, only="collectives"\)'),
        ("measured_timeline", "torch.profiler"),
        ("HookEvent", "fzero.state.hooks"),
    ):
        with pytest.raises(AttributeError, match=f"{name} is gone(.|\n)*Fix: .*{use}"):
            getattr(fzero.plot, name)
        assert not hasattr(fzero.plot, name)
    with pytest.raises(AttributeError, match="has no attribute 'schedules'"):
        _ = fzero.plot.schedules


@pytest.mark.parametrize("count", [2, 40])
def test_figures_of_small_and_large_models_are_saved(count: int) -> None:
    """Names are not read as matplotlib's own marks: mathematics that does not close would raise."""
    paths = ["_orig.w", "$x_{$", *(f"layer.{i}.weight" for i in range(count - 2))]
    params = {path: torch.ones(i + 1) for i, path in enumerate(paths)}
    maps = [partition_map(stacked_states(Case(params, s, 2, 64))[1]) for s in (0, 3)]
    figure = side_by_side(maps)
    assert len(figure.axes) == 2
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[:2] == [" _orig.w", r"\$x_{\$"] and "paler: not reduced yet" in names
    # 40 leaves and 21 colours: neighbours have one, and every leaf is in the legend.
    assert ("layer.0 to layer.1 (2 leaves)" in names) == (count == 40)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")


def test_a_bar_has_as_much_of_a_long_name_as_fits() -> None:
    path = "a_module_with_a_name." * 9 + "layer.weight"
    state = fzero.init({path: torch.ones(8), "b": torch.ones(1)}, fzero.optim.sgd(0.1), stage=0)
    written = {text.get_text() for text in partition_map(state).draw().texts}
    found = [name for name in written if name.endswith("layer.weight")]
    assert found and all(path.endswith(name) and len(name) < len(path) for name in found)
    assert "weight" not in written  # which says nothing


BLOCK = ("ln.weight", "attn.q.weight", "attn.k.weight", "mlp.0.weight", "mlp.2.weight")
MODELS = {
    "three blocks": ["wte.weight", *(f"h.{i}.{x}" for i in range(3) for x in BLOCK), "head.weight"],
    "fifty": ["wte.weight", *(f"h.{i}.{x}" for i in range(50) for x in BLOCK), "head.weight"],
    "a thousand": [f"w{i}" for i in range(1000)],
    "deep": [".".join("abcdefghij"[:n]) for n in range(1, 11)] + [f"z.{i}.w" for i in range(90)],
    "one colour each": [f"w{i}" for i in range(21)],
    "one too many": [f"w{i}" for i in range(22)],
}


@pytest.mark.parametrize("name", MODELS)
def test_each_leaf_is_in_one_entry_of_the_legend_and_each_entry_has_its_colour(name: str) -> None:
    leaves = tuple(MODELS[name])
    labels, of_leaf = legend_entries(leaves)
    assert len(of_leaf) == len(leaves) and sorted(set(of_leaf)) == list(range(len(labels)))
    assert list(of_leaf) == sorted(of_leaf)  # neighbours
    assert len(labels) <= COLOURS == len({colour(i) for i in range(COLOURS)})
    counts = [of_leaf.count(i) for i in range(len(labels))]
    told = [int(label.split("(")[1].split()[0]) if "(" in label else 1 for label in labels]
    assert told == counts
    if len(leaves) > COLOURS:
        assert len(labels) > COLOURS // 2  # few colours are left over
    if name in ("three blocks", "fifty"):
        assert labels[0] == "wte.weight" and labels[-1] == "head.weight"  # no block's colour


def test_texts_of_large_models_fit_into_a_terminal() -> None:
    params = {path: torch.ones(4) for path in MODELS["fifty"]}
    found = partition_map(stacked_states(Case(params, 3, 2, 64))[1])
    lines = found.table().splitlines()
    assert max(map(len, lines)) <= 120 and len(found.segments) > 100
    shown = lines[1].split()[4:]
    assert (
        shown[-1] == f"+{len(found.of(0, 'parameters')) - len(shown) + 1}"
    )  # how many are not shown


def test_many_ranks_are_one_picture() -> None:
    """64 of them: lower bars, one name a rank, and what its bars are below."""
    state = stacked_states(Case({"w": torch.ones(640)}, 3, 64, 64))[1]
    figure = side_by_side([partition_map(state)])
    assert figure.get_figheight() < 25
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [name for name in names if name] == [f"rank {i}" for i in range(64)]
    assert (
        figure.axes[0].get_xlabel().endswith("from above: parameters, window, gradients, optimizer")
    )


def test_maps_of_different_models_do_not_share_a_legend() -> None:
    one = partition_map(stacked_states(CASE)[0])
    other = partition_map(fzero.init([torch.ones(2)], fzero.optim.sgd(0.1), stage=0))
    with pytest.raises(fzero.LayoutError, match="Fix: give maps of one model"):
        side_by_side([one, other])
    with pytest.raises(fzero.LayoutError, match="0 maps"):
        side_by_side([])


@pytest.mark.parametrize("kind", PICTURES)
def test_without_matplotlib_only_figures_fail(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = shown(kind)
    assert found.table() and "<pre>" in found._repr_html_()
    with pytest.raises(MissingExtraError, match=r"pip install 'fzero\[plots\]'") as raised:
        found.draw()
    assert isinstance(raised.value, ImportError)
