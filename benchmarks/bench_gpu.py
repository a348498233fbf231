"""Time a step of a GPT at W = 1 on one GPU: plain PyTorch, the adapter, the functional step.

    python benchmarks/bench_gpu.py                          # about 1 billion parameters, bf16
    python benchmarks/bench_gpu.py --device cpu --layers 2 --width 64 --tokens 32   # a smoke test

On one rank nothing crosses ranks, so the difference is what the shell costs. Every contestant has
the same weights and data and a fused AdamW on the bf16 parameters themselves; they are stepped in
turn, and a ratio compares steps of one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import write_report
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine

VOCABULARY = 32_000

Step = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Pre-norm attention and feed-forward of width d."""

    def __init__(self, width: int, heads: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, t, d] -> [n, t, d], causal."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Embedding, blocks, tied head; forward(symbols [n, t + 1]) -> mean cross-entropy, []."""

    def __init__(self, layers: int, width: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.symbols = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, max(width // 128, 1)) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.symbols.weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        """See the class."""
        h = self.norm(self.blocks(self.symbols(symbols[:, :-1])))
        logits = F.linear(h, self.symbols.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), symbols[:, 1:].flatten())


def plain(model: nn.Module) -> Step:
    """loss.backward() and a fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def adapter(model: nn.Module, stage: int) -> Step:
    """The same loop under the engine."""
    engine = Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        stage=stage,
        master_weights=False,
        accumulate_dtype=next(model.parameters()).dtype,
    )

    def step(batch: Tensor) -> Tensor:
        loss = engine(batch)
        loss.backward()
        engine.step()
        return loss.detach()

    return step


def functional(model: nn.Module, stage: int) -> Step:
    """The functional step, donating."""
    apply, params = fzero.functionalize(model)

    def step_fn(state: Any, batch: Tensor) -> Any:
        state, loss = fzero.grad_and_reduce(apply, state)(batch)
        return fzero.apply_gradients(state), loss

    train_step = fzero.shard(step_fn, stage=stage, donate=True)
    held = [train_step.init(params, fzero.optim.adamw(1e-4, master_weights=False))]

    def step(batch: Tensor) -> Tensor:
        held[0], loss = train_step(held[0], batch)
        return loss

    return step


def measure(steps: dict[str, Step], batches: list[Tensor], device: str) -> dict[str, list[float]]:
    """Milliseconds of each contestant's steps, stepped in turn; the first three do not count."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number, batch in enumerate(batches):
        for name, step in steps.items():
            _wait(device)
            begin = time.perf_counter()
            step(batch)
            _wait(device)
            if number >= 3:
                found[name].append(1e3 * (time.perf_counter() - begin))
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure, print, and write a file with --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--stages", default="0,3")
    parser.add_argument("--out", type=Path, default=None, help="folder for a Markdown file")
    given = parser.parse_args()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Gpt(given.layers, given.width).to(given.device, torch.bfloat16)

    steps = {"plain": plain(model())}
    for stage in map(int, given.stages.split(",")):
        steps[f"adapter, stage {stage}"] = adapter(model(), stage)
        steps[f"functional, stage {stage}"] = functional(model(), stage)
    shape = (given.samples, given.tokens + 1)
    batches = [
        torch.randint(VOCABULARY, shape, device=given.device) for _ in range(given.rounds + 3)
    ]
    times = measure(steps, batches, given.device)
    numel = sum(p.numel() for p in model().parameters())
    base = statistics.median(times["plain"])
    rows = ["| contestant | ms, median | ms, min | of plain |", "|---|---|---|---|"]
    for name, each in times.items():
        middle = statistics.median(each)
        rows.append(f"| {name} | {middle:.2f} | {min(each):.2f} | {middle / base:.3f} |")
    intro = f"{numel / 1e6:.1f} M parameters, bf16, {shape[0]} x {given.tokens} tokens, W = 1.\n"
    print(intro, *rows, sep="\n")
    if given.out is not None:
        write_report(given.out, f"gpu-step-{given.device}", ["\n".join(rows)], intro=intro)


if __name__ == "__main__":
    main()
