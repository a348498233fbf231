"""Faults: what is wrong in run b, and where `diff` is to find it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.machine import reduce, unshard
from fzero.optim import Optimizer
from fzero.state import Setup
from tests.tools.diff.runs import (
    BIAS,
    FIRST,
    SECOND,
    Landed,
    loss,
    patched,
    run,
    step_with,
    updated,
)

norm = sys.modules["fzero.transforms.clip"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong in run b, where it is, and how the runs are made."""

    body: Callable[..., Any] = updated
    named: str  # the operation
    path: str | None = None  # None: any; "": of no parameter
    ranks: tuple[int, ...] | None = None  # None: any
    step: int = 1
    good: Callable[..., Any] = updated  # the step of run a
    options: dict[str, Any] = field(default_factory=dict)  # of run b
    both: dict[str, Any] = field(default_factory=dict)  # of both runs
    at: tuple[int, int] = (2, 2)  # stage and ranks of run b; run a is at stage 0 on one rank

    def runs(self) -> tuple[fzero.tools.Run, fzero.tools.Run]:
        sizes = {"stage": self.at[0], "world_size": self.at[1]}
        a = run(self.good, **{"calls": self.step, **self.both})
        body = self.body() if self.step > 1 else self.body  # one that keeps something
        return a, run(body, **{"calls": self.step, **sizes, **self.both, **self.options})


def on_rank(rank: int, wrong: Any, right: Any) -> Any:
    return wrong if fzero.axis_index() == rank else right


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


ALL = (0, 1, 2, 3)


# Reductions and gathers.


def forgets_the_reduction(state: Any, batch: Any, reduced: bool = True) -> Any:
    for one in zip(*batch, strict=True):
        state = fzero.add_gradients(state, gradient(fzero.full_params(state), one), reduced=reduced)
    return fzero.apply_gradients(state), None


def gradient(params: Any, batch: Any) -> Any:
    """A rank's own gradient, by torch.func."""
    learning = {name: value for name, value in params.items() if name != "fixed"}
    found = torch.func.grad(lambda p: loss({**p, "fixed": params["fixed"]}, batch))(learning)
    return {**found, "fixed": None}


def throws_a_state_away(state: Any, batch: Any) -> Any:
    micro_batches = list(zip(*batch, strict=True))
    state, _ = fzero.grad_and_reduce(loss, state)(micro_batches[0])
    fzero.grad_and_reduce(loss, state)(micro_batches[1])
    return fzero.apply_gradients(state), None


def keeps_old_gradients() -> Any:
    def step(state: Any, batch: Any) -> Any:
        for one in zip(*batch, strict=True):
            state, _ = fzero.grad_and_reduce(loss, state)(one)
        return fzero.apply_gradients(state).replace(gradients=state.gradients), None

    return step


def own_part(local: Any, axis: Any, ordered: bool) -> Landed:
    return Landed([x.view(axis.size, -1)[axis.rank] * axis.size for x in local])


def scatters_turned(local: Any, axis: Any, ordered: bool, start: Any = reduce.start_scatter) -> Any:
    turned = [x.view(axis.size, -1).roll(1, 0).reshape(-1) for x in local]
    return start(turned, axis, ordered=ordered)


def loses_a_bucket(
    self: Any, unit: int, *, mine: bool = True, start: Any = reduce.Reducer.start
) -> Any:
    return start(self, unit, mine=mine and unit != 0)


def sends_rounded(self: Any, index: int, x: Tensor, sent: Any = Setup.sent) -> Tensor:
    return sent(self, index, x).bfloat16().to(x.dtype)


REAL_GATHER = unshard.start_gather


def gathers_turned_on_rank_1(shards: Any, axis: Any, codecs: Any = ()) -> Any:
    flats = REAL_GATHER(shards, axis, codecs=codecs).wait()
    turned = [x.view(axis.size, -1).roll(1, 0).reshape(-1) for x in flats]
    return Landed(on_rank(1, turned, flats))


def gathers_rounded(shards: Any, axis: Any, codecs: Any = ()) -> Any:
    rounded = [x.bfloat16().to(x.dtype) for x in shards]
    return REAL_GATHER(rounded, axis, codecs=codecs)


