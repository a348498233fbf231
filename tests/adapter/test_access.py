"""What an engine holds, read and written by path; and the report of its bytes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.adapter import Engine
from fzero.errors import FzeroError, LayoutError, PhaseError
from tests.adapter.plain import STAGES, Draw, order_may_change
from tests.adapter.unsharded import Odd, Unsharded, loss_of, same_update, seeded
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

ADAM = functools.partial(torch.optim.AdamW, lr=0.05)


def learning(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def adam_of(module: nn.Module) -> torch.optim.Optimizer:
    return ADAM(learning(module))


def close_to(label: str, found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, label
    assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-13), label


def pieces(mine: Tensor, world_size: int, stage: int, shape: torch.Size) -> Tensor:
    """What the ranks hold of one parameter, one after the other."""
    assert mine.ndim == 1
    if stage == 0:
        return mine.view(shape)
    found: list[Any] = [None] * world_size
    if world_size == 1:
        found = [mine]
    else:
        torch.distributed.all_gather_object(found, mine)
    return torch.cat(found).view(shape)


def gradients_body(rank: int, world_size: int) -> None:
    reference = Unsharded(Odd, adam_of, world_size)
    wanted = {p: g.clone() for p, g in reference.gradients(0).items()}
    for stage in STAGES:
        engine = Engine(seeded(Odd), ADAM, stage=stage, bucket_bytes=100)
        label = f"stage {stage}, W={world_size}"
        loss_of(engine, rank, 0).backward()
        first = engine.local_gradient("b.weight")  # nothing else has asked before
        found = engine.full_gradients()
        assert torch.equal(first, engine.local_gradient("b.weight")), label
        assert list(found) == list(wanted)
        for path, gradient in wanted.items():
            close_to(f"{label}: {path}", found[path], gradient)
            assert torch.equal(engine.full_gradient(path), found[path])
            local = engine.local_gradient(path)
            assert torch.equal(pieces(local, world_size, stage, gradient.shape), found[path])
        for path in ("b.weight", "unused.bias"):
            new = Draw(0, 5).whole(*wanted[path].shape)
            engine.set_full_gradient(path, new)
            assert torch.equal(engine.full_gradient(path), new), f"{label}: {path}"
            close_to(label, engine.full_gradients()["b.bias"], wanted["b.bias"])
        reference = Unsharded(Odd, adam_of, world_size)
        reference.gradients(0)
        for path in ("b.weight", "unused.bias"):
            p = reference.module.get_parameter(path)
            p.grad = Draw(0, 5).whole(*p.shape)
        reference.optimizer.step()
        engine.step()
        same_update(label, engine.full_parameters(), reference.parameters(), reference.begin)
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_read_whole_and_in_pieces_and_what_is_set_is_what_step_uses(
    world_size: int,
) -> None:
    run_ranks(gradients_body, world_size)


def share_body(rank: int, world_size: int) -> None:
    for stage in (0, 2, 3):
        engine = Engine(
            seeded(Odd), ADAM, stage=stage, loss_scale=8.0, average_micro_batches=True, max_norm=0.1
        )
        reference = Unsharded(Odd, adam_of, world_size)
        wanted = [
            {p: g.clone() for p, g in reference.gradients(number).items()} for number in (0, 1)
        ]
        for number in (0, 1):
            engine.scale(loss_of(engine, rank, number)).backward()
        for path, gradient in engine.full_gradients().items():
            mean = (wanted[0][path] + wanted[1][path]) / 2
            close_to(f"stage {stage}: {path}", gradient, mean)
        new = Draw(0, 5).whole(5, 3)
        engine.set_full_gradient("a.weight", new)
        assert torch.equal(engine.full_gradient("a.weight"), new)
        engine.close()


def test_gradients_are_those_of_the_update_divided_and_unscaled_and_not_clipped() -> None:
    run_ranks(share_body, 2)


def parameters_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        engine = Engine(seeded(Odd), ADAM, stage=stage, bucket_bytes=100)
        reference = Unsharded(Odd, adam_of, world_size)
        label = f"stage {stage}, W={world_size}"
        found = engine.full_parameters()
        for path, value in reference.begin.items():  # frozen ones, too
            assert torch.equal(found[path], value), f"{label}: {path}"
            assert torch.equal(engine.full_parameter(path), value)
            mine = engine.local_parameter(path)
            if path != "fixed":
                assert torch.equal(pieces(mine, world_size, stage, value.shape), value), label
        found["a.weight"].zero_()  # a copy
        for path in ("fixed", "a.weight", "c.weight"):
            new = Draw(0, 5)(*reference.begin[path].shape)
            engine.set_full_parameter(path, new)
            reference.module.get_parameter(path).data.copy_(new)
            assert torch.equal(engine.full_parameter(path), new), f"{label}: {path}"
        assert torch.equal(engine.full_parameter("a.bias"), reference.begin["a.bias"])
        x = Draw(0, 6)(2, 3)
        close_to(label, engine(x).detach(), reference.module(x).detach())
        begin = reference.parameters()
        for number in range(2):
            with order_may_change():
                loss_of(engine, rank, number).backward()
            engine.step()
            reference.step(number)
        same_update(label, engine.full_parameters(), reference.parameters(), begin)
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_are_read_whole_and_in_pieces_and_what_is_set_is_trained_on(
    world_size: int,
) -> None:
    run_ranks(parameters_body, world_size)


def states_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        label = f"stage {stage}, W={world_size}"
        engine = Engine(seeded(Odd), ADAM, stage=stage, bucket_bytes=100)
        reference = Unsharded(Odd, adam_of, world_size)
        for number in range(2):
            loss_of(engine, rank, number).backward()
            engine.step()
            reference.step(number)
        states = engine.full_optimizer_states()
        of = {path: reference.optimizer.state[p] for path, p in named(reference.module)}
        assert states.keys() == of.keys(), label
        for path, state in of.items():
            assert states[path].keys() == state.keys()
            for name, value in state.items():
                close_to(f"{label}: {path}.{name}", states[path][name].to(value.dtype), value)
                one = engine.full_optimizer_state(path, name)
                assert torch.equal(one, states[path][name])
        new = Draw(0, 5)(5, 3).abs()
        for name in ("exp_avg", "exp_avg_sq"):
            engine.set_full_optimizer_state("a.weight", name, new)
            of["a.weight"][name].copy_(new)
            assert torch.equal(engine.full_optimizer_state("a.weight", name), new), label
        begin = reference.parameters()
        for number in range(2, 4):
            loss_of(engine, rank, number).backward()
            engine.step()
            reference.step(number)
        same_update(label, engine.full_parameters(), reference.parameters(), begin)
        engine.close()


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(path, p) for path, p in module.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_optimizer_states_are_those_of_the_unsharded_run_and_what_is_set_is_used(
    world_size: int,
) -> None:
    run_ranks(states_body, world_size)


def first_states_body(rank: int, world_size: int) -> None:
    """The optimizer's state of another run, written into a new engine before its first step."""
    reference = Unsharded(Odd, adam_of, world_size)
    for number in range(3):
        reference.step(number)
    begin = reference.parameters()
    of = {path: copy.deepcopy(reference.optimizer.state[p]) for path, p in named(reference.module)}
    reference.step(3)
    for stage in STAGES:
        engine = Engine(seeded(Odd), ADAM, stage=stage, bucket_bytes=100)
        for path, value in begin.items():
            engine.set_full_parameter(path, value)
        for path, state in of.items():
            for name, value in state.items():
                engine.set_full_optimizer_state(path, name, value.clone())
        loss_of(engine, rank, 3).backward()
        engine.step()
        label = f"stage {stage}, W={world_size}"
        same_update(label, engine.full_parameters(), reference.parameters(), begin)
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_optimizer_states_may_be_written_before_the_first_step(world_size: int) -> None:
    run_ranks(first_states_body, world_size)


