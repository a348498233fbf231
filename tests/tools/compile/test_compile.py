"""A compiled step against the step: the same bits where sums are exact, the same bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero.errors import LayoutError, MismatchError, PhaseError
from fzero.state import NAMESPACE
from tests.adapter.on_ranks import on_ranks
from tests.descends import descends
from tests.oracle import square_loss
from tests.strategies import same

RULE = fzero.optim.sgd(2.0**-8, momentum=0.5)


def params() -> dict[str, Any]:
    """Uneven sizes, a scalar, a frozen one, an empty one."""
    torch.manual_seed(0)
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    values = {f"w{i}": torch.randint(-2, 3, (n, 3)).float() for i, n in enumerate((5, 7, 4, 2))}
    return values | {"scalar": torch.ones(()), "empty": torch.empty(0, 3), "frozen": frozen}


def step_fn(state: Any, xs: Tensor) -> tuple[Any, Any]:
    for x in xs:
        state, loss = fzero.grad_and_reduce(square_loss, state)(x)
    return fzero.apply_gradients(state), {"loss": fzero.pmean(loss), "count": len(xs)}


WRAPS: dict[str, Any] = {
    "plain": lambda fn: fn,
    "coalesced": fzero.coalesce,
    "clipped": lambda fn: fzero.clip(fn, max_norm=1e9),  # a factor of exactly 1
}


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def check(stage: int, wrap: str, rank: int, **options: Any) -> tuple[Any, Any]:
    """Three steps of both, bit for bit; return what the last one sent."""
    step = fzero.shard(WRAPS[wrap](step_fn), stage=stage, bucket_bytes=100)
    compiled = fzero.compile(step, backend="eager", **options)
    state = other = compiled.init(params(), RULE)
    logs = []
    for number in range(3):
        xs = torch.tensor([number + rank, 2 * rank]).float()
        with fzero.count_collectives() as log:
            state, aux = step(state, xs)
        logs[:] = [log]
        with fzero.count_collectives() as log:
            other, found = compiled(other, xs)
        logs.append(log)
        same(leaves(other), leaves(state))
        assert found["count"] == 2 and torch.equal(found["loss"], aux["loss"])
    same(fzero.full_params(other), fzero.full_params(state))
    assert other.setup == state.setup and other.progress == state.progress
    return logs[0], logs[1]


@pytest.mark.parametrize("stage", range(4))
def test_on_one_rank_it_has_the_bits_of_the_step(stage: int) -> None:
    check(stage, "clipped", 0)


SENT = ("all_gather", "reduce_scatter", "all_reduce")


@pytest.mark.floor
@on_ranks(2, pytest.param(3, marks=pytest.mark.slow), timeout_s=110)
def test_on_several_ranks_it_has_the_bits_of_the_step_and_sends_its_bytes(
    rank: int, world_size: int
) -> None:
    two = [(0, "coalesced"), (0, "plain"), (3, "clipped")]
    places = two if world_size == 2 else [(2, "clipped")]
    for stage, wrap in places:
        log, other = check(stage, wrap, rank)
        sent = [one.wire_bytes(ops=SENT) for one in (log, other)]
        assert min(sent) > 0 and abs(sent[0] - sent[1]) <= 8  # each buffer's are rounded down
        assert other.counts()["agree"] == 1 <= log.counts()["agree"]
        calls, merged = (sum(one.counts().get(k, 0) for k in SENT) for one in (log, other))
        assert merged < calls or (stage == 0 and wrap == "coalesced")


def agree(step: Any, batches: Sequence[Tensor], values: Any = None, rule: Any = RULE) -> None:
    """The step and the compiled one have the same bits after each batch."""
    compiled = fzero.compile(step, backend="eager")
    state, other = (step.init(values or params(), rule) for _ in range(2))
    for xs in batches:
        (state, _), (other, _) = step(state, xs), compiled(other, xs)
        same(leaves(other), leaves(state))


@pytest.mark.slow  # the step itself is tested so
@on_ranks(4)
def test_on_a_mesh_of_two_dims_it_has_the_bits_of_the_step(rank: int) -> None:
    step = fzero.shard(step_fn, stage=3, mesh=(2, 2), optimizer_over="all")
    agree(step, [torch.tensor([number + rank, 2 * rank]).float() for number in range(2)])


@pytest.mark.slow  # the step itself is tested so
@on_ranks(2)
def test_encoded_gradients_lose_what_those_of_the_step_lose(rank: int) -> None:
    """What one step loses the next one adds."""
    encoded = fzero.compress(step_fn, gradients=fzero.codecs.int8())
    step = fzero.shard(encoded, stage=2)
    agree(step, [torch.tensor([0.3 + number, rank / 7]) for number in range(3)])


@on_ranks(2)
def test_a_sum_of_the_batch_over_ranks_leaves_the_batch_as_it_was(rank: int) -> None:
    xs = torch.tensor([1.0, 2 * rank])
    agree(fzero.shard(lambda state, xs: step_fn(state, fzero.psum(xs) / 2), stage=0), [xs])
    assert xs.tolist() == [1.0, 2 * rank]


@pytest.mark.parametrize("donate", [False, True])
def test_a_schedule_is_asked_in_each_call(donate: bool) -> None:
    rule = fzero.optim.sgd(
        lambda count: 2.0 ** -(4 + count),
        groups=[(lambda leaf: leaf.path == "w1", {"lr": lambda count: 2.0 ** -(8 - count)})],
    )
    for stage in (0, 2):
        agree(fzero.shard(step_fn, stage=stage, donate=donate), [torch.ones(1)] * 3, rule=rule)


@pytest.mark.parametrize("rule", [fzero.optim.adamw(0.1), fzero.optim.lion(0.1), RULE])
def test_an_update_has_the_bits_of_the_kernel_that_the_step_runs(rule: Any) -> None:
    values = {name: value.bfloat16() for name, value in params().items() if name != "scalar"}
    source = torch.Generator().manual_seed(0)
    batches = [torch.randn(5, 3, generator=source).bfloat16() for _ in range(3)]
    step = fzero.shard(descends(lambda p, g: (p["w0"] * g).sum()), stage=2, donate=True)
    agree(step, batches, values, rule)


@on_ranks(2)
def test_ranks_that_run_other_graphs_are_told(rank: int) -> None:
    def other_fn(state: Any, xs: Tensor) -> tuple[Any, Any]:
        extra = fzero.psum(xs) if rank else xs
        return step_fn(state, extra)

    step = fzero.compile(fzero.shard(other_fn, stage=2), backend="eager")
    state = step.init(params(), RULE)
    with pytest.raises(MismatchError, match="disagree about the collectives of a compiled step"):
        step(state, torch.ones(2))


def test_other_shapes_are_other_graphs_up_to_a_bound() -> None:
    step = fzero.shard(step_fn, stage=0)
    compiled = fzero.compile(step, backend="eager", max_graphs=2)
    state = compiled.init(params(), RULE)
    for length in (1, 2, 1, 2):
        made = compiled(state, torch.ones(length)), step(state, torch.ones(length))
        same(*map(leaves, made))
    with pytest.warns(UserWarning, match=r"there are 2 graphs, (?s:.*) raise max_graphs"):
        made = compiled(state, torch.ones(3))
    same(leaves(made), leaves(step(state, torch.ones(3))))
    same(leaves(compiled(state, torch.ones(1))), leaves(step(state, torch.ones(1))))


@pytest.mark.slow
@pytest.mark.floor
def test_inductor_computes_the_same() -> None:
    torch.manual_seed(0)
    apply, values = fzero.functionalize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))

    def loss_fn(p: Any, x: Tensor) -> Tensor:  # the random numbers are torch's
        return nn.functional.dropout(apply(p, x), 0.5).square().mean()

    train = descends(loss_fn)
    step = fzero.shard(train, stage=0)
    compiled = fzero.compile(step)
    state = other = step.init(values, fzero.optim.adamw(1e-2))
    for seed in range(3):
        x = torch.randn(6, 4)
        torch.manual_seed(seed)
        state, loss = step(state, x)
        torch.manual_seed(seed)
        other, found = compiled(other, x)
        torch.testing.assert_close(found, loss)
    torch.testing.assert_close(fzero.full_params(other), fzero.full_params(state))


def test_what_cannot_be_compiled_says_so() -> None:
    step = fzero.shard(step_fn, stage=0)
    with pytest.raises(LayoutError, match=r"max_graphs=-1, backend='cuda'"):
        fzero.compile(step, max_graphs=-1, backend="cuda")  # type: ignore
    with pytest.raises(LayoutError, match=r"fzero.compile around compile"):
        fzero.compile(fzero.compile(step))
    simulated = fzero.simulate(fzero.compile(step), world_size=2)
    state = simulated.init(params(), RULE)
    with pytest.raises(PhaseError, match="compiled step on virtual ranks"):
        simulated(state, torch.ones(2, 2))

    def reads(state: Any, x: Tensor) -> tuple[Any, float]:
        return state, float(x.sum())

    compiled = fzero.compile(fzero.shard(reads, stage=0), backend="eager")
    state = compiled.init(params(), RULE)
    with pytest.raises(PhaseError, match="reads values of a tensor"):
        compiled(state, torch.ones(2))
    weight = nn.Parameter(torch.ones(2))
    instance = fzero.optim.from_torch(torch.optim.SGD([weight], lr=0.1))
    compiled = fzero.compile(step, backend="eager")
    with pytest.raises(LayoutError, match="read from a SGD at each update"):
        compiled(compiled.init({"w": weight}, instance), torch.ones(2))


def test_writes_in_a_loss_are_right_and_one_into_the_batch_is_refused() -> None:
    def through_a_view(p: Any, x: Tensor) -> Tensor:
        h = p["w0"] * x
        h[:, 0] = 3
        h[1].mul_(p["scalar"])
        return (h * p["w0"]).sum()

    def in_place(p: Any, x: Tensor) -> Tensor:
        return (p["w0"] * x).mul_(2).relu_().sum()

    def into_the_batch(p: Any, x: Tensor) -> Tensor:
        return (p["w0"] * x.mul_(2)).sum()

    def train(loss: Any) -> Any:
        one = descends(loss)
        return fzero.shard(one, stage=0)

    x = torch.tensor(2.0)
    for loss in (through_a_view, in_place):
        step = train(loss)
        state = step.init(params(), RULE)
        same(leaves(fzero.compile(step, backend="eager")(state, x)), leaves(step(state, x)))
    compiled = fzero.compile(train(into_the_batch), backend="eager")
    with pytest.raises(LayoutError, match=r"writes into one of its arguments \(aten.copy_"):
        compiled(compiled.init(params(), RULE), x)
    assert x == 2


def test_a_caller_can_differentiate() -> None:
    compiled = fzero.compile(fzero.shard(step_fn, stage=0), backend="eager")
    xs = torch.tensor([1.0], requires_grad=True)
    moved = fzero.full_params(compiled(compiled.init(params(), RULE), xs)[0])["w0"]
    (slope,) = torch.autograd.grad(moved.sum(), xs)
    assert slope.abs().sum() > 0


def test_a_trace_of_it_is_that_of_the_step() -> None:
    step = fzero.shard(step_fn, stage=0)
    compiled = fzero.compile(step, backend="eager")
    state, xs = compiled.init(params(), RULE), torch.ones(2)
    assert fzero.trace(compiled)(state, xs).diff(fzero.trace(step)(state, xs)).equal
    assert repr(compiled) == "compile(backend='eager') . shard(stage=0) . step_fn"


@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recurrent_modules_are_compiled_as_the_products_that_they_are(checkpointed: bool) -> None:
    """mkldnn's fused LSTM has a workspace that no graph can hold, in the recomputation as well."""
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 5, num_layers=2, bidirectional=True)
    apply, params = fzero.functionalize(lstm)

    def loss(p: Any, x: Tensor) -> Tensor:
        if checkpointed:
            return checkpoint(lambda x: apply(p, x)[0], x, use_reentrant=False).square().mean()
        return apply(p, x)[0].square().mean()

    lstm_step = descends(loss)
    step = fzero.shard(lstm_step, stage=0)
    compiled = fzero.compile(step, backend="eager")
    state = other = step.init(params, fzero.optim.sgd(0.5))
    x, before = torch.randn(4, 2, 3), torch._C._get_mkldnn_enabled()
    for _ in range(2):
        (state, value), (other, found) = step(state, x), compiled(other, x)
        torch.testing.assert_close(found, value)
    torch.testing.assert_close(fzero.full_params(other), fzero.full_params(state))
    assert not any("rnn" in op.name for op in fzero.trace(step)(state, x).ops)
    assert torch._C._get_mkldnn_enabled() is before


def test_a_recurrent_module_that_raises_leaves_the_settings_of_torch_as_they_were() -> None:
    apply, params = fzero.functionalize(nn.LSTM(3, 5))

    lstm_step = descends(lambda p, x: apply(p, x)[0].mean())
    step = fzero.shard(lstm_step, stage=0)
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    with pytest.raises(RuntimeError, match="size"):
        fzero.trace(step)(step.init(params, fzero.optim.sgd(0.5)), torch.ones(4, 2, 7))
    assert (torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()) == before
    assert before[0]  # else this test sees nothing
