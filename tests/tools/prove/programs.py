"""Steps whose programs are proved and mutated: of the model of `tests.tools.trace.steps`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.tools.prove.proof import ProgramRecorder, Proof, prove_programs, ranks_of
from fzero.tools.prove.terms import Budget
from fzero.tools.trace.found import AsFound
from fzero.tools.trace.program import RecordedStep
from tests.tools.trace.steps import model

ROWS = 3


def losses(times: int, dtype: torch.dtype = torch.float32) -> tuple[Callable[..., Any], Any]:
    """A step of so many backwards, and its parameters: tied, frozen, unused and odd ones."""
    apply, params = fzero.functionalize(model("cpu").to(dtype))

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x.to(dtype)).float().pow(2).mean()

    def step_fn(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        for number in range(1, times + 1):
            state, loss = fzero.grad_and_reduce(loss_fn, state)(number * x)
        return fzero.apply_gradients(state), fzero.pmean(loss)

    return step_fn, params


SGD, ADAM, LION = fzero.optim.sgd(0.5, momentum=0.9), fzero.optim.adamw(0.1), fzero.optim.lion(0.1)
once, params = losses(1)
twice, _ = losses(2)
low, low_params = losses(1, torch.bfloat16)
half, half_params = losses(1, torch.float16)

Case = tuple[Callable[..., Any], Any, Any, dict[str, Any]]
CASES: dict[str, Case] = {
    "sgd": (once, params, SGD, {}),
    "adamw, clipped by norm": (fzero.clip(twice, max_norm=0.1), params, ADAM, {}),
    "lion, in a window": (fzero.coalesce(twice), params, LION, {}),
    "clipped by value": (fzero.clip(once, max_value=0.1, max_norm=1.0), params, ADAM, {}),
    "autocast": (fzero.autocast(once, dtype=torch.bfloat16), params, ADAM, {}),
    "bf16 with masters": (fzero.clip(low, max_norm=2.0), low_params, ADAM, {}),
    "fp16 with a loss scale": (
        fzero.clip(fzero.scale_loss(half), max_norm=1.0),
        half_params,
        ADAM,
        {},
    ),
    "a loss scale": (fzero.scale_loss(once), params, SGD, {}),
    "small buckets, donated": (twice, params, ADAM, {"bucket_bytes": 64, "donate": True}),
    "divided before the sum": (once, params, ADAM, {"gradient_predivide_factor": 3.0}),
    "remat": (twice, params, ADAM, {"reshard_after_forward": False}),
}


@dataclass(frozen=True)
class Recorded:
    """The recorded programs of a case."""

    one_rank: RecordedStep
    ranks: list[RecordedStep]
    world: int

    def proof(self, ranks: list[RecordedStep] | None = None) -> Proof:
        return prove_programs("step", self.one_rank, ranks or self.ranks, self.world)


def recorded(name: str, stage: int, world: int) -> Recorded:
    step_fn, given, optimizer, options = CASES[name]
    if stage < 3:
        options = {k: x for k, x in options.items() if k != "reshard_after_forward"}
    else:
        options = {k: x for k, x in options.items() if k != "bucket_bytes"}
    step = fzero.shard(step_fn, stage=stage, **options)
    state, x = step.init(given, optimizer), torch.zeros(ROWS, 5)
    with AsFound("prove", step, state, (x,)) as found:
        recorder = ProgramRecorder(step, state, (x,), Budget(ranks=len(ranks_of(world))), found)
        one_rank = recorder.of(1, 0)
        return Recorded(one_rank, [recorder.of(world, r) for r in ranks_of(world)], world)
