"""What a plan is asked for: steps of one's own, large models, worlds that fit, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import AxisError, LayoutError, PhaseError
from fzero.tools.plan import Rates, Traffic
from fzero.tools.plan.records import time_of
from fzero.tools.plan.run import MemoryWatch
from fzero.tools.plan.without_values import maker
from tests.tools.plan.models import Case, Decoder, next_token
from tests.tools.trace.steps import Of


def test_a_step_of_ones_own_is_planned_as_the_module_is() -> None:
    around = {"micro_batches": 2, "coalesced": True, "max_norm": 1.0}
    case = Case(model="decoder", stage=3, around=around)
    step, params = case.step(lambda state: None)
    mine = fzero.plan.of_step(step, params, case.optimizer(), case.batch(), world=5)
    plan = case.plan(5)
    assert (mine.traffic, mine.bytes, mine.peak_bytes) == (
        plan.traffic,
        plan.bytes,
        plan.peak_bytes,
    )
    assert plan.collectives["reduce_scatter"] == 5  # once each unit, whatever the micro-batches


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_an_optimizer_of_names_has_its_param_groups_in_a_plan(autocast: Any) -> None:
    """SGD keeps nothing for the bias, and a momentum for the weight."""
    model, batch = torch.nn.Linear(32, 16), torch.ones(4, 32)
    named = dict(model.named_parameters())
    groups = [
        {"params": [("weight", named["weight"])], "momentum": 0.9},
        {"params": [("bias", named["bias"])]},
    ]
    optimizer = fzero.optim.from_torch(torch.optim.SGD(groups))
    plan = fzero.plan(model, batch, world=4, stage=2, optimizer=optimizer, autocast=autocast)
    assert plan.bytes["optimizer"] == 32 * 16 * 4 / 4 + 8  # and the number of updates


def test_several_models() -> None:
    """States in one step add up."""

    def step_fn(states: Any, x: Tensor) -> tuple[Any, None]:
        def loss(params: Any, x: Tensor) -> Tensor:
            return (x @ params["g"]["w"] @ params["d"]["w"]).sum()

        states, _ = fzero.grad_and_reduce(loss, states)(x)
        return fzero.apply_gradients(states), None

    step = fzero.shard(step_fn, stage={"g": 0, "d": 3})
    params = {name: {"w": torch.ones(8, 8)} for name in "gd"}
    plan = fzero.plan.of_step(step, params, fzero.optim.sgd(0.1), torch.ones(2, 8), world=4)
    assert plan.stage == (3, 0) and plan.bytes["parameters"] == 256 + 64


def test_running_statistics_are_updated_as_in_a_step_that_hands_them_on() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    apply, params, buffers = fzero.functionalize(model, buffers=True)

    def loss(params: Any, x: Tensor, buffers: Any) -> Any:
        out, new = apply(params, x, buffers=buffers)
        return out.mean(), new

    def step_fn(state: Any, x: Tensor, buffers: Any) -> Any:
        state, aux = fzero.grad_and_reduce(loss, state, has_aux=True)(x, buffers)
        return fzero.apply_gradients(state), aux

    step, x = fzero.shard(step_fn, stage=3), torch.ones(4, 3, 9, 9)
    mine = fzero.plan.of_step(step, params, fzero.optim.adamw(3e-4), x, buffers, world=3)
    plan = fzero.plan(model, x, stage=3, world=3)
    assert (plan.traffic, plan.bytes) == (mine.traffic, mine.bytes)
    assert plan.peak_bytes == pytest.approx(mine.peak_bytes, rel=0.01)
    assert model[1].num_batches_tracked == 0


def test_nothing_of_the_model_is_touched() -> None:
    model = Case().module()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    step = fzero.plan(model, torch.ones(2, 50), stage=2, world=3)
    assert step.device == "cpu" and all(x.device.type == "cpu" for x in model.parameters())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def test_gradients_do_not_add_to_the_peak_of_a_higher_stage() -> None:
    made = fzero.plan.compare(Decoder(layers=4), Case(model="decoder").batch(), world=64)
    peaks = [plan.peak_bytes or 0 for plan in made.plans]
    assert peaks[0] > peaks[1] == peaks[2] > peaks[3]
    assert repr(made).splitlines()[1].split() == ["stage", "0", "1", "2", "3"]


def test_the_smallest_world_fits_and_the_one_before_does_not() -> None:
    options: dict[str, Any] = {"stage": 3, "loss": next_token, "device": "cuda"}
    model, batch = Decoder(), Case(model="decoder").batch()
    limit = 0.5 * (fzero.plan(model, batch, world=1, **options).peak_bytes or 0)
    limit += 0.5 * (fzero.plan(model, batch, world=999, **options).peak_bytes or 0)
    found = fzero.plan.smallest_world(model, batch, fits_bytes=limit, **options)
    before = fzero.plan(model, batch, world=found.world - 1, **options)
    assert found.fits(limit) and not before.fits(limit)
    even = fzero.plan.smallest_world(model, batch, fits_bytes=limit, multiple_of=4, **options)
    assert even.world % 4 == 0 and found.world <= even.world < found.world + 4
    with pytest.raises(LayoutError, match="most of it is 'activations and temporaries'"):
        fzero.plan.smallest_world(model, batch, fits_bytes=1e5, at_most=64, **options)


def test_the_time_is_that_of_the_rates() -> None:
    rates = Rates(link_bytes_per_s=10, memory_bytes_per_s=2, flops_per_s=4, latency_s=3)
    traffic = [Traffic("all_gather", "dp", 2, 40), Traffic("all_reduce", "dp", 1, 10)]
    made = time_of({(8.0, 2.0): 3, (0.0, 6.0): 2}, traffic, rates)
    assert made.terms == {"compute": 6.0, "memory": 6.0, "link": 5.0, "latency": 9.0}
    assert (made.serial_s, made.overlapped_s, made.shares["latency"]) == (26.0, 14.0, 9 / 26)


def test_flops_are_those_of_the_products() -> None:
    """Forward and backward of y = x w: 2 b n m each, without the gradient by x."""
    rates = Rates(flops_per_s=1.0, memory_bytes_per_s=1e30)
    plan = fzero.plan(nn.Linear(6, 5, bias=False), torch.ones(4, 6), stage=0, world=1, rates=rates)
    assert plan.time is not None and plan.time.compute_s == 2 * (2 * 4 * 6 * 5)


def test_to_ask_where_a_fake_tensor_is_moves_no_bytes() -> None:
    make = maker(autocasts=True)
    x, y = make(torch.ones(4)).requires_grad_(), make(torch.ones(4))
    with MemoryWatch("cpu") as watch, torch.autocast("cpu"):
        (x * y).sum().backward()
    moved = {nbytes: count for (_, nbytes), count in watch.work.items()}
    assert moved == {48: 2, 20: 1, 8: 1}  # two products, the sum, and its gradient


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"world": 0}, AxisError, "world=0"),
        ({"world": (2, 2, 2)}, AxisError, r"world=\(2, 2, 2\)"),
        ({"rank": 4}, AxisError, "rank=4 of 4"),
        ({"device": "tpu"}, LayoutError, "device='tpu'"),
    ],
)
def test_bad_options_are_named(change: dict[str, Any], error: type, says: str) -> None:
    options = {"world": 4, "stage": 2, **change}
    with pytest.raises(error, match=says):
        fzero.plan(nn.Linear(2, 2), torch.ones(1, 2), **options)


def test_what_is_no_model_says_so() -> None:
    with pytest.raises(LayoutError, match=r"plan was given a dict_values"):
        fzero.plan({}.values(), torch.ones(1), world=1, stage=0)
    with pytest.raises(LayoutError, match="without an init"):
        fzero.plan.of_step(lambda state: state, {}, fzero.optim.sgd(0.1), world=1)
    with pytest.raises(LayoutError, match="link_bytes_per_s=0"):
        Rates(link_bytes_per_s=0)
    with pytest.raises(LayoutError, match="without a floating tensor"):
        fzero.plan(Of(lambda w, x: (x @ w).argmax(), 2, 2), torch.ones(2, 2), world=1, stage=0)


READS: dict[str, Any] = {  # of an input, and of which of its rows are positive
    "if": lambda x, chosen: x if chosen.all() else -x,
    "item": lambda x, chosen: x * chosen.sum().item(),
    "mask": lambda x, chosen: x[chosen],
    "nonzero": lambda x, chosen: x[chosen.nonzero().squeeze(-1)],
    "where": lambda x, chosen: x[torch.where(chosen)[0]],
    "counts": lambda x, chosen: x.split([1, *torch.bincount(chosen.long()).tolist()])[0],
    "sizes": lambda x, chosen: x.split(chosen.long().tolist())[0],
    "cpu": lambda x, chosen: x.split(chosen.cpu().long().tolist())[0],
    "numpy": lambda x, chosen: x * float(chosen.numpy().sum()),
    "unique": lambda x, chosen: x * len(chosen.unique()),
    "repeat": lambda x, chosen: x.repeat_interleave(chosen.long(), 0),
    "equal": lambda x, chosen: x if torch.equal(chosen, ~chosen) else -x,
    "put": lambda x, chosen: torch.zeros_like(x).index_put((chosen,), x[chosen]),
}


def experts(way: str) -> nn.Module:
    """Reads which rows of its input are positive, in one of the ways in which experts do."""
    return Of(lambda w, x: READS[way](x, x.sum(-1) > 0) @ w, 2, 2)


@pytest.mark.parametrize("way", READS)
def test_a_model_that_decides_by_values_says_that_there_are_none(way: str) -> None:
    """On the meta device or not, at the operation that asks, with what `fzero.trace` says."""
    for model in (experts(way), experts(way).to("meta")):
        with pytest.raises(
            PhaseError, match=r"reads values(.*)planned(.*)\n(.*)\nFix: use torch.w"
        ):
            fzero.plan(model, torch.ones(1, 2), world=2, stage=0)
    assert fzero.world().size == 1  # nothing is left behind


def test_under_autocast_the_error_is_the_same() -> None:
    with pytest.raises(PhaseError, match=r"reads values of a tensor while it is planned"):
        fzero.plan(experts("mask"), torch.ones(1, 2), world=2, stage=0, autocast=torch.bfloat16)


def routed(w: Tensor, x: Tensor) -> Tensor:
    weights, chosen = (x @ w).topk(2)
    rows = torch.zeros_like(x)
    rows[chosen[:, 0] == 0] = 1.0  # a mask that is written through
    repeated = x.repeat_interleave(chosen[:, 0], 0, output_size=len(x))
    return rows * weights.sum(-1, keepdim=True) * repeated


def packed(w: Tensor, x: Tensor) -> Tensor:
    places = torch.arange(len(x))
    one_sequence = bool((places.diff() == 1).all())
    places[0] = 7
    return x @ w if one_sequence else x.detach()


def no_rule(w: Tensor, x: Tensor) -> Tensor:
    raise NotImplementedError("no rule")


def test_a_mixture_of_experts_whose_shapes_are_known_is_planned() -> None:
    plan = fzero.plan(Of(routed, 4, 4), torch.ones(3, 4), world=2, stage=3)
    assert plan.collectives["reduce_scatter"] == 1


def test_another_error_in_a_plan_says_that_it_was_planned() -> None:
    with pytest.raises(NotImplementedError) as raised:
        fzero.plan(Of(no_rule, 2, 2), torch.ones(1, 2), world=2, stage=0)
    assert "while Of was planned" in "".join(raised.value.__notes__)


def test_a_model_may_decide_by_what_sizes_alone_say() -> None:
    plan = fzero.plan(Of(packed, 2, 2), torch.ones(3, 2), world=2, stage=2)
    assert plan.collectives["reduce_scatter"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 64, 1024])
def test_matrices_with_owners_are_kept_evenly(world: int) -> None:
    """A model of a billion parameters: an element is kept once, but for little padding."""
    with torch.device("meta"):
        layers = [nn.Linear(4096, 4096) for _ in range(60)]
        model = nn.Sequential(*layers, nn.LayerNorm(4096))
    rules = {"matrices": fzero.optim.muon(0.01), "rest": fzero.optim.adamw(1e-3)}
    optimizer = fzero.optim.partition(rules, lambda x: "matrices" if len(x.shape) == 2 else "rest")
    batch = torch.zeros(1, 4096, device="meta")
    planned = fzero.plan(model, batch, stage=3, world=world, optimizer=optimizer)
    numel = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert numel > 10**9
    kept = matrices + 2 * (numel - matrices)  # momentum; two means of the rest
    assert planned.bytes["optimizer"] <= 1.05 * 4 * kept / world
    assert "but for what it keeps, and sends, of the parameters that it owns" in repr(planned)


def test_a_plan_says_what_owners_compute_and_what_they_keep() -> None:
    def step_fn(state: Any, x: Tensor) -> Any:
        state, _ = fzero.grad_and_reduce(lambda p, x: (p["a"] @ x).sum() + p["b"].sum(), state)(x)
        return fzero.apply_gradients(state), None

    params, x = {"a": torch.ones(8, 8), "b": torch.ones(8, 8)}, torch.ones(8)
    keeping = fzero.optim.from_torch(torch.optim.SGD, needs="matrix")
    momentum = fzero.optim.from_torch(
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9), needs="matrix"
    )
    local = fzero.local(step_fn, every=1, outer=fzero.optim.muon(0.1))
    mesh: Any = {"mesh": (1, 2)}
    for step, rule, said in (
        (fzero.shard(step_fn, stage=2), momentum, "1.00 times the mean, and one keeps at most 1."),
        (fzero.shard(step_fn, stage=2), keeping, "1.00 times the mean; they keep nothing whole."),
        (fzero.shard(local, stage=2, **mesh), fzero.optim.sgd(0.1), "2 owners of the outer rule"),
    ):
        assert said in repr(fzero.plan.of_step(step, params, rule, x, world=2))


@pytest.mark.slow
def test_seventy_billion_parameters_on_1024_ranks() -> None:
    """In bf16 with fp32 masters, recomputing each block: some ten seconds of one core."""
    with torch.device("meta"):
        model = Decoder(
            layers=80, dim=8192, heads=64, kv_heads=8, hidden=28672, vocabulary=128256, remat=True
        ).bfloat16()
    tokens = torch.empty(1, 4096, dtype=torch.int64, device="meta")
    plan = fzero.plan(model, tokens, world=1024, stage=3, loss=next_token, donate=True)
    numel = sum(p.numel() for p in model.parameters())
    assert numel > 70e9
    assert plan.bytes["masters"] == pytest.approx(numel * 4 / 1024, rel=1e-3)
    assert plan.collectives["reduce_scatter"] == 83 and plan.fits(80e9)