def wrong_calls(engine: Engine) -> list[tuple[Callable[[], Any], type[FzeroError], str]]:
    """Calls, what they raise, and what the message names."""
    wrong = torch.zeros(4).double()
    set_state = functools.partial(engine.set_full_optimizer_state, "a.bias", "exp_avg")
    return [
        (lambda: engine.full_gradient("a.wieght"), LayoutError, "a.wieght"),
        (lambda: engine.local_gradient("fixed"), PhaseError, "fixed"),
        (lambda: engine.set_full_gradient("a.weight", wrong), LayoutError, "a.weight"),
        (lambda: engine.full_parameter("z"), LayoutError, "'z'"),
        (lambda: engine.set_full_parameter("b.bias", wrong), LayoutError, "b.bias"),
        (lambda: engine.full_optimizer_state("fixed", "step"), PhaseError, "fixed"),
        (lambda: engine.full_optimizer_state("a.bias", "exp_agv"), LayoutError, "exp_agv"),
        (lambda: set_state(wrong), LayoutError, "a.bias"),
    ]


def errors_body(rank: int, world_size: int) -> None:
    for stage in STAGES:
        engine = Engine(seeded(Odd), ADAM, stage=stage)
        loss_of(engine, rank, 0).backward()
        begin = engine.full_parameters()
        for number, (call, kind, text) in enumerate(wrong_calls(engine)):
            with pytest.raises(kind, match="Fix: ") as caught:
                call()
            assert text in str(caught.value), f"case {number}: {caught.value}"
        assert all(map(torch.equal, begin.values(), engine.full_parameters().values()))
        reference = Unsharded(Odd, adam_of, world_size)
        reference.step(0)
        engine.step()  # none of them left anything
        same_update("", engine.full_parameters(), reference.parameters(), reference.begin)
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wrong_path_shape_or_name_is_named_and_changes_nothing(world_size: int) -> None:
    run_ranks(errors_body, world_size)


