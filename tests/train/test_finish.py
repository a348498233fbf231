"""What is told after the last step: validation, curve, sample; and while it runs: progress."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_ranks
from tests.train.runs import small
from train.curve import plot_losses
from train.finish import digest, finish, validate
from train.gpt import GPT
from train.progress import Progress
from train.settings import resolve
from train.step import make_job, make_optimizer
from train.stream import even_windows


def validate_rank(rank: int, world_size: int, out: Path, count: int) -> float | None:
    job, params = make_job(resolve(small(out, global_batch=24)))
    return validate(job, params, even_windows(job.corpus.valid, context=16, count=count))


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("world_size", "count"), [(2, 81), (3, 2)])
def test_validation_is_the_mean_over_all_windows_once(
    tmp_path: Path, world_size: int, count: int
) -> None:
    settings = resolve(small(tmp_path))
    job, _ = make_job(settings)
    torch.manual_seed(settings.kind.seed)
    held = even_windows(job.corpus.valid, context=16, count=count).long()
    logits = GPT(settings.kind.model)(held[:, :-1])
    want = F.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten()).item()
    for got in run_ranks(validate_rank, world_size, tmp_path, count):
        assert got == pytest.approx(want, rel=1e-5)


def test_the_lines_say_validation_bigram_curve_and_sample(tmp_path: Path) -> None:
    settings = resolve(small(tmp_path, plot=True, sample_bytes=30))
    job, params = make_job(settings)
    state = job.step.init(params, make_optimizer(settings))
    told: list[str] = []
    lines = finish(job, state, [5.0, 4.0], curve=tmp_path / "loss.png", note=told.append)
    first, second = told  # how much text there is depends on the version of Python
    assert re.fullmatch(r"validating on \d+ windows of the text that was held out \.\.\.", first)
    assert second == "sampling 30 bytes ..."
    assert lines is not None and len(lines) == 4
    assert lines.pop(0) == f"last loss 4, parameters {digest(params)}"
    words = lines[0].split()
    assert words[:2] == ["validation", "loss"] and 5 < float(words[2]) < 6
    assert words[3:6] == ["nats/byte", "(byte", "bigram:"] and 2 < float(words[6].strip(")")) < 4
    assert lines[1] == f"loss curve: {tmp_path / 'loss.png'}"
    assert lines[2].startswith("sample:\ndef ") and lines[2].isascii()
    assert all(c.isprintable() or c in "\n\t" for c in lines[2])


def test_without_matplotlib_the_curve_is_skipped_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = plot_losses([3.0], tmp_path / "loss.png", bigram=2.4, validation=2.1)
    assert "skipped, matplotlib is not installed" in done
    assert not (tmp_path / "loss.png").exists()


def test_a_signal_ends_the_validation_and_the_sample(tmp_path: Path) -> None:
    settings = resolve(small(tmp_path, sample_bytes=10**6))  # it would take hours
    job, params = make_job(settings)
    state = job.step.init(params, make_optimizer(settings))
    for word in ("validating", "sampling"):
        received: list[int] = []
        told: list[str] = []

        def signalled_at(text: str, word: str = word, to: list[int] = received) -> None:
            to.extend([signal.SIGINT] if text.startswith(word) else [])
            told.append(text)  # noqa: B023

        assert finish(job, state, [5.0], curve=None, received=received, note=signalled_at) is None
        assert told[-1].startswith(word)


def signalled_rank(rank: int, world_size: int, out: Path) -> Any:
    job, params = make_job(resolve(small(out)))
    state = job.step.init(params, make_optimizer(job.settings))
    return finish(job, state, [5.0], curve=None, received=[signal.SIGTERM] * (rank == 1))


@pytest.mark.xdist_group("gloo")
def test_a_signal_to_one_rank_ends_the_validation_of_all(tmp_path: Path) -> None:
    assert run_ranks(signalled_rank, 2, tmp_path) == [None, None]


@pytest.mark.parametrize(
    ("is_terminal", "has_tqdm", "shown", "kind"),
    [
        (True, True, True, "bar"),
        (True, False, True, "lines"),
        (False, True, True, "lines"),
        (True, True, False, "nothing"),
    ],
)
def test_progress_is_a_bar_on_a_terminal_and_else_the_first_and_the_last_line(
    is_terminal: bool,
    has_tqdm: bool,
    shown: bool,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with Progress(start=3, total=6, tokens_per_step=1000, shown=shown) as progress:
        for loss in (2.0, 1.5, 1.25):
            progress.step(loss, 57_000_000)
    told = capsys.readouterr().err
    if kind == "nothing":
        assert told == ""
    elif kind == "bar":
        assert "\r" in told and told.endswith("\n")
        assert "step 6/6 |" in told and "00:00 left, loss 1.250, " in told and "tokens/s" in told
    else:
        first, last = told.splitlines()
        assert first.startswith("step 4/6: loss 2.000,")
        assert last.startswith("step 6/6: loss 1.250,")
        assert "tokens/s, 57.0 MB/rank, 0:00:00 left" in first and first[-4:] == last[-4:]
