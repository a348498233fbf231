"""A causal LM on sequences of very different length: the exact mean over tokens, on any ranks.

    python examples/ragged_lm.py
    torchrun --nproc-per-node 3 examples/ragged_lm.py --stage 3

Each call is the mean over its own tokens, and its weight is their number. The update divides once:
sum(w g) / sum(w) over micro-batches and ranks, the gradient of one process on all tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

LENGTHS = (2, 3, 40, 5, 2, 7, 31, 2, 4, 3, 2, 19)  # of one batch; a rank has every W-th of them
VOCABULARY, WIDTH, STEPS, LR = 50, 16, 5, 0.5


def model() -> nn.Module:
    """Return a language model of single tokens, in float64."""
    torch.manual_seed(0)
    layers = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(WIDTH, VOCABULARY)).double()


def batch(step: int) -> list[Tensor]:
    """Return the sequences of one step, the same on every rank."""
    torch.manual_seed(1 + step)
    return [torch.randint(VOCABULARY, (length,)) for length in LENGTHS]


def mean_over_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of the next token, averaged over the tokens of one sequence."""
    return F.cross_entropy(logits[:-1], tokens[1:])


def train(stage: int) -> Any:
    """Train sharded; return the full parameters."""
    apply, params = fzero.functionalize(model())

    def loss_fn(params: Any, tokens: Tensor) -> Tensor:
        return mean_over_tokens(apply(params, tokens), tokens)

    def step_fn(state: Any, sequences: list[Tensor]) -> tuple[Any, Tensor]:
        for tokens in sequences:
            grad = fzero.grad_and_reduce(loss_fn, state, weight=len(tokens) - 1)
            state, loss = grad(tokens)
        return fzero.apply_gradients(state), loss

    step = fzero.shard(fzero.coalesce(step_fn), stage=stage)
    state, world = step.init(params, fzero.optim.sgd(LR)), fzero.world()
    for number in range(STEPS):
        state, _ = step(state, batch(number)[world.rank :: world.size])
    return fzero.full_params(state)


def in_one_process() -> dict[str, Tensor]:
    """Train plainly on the mean over all tokens of a batch; return the parameters."""
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), LR)
    for number in range(STEPS):
        terms = [(len(x) - 1) * mean_over_tokens(plain(x), x) for x in batch(number)]
        (torch.stack(terms).sum() / sum(n - 1 for n in LENGTHS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(plain.named_parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    found, want = train(parser.parse_args().stage), in_one_process()
    worst = max((found[path] - x).abs().max().item() for path, x in want.items())
    if fzero.axis_index() == 0:
        print(f"{sum(LENGTHS) - len(LENGTHS)} tokens, on {fzero.world().size} rank(s)")
        print(f"check: parameters after {STEPS} steps equal those of one process to {worst:.1e}")