class Wide(nn.Module):
    """Both groups divide by 1, 2 and 3 ranks into multiples of 16 bytes: nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(16, 48, dtype=torch.bfloat16)
        self.full = nn.Linear(12, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x.bfloat16()).float().sum() + self.full(x[:, :12]).sum()


LOW, FULL = 16 * 48 + 48, 12 * 4


def report_body(rank: int, world_size: int) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    x = torch.ones(2, 16)
    for stage in STAGES:
        label = f"stage {stage}, W={world_size}"
        engine = Engine(Wide(), torch.optim.Adam, stage=stage)
        w = world_size if stage else 1  # gradients and optimizer state are divided by this
        p = world_size if stage == 3 else 1
        held = {bf16: 2 * LOW // p, fp32: 4 * FULL // p}
        idle = engine.memory_report()
        assert idle.parameters == held, label
        assert idle.masters == {fp32: 4 * LOW // w}, label
        assert not idle.live_parameters and not idle.gradients, label
        states = sum(idle.optimizer.values()) - 2 * 4 * (LOW + FULL) // w
        assert 0 <= states <= 4 * 4, f"{label}: {idle.optimizer}"  # the step counts
        with engine.no_sync():
            engine(x).backward()
            if stage == 3 and world_size > 1:
                assert not engine.memory_report().live_parameters, label
            inside = engine.memory_report()  # a full gradient waits, bf16 ones in fp32
            assert inside.gradients == {fp32: 4 * (LOW + FULL)}, label
        engine(x).backward()
        reduced = engine.memory_report()
        assert reduced.gradients == {fp32: 4 * (LOW + FULL) // w}, label
        engine.step()
        after = engine.memory_report()
        assert after == idle, label
        kinds = (after.parameters, after.masters, after.optimizer)
        assert after.total_bytes == sum(sum(kind.values()) for kind in kinds), label
        assert f"{after.total_bytes:,}" in str(after)
        engine.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_memory_report_has_the_bytes_of_the_theory_at_every_stage(world_size: int) -> None:
    run_ranks(report_body, world_size)
