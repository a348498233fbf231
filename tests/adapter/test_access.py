"""What an engine holds, read and written by path; and the report of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from fzero.errors import FzeroError, LayoutError, PhaseError
from tests.adapter.nets import Odd
from tests.adapter.on_ranks import Place, at_places
from tests.adapter.plain import (
    Draw,
    Reference,
    adamw_of,
    back,
    learning,
    same,
    update,
)


def check_piece(mine: Tensor, whole: Tensor, world_size: int, stage: int) -> None:
    """The 1-D pieces of all ranks, one after the other, are the whole; at stage 0 each is."""
    assert mine.ndim == 1
    found: list[Any] = [mine]
    if stage and world_size > 1:
        found = [None] * world_size
        torch.distributed.all_gather_object(found, mine)
    assert torch.equal(torch.cat(found).view(whole.shape), whole)


@at_places(1, 2, 3)
def test_gradients_are_read_whole_and_in_pieces_and_what_is_set_is_what_step_uses(
    at: Place,
) -> None:
    engine = at.engine(Odd, adamw_of, bucket_bytes=100)
    reference = at.plain(Odd, adamw_of)
    wanted = reference.run(back, 0)
    back(engine, at.draw(0))
    first = engine.local_gradient("b.weight")  # nothing else has asked before
    found = engine.full_gradients()
    assert list(found) == list(wanted)
    same(found, wanted)
    assert torch.equal(first, engine.local_gradient("b.weight"))
    for path, gradient in found.items():
        assert torch.equal(engine.full_gradient(path), gradient)
        check_piece(engine.local_gradient(path), gradient, at.ranks, at.stage)
    for path in ("b.weight", "unused.bias"):
        wanted[path] = Draw(0, 5).whole(*wanted[path].shape)
        engine.set_full_gradient(path, wanted[path])
        assert torch.equal(engine.full_gradient(path), wanted[path])
        same(engine.full_gradients(), wanted)
    engine.step()
    same(engine.full_parameters(), reference.step(wanted), 1e-9)


@at_places(1, 2, 3)
def test_parameters_are_read_whole_and_in_pieces_and_what_is_set_is_trained_on(at: Place) -> None:
    engine = at.engine(Odd, adamw_of, bucket_bytes=100)
    reference = at.plain(Odd, adamw_of)
    found = engine.full_parameters()
    same(found, reference.parameters(), 0.0)  # frozen ones, too
    for path, value in found.items():
        assert torch.equal(engine.full_parameter(path), value)
        if path != "fixed":
            check_piece(engine.local_parameter(path), value, at.ranks, at.stage)
    found["a.weight"].zero_()  # a copy
    for path in ("fixed", "a.weight", "c.weight"):
        new = Draw(0, 5)(*found[path].shape)
        engine.set_full_parameter(path, new)
        reference.module.get_parameter(path).data.copy_(new)
        assert torch.equal(engine.full_parameter(path), new)
    same(engine.full_parameters(), reference.parameters(), 0.0)
    for number in range(2):
        update(engine, reference, at.rank, number, tol=1e-9)


def states_of(reference: Reference) -> dict[str, dict[str, Tensor]]:
    assert reference.optimizer is not None
    return {path: reference.optimizer.state[p] for path, p in learning(reference.module).items()}


@at_places(1, 2, 3)
def test_optimizer_states_are_those_of_the_unsharded_run_and_go_on_in_another_engine(
    at: Place,
) -> None:
    engine = at.engine(Odd, adamw_of, bucket_bytes=100)
    reference = at.plain(Odd, adamw_of)
    for number in range(2):
        update(engine, reference, at.rank, number, tol=1e-9)
    states, wanted = engine.full_optimizer_states(), states_of(reference)
    assert states.keys() == wanted.keys()
    for path, state in wanted.items():
        if not state:  # nobody has used it
            assert not any(x.any() for x in states[path].values())
            continue
        same(states[path], state, 1e-9, path)
        for name in state:
            assert torch.equal(engine.full_optimizer_state(path, name), states[path][name])
    states["a.weight"]["exp_avg"] = new = Draw(0, 5)(5, 3)
    wanted["a.weight"]["exp_avg"].copy_(new)
    second = at.engine(Odd, adamw_of)
    for path, value in engine.full_parameters().items():
        second.set_full_parameter(path, value)
    for e in (engine, second):  # for the second one before its first step
        for path, state in states.items():
            for name, value in state.items():
                e.set_full_optimizer_state(path, name, value)
                assert torch.equal(e.full_optimizer_state(path, name), value)
        back(e, at.draw(2))
        e.step()
    after = reference.step(reference.run(back, 2))
    same(engine.full_parameters(), after, 1e-9)
    same(second.full_parameters(), after, 1e-9)


WRONG = torch.zeros(4, dtype=torch.float64)
NOTHING: Any = None
WRONG_CALLS: list[tuple[Callable[[Engine], Any], type[FzeroError], str]] = [
    (lambda e: e.full_gradient("a.wieght"), LayoutError, "a.wieght"),
    (lambda e: e.local_gradient("fixed"), PhaseError, "fixed"),
    (lambda e: e.set_full_gradient("a.weight", WRONG), LayoutError, "a.weight"),
    (lambda e: e.full_parameter("z"), LayoutError, "'z'"),
    (lambda e: e.set_full_parameter("b.bias", WRONG), LayoutError, "b.bias has the shape (3,)"),
    (lambda e: e.set_full_parameter("b.bias", NOTHING), LayoutError, "b.bias has the shape (3,)"),
    (lambda e: e.full_optimizer_state("fixed", "step"), PhaseError, "fixed"),
    (lambda e: e.full_optimizer_state("a.bias", "exp_agv"), LayoutError, "exp_agv"),
    (lambda e: e.set_full_optimizer_state("a.bias", "exp_avg", WRONG), LayoutError, "a.bias"),
]


@at_places(1, 2)
def test_a_wrong_path_shape_or_name_is_named_and_changes_nothing(at: Place) -> None:
    engine, reference = at.both(Odd, adamw_of)
    wanted = reference.run(back, 0)
    back(engine, at.draw(0))
    for call, kind, text in WRONG_CALLS:
        with pytest.raises(kind, match="Fix: ") as caught:
            call(engine)
        assert text in str(caught.value)
    same(engine.full_parameters(), reference.parameters(), 0.0)
    engine.step()
    same(engine.full_parameters(), reference.step(wanted), 1e-9)


class Wide(nn.Module):
    """Both groups divide by 1, 2 and 3 ranks into multiples of 16 bytes: nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(16, 48, dtype=torch.bfloat16)
        self.full = nn.Linear(12, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x.bfloat16()).float().sum() + self.full(x[:, :12]).sum()


