"""The bigram baseline against a count in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from fzero.job.bigram import bigram_loss, fit_bigram

TEXT = b"the quick brown fox, the lazy dog; the end.\x00\xff\xff"


def test_it_is_the_smoothed_count() -> None:
    text = torch.tensor(list(TEXT), dtype=torch.uint8)
    pairs, firsts = Counter(pairwise(TEXT)), Counter(TEXT[:-1])
    log_p = fit_bigram(text, smoothing=0.5)
    for a in {*TEXT, 7}:
        for b in {*TEXT, 9}:
            want = math.log((pairs[a, b] + 0.5) / (firsts[a] + 128))
            assert log_p[a, b].item() == pytest.approx(want, rel=1e-12)


def test_the_loss_is_the_mean_over_predicted_bytes() -> None:
    log_p = fit_bigram(torch.tensor(list(TEXT), dtype=torch.uint8))
    windows = torch.tensor([list(b"the d"), list(b"fox b")], dtype=torch.uint8)
    pairs = [(a, b) for row in windows.tolist() for a, b in pairwise(row)]
    want = -sum(log_p[a, b].item() for a, b in pairs) / 8
    assert bigram_loss(log_p, windows) == pytest.approx(want, rel=1e-12)