def gathers_stale() -> Any:
    """The unit of the first layer, the largest one, is gathered as it was at first."""
    kept: dict[int, Any] = {}

    def start(shards: Any, axis: Any, codecs: Any = ()) -> Any:
        if shards[0].numel() > 12:
            shards = kept.setdefault(axis.rank, [x.clone() for x in shards])
        return REAL_GATHER(shards, axis, codecs=codecs)

    return patched(unshard, "start_gather", start)


# Clipping.


def clipped(body: Any = updated) -> Any:
    return fzero.clip(body, max_norm=0.01)


def stays_on_the_rank(totals: list[Tensor], axis: Any, **options: Any) -> list[Tensor]:
    return totals


def no_factor_on_rank_1(norm: Tensor, max_norm: float) -> Any:
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return on_rank(1, torch.ones_like(factor), factor)


# The optimizer.


def advancing(change: Callable[..., Any], body: Any = updated) -> Any:
    """The step with an optimizer that changes (params, grads, state), or the result of it."""
    real = Optimizer.advance

    def advance(self: Any, params: Any, grads: Any, state: Any, pieces: Any, **options: Any) -> Any:
        def go_on(params: Any = params, grads: Any = grads, state: Any = state) -> Any:
            return real(self, params, grads, state, pieces, **options)

        return change(go_on, params, grads, state)

    return patched(Optimizer, "advance", advance, body)


