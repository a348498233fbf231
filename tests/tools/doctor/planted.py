"""Collectives with a fault, for the doctor to find. Its ranks import them by name."""

from __future__ import annotations

import functools
import os
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fzero


def on_a_backend_that_takes_the_largest(x: Tensor) -> Tensor:
    """fzero's own sum, where the backend gives MAX in its place."""
    broken = functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX)
    with mock.patch.object(dist, "all_reduce", broken):
        return fzero.all_reduce(x)


def with_a_mean_for_a_sum(x: Tensor) -> Tensor:
    """AVG where SUM was asked for."""
    return fzero.pmean(x)


def with_a_gradient_of_zero(x: Tensor) -> Tensor:
    """A sum whose graph is cut."""
    return fzero.all_reduce(x).detach() + 0 * x


def with_the_gradient_of_its_own_part(x: Tensor) -> Tensor:
    """A sum that is differentiated as if it were this rank's own tensor."""
    return x + (fzero.all_reduce(x) - x).detach()


def that_is_wrong_on_rank_1(x: Tensor) -> Tensor:
    """A sum to which the last rank adds something."""
    y = fzero.all_reduce(x)
    return y + 1 if dist.get_rank() == 1 else y


def that_raises_on_rank_1(x: Tensor) -> Tensor:
    """A sum that one rank does not have for whole numbers."""
    y = fzero.all_reduce(x)
    if dist.get_rank() == 1 and not x.is_floating_point():
        raise NotImplementedError("no such sum\nand more")
    return y


def in_another_dtype(x: Tensor) -> Tensor:
    """A sum in fp32, whatever it is given."""
    return fzero.all_reduce(x.float())


def that_ends_rank_0(x: Tensor) -> Tensor:
    """A process that dies, as by a fault in a kernel."""
    if dist.get_rank() == 0:
        os._exit(7)
    return fzero.all_reduce(x)


def that_is_alone_on_rank_0(x: Tensor) -> Tensor:
    """A collective for which one rank does not come."""
    if dist.get_rank() == 1:
        time.sleep(120)
    return fzero.all_reduce(x)


def that_is_right(x: Tensor) -> Tensor:
    """A sum."""
    return fzero.all_reduce(torch.clone(x))
