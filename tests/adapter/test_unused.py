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
from tests.adapter.experts import Experts, X, adamw, close_to, momentum, moved, nadam, stepping
from tests.adapter.on_ranks import Place, each_stage, on_ranks, virtually
from tests.adapter.plain import Draw, Reference
from tests.failing import fails_in_backward

Calls = Sequence[Sequence[int] | None]
"""What each call of a rank uses; None: the rank makes none."""

# By update, and then by rank.
PLAN: list[list[Calls]] = [
    [[[0], [1]], [[1], [0]], [[1], None]],  # 2 and 3 have not been used yet
    [[[2], []], [[], []], [None, None]],  # 2 by the first rank alone
    [[None, None]] * 3,  # nothing at all
    [[[0, 3], None], [[0], [3]], [[0], [0]]],
    [[[], []], [[1], []], [[3], []]],
]


def calls_of(row: Sequence[Calls], way: str = "") -> Callable[[Any, Draw], None]:
    """The calls of one update, in a window or not."""

    def program(e: Any, draw: Draw) -> None:
        if way in ("coalesce", "no_sync"):
            with getattr(e, way)():
                calls_of(row)(e, draw)
            return
        for chosen in row[draw.rank]:
            x = draw(2, 3)
            if chosen is not None:
                e.backward(e(x, chosen))
            if way == "accumulate" and isinstance(e, Engine):
                e.step()

    return program


def check(at: Place, stage: int, optimizer_of: Any = adamw, way: str = "", **options: Any) -> None:
    """Values and states after each update are those of plain PyTorch."""
    engine, plain = stepping(stage, optimizer_of, **options), at.plain(Experts, optimizer_of)
    for update, row in enumerate(PLAN):
        calls_of(row, way)(engine, at.draw(update))
        if way != "accumulate":
            engine.step()
        close_to(engine.full_parameters(), plain.step(plain.run(calls_of(row), update)))
    assert int(engine.state.step) == len(PLAN)
    engine.close()
    assert engine.optimizer is not None and plain.optimizer is not None
    for path, p in engine.module.named_parameters():
        wanted = plain.optimizer.state[plain.module.get_parameter(path)]
        close_to(dict(engine.optimizer.state[p]), dict(wanted))


@pytest.mark.parametrize(
    ("optimizer_of", "stage", "world_size", "way", "options"),
    [
        (adamw, 0, 1, "", {}),
        (adamw, 1, 3, "coalesce", {"loss_scale": 256.0}),
        (adamw, 2, 2, "accumulate", {"gradient_accumulation_steps": 2}),
        (adamw, 3, 3, "", {"loss_scale": "dynamic"}),
        (momentum, 0, 3, "no_sync", {}),
        (momentum, 2, 1, "", {"offload": fzero.Offload(optimizer="cpu")}),
        (momentum, 3, 2, "no_sync", {"reshard_after_forward": False}),
        (nadam, 1, 2, "", {"mesh": (2, 1)}),
        (nadam, 3, 1, "coalesce", {}),
    ],
)
def test_values_and_states_are_those_of_plain_pytorch(
    optimizer_of: Any, stage: int, world_size: int, way: str, options: dict[str, Any]
) -> None:
    def each() -> None:
        at = Place(fzero.world().rank, world_size)
        check(at, stage, optimizer_of, way, **options)

    each() if world_size == 1 else fzero.simulate(each, world_size=world_size)()


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 3])
def test_processes_leave_out_what_virtual_ranks_do(at: Place, stage: int) -> None:
    check(at, stage)


