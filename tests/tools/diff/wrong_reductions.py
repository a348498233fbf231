"""Faults where gradients are reduced, and where parameters are gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fzero
from fzero.machine import reduce, unshard
from fzero.state import Setup
from tests.tools.diff.fault import Fault, on_rank
from tests.tools.diff.runs import FIRST, Landed, loss, patched

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


FAULTS = {
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
}
