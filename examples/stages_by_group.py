"""One model, a stage and an optimizer for each group of its parameters.

    python examples/stages_by_group.py
    torchrun --nproc-per-node 2 examples/stages_by_group.py

A large table of embeddings is sharded (stage 3), the layers keep whole parameters and shard the
rest (stage 2), the small head is whole on every rank (stage 0). Each group has a state of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

import fzero

WORDS, WIDTH, BATCH, LENGTH, STEPS, TOLERANCE = 500, 16, 60, 8, 60, 1e-12
STAGES = {"table": 3, "layers": 2, "head": 0}
SLOTS = {"table": 1, "layers": 2, "head": 2}  # numbers that the optimizer keeps for a parameter
OPTIMIZERS = {
    "table": fzero.optim.sgd(1.0, momentum=0.9),
    "layers": fzero.optim.adamw(1e-2, weight_decay=0.1),
    "head": fzero.optim.adam(1e-3),
}

torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
parts = {"table": nn.EmbeddingBag(WORDS, WIDTH), "layers": layers, "head": nn.Linear(WIDTH, 4)}
model = nn.Sequential(OrderedDict(parts)).double()  # words [n, LENGTH] -> [n, 4]
apply, params = fzero.functionalize(model)
words = torch.randint(WORDS, (STEPS, BATCH, LENGTH))
target = torch.randn(WORDS, 4, dtype=torch.float64)[words].mean(-2)


def by_group(params: Any) -> dict[str, Any]:
    """Return the parameters of each group, which is the first word of their names."""
    return {g: {k: p for k, p in params.items() if k.startswith(f"{g}.")} for g in STAGES}


def together(groups: Any) -> dict[str, Tensor]:
    """Undo `by_group`."""
    return {name: p for group in groups.values() for name, p in group.items()}


def loss(groups: Any, words: Tensor, target: Tensor) -> Tensor:
    """Return the loss of the parameters of all groups."""
    return (apply(together(groups), words) - target).square().mean()


def step_fn(states: Any, words: Tensor, target: Tensor) -> tuple[Any, Tensor]:
    """Make one step of all groups: nothing in it says which stage a group has."""
    states, value = fzero.grad_and_reduce(loss, states)(words, target)
    return fzero.apply_gradients(states), fzero.pmean(value)


def plain_training() -> dict[str, Tensor]:
    """Train `model` in plain PyTorch, one process and whole batches; return its parameters."""
    table = torch.optim.SGD(model.table.parameters(), lr=1.0, momentum=0.9)
    layers = torch.optim.AdamW(model.layers.parameters(), lr=1e-2, weight_decay=0.1)
    head = torch.optim.Adam(model.head.parameters(), lr=1e-3)
    for xs, ys in zip(words, target, strict=True):
        model.zero_grad()
        (model(xs) - ys).square().mean().backward()
        for optimizer in (table, layers, head):
            optimizer.step()
    return dict(model.named_parameters())


def main() -> None:
    """Train, and fail if a claim is not so."""
    axis = fzero.world()
    say = print if axis.rank == 0 else lambda *_: None
    step = fzero.shard(step_fn, stage=STAGES)
    states = step.init(by_group(params), OPTIMIZERS)
    for batch in zip(words, target, strict=True):
        states, _ = step(states, *(x[axis.rank :: axis.size] for x in batch))

    for group, state in states.items():
        w, whole = axis.size, 8 * sum(p.numel() for p in by_group(params)[group].values())
        held = fzero.state_bytes(state)
        shares = held["parameters"] / whole, held["optimizer"] / (whole * SLOTS[group])
        say(f"{group:7} stage {state.stage}: a rank holds {shares[0]:4.0%} of the parameters and "
            f"{shares[1]:4.0%} of the optimizer's numbers")  # fmt: skip
        promised = {0: (1, 1), 2: (1, 1 / w), 3: (1 / w, 1 / w)}[state.stage]
        if any(abs(a - b) > 0.1 for a, b in zip(shares, promised, strict=True)):
            raise SystemExit(f"{group}: another share than its stage promises")
    found, exact = together(fzero.full_params(states)), plain_training()
    off = max((found[name] - p).abs().max().item() for name, p in exact.items())
    say(f"check: {STEPS} steps on {axis.size} rank(s) are those of plain PyTorch to {off:.1e}")
    if not off < TOLERANCE:
        raise SystemExit(f"check: more than {TOLERANCE:.0e} off")


if __name__ == "__main__":
    main()
