"""What no rank has used since the last update is not stepped: in PyTorch it has no gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.adapter import Engine, initialize
from fzero.errors import PhaseError
from tests.adapter.experts import (
    PLAN,
    Experts,
    X,
    adamw,
    close_to,
    made,
    momentum,
    moved,
    nadam,
    on_virtual_ranks,
    plain,
    run,
    stepping,
)
from tests.adapter.on_ranks import each_stage, on_ranks
from tests.failing import fails_in_backward


@pytest.mark.parametrize(
    ("optimizer_of", "stage", "ranks", "way", "options"),
    [
        (adamw, 0, 1, "", {}),
        (adamw, 1, 3, "coalesce", {"loss_scale": 256.0}),
        (adamw, 2, 2, "accumulate", {"gradient_accumulation_steps": 2}),
        (adamw, 3, 3, "", {"loss_scale": "dynamic"}),
        (momentum, 0, 3, "no_sync", {}),
        (momentum, 2, 1, "", {"offload": fzero.Offload(optimizer="cpu")}),
        (momentum, 3, 2, "no_sync", {"whole_parameters": True}),
        (nadam, 1, 2, "", {"mesh": (2, 1)}),
        (nadam, 3, 1, "coalesce", {}),
    ],
)
def test_values_and_states_are_those_of_plain_pytorch(
    optimizer_of: Callable[..., Any], stage: int, ranks: int, way: str, options: dict[str, Any]
) -> None:
    def body(rank: int) -> None:
        module = made()
        engine = Engine(module, optimizer_of(module), stage=stage, **options)
        for update, row in enumerate(PLAN):
            run(engine, rank, row, update, way)
            if way != "accumulate":
                engine.step()
            wanted = plain(ranks, optimizer_of, PLAN[: update + 1])
            close_to(engine.full_parameters(), wanted.values)
        assert int(engine.state.step) == len(PLAN)
        engine.close()
        assert engine.optimizer is not None
        for path, p in module.named_parameters():
            close_to(dict(engine.optimizer.state[p]), wanted.states[path])

    on_virtual_ranks(ranks, body)


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 3])
def test_processes_leave_out_what_virtual_ranks_do(rank: int, world_size: int, stage: int) -> None:
    module = made()
    engine = Engine(module, adamw(module), stage=stage)
    for update, row in enumerate(PLAN):
        run(engine, rank, row, update)
        engine.step()
    close_to(engine.full_parameters(), plain(world_size, adamw, PLAN).values)
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_of_zero_that_came_is_a_gradient(stage: int) -> None:
    def body(engine: Engine, rank: int) -> None:
        before = engine.full_parameters()
        engine.backward(0 * engine(X, [rank]))
        engine.step()
        assert moved(engine, before) == {"stem", "head", "0", "1"}  # they decay

    stepping(stage, body)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_was_thrown_away_was_not_used(stage: int) -> None:
    def body(engine: Engine, rank: int) -> None:
        engine.backward(engine(X, [0]))
        engine.zero_grad()
        with pytest.raises(ZeroDivisionError):
            h = engine(fails_in_backward(X.clone().requires_grad_(), ZeroDivisionError), [1])
            h.backward()
        with pytest.raises(KeyError), engine.coalesce():
            if stage < 3:
                engine.backward(engine(X, [2]))
            raise KeyError
        before = engine.full_parameters()
        engine.backward(engine(X, [3]))
        engine.step()
        assert moved(engine, before) == {"stem", "head", "3"}

    stepping(stage, body)


def test_a_gradient_that_is_written_counts() -> None:
    def body(engine: Engine, rank: int) -> None:
        before = engine.full_parameters()
        engine.backward(engine(X, []))
        engine.set_full_gradient("experts.2.weight", torch.zeros(3, 3))
        engine.step()
        assert moved(engine, before) == {"stem", "head", "2"}

    stepping(2, body)


def test_a_gradient_that_comes_inside_of_a_forward_counts() -> None:
    class Inner(Experts):
        def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
            self.experts[3](x).sum().backward()
            return super().forward(x, chosen)

    torch.manual_seed(3)
    module = Inner()
    engine = Engine(module, adamw(module), stage=2)
    before = engine.full_parameters()
    engine(X, [0]).backward()
    engine.step()
    assert moved(engine, before) == {"stem", "head", "0", "3"}


@each_stage
def test_an_update_in_which_nothing_was_used_counts_and_steps_nothing(stage: int) -> None:
    def body(rank: int) -> None:
        module = made()
        optimizer = adamw(module)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine = Engine(module, optimizer, stage=stage, max_norm=1.0)
        before = engine.full_parameters()
        assert engine.clip_grad_norm_(1.0) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert engine.step() is True
            rates.step()
        assert moved(engine, before) == set() and int(engine.state.step) == 1
        assert rates.get_last_lr() == [0.05, 0.05] and engine.global_grad_norm == 0
        assert module.stem.weight.grad is None
        with pytest.raises(PhaseError, match="there are no gradients"):
            engine.full_gradients()

    on_virtual_ranks(2, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_schedule_of_a_rule_goes_on_in_an_update_in_which_nothing_was_used(stage: int) -> None:
    def body(rank: int) -> None:
        module = made()
        engine = Engine(module, fzero.optim.sgd(lambda k: 2.0**-k), stage=stage)
        engine.step()
        before = engine.full_parameters()
        engine.backward(engine(X, []))
        gradients = engine.full_gradients()
        engine.step()
        close_to(engine.full_parameters(), {k: before[k] - gradients[k] / 2 for k in before})

    on_virtual_ranks(2, body)


def test_an_overflow_leaves_out_what_was_not_used_as_well() -> None:
    def body(rank: int) -> None:
        module = made()
        engine = Engine(module, adamw(module), stage=2, loss_scale="dynamic")
        plain_one = made()
        optimizer = adamw(plain_one)
        for update, chosen in enumerate(([0], [1], [2], [0])):
            loss = engine(X, chosen)
            engine.backward(loss * float("inf") if update == 1 else loss)
            engine.step()
            if update != 1:
                optimizer.zero_grad()
                plain_one(X, chosen).backward()
                optimizer.step()
        assert int(engine.state.step) == 3
        close_to(engine.full_parameters(), dict(plain_one.named_parameters()))

    on_virtual_ranks(2, body)


def test_the_norm_and_the_gradients_count_what_was_not_used_as_zero() -> None:
    def body(engine: Engine, rank: int) -> None:
        engine.backward(engine(X, [rank]))
        whole = engine.full_gradients()
        assert not whole["experts.3.weight"].any() and whole["experts.0.weight"].any()
        norm = torch.cat([g.flatten() for g in whole.values()]).norm()
        close_to(engine.global_grad_norm, norm)
        close_to(engine.clip_grad_norm_(1.0), norm)

    stepping(3, body)


def rounds_and_exchanges(chosen: Callable[[int], Sequence[int]], stage: int) -> tuple[int, int]:
    """Of a step of two ranks: its rounds, and other exchanges of objects than those."""
    found = []

    def body(engine: Engine, rank: int) -> None:
        for _ in range(2):
            engine.backward(engine(X, [0, 1, 2, 3]))
            engine.step()
        engine.backward(engine(X, chosen(rank)))
        channel = engine._driver.running.performer.channel
        before, told = channel.rounds, channel.tell
        exchanges = []

        def tell(value: Any) -> list[Any]:
            exchanges.append(value)
            return told(value)

        channel.tell = tell
        engine.step()
        found.append((channel.rounds - before, len(exchanges)))
        channel.tell = told

    stepping(stage, body)
    assert found[0] == found[1]
    return found[0]


def test_sets_are_exchanged_only_where_ranks_have_left_out_other_parameters() -> None:
    assert rounds_and_exchanges(lambda rank: [0, 1, 2, 3], 2) == (1, 0)
    assert rounds_and_exchanges(lambda rank: [0, 1, 2, 3] if rank else [], 2) == (1, 0)
    assert rounds_and_exchanges(lambda rank: [0], 2) == (1, 0)
    assert rounds_and_exchanges(lambda rank: [rank], 2)[0] == 1


def test_two_engines_leave_out_parameters_of_their_own() -> None:
    def body(rank: int) -> None:
        a, b = made(), made()
        first, second = Engine(a, adamw(a), stage=1), Engine(b, adamw(b), stage=3)
        before = first.full_parameters()
        (first(X, [0]) * second(X, [1])).backward()
        first.step()
        second.step()
        assert moved(first, before) == {"stem", "head", "0"}
        assert moved(second, before) == {"stem", "head", "1"}

    on_virtual_ranks(2, body)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_functional_step_of_the_same_state_steps_zeros(stage: int) -> None:
    def body(rank: int) -> None:
        module = made()
        apply, params = fzero.functionalize(module)
        state = fzero.init(params, fzero.optim.adamw(0.1, weight_decay=0.5), stage=stage)
        state, _ = fzero.grad_and_reduce(lambda p: apply(p, X, [0]), state)()
        after = fzero.full_params(fzero.apply_gradients(state))
        assert not torch.equal(after["experts.3.weight"], module.get_parameter("experts.3.weight"))
        engine = Engine(module, fzero.optim.adamw(0.1, weight_decay=0.5), stage=stage)
        engine.state, _ = fzero.grad_and_reduce(lambda p: apply(p, X, [0]), engine.state)()
        engine.step()  # gradients of a functional step are gradients of every leaf
        close_to(engine.full_parameters(), dict(after))

    on_virtual_ranks(2, body)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_initialize_leaves_out_what_no_rank_used(stage: int) -> None:
    """Unlike DeepSpeed, which steps zeros."""

    def body(rank: int) -> None:
        module = made().float()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}},
        }
        engine: Any = initialize(module, config=config)
        before = engine.full_parameters()
        engine.backward(engine(X.float(), [rank]))
        engine.step()
        assert moved(engine, before) == {"stem", "head", "0", "1"}

    on_virtual_ranks(2, body)
