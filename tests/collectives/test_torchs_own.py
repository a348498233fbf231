"""Why a loss takes fzero's collectives: what torch's own do in it, without an error."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import fzero
from tests.adapter.on_ranks import on_ranks


@on_ranks(2)
def test_torchs_own_collectives_are_wrong_in_a_loss(rank: int) -> None:
    """d(sum_s y_s)/dx_r of y = sum_r x_r on each of 2 ranks s is 2."""
    x = torch.ones(3, requires_grad=True)
    (right,) = torch.autograd.grad(fzero.all_reduce(x).sum(), x)
    assert right.tolist() == [2, 2, 2]
    y = x.clone()
    dist.all_reduce(y)
    with warnings.catch_warnings():  # torch says that its own autograd does not know the op
        warnings.simplefilter("ignore")
        (own,) = torch.autograd.grad(y.sum(), x)
    assert own.tolist() == [1, 1, 1]  # of its own part alone

    group = dist.group.WORLD
    assert group is not None
    given = torch.ones(3), torch.ones(3)
    right = torch.func.jvp(fzero.all_reduce, *((one,) for one in given))[1]
    assert right.tolist() == [2, 2, 2]
    zero = torch.func.jvp(lambda x: functional.all_reduce(x, "sum", group), *((x,) for x in given))
    assert not torch.any(zero[1])
