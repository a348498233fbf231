"""A loss in chunks over the sequence: the head is gathered once forward and once backward.

    python examples/chunked_loss.py
    torchrun --nproc-per-node 2 examples/chunked_loss.py --stage 3

The logits of a whole sequence are its largest tensor. Here they exist for one chunk at a time: the
loss of a chunk is a checkpoint, which computes its logits again in the backward. At stage 3 the
unit that was read last stays gathered: the head crosses ranks twice, whatever the chunks.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero

VOCABULARY, WIDTH, LENGTH, CHUNKS = 64, 16, 96, 16


class LanguageModel(nn.Module):
    """Layers, and a head that is called by chunk: returns the loss, the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, chunks: int) -> Tensor:
        """Return the loss of tokens [n + 1], computed for n / chunks of them at a time."""
        hidden, wanted = self.layers(self.embedding(tokens[:-1])), tokens[1:]
        parts = zip(hidden.chunk(chunks), wanted.chunk(chunks), strict=True)
        losses = [checkpoint(self._loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(wanted)

    def _loss(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden), wanted, reduction="sum")


def gradient(stage: int, chunks: int) -> tuple[Any, int]:
    """Return the gradient of one batch, and how often this rank gathered the head."""
    torch.manual_seed(0)
    apply, params = fzero.functionalize(LanguageModel().double())
    tokens = torch.randint(VOCABULARY, (LENGTH + 1,))
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage)
    with fzero.count_collectives() as log:
        state, _ = fzero.grad_and_reduce(apply, state)(tokens, chunks)
    events = [one for one in log.events if one.rank == fzero.axis_index()]
    gathers = [one for one in events if one.op == "all_gather" and "head.weight" in one.paths]
    return fzero.gradients(state), len(gathers)


def in_one_process() -> dict[str, Tensor]:
    """Return the gradient of the whole loss at once, by plain autograd."""
    torch.manual_seed(0)
    plain = LanguageModel().double()
    plain(torch.randint(VOCABULARY, (LENGTH + 1,)), 1).backward()
    return {path: p.grad for path, p in plain.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    found, gathers = gradient(parser.parse_args().stage, CHUNKS)
    worst = max((found[path] - g).abs().max().item() for path, g in in_one_process().items())
    if fzero.axis_index() == 0:
        ranks = fzero.world().size
        print(f"{CHUNKS} chunks on {ranks} rank(s): this one gathered the head {gathers} times")
        print(f"check: the gradient equals that of one process to {worst:.1e}")
