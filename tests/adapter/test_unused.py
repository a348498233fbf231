"""What no rank has used since the last update is not stepped: in PyTorch it has no gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine, initialize
from fzero.errors import LayoutError, MismatchError, PhaseError
from tests.adapter.nets import linear
from tests.adapter.on_ranks import each_stage, on_ranks
from tests.failing import fails_in_backward

EXPERTS = 4


class Experts(nn.Module):
    """A part that is always used, and others that a call chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = linear(3, 3), linear(3, 1)
        self.experts = nn.ModuleList(linear(3, 3) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        h = self.stem(x)
        for i in chosen:
            h = h + self.experts[i](x)
        return self.head(h).sum()


def made() -> Experts:
    torch.manual_seed(3)
    return Experts()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Two param groups, of which one decays."""
    flat = [p for p in module.parameters() if p.ndim == 1]
    rest = [p for p in module.parameters() if p.ndim > 1]
    groups = [{"params": rest, "weight_decay": 0.5}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    """Its first step is another one than those that follow."""
    options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.5}
    return torch.optim.SGD(module.parameters(), lr=0.1, **options)


def nadam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(module.parameters(), lr=0.1, weight_decay=0.1)


def x_of(rank: int, update: int, call: int) -> Tensor:
    source = torch.Generator().manual_seed(100 * update + 10 * call + rank)
    return torch.randn(2, 3, dtype=torch.float64, generator=source)


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


class Plain(NamedTuple):
    values: dict[str, Tensor]
    states: dict[str, dict[str, Any]]


def plain(ranks: int, optimizer_of: Callable[..., Any], plan: Sequence[Sequence[Calls]]) -> Plain:
    """One process that sees the data of all ranks."""
    module = made()
    optimizer = optimizer_of(module)
    for update, row in enumerate(plan):
        optimizer.zero_grad()
        for rank in range(ranks):
            for call, chosen in enumerate(row[rank]):
                if chosen is not None:
                    (module(x_of(rank, update, call), chosen) / ranks).backward()
        optimizer.step()
    states = {path: dict(optimizer.state.get(p, {})) for path, p in module.named_parameters()}
    return Plain({path: p.detach() for path, p in module.named_parameters()}, states)


def on_virtual_ranks(ranks: int, body: Callable[[int], None]) -> None:
    def each(rank: Tensor) -> Tensor:
        body(int(rank))
        return rank

    if ranks == 1:
        body(0)
    else:
        fzero.simulate(each, world_size=ranks)(torch.arange(ranks))


def run(engine: Engine, rank: int, row: Sequence[Calls], update: int, way: str = "") -> None:
    """The calls of one update, in a window or not."""
    ways: dict[str, Any] = {"coalesce": engine.coalesce, "no_sync": engine.no_sync}
    if way in ways:
        with ways[way]():
            run(engine, rank, row, update)
        return
    for call, chosen in enumerate(row[rank]):
        if chosen is not None:
            engine.backward(engine(x_of(rank, update, call), chosen))
        if way == "accumulate":
            engine.step()


def close_to(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


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


def stepping(stage: int, body: Callable[[Engine, int], Any], ranks: int = 2) -> None:
    """Run body(engine, rank) with an engine whose update moves whatever it steps."""

    def each(rank: int) -> None:
        module = made()
        body(Engine(module, adamw(module), stage=stage), rank)

    on_virtual_ranks(ranks, each)


def moved(engine: Engine, before: dict[str, Tensor]) -> set[str]:
    """The parts of which a weight has other values than before: ("stem", "head", "0", ...)."""
    after = engine.full_parameters()
    paths = {path for path in before if not torch.equal(before[path], after[path])}
    return {path.split(".")[-2] for path in paths if path.endswith("weight")}


X = torch.ones(1, 3, dtype=torch.float64)


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
        channel = engine._driver.running.channel
        assert channel is not None
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


# Freezing.


@each_stage
@pytest.mark.parametrize("optimizer_of", [adamw, momentum])
def test_what_is_frozen_between_steps_does_not_move_and_learns_again_later(
    stage: int, optimizer_of: Callable[..., Any]
) -> None:
    frozen = {1: False, 3: True}  # from which update on the stem requires grad, or not

    def body(rank: int) -> None:
        module, twin = made(), made()
        engine, optimizer = Engine(module, optimizer_of(module), stage=stage), optimizer_of(twin)
        for update in range(5):
            for one in (module, twin):
                for p in one.stem.parameters():
                    p.requires_grad_(frozen.get(update, p.requires_grad))
            optimizer.zero_grad()
            twin(X, [update % 2]).backward()
            optimizer.step()
            engine(X, [update % 2]).backward()
            engine.step()
            close_to(engine.full_parameters(), dict(twin.named_parameters()))

    on_virtual_ranks(2, body)


def test_what_one_rank_alone_freezes_learns_from_the_others() -> None:
    def body(engine: Engine, rank: int) -> None:
        engine.module.stem.requires_grad_(rank == 0)
        before = engine.full_parameters()
        engine(X, []).backward()
        engine.step()
        assert moved(engine, before) == {"stem", "head"}

    stepping(2, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_frozen_between_the_backward_and_the_update_has_its_gradient(stage: int) -> None:
    def body(engine: Engine, rank: int) -> None:
        before = engine.full_parameters()
        engine(X, []).backward()
        engine.module.requires_grad_(False)
        engine.step()
        assert moved(engine, before) == {"stem", "head"}

    stepping(stage, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_unfreezing_and_new_groups_are_refused_on_every_rank_and_change_nothing(
    stage: int,
) -> None:
    def body(rank: int) -> None:
        module = made()
        module.experts.requires_grad_(False)
        optimizer = torch.optim.AdamW([*module.stem.parameters(), *module.head.parameters()])
        engine = Engine(module, optimizer, stage=stage)
        before = engine.full_parameters()
        engine(X, [0]).backward()
        module.experts[0].requires_grad_(True)
        with pytest.raises(LayoutError, match=r"experts.0.weight requires grad now"):
            engine.step()
        module.experts[0].requires_grad_(False)
        optimizer.add_param_group({"params": [module.experts[0].weight]})
        with pytest.raises(PhaseError, match=r"has 2 param groups"):
            engine.step()
        del optimizer.param_groups[1]
        assert moved(engine, before) == set()
        engine.step()
        assert moved(engine, before) == {"stem", "head"}

    on_virtual_ranks(2, body)


def test_a_gradient_by_hand_that_no_backward_brought_is_not_lost_in_silence() -> None:
    module = made()
    engine = Engine(module, adamw(module), stage=2)
    module.stem.weight.grad = torch.ones_like(module.stem.weight)
    with pytest.raises(LayoutError, match=r"p.grad of stem.weight"):
        engine.step()
    engine.zero_grad()
    assert engine.step() is True


# Ranks that differ.


def test_an_error_of_one_rank_at_its_update_ends_the_others() -> None:
    def body(engine: Engine, rank: int) -> None:
        engine(X, [0]).backward()
        before = engine.full_parameters()
        if rank == 0:
            engine.module.stem.weight.data = torch.zeros(3, 3, dtype=torch.float64)
        with pytest.raises((LayoutError, fzero.errors.PeerFailedError)):
            engine.step()
        assert moved(engine, before) <= {"stem"}  # by the user

    stepping(1, body)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_that_one_rank_threw_away_raise_on_all(stage: int) -> None:
    def body(engine: Engine, rank: int) -> None:
        engine(X, [0]).backward()
        before = engine.full_parameters()
        if rank:
            engine.module.zero_grad()
        with pytest.raises(MismatchError, match="holds reduced gradients, and rank 1 holds none"):
            engine.step()
        assert moved(engine, before) == set()
        engine.zero_grad()
        engine(X, [0]).backward()
        engine.step()
        assert moved(engine, before) == {"stem", "head", "0"}

    stepping(stage, body)


def set_of(group: int, **options: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer.param_groups[group].update(options)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (set_of(0, lr=0.25), "lr=0.25"),
        (set_of(1, weight_decay=0.125), "weight_decay=0.125"),
        (set_of(1, betas=[0.5, 0.75]), "betas="),
        (set_of(0, lr=torch.tensor(0.5)), r"lr=tensor\(0.5\)"),
        (set_of(0, maximize=True), "maximize=True"),
        (lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "param group 2"),
        (
            lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0).step(1.0),
            None,
        ),
    ],
)
def test_what_the_optimizer_has_on_one_rank_only_raises_on_all(
    stage: int, change: Callable[[Any], None], seen: str | None
) -> None:
    def body(engine: Engine, rank: int) -> None:
        engine(X, [0]).backward()
        before = engine.full_parameters()
        if rank:
            change(engine.optimizer)
        if seen is None:  # nothing that an update depends on
            engine.step()
            return
        with pytest.raises(MismatchError, match=seen):
            engine.step()
        assert moved(engine, before) == set() and int(engine.state.step) == 0

    stepping(stage, body)


def test_a_schedule_that_follows_the_loss_of_one_rank_raises_on_all() -> None:
    def body(engine: Engine, rank: int) -> None:
        assert engine.optimizer is not None
        rates = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
        step = partial(engine.backward, gradient=None)
        for update in range(2):
            step(engine(X, [0, 1, 2, 3]))
            if update:
                with pytest.raises(
                    MismatchError, match=r"step\(\) of engine .* with param group 0"
                ):
                    engine.step()
            else:
                engine.step()
            rates.step(1.0)
            rates.step(1.0 - rank)  # better on rank 1 alone

    stepping(2, body)
