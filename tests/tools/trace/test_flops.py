"""FLOPs of a trace and of a plan: by hand, and as torch counts them where it counts all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fzero
from fzero.tools.trace.ops import flops_of
from tests.descends import descends
from tests.tools.trace.steps import Of

B, T, D, H = 2, 6, 8, 4  # a batch, tokens, features, heads


class _Heads(nn.Module):
    """Attention of one projection as queries, keys and values; GQA if there are fewer of these."""

    def __init__(self, kv_heads: int = H, backend: Any = None, **options: Any) -> None:
        super().__init__()
        self.kv_heads, self.backend, self.options = kv_heads, backend, options
        self.options["enable_gqa"] = kv_heads != H
        self.q = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(B, T, H, D // H).transpose(1, 2)
        k = q[:, : self.kv_heads]
        if self.backend is None:
            return F.scaled_dot_product_attention(q, k, k, **self.options)
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, k, **self.options)


class _Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(D, 2 * D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def _recurrence(gates: int) -> int:
    """Inputs and states through the gates, the weights' gradients, and those of T - 1 states."""
    hidden, rows = 2 * D, B * T
    both = 2 * rows * gates * hidden * (D + hidden)
    return 2 * both + 2 * B * (T - 1) * gates * hidden * hidden


PROJECTION = 2 * (2 * B * T * D * D)  # forward and the gradient of the weight; none of the batch
PAIRS = 2 * B * T * T * D  # one of the products of attention
LINEAR = 2 * B * T * D * D

# (module, FLOPs by hand, whether torch's own counter knows all of it)
CASES: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    "linear": (lambda: nn.Linear(D, D), 2 * LINEAR, True),
    "two linears": (lambda: nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)), 5 * LINEAR, True),
    "conv": (lambda: nn.Conv1d(T, 3, 3), 2 * 2 * B * 3 * T * 3 * (D - 2), True),
    "transposed conv": (lambda: nn.ConvTranspose1d(T, 3, 3), 2 * 2 * B * 3 * T * 3 * D, True),
    "flash": (_Heads, PROJECTION + 7 * PAIRS, False),
    "causal": (lambda: _Heads(is_causal=True), PROJECTION + 7 * PAIRS, False),
    "gqa": (lambda: _Heads(2), PROJECTION + 7 * PAIRS, False),
    "math": (lambda: _Heads(backend=SDPBackend.MATH), PROJECTION + 6 * PAIRS, True),
    "multihead": (_SelfAttention, 2 * (2 * B * T * D * 4 * D) + LINEAR + 7 * PAIRS, False),
    "lstm": (lambda: _Recurrent(nn.LSTM), _recurrence(4), False),
    "gru": (lambda: _Recurrent(nn.GRU), _recurrence(3), True),
    "rnn": (lambda: _Recurrent(nn.RNN), _recurrence(1), True),
    "einsum": (lambda: Of(lambda w, x: torch.einsum("btd,de->bte", x, w), D, D), 2 * LINEAR, True),
    "bmm": (lambda: Of(lambda w, x: x @ w, B, D, 3), 2 * (2 * B * T * D * 3), True),
    "baddbmm": (
        lambda: Of(lambda w, x: torch.baddbmm(x.new_zeros(3), x, w), B, D, 3),
        2 * (2 * B * T * D * 3),
        True,
    ),
    "addmm": (
        lambda: Of(lambda w, x: torch.addmm(x.new_zeros(3), x[0], w), D, 3),
        2 * (2 * T * D * 3),
        True,
    ),
    "addmm_": (
        lambda: Of(lambda w, x: x.new_zeros(T, 3).addmm_(x[0], w), D, 3),
        2 * (2 * T * D * 3),
        False,
    ),
    "addbmm": (
        lambda: Of(lambda w, x: torch.addbmm(x.new_zeros(3), x, w), B, D, 3),
        2 * (2 * B * T * D * 3),
        False,
    ),
    "vector": (lambda: Of(lambda w, x: x[0] @ w, D), 2 * (2 * T * D), False),
    "dot": (lambda: Of(lambda w, x: x[0, 0] @ w, D), 2 * D, False),
    "bilinear": (
        lambda: Of(lambda w, x: F.bilinear(x[0], x[1], w), 3, D, D),
        2 * (2 * T * 3 * D * D),
        False,
    ),
    "embedding": (lambda: Of(lambda w, x: F.embedding(x[..., 0].long(), w), 5, D), 0, True),
    "pointwise": (lambda: Of(lambda w, x: (x * w).relu(), D), 0, True),
}