@virtually(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_of_zero_that_came_is_a_gradient(rank: int, stage: int) -> None:
    engine = stepping(stage)
    before = engine.full_parameters()
    engine.backward(0 * engine(X, [rank]))
    engine.step()
    assert moved(engine, before) == {"stem", "head", "0", "1"}  # they decay


@pytest.mark.filterwarnings("ignore:KeyError left a coalesce")
@virtually(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_was_thrown_away_was_not_used(stage: int) -> None:
    engine = stepping(stage)
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


class Inner(Experts):
    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        self.experts[3](x).sum().backward()
        return super().forward(x, chosen)


@virtually(2)
def test_a_gradient_that_is_written_or_comes_inside_of_a_forward_counts() -> None:
    module = Inner()
    engine = Engine(module, adamw(module), stage=2)
    before = engine.full_parameters()
    engine(X, []).backward()
    engine.set_full_gradient("experts.2.weight", torch.zeros(3, 3))
    engine.step()
    assert moved(engine, before) == {"stem", "head", "2", "3"}


@virtually(2)
@each_stage
def test_an_update_in_which_nothing_was_used_counts_and_steps_nothing(stage: int) -> None:
    engine = stepping(stage, max_norm=1.0)
    assert engine.optimizer is not None
    rates = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    before = engine.full_parameters()
    assert engine.clip_grad_norm_(1.0) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.step() is True
        rates.step()
    assert moved(engine, before) == set() and int(engine.state.step) == 1
    assert rates.get_last_lr() == [0.05, 0.05] and engine.global_grad_norm == 0
    assert engine.module.stem.weight.grad is None
    with pytest.raises(PhaseError, match="there are no gradients"):
        engine.full_gradients()


@virtually(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_schedule_of_a_rule_goes_on_in_an_update_in_which_nothing_was_used(stage: int) -> None:
    engine = stepping(stage, lambda _: fzero.optim.sgd(lambda k: 2.0**-k))
    engine.step()
    before = engine.full_parameters()
    engine.backward(engine(X, []))
    gradients = engine.full_gradients()
    engine.step()
    close_to(engine.full_parameters(), {k: before[k] - gradients[k] / 2 for k in before})


@virtually(2)
def test_an_overflow_leaves_out_what_was_not_used_as_well() -> None:
    engine, plain = stepping(2, loss_scale="dynamic"), Reference(Experts, 1, adamw)
    for update, chosen in enumerate(([0], [1], [2], [0])):
        loss = engine(X, chosen)
        engine.backward(loss * float("inf") if update == 1 else loss)
        engine.step()
        if update != 1:
            plain.step(plain.run(lambda e, _, c=chosen: e.backward(e(X, c)), 0))
    assert int(engine.state.step) == 3
    close_to(engine.full_parameters(), plain.parameters())


@virtually(2)
def test_the_norm_and_the_gradients_count_what_was_not_used_as_zero(rank: int) -> None:
    engine = stepping(3)
    engine.backward(engine(X, [rank]))
    whole = engine.full_gradients()
    assert not whole["experts.3.weight"].any() and whole["experts.0.weight"].any()
    norm = torch.cat([g.flatten() for g in whole.values()]).norm()
    close_to(engine.global_grad_norm, norm)
    close_to(engine.clip_grad_norm_(1.0), norm)


@virtually(2)
@pytest.mark.parametrize(
    ("chosen", "exchanges"),
    [
        (([0, 1, 2, 3], [0, 1, 2, 3]), 0),
        (([], [0, 1, 2, 3]), 0),
        (([0], [0]), 0),
        (([0], [1]), 1),
    ],
)
def test_sets_are_exchanged_only_where_ranks_have_left_out_other_parameters(
    rank: int, chosen: tuple[list[int], list[int]], exchanges: int
) -> None:
    """Of a step: its rounds, and other exchanges of objects than those."""
    engine, found = stepping(2), []
    for _ in range(2):
        engine.backward(engine(X, [0, 1, 2, 3]))
        engine.step()
    engine.backward(engine(X, chosen[rank]))
    performer = engine._driver.running.performer
    before, told = performer.rounds, performer.tell
    performer.tell = lambda value: found.append(value) or told(value)
    engine.step()
    performer.tell = told
    assert performer.rounds - before == 1 and (len(found) > 0) == exchanges


@virtually(2)
def test_two_engines_leave_out_parameters_of_their_own() -> None:
    first, second = stepping(1), stepping(3)
    before = first.full_parameters()
    (first(X, [0]) * second(X, [1])).backward()
    first.step()
    second.step()
    assert moved(first, before) == {"stem", "head", "0"}
    assert moved(second, before) == {"stem", "head", "1"}


@virtually(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_functional_step_of_the_same_state_steps_zeros(stage: int) -> None:
    module, rule = Experts(), fzero.optim.adamw(0.1, weight_decay=0.5)
    apply, params = fzero.functionalize(module)
    state = fzero.init(params, rule, stage=stage)
    state, _ = fzero.grad_and_reduce(lambda p: apply(p, X, [0]), state)()
    after = fzero.full_params(fzero.apply_gradients(state))
    assert not torch.equal(after["experts.3.weight"], module.get_parameter("experts.3.weight"))
    engine = Engine(module, rule, stage=stage)
    engine.state, _ = fzero.grad_and_reduce(lambda p: apply(p, X, [0]), engine.state)()
    engine.step()  # gradients of a functional step are gradients of every leaf
    close_to(engine.full_parameters(), dict(after))


@virtually(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_initialize_leaves_out_what_no_rank_used_unlike_deepspeed(rank: int, stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}},
    }
    engine: Any = initialize(Experts().float(), config=config)
    before = engine.full_parameters()
    engine.backward(engine(X.float(), [rank]))
    engine.step()
    assert moved(engine, before) == {"stem", "head", "0", "1"}
