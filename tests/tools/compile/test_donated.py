"""A compiled step that donates: it writes into the memory of the state that it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero
from fzero.errors import DonatedError, LayoutError
from fzero.tools.compile import passes
from tests.adapter.on_ranks import on_ranks
from tests.descends import descends
from tests.strategies import same
from tests.tools.compile.test_compile import RULE, leaves, params, step_fn


@pytest.mark.parametrize("stage", range(4))
def test_a_donating_step_writes_into_the_memory_that_it_is_given(stage: int) -> None:
    step = fzero.shard(step_fn, stage=stage, donate=True)
    compiled = fzero.compile(step, backend="eager")
    state, other = (compiled.init(params(), RULE) for _ in range(2))
    xs = torch.tensor([1.0, 3.0])
    for _ in range(3):
        before, used = [flat.data_ptr() for flat in other.params.flats], other
        (state, aux), (other, found) = step(state, xs), compiled(other, xs)
        same(leaves(other), leaves(state))
        assert torch.equal(found["loss"], aux["loss"])
        assert [flat.data_ptr() for flat in other.params.flats] == before
        with pytest.raises(DonatedError):
            compiled(used, xs)
    with pytest.raises(LayoutError, match="it must be one number"):
        compiled(other, torch.ones(2, 3, 7))  # no graph comes of it, and nothing is used up
    same(leaves(compiled(other, xs)[0]), leaves(step(state, xs)[0]))


@on_ranks(2)
def test_gathers_of_a_donating_step_end_in_the_memory_that_it_is_given(rank: int) -> None:
    check_in_place(rank, "eager")


@pytest.mark.slow  # what it adds is that a view that inductor returns is one
@on_ranks(2, timeout_s=300)
def test_gathers_behind_kernels_of_inductor_end_there_too(rank: int) -> None:
    check_in_place(rank, "inductor")


def check_in_place(rank: int, backend: Any) -> None:
    """Updated where the parameters are, and steps of masters, which are gathered from elsewhere."""
    halves = {name: value.bfloat16() for name, value in params().items() if name != "scalar"}

    of_halves = descends(lambda p, xs: (p["w0"] * xs[0]).sum())
    for values, fn in ((params(), step_fn), (halves, of_halves)):
        step = fzero.shard(fn, stage=2, donate=True)
        compiled = fzero.compile(step, backend=backend, bucket_bytes=0)
        state, other = (step.init(values, RULE) for _ in range(2))
        for number in range(3):
            xs = torch.tensor([number + rank, 2 * rank]).to(next(iter(values.values())).dtype)
            before = [flat.data_ptr() for flat in other.params.flats]
            (state, _), (other, _) = step(state, xs), compiled(other, xs)
            same(leaves(other), leaves(state))
            assert [flat.data_ptr() for flat in other.params.flats] == before


def test_a_state_comes_back_from_an_error_unless_it_was_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong: list[str] = []

    def fail(*_: Any) -> Any:
        raise RuntimeError(f"{wrong[0]} is wrong")

    rule = fzero.optim.sgd(lambda count: fail() if wrong == ["lr"] else 2.0**-8)
    step = fzero.shard(step_fn, stage=0, donate=True)
    compiled = fzero.compile(step, backend="eager")
    state, _ = compiled(compiled.init(params(), rule), torch.ones(1))
    wrong.append("lr")
    with pytest.raises(RuntimeError, match="lr is wrong"):
        compiled(state, torch.ones(1))
    wrong.clear()
    state, _ = compiled(state, torch.ones(1))
    wrong.append("update")
    monkeypatch.setattr(passes, "update_in_place", fail)
    with pytest.raises(RuntimeError, match="update is wrong"):
        compiled(state, torch.ones(1))
    with pytest.raises(DonatedError):
        compiled(state, torch.ones(1))
