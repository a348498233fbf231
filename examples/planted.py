"""Ten silent bugs of public training code, each in a small step: what silent_bugs.py looks at.

Each of ten functions makes a step as it should be and, with `bug`, as public code had it; the line
is marked. docs/gallery/silent_bugs.md has the public threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler

import fzero

STEPS, LR, CLIP, EXPERTS = 30, 2e-2, 0.2, 4


class Net(nn.Module):
    """A frozen layer with an adapter (a, b), dropout, experts if their counts are given, a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(6, 16).requires_grad_(False), nn.Linear(16, 1)
        self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.expert_bias, self.dropout = nn.Parameter(torch.zeros(EXPERTS)), dropout

    def forward(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return [n, 1]."""
        hidden = F.dropout(torch.tanh(self.base(x) + self.b(self.a(x))), self.dropout)
        if counts is not None:  # each row goes to an expert, which is four of the 16 units
            chosen = F.one_hot((x[:, :EXPERTS] + self.expert_bias.detach()).argmax(1), EXPERTS)
            counts.add_(chosen.sum(0))
            hidden = hidden * chosen.repeat_interleave(16 // EXPERTS, 1)
        return self.head(hidden) + 0 * self.expert_bias.sum()


def plain(loss: Any, rows: Any = lambda *batch: batch, weight: Any = lambda *_: None) -> Any:
    """Make the usual step: a loss, optionally of some rows of each batch, with a weight."""

    def step_fn(state: fzero.TrainState, batches: Any) -> Any:
        for batch in batches:
            mine = rows(*batch)
            state, _ = fzero.grad_and_reduce(loss, state, weight=weight(*mine))(mine)
        return fzero.apply_gradients(state), None

    return step_fn


def by_hand(loss: Any, change: Any, reduced: bool) -> Any:
    """Make a step that takes the gradient itself, and may change it before the state has it."""

    def step_fn(state: fzero.TrainState, batches: Any) -> Any:
        for batch in batches:
            grads = change(torch.func.grad(loss)(fzero.full_params(state), batch))
            state = fzero.add_gradients(state, grads, reduced=reduced)
        return fzero.apply_gradients(state), None

    return step_fn


def loss_twice(loss: Any, bug: bool) -> Any:
    """`loss` is divided by the two micro-batches already; the backward divides once more."""
    return plain(lambda params, batch: loss(params, batch) / (2 if bug else 1))  # the bug


def mean_of_means(loss: Any, bug: bool) -> Any:
    """Of rows without a label there is no loss; each rank's mean counts as much as another's."""

    def labelled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        kept = x[:, 0] > 0.6 - 1.5 * fzero.axis_index()  # most labels are on rank 1
        return x[kept], y[kept]

    return plain(loss, labelled, lambda x, _: None if bug else len(x))  # the bug


def one_rank(loss: Any, bug: bool) -> Any:
    """The module inside of the wrapper was called, so no hook reduces what backward leaves."""
    return by_hand(loss, lambda grads: grads, reduced=True) if bug else plain(loss)  # the bug


def bf16_moments(loss: Any, bug: bool) -> Any:
    """The step is sound: see `optimizer`."""
    return plain(loss)


def adapter_by_parts(loss: Any, bug: bool) -> Any:
    """The second update ends with a save and a load; the file has rank 0's rows of b alone."""
    train = plain(loss)

    def step_fn(state: fzero.TrainState, batches: Any) -> Any:
        state, _ = train(state, batches)
        if int(state.step) == 2:
            saved = dict(fzero.full_params(state))
            if bug:
                here = torch.arange(16) < 16 // fzero.axis_size()
                saved["b.weight"] = saved["b.weight"] * here[:, None]  # the bug
            state = fzero.map_params(lambda p, loaded: 0 * p + loaded, state, saved)
        return state, None

    return step_fn


def dropout_redrawn(loss: Any, bug: bool) -> Any:
    """The backward recomputes the forward, with another mask than the loss had."""
    options: Any = {"use_reentrant": False, "preserve_rng_state": not bug}  # the bug
    return plain(lambda params, batch: checkpoint(loss, params, batch, **options))


def counted_twice(loss: Any, bug: bool) -> Any:
    """The rows of each expert are counted in the forward, which the backward recomputes."""

    def step_fn(state: fzero.TrainState, batches: Any) -> Any:
        counts = torch.zeros(EXPERTS)

        def counted(params: Any, batch: Any) -> Tensor:
            return loss(params, batch, counts)

        def recomputed(params: Any, batch: Any) -> Tensor:
            return checkpoint(counted, params, batch, use_reentrant=False)

        state, _ = plain(recomputed if bug else counted)(state, batches)  # the bug
        load = fzero.psum(counts)
        move = {name: torch.zeros_like(p) for name, p in fzero.full_params(state).items()}
        move["expert_bias"] = 1e-2 * (load.mean() - load)
        return fzero.map_params(torch.add, state, move), None

    return step_fn


def clip_first(loss: Any, bug: bool) -> Any:
    """Each rank clips by the norm of its own gradient; the sound step is clipped in `made`."""

    def clipped(grads: dict[str, Tensor]) -> dict[str, Tensor]:
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        return {name: (CLIP / norm).clamp(max=1) * g for name, g in grads.items()}

    return by_hand(loss, clipped, reduced=False) if bug else plain(loss)  # the bug


def padding_counted(loss: Any, bug: bool) -> Any:
    """Two ranks share 11 rows; the sampler repeats the first one, and it counts twice."""

    def sampled(x: Any, y: Tensor) -> tuple[Tensor, Tensor]:  # of the data set, here 11 rows
        rank, ranks = fzero.axis_index(), fzero.axis_size()
        mine = list(DistributedSampler(x, ranks, rank, shuffle=False))
        mine = mine if bug else mine[: len(range(rank, len(x), ranks))]  # the bug
        return x[mine], y[mine]

    return plain(loss, sampled, lambda x, _: len(x))


def stale_scheduler(loss: Any, bug: bool) -> Any:
    """The step is sound: see `optimizer`."""
    return plain(loss)


BUGS: dict[str, Callable[[Any, bool], Any]] = {
    make.__name__: make
    for make in (loss_twice, mean_of_means, one_rank, bf16_moments, adapter_by_parts,
                 dropout_redrawn, counted_twice, clip_first, padding_counted, stale_scheduler)
}  # fmt: skip


def optimizer(name: str, bug: bool) -> Any:
    """Return AdamW; two bugs are in it."""
    if name == "bf16_moments":  # made of parameters in bf16, whose dtype its moments have
        return fzero.optim.adamw(LR, state_dtype=torch.bfloat16 if bug else None)  # the bug
    if name == "stale_scheduler":  # the scheduler moves groups that the optimizer no longer reads
        return fzero.optim.adamw(LR if bug else lambda step: LR * (1 - step / STEPS))  # the bug
    return fzero.optim.adamw(LR)


def made(name: str, bug: bool, stage: int, loss: Any) -> Any:
    """Return the sharded step of a bug, or of its sound version."""
    step = BUGS[name](loss, bug)
    sound_clip = name == "clip_first" and not bug
    return fzero.shard(fzero.clip(step, max_norm=CLIP) if sound_clip else step, stage=stage)
