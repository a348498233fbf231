"""The models: the GPT, and the bigram baseline against a count in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from train.bigram import bigram_loss, fit_bigram
from train.gpt import GPT, GPTConfig, generate

SMALL = GPTConfig(layers=2, width=24, heads=3, context=16)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("at", [1, 7, 15])
def test_future_bytes_do_not_change_earlier_logits(at: int) -> None:
    model = GPT(SMALL).double()
    one = tokens(1, 16)
    two = one.clone()
    two[:, at:] = 255 - two[:, at:]
    a, b = model(one), model(two)
    torch.testing.assert_close(a[:, :at], b[:, :at], rtol=0, atol=1e-12)
    assert (a[:, at:] != b[:, at:]).any(-1).all()  # and every later byte sees the change


def test_position_counts() -> None:
    model = GPT(SMALL).double()
    same = torch.tensor([[1, 2, 2], [2, 1, 2]], dtype=torch.uint8)
    one, two = model(same)[:, -1]
    assert not torch.allclose(one, two)


def test_the_default_has_a_few_million_parameters_and_one_tied_table() -> None:
    apply, params = fzero.functionalize(GPT(GPTConfig()))
    assert 4e6 < sum(p.numel() for p in params.values()) < 6e6
    outside = [name for name in params if not name.startswith("blocks.")]
    assert outside == ["embedding.weight", "norm.weight", "norm.bias"]  # no head of its own
    assert {apply.units(name) for name in params} == {
        "embedding",
        "norm",
        *(f"blocks.{i}" for i in range(6)),
    }


def test_a_head_of_an_odd_number_of_features_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"(?s)Usual cause: .*Fix: .*multiple of 2 x heads = 6"):
        GPTConfig(width=15, heads=3)


def test_generation_follows_the_logits_and_the_seed() -> None:
    def next_is_plus_one(seen: Tensor) -> Tensor:
        assert seen.shape[1] <= 4  # never more than the context
        return 1e4 * torch.nn.functional.one_hot((seen.long() + 1) % 256, 256).float()

    prompt = torch.tensor([253], dtype=torch.uint8)
    drawn = generate(next_is_plus_one, prompt, count=5, context=4)
    assert drawn.tolist() == [254, 255, 0, 1, 2]
    assert drawn.dtype == torch.uint8

    def even(seen: Tensor) -> Tensor:
        return torch.zeros(*seen.shape, 256)

    first, again = (generate(even, prompt, count=20, context=4, seed=5) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, generate(even, prompt, count=20, context=4, seed=6))


# The bigram

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
