"""What is told after the last step: validation, curve, sample; and while it runs: progress."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fzero.job.curve import plot_losses
from fzero.job.finish import finish, validate
from fzero.job.gpt import GPT
from fzero.job.progress import Progress
from fzero.job.settings import resolve
from fzero.job.step import make_job, make_optimizer
from fzero.job.stream import even_windows
from tests.job.runs import small
from tests.ranks import run_ranks


def validate_rank(rank: int, world_size: int, out: Path, count: int) -> float:
    job, params = make_job(resolve(small(out, global_batch=24)))
    return validate(job, params, even_windows(job.corpus.valid, context=16, count=count))


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("world_size", "count"), [(2, 81), (3, 2)])
def test_validation_is_the_mean_over_all_windows_once(
    tmp_path: Path, world_size: int, count: int
) -> None:
    settings = resolve(small(tmp_path))
    job, _ = make_job(settings)
    torch.manual_seed(settings.course.seed)
    held = even_windows(job.corpus.valid, context=16, count=count).long()
    logits = GPT(settings.kind.model)(held[:, :-1])
    want = F.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten()).item()
    for got in run_ranks(validate_rank, world_size, tmp_path, count):
        assert got == pytest.approx(want, rel=1e-5)


def test_the_lines_say_validation_bigram_curve_and_sample(tmp_path: Path) -> None:
    settings = resolve(small(tmp_path, plot=True, sample_bytes=30))
    job, params = make_job(settings)
    lines = finish(job, job.step.init(params, make_optimizer(settings)), [5.0, 4.0])
    assert len(lines) == 3
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


def test_progress_is_the_first_and_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(start=3, total=6, tokens_per_step=1000)
    for loss in (2.0, 1.5, 1.25):
        progress.step(loss, 57_000_000)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("step 4/6: loss 2.000,")
    assert last.startswith("step 6/6: loss 1.250,")
    assert "tokens/s, 57.0 MB/rank" in first and "tokens/s, 57.0 MB/rank" in last
