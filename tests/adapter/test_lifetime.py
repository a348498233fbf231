"""An engine that nobody holds any more goes, with its model, and leaves the others in order."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.errors import PeerFailedError
from tests.adapter.nets import F64, Net
from tests.adapter.on_ranks import Place, at_places, virtually
from tests.adapter.plain import back, engine_of, same, update
from tests.failing import fails_in_backward


@at_places(1, 2)
@pytest.mark.parametrize("uses", ["none", "a forward", "gradients", "updates"])
def test_an_engine_that_nobody_holds_goes_with_its_model(at: Place, uses: str) -> None:
    e: Any = at.engine(Net, autocast=torch.bfloat16)
    if uses == "a forward":
        e(torch.ones(2, 3, dtype=F64))
    if uses in ("gradients", "updates"):
        back(e, at.draw(0))
    if uses == "updates":
        e.step()
    held = [*e.module.parameters(), e.state.params.flats[0], e.module, e._driver]
    gone = [weakref.ref(x) for x in held]
    del e, held
    gc.collect()
    gc.collect()  # what autograd held is found by the second one
    assert [x() for x in gone] == [None] * len(gone)


@virtually(2)
def test_an_engine_that_nobody_holds_lets_go_of_the_graphs_of_its_losses(rank: int) -> None:
    e = engine_of(Net, 2)
    fzero.psum(e(torch.ones(2, 3, dtype=F64)).sum())
    gone = weakref.ref(e.module)
    del e
    gc.collect()
    assert gone() is None


@at_places(1, 2)
def test_a_model_keeps_its_engine(at: Place) -> None:
    e, plain = at.both(Net)
    module, driver = e.module, weakref.ref(e._driver)
    del e
    gc.collect()
    back(module, at.draw(0))
    kept: Any = driver()
    wanted = plain.run(back, 0)
    found = kept.state.setup.layout.leaves
    assert {leaf.path for leaf in found} == set(wanted) and kept.state.progress.backwards == 1


class Broken(nn.Module):
    """Its backward raises after a part of the gradients has come, if it `fails`."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.first, self.fails = Net(), nn.Linear(3, 3, dtype=F64), False

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        return self.net(fails_in_backward(x, MemoryError("no memory")) if self.fails else x)


@at_places(2)
@pytest.mark.parametrize("failing", [{0, 1}, {1}], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("collecting", [set(), {0}, {1}], ids=str)
def test_the_next_engine_after_a_plain_backward_that_raised_trains(
    at: Place, failing: set[int], collecting: set[int]
) -> None:
    """As where a smaller batch is tried with a new engine, after one that took too much memory."""
    e: Any = at.engine(Broken)
    e.module.fails = at.rank in failing
    with suppress(MemoryError, PeerFailedError):
        back(e, at.draw(0))
        raise AssertionError("a backward without an error")
    e = None
    if at.rank in collecting:
        gc.collect()
    new, plain = at.both(Broken)
    for number in range(2):
        update(new, plain, at.rank, number)
    same(new.full_parameters(), dict(plain.module.named_parameters()))


@at_places(2)
def test_a_backward_that_raises_beside_another_engine_in_a_pass_is_heard(at: Place) -> None:
    """Below stage 3 it is announced at its end only, while a user's collective is pending."""
    beside: Any = at.engine(Net)
    e: Any = at.engine(Broken)
    output = beside(at.draw(0)(2, 3))
    fzero.psum(output.sum())
    e.module.fails = at.rank == 1
    with pytest.raises(MemoryError if at.rank == 1 else PeerFailedError):
        back(e, at.draw(0))
    new, plain = at.both(Broken)
    for number in range(2):
        update(new, plain, at.rank, number)
    same(new.full_parameters(), dict(plain.module.named_parameters()))
    del output
    beside.close()  # else its pass is under way for all tests that follow in these processes
