"""What a step does on several ranks, and what one rank does with the mean gradient: with numbers.

The second is run from the definition, without a collective: each rank alone, with its own batch,
and the k-th gradient in the place of its own is the mean over ranks of those that they made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fzero
import fzero.transforms.forward as forward
import fzero.transforms.grad as module
from tests.tools.prove.adversary.programs import Program

_UNDER_WAY: list[_Gradients] = []


class _Gradients:
    """The gradients that a rank makes, in order; the first ones are replaced by `means`."""

    def __init__(self, means: Sequence[list[Tensor]]) -> None:
        self.means, self.own = means, list[list[Tensor]]()

    def next(self, count: int) -> int:
        self.own.append([torch.empty(0)] * count)
        return len(self.own) - 1

    def give(self, call: int, leaf: int, gradient: Tensor) -> Tensor:
        self.own[call][leaf] = gradient.clone()
        return self.means[call][leaf] if call < len(self.means) else gradient


def by_hand(loss: Tensor, leaves: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """`torch.autograd.grad`, for steps that make gradients themselves."""
    found = list(torch.autograd.grad(loss, list(leaves), **options))
    if not _UNDER_WAY:
        return found
    call = _UNDER_WAY[0].next(len(found))
    return [_UNDER_WAY[0].give(call, i, one) for i, one in enumerate(found)]


def true_params(program: Program) -> list[Tensor]:
    """The leaves of the parameters by the definition; raises if ranks alone do not agree."""
    means: list[list[Tensor]] = []
    while True:
        runs = [_alone(program, rank, means) for rank in range(program.world)]
        made = [own for own, _ in runs]
        if len(made[0]) == len(means):
            break
        assert len({len(one) for one in made}) == 1, "ranks make other numbers of gradients"
        new = zip(*(one[len(means)] for one in made), strict=True)
        means.append([_wide(torch.stack(one)).mean(0).to(one[0].dtype) for one in new])
    first, *rest = (params for _, params in runs)
    assert all(_distance(first, one) < 1e-6 for one in rest), "the update is not of the gradient"
    return first


def _alone(program: Program, rank: int, means: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
    with _replaced(means) as gradients, torch.random.fork_rng():
        torch.manual_seed(0)
        options: Any = {**program.options, "stage": 0}
        step = fzero.shard(program.make(), **options)
        state = step.init(program.params(), program.optimizer())
        for _ in range(program.calls):
            state = step(state, *program.inputs(rank))[0]
        return gradients.own, _leaves(fzero.full_params(state))


@contextmanager
def _replaced(means: Any) -> Iterator[_Gradients]:
    """Replace what backwards of `grad_and_reduce` make."""
    gradients, leaves_of = _Gradients(means), list[Any]()

    def leaves_in(*args: Any) -> Any:
        leaves_of.append(made := old_leaves(*args))
        return made

    def learning(leaves: Any) -> list[Tensor]:
        return [leaf for leaf in leaves.values() if leaf.requires_grad]

    def loss_and_aux(*args: Any, **kwargs: Any) -> Any:
        loss, aux = old_loss(*args, **kwargs)  # each leaf is used, so that each has a gradient
        for leaf in (leaf for leaves in leaves_of for leaf in learning(leaves)):
            loss = loss + _nothing(leaf)
        return loss, aux

    def loss_learned(states: Any, loss: Tensor) -> Tensor:
        learned = old_learned(states, loss)
        for leaves in leaves_of[-len(states) :]:
            call = gradients.next(len(learning(leaves)))
            for i, leaf in enumerate(learning(leaves)):
                leaf.register_hook(lambda g, i=i, call=call: gradients.give(call, i, g))
        del leaves_of[-len(states) :]
        return learned

    old_leaves, old_learned = forward.leaves_in_pass, forward.loss_learned
    old_loss = module.loss_and_aux
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "leaves_in_pass", leaves_in)
        patch.setattr(module, "loss_and_aux", loss_and_aux)
        patch.setattr(forward, "loss_learned", loss_learned)
        _UNDER_WAY.append(gradients)
        try:
            yield gradients
        finally:
            _UNDER_WAY.pop()


def _nothing(leaf: Tensor) -> Tensor:
    real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return real.reshape(-1)[:1].sum() * 0


def params_on_ranks(program: Program) -> list[list[Tensor]]:
    """The leaves of the parameters after all calls, as each of W virtual ranks has them."""
    world = program.world
    with torch.random.fork_rng():
        torch.manual_seed(0)
        step = fzero.simulate(fzero.shard(program.make(), **program.options), world_size=world)
        state = step.init(program.params(), program.optimizer())
        every: Any = [program.inputs(rank) for rank in range(world)]
        stacked: Any = optree.tree_map(lambda *xs: _stacked(xs), *every)
        for _ in range(program.calls):
            state = step(state, *stacked)[0]
        full = _leaves(fzero.simulate(fzero.full_params, world_size=world)(state))
    return [[one[rank] for one in full] for rank in range(world)]


def _stacked(xs: Sequence[Any]) -> Any:
    return torch.stack(list(xs)) if isinstance(xs[0], Tensor) else xs[0]


def _leaves(params: Any) -> list[Tensor]:
    return [x.detach() for x in optree.tree_leaves(params)]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    pairs = [(x.flatten(), y.flatten()) for x, y in zip(a, b, strict=True) if x.numel()]
    gone = [bool(x.isfinite().all()) != bool(y.isfinite().all()) for x, y in pairs]
    if any(gone):
        return float("inf")
    size = max([1.0, *(float(x.abs().max()) for x, _ in pairs)])
    return max(float((_wide(x) - _wide(y)).abs().max()) for x, y in pairs) / size


def error_of(program: Program) -> float:
    """How far ranks are from the theorem, or from each other; inf if they cannot run the step."""
    try:
        ranks = params_on_ranks(program)
    except (fzero.MismatchError, fzero.AxisError):  # there is no new state
        return float("inf")
    apart = max(_distance(ranks[0], one) for one in ranks)
    if apart > 1e-3:
        return apart
    wanted = true_params(program)
    return max(_distance(wanted, one) for one in ranks)
