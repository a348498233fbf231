"""Rooms that go over what a state keeps name no feature, nor do modules that run a step.

A feature is a transform or a rule with numbers of its own in a state. Where a room names one, the
next feature needs a line there, too. The rooms of `ROOMS` know the forms of a state, the modules of
`POINTS_ONLY` the points of a step. What is read is the syntax: identifiers, attributes, keywords
and what is imported; words in texts and comments may say anything.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fzero"

FEATURES = {
    "residual": "what encoding has lost of gradients",
    "residuals": "the same",
    "powersgd": "a codec that keeps where its factors start from",
    "starts": "the same",
    "compress": "codecs of gradients",
    "outer": "local updates: the rule of the outer update",
    "local": "local updates",
    "anchors": "local updates: where replicas have met",
    "anchored": "the same",
    "coming": "local updates: what is on its way",
    "fragments": "the same",
    "owners": "rules that step whole matrices",
    "masters": "what a rule keeps of 16-bit parameters",
    "weight": "weighted gradients",
    "weights": "the same",
    "weighted": "the same",
    "scale": "the loss scale",
    "scaled": "the same",
    "clip": "clipping",
    "ema": "an average of parameters",
}
"""{a word of a name: what it is of}."""

POINTS_ONLY = (
    "transforms/grad.py",
    "transforms/autograd.py",
    "transforms/backward_pass.py",
    "transforms/update.py",
    "transforms/add.py",
    "transforms/map_params.py",
    "adapter/losses.py",
    "adapter/engine_step.py",
)
"""What runs a step: it goes over what features declare (`transforms/recipe.py`)."""

_ARGUMENT = "weight= is what a user says of a call; what becomes of it, a feature knows"
_FORMAT = "the format of DeepSpeed has it by this name"
EXCEPT: dict[str, dict[str, str]] = {
    "checkpoint/_partial.py": {"masters": "a master that a file lacks is made of its parameter"},
    "checkpoint/_universal.py": {"scale": _FORMAT, "masters": _FORMAT},
    "transforms/grad.py": {"weight": _ARGUMENT},
    "transforms/autograd.py": {"weight": _ARGUMENT},
    "adapter/losses.py": {"weight": _ARGUMENT},
    "adapter/engine_step.py": {"weighted": "an update without any token has no norm"},
}
"""{file: {a word that it may have: why}}."""

NAMES_OF_OTHERS = {
    "LOCAL",  # a runtime: one process alone
    "weights_only",  # of torch.load
    "create_local_plan",  # of torch.distributed.checkpoint
    "ScaledTranslation",  # of matplotlib
    "dpi_scale_trans",
    "clip_on",
    "grad_scale",  # of the fused kernels of torch.optim
    "LocalStates",  # these two: the states of the ranks of this process
    "local_states",
    "receive_local",  # these two: a rank's own gradients, before they are reduced
    "pop_local",
}

ROOMS = ("checkpoint", "tools/record", "tools/plot")
"""What goes over forms. `plan` shows masters as a kind of their own, `certify` and `diff` try and
follow the options of fzero by name, and `prove` knows operators: these are not among them."""


def words_of(name: str) -> set[str]:
    """The words of a name in snake_case or CamelCase."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return {word for word in re.split(r"[._]", apart.lower()) if word}


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of all that is named."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.arg | ast.keyword):
            yield line, node.arg or ""
        elif isinstance(node, ast.ImportFrom):
            yield line, node.module or ""
            yield from ((line, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((line, alias.name) for alias in node.names)


def features_in(source: str, known: frozenset[str] = frozenset()) -> list[str]:
    """Return where a file names a feature."""
    found = names_in(ast.parse(source))
    return [
        f"line {line}: {name}, of {FEATURES[word]}"
        for line, name in found
        if name not in NAMES_OF_OTHERS
        for word in sorted(words_of(name) & FEATURES.keys() - known)
    ]


FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
FILES += [ROOT / place for place in (*POINTS_ONLY, "tools/rounding.py", "tools/doctor.py")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_who_knows_forms_or_points_names_no_feature(path: Path) -> None:
    place = path.relative_to(ROOT).as_posix()
    assert features_in(path.read_text(), frozenset(EXCEPT.get(place, {}))) == []


def test_it_is_found() -> None:
    assert features_in("x = state.window.outer") == [
        "line 1: outer, of local updates: the rule of the outer update"
    ]
    assert len(features_in("from fzero.machine.compress import lost_residual")) == 2
    assert len(features_in("def f(*, loss_scale): return g(localUpdates=1)")) == 2
    assert features_in('x = "the outer rule"  # residual') == []


def test_each_exception_is_used() -> None:
    for place, words in EXCEPT.items():
        for word in words:
            others = frozenset(words) - {word}
            assert features_in((ROOT / place).read_text(), others), (place, word)


CHAPTERS = (
    *("transforms/weights", "transforms/compress", "transforms/offload", "transforms/remat"),
    *("transforms/evaluate", "transforms/full_params", "transforms/add"),
    *("optim/_muon", "optim/matrix_rules", "transforms/vjp"),
)
"""Features of which each is one chapter, and lines in the registries."""

REGISTRIES = ("__init__.py", "transforms/__init__.py", "transforms/recipe.py", "optim/__init__.py")

PLAIN = """
import tempfile, torch, fzero
from fzero.adapter import Engine

def step(state, x):
    state, loss = fzero.grad_and_reduce(lambda p, x: (p["w"] * x).square().sum(), state)(x)
    return fzero.apply_gradients(state), loss

for stage in (0, 3):
    train = fzero.simulate(fzero.shard(fzero.clip(step, max_norm=1.0), stage=stage), world_size=2)
    state = train.init({"w": torch.ones(5)}, fzero.optim.adamw(1e-2))
    state, first = train(state, torch.ones(2, 5))
    state, second = train(state, torch.ones(2, 5))
    assert (second < first).all()
    model = torch.nn.Linear(4, 2)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), stage=stage, max_norm=1.0)
    engine.backward(engine(torch.ones(3, 4)).sum())
    assert engine.step()
    with tempfile.TemporaryDirectory() as folder:
        fzero.checkpoint.save(folder + "/one", engine)
        fzero.checkpoint.load(folder + "/one", engine)
    engine.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_feature_is_taken_out_with_its_chapter_and_its_lines_in_the_registries(
    chapter: str, tmp_path: Path
) -> None:
    package = tmp_path / "fzero"
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / f"{chapter}.py").unlink()
    module = f"fzero.{chapter.replace('/', '.')}"
    names = {
        alias.asname or alias.name: (place, node)
        for place in REGISTRIES
        for node in ast.walk(ast.parse((package / place).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }
    assert names
    for place in REGISTRIES:
        lines = (package / place).read_text().splitlines()
        gone = re.compile(
            rf"from {re.escape(module)} import .*"
            rf"|from fzero\.\w+ import ({'|'.join(names)})( as .*)?"
            rf"|    \"?({'|'.join(names)})\"?,"
        )
        kept = [line for line in lines if not gone.fullmatch(line)]
        (package / place).write_text("\n".join(kept))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PLAIN],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
