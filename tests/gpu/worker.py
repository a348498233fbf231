"""One rank: train under the adapter and the functional step, and compare with one process.

Run under torchrun by tests/gpu/test_nccl.py, on NCCL; without a GPU on gloo, so that it does not
rot. Prints one line for each case that is right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, _reducer, _source, _update

STEPS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLEEP_CYCLES = 50_000_000  # about 30 ms: longer than any kernel here takes


def make_model() -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Embedding(17, 24)]
    for _ in range(3):
        layers += [nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24), nn.LayerNorm(24)]
    model = nn.Sequential(*layers, nn.Linear(24, 17, bias=False))
    model[-1].weight = model[0].weight
    return model.double().to(DEVICE)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 17, (2, 4, 6), generator=generator)
    return tokens[0].to(DEVICE), tokens[1].to(DEVICE)


def loss_of(model: Callable[[Tensor], Tensor], step: int, rank: int) -> Tensor:
    tokens, targets = batch(step, rank)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def reference(world_size: int) -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        sum(loss_of(model, step, rank) for rank in range(world_size)).div(world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def adapter(stage: int, **options: Any) -> dict[str, Tensor]:
    model = make_model()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, **options)
    for step in range(STEPS):
        loss_of(engine, step, fzero.axis_index()).backward()
        engine.step()
    found = engine.full_parameters()
    engine.close()
    return found


def functional(stage: int) -> dict[str, Tensor]:
    apply, params = fzero.functionalize(make_model())

    def step_fn(state: Any, step: int) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return loss_of(lambda tokens: apply(params, tokens), step, fzero.axis_index())

        state, loss = fzero.grad_and_reduce(loss_fn, state)()
        return fzero.apply_gradients(state), loss

    train_step = fzero.shard(fzero.coalesce(step_fn), stage=stage)
    state = train_step.init(params, fzero.optim.adamw(1e-2, weight_decay=1e-2))
    for step in range(STEPS):
        state, _ = train_step(state, step)
    return fzero.full_params(state)


def delayed(start: Callable[..., Any]) -> Callable[..., Any]:
    """`start`, with a long kernel before it: what does not wait for its inputs reads old ones."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        if DEVICE == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)
        return start(*args, **kwargs)

    return slow


def delay(where: str) -> None:
    for module, name in {
        "gathers": [(_source, "start_gather"), (_update, "start_gather_in_place")],
        "reductions": [(_reducer, "start_scatter"), (_reducer, "start_reduce")],
        "nothing": [],
    }[where]:
        setattr(module, name, delayed(getattr(module, name)))


def check(name: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for path, value in found.items():
        torch.testing.assert_close(value, wanted[path], rtol=1e-10, atol=1e-10, msg=path)
    sys.stdout.write(f"right: {name} on rank {fzero.axis_index()}\n")


def main() -> None:
    where = sys.argv[1]
    wanted = reference(fzero.axis_size())
    delay(where)
    for stage in range(4):
        for overlap in (True, False):
            check(f"adapter {stage} {overlap}", adapter(stage, overlap=overlap), wanted)
        check(f"lockstep {stage}", adapter(stage, lockstep=True, bucket_bytes=4096), wanted)
        if where == "nothing":
            check(f"functional {stage}", functional(stage), wanted)


if __name__ == "__main__":
    main()