LOW, FULL = 16 * 48 + 48, 12 * 4


@at_places(1, 2, 3)
def test_the_memory_report_has_the_bytes_of_the_theory(at: Place) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    x = torch.ones(2, 16)
    engine = Engine(Wide(), torch.optim.Adam, stage=at.stage)
    w = at.ranks if at.stage else 1  # gradients and optimizer state are divided by this
    p = at.ranks if at.stage == 3 else 1
    idle = engine.memory_report()
    assert idle.parameters == {bf16: 2 * LOW // p, fp32: 4 * FULL // p}
    assert idle.masters == {fp32: 4 * LOW // w}
    assert not idle.live_parameters and not idle.gradients
    counters = sum(idle.optimizer.values()) - 2 * 4 * (LOW + FULL) // w
    assert 0 <= counters <= 4 * 4, idle.optimizer
    with engine.no_sync():
        engine(x).backward()
        if at.is_lazy:
            assert not engine.memory_report().live_parameters
        inside = engine.memory_report()  # a full gradient waits, bf16 ones in fp32
        assert inside.gradients == {fp32: 4 * (LOW + FULL)}
    engine(x).backward()
    assert engine.memory_report().gradients == {fp32: 4 * (LOW + FULL) // w}
    engine.step()
    after = engine.memory_report()
    assert after == idle
    kinds = (after.parameters, after.masters, after.optimizer)
    assert after.total_bytes == sum(sum(kind.values()) for kind in kinds)
    assert f"{after.total_bytes:,}" in str(after)
