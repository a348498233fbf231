"""How often processes agree for a collective of the user's: once for each, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fzero
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

CALLS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "psum": ("all_reduce", fzero.psum),
    "all_to_all": ("all_to_all", fzero.all_to_all),
    "ppermute": ("ppermute", lambda x: fzero.ppermute(x, [(0, 1), (1, 0)])),
}


def _counts(rank: int, size: int) -> dict[tuple[str, str], dict[str, int]]:
    x, found = torch.ones(2, requires_grad=True), dict[tuple[str, str], dict[str, int]]()
    for name, (_, call) in CALLS.items():
        with fzero.count_collectives() as log, torch.no_grad():
            call(x)
        found[name, "no_grad"] = log.counts()
        with fzero.count_collectives() as log:
            torch.autograd.grad(call(x).sum(), x)
        found[name, "backward"] = log.counts()
    return found


@pytest.mark.smoke
def test_a_call_has_one_round_and_its_backward_another() -> None:
    wanted = {
        (name, mode): {"agree": n, op: n}
        for name, (op, _) in CALLS.items()
        for mode, n in (("no_grad", 1), ("backward", 2))
    }
    assert run_ranks(_counts, 2) == [wanted, wanted]


def test_one_rank_communicates_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    with fzero.count_collectives() as log:
        for call in (fzero.psum, fzero.all_to_all, fzero.all_gather):
            torch.autograd.grad(call(x).sum(), x)
        fzero.ppermute(x, [(0, 0)])
    assert log.counts() == {}
