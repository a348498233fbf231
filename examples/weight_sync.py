"""Weights that go to an inference engine in another process, and later only those that changed.

    python examples/weight_sync.py
    torchrun --nproc-per-node 2 examples/weight_sync.py --stage 3

A frozen base with low-rank adapters is trained, sharded. `fzero.iter_params` gives whole tensors
one by one; rank 0 writes each into shared memory. By their digests only adapters go there later.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from subprocess import PIPE, Popen

import torch
from torch import Tensor, nn

import fzero

WIDTH, RANK, BATCH, STEPS, ROUNDS, TOLERANCE = 64, 2, 48, 5, 3, 1e-12
X = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank change of it that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH**0.5)
        self.lora_b = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """[b, WIDTH] -> [b, WIDTH]."""
        return (self.base(x) + x @ self.lora_a.T @ self.lora_b.T).tanh()


def model(seed: int) -> nn.Module:
    """Return the model, with the values of a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(), Adapted(), Adapted()).double()


def serve(shared: Tensor) -> None:
    """Be the engine: load what lies in the shared memory under a name, or answer to an input."""
    served = model(seed=1)  # other values: all that is right comes from the trainer
    while sys.stdin.buffer.peek(1):
        said = pickle.load(sys.stdin.buffer)
        if isinstance(said, str):
            parameter = served.get_parameter(said).data
            parameter.copy_(shared[: parameter.numel()].view_as(parameter))
        pickle.dump(served(X).detach() if said is None else said, sys.stdout.buffer)
        sys.stdout.flush()


def ask(engine: Popen[bytes], said: str | None) -> str | Tensor:
    """Return the engine's answer: its output, or the name of what it has loaded."""
    engine.stdin.write(pickle.dumps(said))
    engine.stdin.flush()
    return pickle.load(engine.stdout)


def train(stage: int, file: str, shared: Tensor) -> None:
    """Train and send in turn, and fail if the engine answers otherwise than the trainer."""
    axis, (apply, params) = fzero.world(), fzero.functionalize(model(seed=0))
    state, seen, off = fzero.init(params, fzero.optim.adamw(1e-2), stage=stage), None, 0.0
    mine, command = X[axis.rank :: axis.size], [sys.executable, __file__, "--serve", file]
    engine = Popen(command, stdin=PIPE, stdout=PIPE) if axis.rank == 0 else None
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            state, _ = fzero.grad_and_reduce(lambda p: apply(p, mine).square().mean(), state)()
            state = fzero.apply_gradients(state)
        weights, sent = fzero.iter_params(state, since=seen), 0
        for name, tensor in weights:  # all ranks gather, and one unit is whole at a time
            sent += tensor.nbytes
            if engine is not None:
                shared[: tensor.numel()] = tensor.flatten()
                assert ask(engine, name) == name
        seen, wanted = weights.digests, fzero.evaluate(apply, state)(X)
        if engine is not None:
            off = max(off, (ask(engine, None) - wanted).abs().max().item())
            print(f"{sent:,} bytes went to the engine, on {axis.size} rank(s)")
    if engine is not None:
        engine.communicate()
        print(f"check: {ROUNDS} answers of the engine are those of the trainer to {off:.1e}")
        assert off < TOLERANCE


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--serve", help="be the engine, with this file as memory")
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile() as made:
        memory = torch.from_file(args.serve or made.name, shared=True, size=WIDTH**2, dtype=X.dtype)
        serve(memory) if args.serve else train(args.stage, made.name, memory)
