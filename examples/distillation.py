"""Distillation: a frozen teacher beside its student, each sharded at a stage of its own.

    python examples/distillation.py
    torchrun --nproc-per-node 2 examples/distillation.py

Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv 1503.02531. The teacher is the
larger of the two, so it is at stage 3. It has no optimizer, and no gradient of it is ever made.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

FEATURES, CLASSES, BATCH, STEPS = 8, 5, 60, 200
TEMPERATURE, LR, TOLERANCE = 2.0, 1e-2, 1e-10
STAGES = {"student": 1, "teacher": 3}


def mlp(width: int) -> nn.Module:
    """Return a network from [n, FEATURES] to [n, CLASSES]."""
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES)).double()


torch.manual_seed(0)
teacher, student = mlp(128).requires_grad_(False), mlp(16)
teacher_apply, teacher_params = fzero.functionalize(teacher)
student_apply, student_params = fzero.functionalize(student)
x = torch.randn(STEPS + 8, BATCH, FEATURES, dtype=torch.float64)  # the last 8 are held out


def distance(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of the softened outputs, a mean over samples."""
    soft, target = (F.log_softmax(z / TEMPERATURE, dim=-1) for z in (student, teacher))
    return F.kl_div(soft, target, reduction="batchmean", log_target=True) * TEMPERATURE**2


def loss(params: Any, x: Tensor) -> Tensor:
    """Return the loss of both models' parameters, which come in the tree of their states."""
    return distance(student_apply(params["student"], x), teacher_apply(params["teacher"], x))


def step_fn(states: Any, x: Tensor) -> Any:
    """Differentiate by both, as far as they learn; update the student."""
    states, value = fzero.grad_and_reduce(loss, states)(x)
    return {**states, "student": fzero.apply_gradients(states["student"])}, fzero.pmean(value)


def plain_training() -> Any:
    """Return the student after the same steps in plain PyTorch: one process, whole batches."""
    model = copy.deepcopy(student)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for batch in x[:STEPS]:
        optimizer.zero_grad()
        distance(model(batch), teacher(batch)).backward()
        optimizer.step()
    return dict(model.named_parameters())


def main() -> None:
    """Train, and fail if a claim is not so."""
    axis = fzero.world()
    say = print if axis.rank == 0 else lambda *_: None

    step = fzero.shard(step_fn, stage=STAGES)
    optimizers = {"student": fzero.optim.adam(LR), "teacher": fzero.optim.NoOptimizer()}
    states = step.init({"student": student_params, "teacher": teacher_params}, optimizers)
    before = states["teacher"]
    for batch in x[:STEPS]:
        states, _ = step(states, batch[axis.rank :: axis.size])

    after, held = states["teacher"], fzero.state_bytes(states["teacher"])
    say(f"bytes of the teacher on each rank: {held['parameters']:,} of parameters, "
        f"{held['gradients']} of gradients, {held['optimizer']} of its optimizer")  # fmt: skip
    same = all(map(torch.equal, before.params.flats, after.params.flats))
    if not same or held["gradients"] or held["optimizer"] or int(after.step):
        raise SystemExit("the teacher's state has changed")

    found = fzero.full_params(states["student"])
    alike = student_apply(found, x[STEPS:]).argmax(-1) == teacher(x[STEPS:]).argmax(-1)
    say(f"the student answers as the teacher does in {alike.double().mean():.1%} of new samples")
    exact = plain_training()
    off = max((found[name] - exact[name]).abs().max().item() for name in exact)
    say(f"check: {STEPS} steps on {axis.size} rank(s) are those of plain PyTorch to {off:.1e}")
    if not (alike.double().mean() > 0.85 and off < TOLERANCE):
        raise SystemExit("not learned, or not the same")


if __name__ == "__main__":
    main()
