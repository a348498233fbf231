"""A causal LM on sequences of very different length: the exact mean over tokens, on any ranks.

    python examples/ragged_lm.py
    torchrun --nproc-per-node 3 examples/ragged_lm.py

Each call is the mean over its own tokens, and its weight is their number. The update divides once:
sum(w g) / sum(w) over micro-batches and ranks, the gradient of one process on all tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

LENGTHS = (2, 3, 40, 5, 2, 7, 31, 2, 4, 3, 2, 19)  # of one batch; a rank has every W-th of them
VOCABULARY, WIDTH, STEPS, LR, STAGE = 50, 16, 5, 0.5, 3

torch.manual_seed(0)
plain: Any = nn.Sequential(
    nn.Embedding(VOCABULARY, WIDTH),
    nn.Linear(WIDTH, WIDTH),
    nn.Tanh(),
    nn.Linear(WIDTH, VOCABULARY),
).double()
batches = [[torch.randint(VOCABULARY, (n,)) for n in LENGTHS] for _ in range(STEPS)]
apply, params = fzero.functionalize(plain)


def loss_fn(params: Any, tokens: Tensor) -> Tensor:
    """Return the loss of the next token, averaged over the tokens of one sequence."""
    return F.cross_entropy(apply(params, tokens)[:-1], tokens[1:])


def step_fn(state: Any, sequences: list[Tensor]) -> tuple[Any, None]:
    """Return the state after one update by the mean over the tokens of all ranks."""
    for tokens in sequences:
        state, _ = fzero.grad_and_reduce(loss_fn, state, weight=len(tokens) - 1)(tokens)
    return fzero.apply_gradients(state), None


step, world = fzero.shard(fzero.coalesce(step_fn), stage=STAGE), fzero.world()
state = step.init(params, fzero.optim.sgd(LR))
optimizer = torch.optim.SGD(plain.parameters(), LR)
for batch in batches:
    state, _ = step(state, batch[world.rank :: world.size])
    terms = [F.cross_entropy(plain(x)[:-1], x[1:], reduction="sum") for x in batch]  # one process
    optimizer.zero_grad()
    (torch.stack(terms).sum() / sum(n - 1 for n in LENGTHS)).backward()
    optimizer.step()
found = fzero.full_params(state)
worst = max((found[path] - x).abs().max().item() for path, x in plain.named_parameters())
if world.rank == 0:
    print(f"{sum(LENGTHS) - len(LENGTHS)} tokens, on {world.size} rank(s) at stage {STAGE}")
    print(f"check: parameters after {STEPS} steps equal those of one process to {worst:.1e}")