def traced(model: nn.Module, x: Tensor) -> int:
    apply, params = fzero.functionalize(model)

    step_fn = descends(lambda p, x: apply(p, x).mean())
    step = fzero.shard(step_fn, stage=0)
    return fzero.trace(step)(step.init(params, fzero.optim.sgd(1.0)), x).flops


def planned(model: nn.Module, x: Tensor, **options: Any) -> float:
    rates = fzero.plan.Rates(flops_per_s=1.0, memory_bytes_per_s=1e30)
    sgd = fzero.optim.sgd(1.0)
    plan = fzero.plan(model, x, stage=0, world=1, optimizer=sgd, rates=rates, **options)
    assert plan.time is not None
    return plan.time.compute_s


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_made_by_hand_and_those_of_torch(name: str) -> None:
    make, by_hand, torch_knows = CASES[name]
    model, x = make(), torch.zeros(B, T, D)
    assert traced(model, x) == by_hand
    with FlopCounterMode(display=False) as counter:
        model(x).mean().backward()
    assert (counter.get_total_flops() == by_hand) == torch_knows


@pytest.mark.parametrize("name", [name for name in CASES if name != "math"])
def test_a_plan_counts_what_a_trace_counts(name: str) -> None:
    make, by_hand, _ = CASES[name]
    assert planned(make(), torch.zeros(B, T, D)) == by_hand


@pytest.mark.parametrize("name", ["flash", "lstm"])
def test_a_plan_under_autocast_counts_as_many(name: str) -> None:
    make, by_hand, _ = CASES[name]
    assert planned(make(), torch.zeros(B, T, D), autocast=torch.bfloat16) == by_hand


def test_long_texts_are_mostly_attention() -> None:
    """Forward and backward of 512 tokens of 16 features: 7 products of 512 x 512 a head."""
    x = torch.zeros(B, T, D).new_zeros(1, 512, 16)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    wrapped = Of(lambda w, x: model(w * x, x, x, need_weights=False)[0], 16)
    assert traced(wrapped, x) > 7 * 2 * 512 * 512 * 16


FUSED = [
    name
    for name in ("flash", "efficient", "cudnn")
    if hasattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
]


@pytest.mark.parametrize("name", FUSED)
def test_fused_attention_of_gpus_counts_as_torch_counts_it(name: str) -> None:
    """Of their shapes alone: there is no GPU. Other sizes of values, and fewer heads of them."""
    forward, backward = (
        getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention{end}")
        for end in ("", "_backward")
    )
    q, k, v = (torch.zeros(B, H, n, e, device="meta") for n, e in ((T, 8), (5, 8), (5, 8)))
    registry = torch.utils.flop_counter.flop_registry
    wanted = registry[forward](q, k, v, out_val=None), registry[backward](q, q, k, v, out_val=None)
    assert flops_of(forward.default, (q, k, v), {}, None) == wanted[0] == 2 * B * H * T * 5 * 16
    assert flops_of(backward.default, (q, q, k, v), {}, None) == wanted[1]
    fewer = flops_of(forward.default, (q, k[:, :1], v[:, :1]), {}, None)
    assert fewer == wanted[0]
    assert flops_of(forward.default, (q, k, v[..., :4]), {}, None) == 2 * B * H * T * 5 * 12


def test_groups_of_rows_count_as_their_products() -> None:
    op = torch.ops.aten._grouped_mm.default
    a, b = torch.zeros(12, 8, device="meta"), torch.zeros(3, 8, 5, device="meta")
    assert flops_of(op, (a, b), {}, None) == 2 * 12 * 8 * 5  # each row with one matrix
    a, b = torch.zeros(3, 4, 8, device="meta"), torch.zeros(8, 15, device="meta")
    assert flops_of(op, (a, b), {}, None) == 2 * 4 * 8 * 15  # each column with one matrix