def skips_on_rank_1(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    return on_rank(1, lambda: ([p.clone() for p in params], state), go_on)()


def keeps_masters(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    new, after = go_on()
    return new, dataclasses.replace(after, masters=tuple(m.clone() for m in state.masters))


def counts_twice(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    return go_on(state=dataclasses.replace(state, count=state.count + 1))


def forgets_moments(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    new, after = go_on()
    return new, dataclasses.replace(after, moments=state.moments)


def drifts_on_rank_1(go_on: Any, params: Any, grads: Any, state: Any) -> Any:
    new, after = go_on()
    return on_rank(1, [p * (1 + 2.0**-51) for p in new], new), after


# What a step returns.


def returns_old_parameters(state: Any, batch: Any) -> Any:
    return updated(state, batch)[0].replace(params=state.params), None


def returns_an_old_optimizer_state(state: Any, batch: Any) -> Any:
    return updated(state, batch)[0].replace(optimizer=state.optimizer), None


def returns_an_old_count(state: Any, batch: Any) -> Any:
    return updated(state, batch)[0].replace(step=state.step), None


def updates_twice(state: Any, batch: Any) -> Any:
    state, _ = updated(state, batch)
    return updated(state, [0 * x for x in batch], lambda p, x: 0 * loss(p, x))


def never_updates(state: Any, batch: Any) -> Any:
    for one in zip(*batch, strict=True):
        state, _ = fzero.grad_and_reduce(loss, state)(one)
    return state, None


def with_optimizer(right: Any, wrong: Any) -> dict[str, Any]:
    return {"both": {"optimizer": right}, "options": {"optimizer": wrong}}


adamw, sgd = fzero.optim.adamw, fzero.optim.sgd
HALF: dict[str, Any] = {"both": {"dtype": torch.bfloat16}}

FAULTS: dict[str, Fault] = {
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
    # reductions
    "a forgotten reduction": Fault(
        body=forgets_the_reduction, named="reduction", at=(0, 2), ranks=(0, 1)
    ),
    "a forgotten reduce-scatter": Fault(
        body=patched(reduce, "start_scatter", own_part), named="reduction", at=(3, 2)
    ),
    "a state thrown away": Fault(body=throws_a_state_away, named="reduction", at=(1, 2)),
    "a sum in place of a mean": Fault(
        options={"reduce_op": "sum"}, named="reduction", at=(0, 4), ranks=ALL
    ),
    "swapped shards of gradients": Fault(
        body=patched(reduce, "start_scatter", scatters_turned),
        named="reduction",
        path=FIRST,
        at=(2, 3),
    ),
    "a lost bucket": Fault(
        body=patched(reduce.Reducer, "start", loses_a_bucket),
        options={"units": lambda path: path},
        named="reduction",
        path=FIRST,
        at=(3, 2),
    ),
    "bf16 on the wire": Fault(
        body=patched(Setup, "sent", sends_rounded), named="reduction", path=FIRST, at=(0, 2)
    ),
    "gradients of the step before": Fault(
        body=keeps_old_gradients, named="reduction", step=2, at=(2, 4)
    ),
    # gathers
    "swapped shards on rank 1": Fault(
        body=patched(unshard, "start_gather", gathers_turned_on_rank_1),
        named="gather",
        path=FIRST,
        ranks=(1,),
        at=(3, 3),
    ),
    "parameters rounded as they are gathered": Fault(
        body=patched(unshard, "start_gather", gathers_rounded),
        named="gather",
        path=FIRST,
        at=(3, 2),
    ),
    "stale parameters": Fault(body=gathers_stale, named="gather", path=FIRST, step=2, at=(3, 2)),
    # clipping
    "the norm of one shard": Fault(
        good=clipped(),
        body=clipped(patched(norm, "reduce_many", stays_on_the_rank)),
        named="norm",
        ranks=(0, 1, 2),
        at=(2, 3),
    ),
    "no clipping": Fault(good=clipped(), named="clip", path=FIRST, at=(3, 2)),
    "no clipping on rank 1": Fault(
        good=clipped(),
        body=clipped(patched(norm, "clip_factor", no_factor_on_rank_1)),
        named="clip",
        path=FIRST,
        ranks=(1,),
        at=(0, 2),
    ),
    # the optimizer
    "a doubled learning rate": Fault(
        named="update", path=FIRST, **with_optimizer(adamw(0.01), adamw(0.02))
    ),
    "a schedule one step late": Fault(
        body=lambda: updated,
        named="update",
        step=2,
        at=(3, 2),
        **with_optimizer(adamw(lambda n: 0.01 / (1 + n)), adamw(lambda n: 0.01 / max(n, 1))),
    ),
    "swapped betas": Fault(
        named="optimizer state exp_avg",
        path=FIRST,
        **with_optimizer(adamw(0.01), adamw(0.01, betas=(0.999, 0.9))),
    ),
    "another eps": Fault(
        named="update",
        path=FIRST,
        at=(3, 2),
        **with_optimizer(adamw(0.01), adamw(0.01, eps=1.01e-8)),
    ),
    "weight decay on an unused parameter": Fault(
        named="update",
        path="unused",
        at=(3, 2),
        **with_optimizer(adamw(0.01, decay_mask=lambda leaf: leaf.path != "unused"), adamw(0.01)),
    ),
    "another momentum": Fault(
        body=lambda: updated,
        named="optimizer state momentum_buffer",
        step=2,
        **with_optimizer(sgd(0.1, momentum=0.9), sgd(0.1, momentum=0.8)),
    ),
    "no update on rank 1": Fault(
        body=advancing(skips_on_rank_1),
        named="optimizer state exp_avg",
        ranks=(1,),
        path=FIRST,
        at=(2, 3),
    ),
    "no update on rank 1, by SGD": Fault(
        body=advancing(skips_on_rank_1),
        named="update",
        ranks=(1,),
        at=(0, 2),
        both={"optimizer": sgd(0.1)},
    ),
    "moments that stay": Fault(
        body=advancing(forgets_moments), named="optimizer state exp_avg", at=(3, 2)
    ),
    "a count that is one ahead": Fault(body=advancing(counts_twice), named="update", at=(1, 2)),
    "masters that stay": Fault(
        body=advancing(keeps_masters), named="optimizer state masters", at=(3, 2), **HALF
    ),
    "a replica that drifts": Fault(
        body=advancing(drifts_on_rank_1), named="replica update", ranks=(1,), at=(0, 3)
    ),
    # what is returned
    "old parameters": Fault(body=returns_old_parameters, named="state", path=FIRST, at=(3, 2)),
    "an old optimizer state": Fault(
        body=returns_an_old_optimizer_state, named="state exp_avg", path=FIRST, at=(2, 3)
    ),
    "an old count": Fault(body=returns_an_old_count, named="state updates", path="", at=(0, 2)),
    "two updates": Fault(body=updates_twice, named="update", path="", ranks=(0, 1)),
    "no update": Fault(body=never_updates, named="update", path="", ranks=(0, 1)),
}
