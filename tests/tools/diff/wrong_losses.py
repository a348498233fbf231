"""Faults in losses, in data, and in the gradients of single parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fzero
from tests.tools.diff.fault import Fault, on_rank
from tests.tools.diff.runs import BIAS, FIRST, SECOND, loss, step_with, updated

# Losses and data.


def drops_a_micro_batch(state: Any, batch: Any) -> Any:
    return updated(state, [x[:1] for x in batch])


def drops_one_on_rank_1(state: Any, batch: Any) -> Any:
    return updated(state, [on_rank(1, x[:1], x) for x in batch])


def shifts_targets_on_rank_2(state: Any, batch: Any) -> Any:
    return updated(state, [batch[0], on_rank(2, batch[1].roll(1, 1), batch[1])])


def takes_the_data_of_rank_0(state: Any, batch: Any) -> Any:
    gathered = [fzero.all_gather(x[None]) for x in batch]
    return updated(state, [x[0] for x in gathered])


def keeps_the_first_batch() -> Any:
    kept: dict[int, Any] = {}

    def step(state: Any, batch: Any) -> Any:
        return updated(state, kept.setdefault(fzero.axis_index(), batch))

    return step


def with_dropout(p: Any, batch: Any) -> Tensor:
    return loss(p, (torch.dropout(batch[0], 0.1, train=True), batch[1]))


def draws_once_more(p: Any, batch: Any) -> Tensor:
    torch.rand(())
    return with_dropout(p, batch)


def rounds_its_inputs(p: Any, batch: Any) -> Tensor:
    return loss(p, (batch[0].bfloat16().to(batch[0].dtype), batch[1]))


# Gradients of single parameters: the values of the loss are right.


def changed(layer: str, name: str, change: Callable[[Tensor], Tensor], rank: int = -1) -> Any:
    """A step whose loss reads a parameter with another derivative."""

    def wrong(p: Any, batch: Any) -> Tensor:
        if rank not in (-1, fzero.axis_index()):
            return loss(p, batch)
        value = p[layer][name]
        other = change(value)
        return loss(
            {**p, layer: {**p[layer], name: other - other.detach() + value.detach()}}, batch
        )

    return step_with(wrong)


def square_of_the_scale(p: Any, batch: Any) -> Tensor:
    scale = p["scale"]
    return loss({**p, "scale": 2 * scale - scale.detach()}, batch)


FAULTS = {
    # losses and data
    "a doubled loss": Fault(
        body=step_with(lambda p, x: 2 * loss(p, x)), named="loss", ranks=(0, 1)
    ),
    "a dropped micro-batch": Fault(body=drops_a_micro_batch, named="loss", ranks=(0, 1)),
    "a dropped micro-batch on rank 1": Fault(
        body=fzero.coalesce(drops_one_on_rank_1), named="loss", ranks=(1,), at=(0, 2)
    ),
    "shifted targets on rank 2": Fault(
        body=shifts_targets_on_rank_2, named="loss", ranks=(2,), at=(2, 3)
    ),
    "another rank's data": Fault(
        body=takes_the_data_of_rank_0, named="loss", ranks=(1, 2, 3), at=(3, 4)
    ),
    "a stale batch": Fault(body=keeps_the_first_batch, named="loss", step=2, at=(2, 3)),
    "other dropout masks": Fault(
        body=step_with(draws_once_more), good=step_with(with_dropout), named="loss", at=(2, 1)
    ),
    "inputs rounded to bf16": Fault(body=step_with(rounds_its_inputs), named="loss", at=(3, 2)),
    # gradients of one parameter
    "a detached weight": Fault(
        body=changed("first", "weight", torch.Tensor.detach),
        named="gradient",
        path=FIRST,
        at=(0, 2),
    ),
    "a detached bias on rank 1": Fault(
        body=changed("second", "bias", torch.Tensor.detach, rank=1),
        named="gradient",
        path="second.bias",
        ranks=(1,),
        at=(2, 3),
    ),
    "a negated gradient": Fault(
        body=changed("second", "weight", torch.neg), named="gradient", path=SECOND, at=(3, 2)
    ),
    "a gradient rounded to bf16": Fault(
        body=changed("first", "weight", lambda x: x.bfloat16().to(x.dtype)),
        named="gradient",
        path=FIRST,
    ),
    "a scalar's gradient twice": Fault(
        body=step_with(square_of_the_scale), named="gradient", path="scale", at=(3, 2)
    ),
    "a frozen bias": Fault(
        options={"trainable": lambda path: path != BIAS}, named="gradient", path=BIAS
    ),
}
