"""`from_torch`: torch.optim on flats makes the updates of torch.optim on the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.checkpoint import load, save
from fzero.errors import LayoutError
from fzero.optim import from_torch
from fzero.state import NAMESPACE
from tests.optim.cases import trained
from tests.optim.torch_cases import ELEMENTWISE, NOT_ELEMENTWISE, SHAPES, by_torch, parameters
from tests.oracle import linear_loss
from tests.strategies import everywhere, integers, same

STEPS = 4
XS = integers((STEPS,), 7, torch.float32)
run = partial(trained, loss=linear_loss)  # its gradients are exact, also as means over ranks


@pytest.mark.parametrize(("style", "donate"), [("factory", True), ("instance", False)])
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_the_bits_are_torchs(name: str, style: str, donate: bool) -> None:
    cls, options = ELEMENTWISE[name]
    params, factory = parameters(), partial(cls, **options) if options else cls
    source = factory if style == "factory" else factory(list(params.values()))
    got, state = run(params, from_torch(source), XS, stage=0, donate=donate)
    same(got, by_torch(params, XS, lambda of: factory(list(of.values()))))
    assert int(state.optimizer.count) == STEPS


@pytest.mark.parametrize("name", sorted({*ELEMENTWISE} - {"adam", "adamw by its class alone"}))
def test_three_ranks_make_the_updates_of_one_which_goes_on_from_their_checkpoint(
    name: str, tmp_path: Path
) -> None:
    """Ranks 1 and 2 have padding alone of the second group, and no rank has any of the third."""
    cls, options = ELEMENTWISE[name]

    def made(of: Mapping[str, Tensor]) -> Any:
        groups = [["a.weight", "b", "a.bias"], ["scale"], ["zero"]]
        return cls([{"params": [of[path] for path in paths]} for paths in groups], **options)

    def close(found: dict[str, Tensor], updates: int) -> None:
        for path, want in by_torch(params, xs[:updates], made).items():
            expected = want.expand_as(found[path])
            torch.testing.assert_close(found[path], expected, rtol=1e-12, atol=1e-14)

    params, xs = parameters(torch.float64), integers((5, 3), 8, bound=9)
    params["zero"] = nn.Parameter(torch.zeros(0, 2, dtype=torch.float64))
    ours = from_torch(made(params))
    got, state = run(params, ours, xs[:2], stage=2)
    close(got, updates=2)
    for counters in state.optimizer.counters.values():
        for each in counters:  # also where there is nothing to step
            assert torch.equal(each, counters[0][:1].expand_as(each))
    save(tmp_path, state)
    alone = load(tmp_path, fzero.init(params, ours, stage=0))
    close(run(params, ours, xs[2:].mean(1), stage=0, state=alone)[0], updates=5)


# Param groups, schedulers, hooks


def grouped(of: Mapping[str, Tensor], scheduled: bool) -> torch.optim.Optimizer:
    """Two groups of unlike options; "b" is in neither. A hook of it steps the scheduler."""
    groups = [
        {"params": [of["scale"], of["a.weight"]], "lr": 0.3, "momentum": 0.9},
        {"params": [of["a.bias"]], "weight_decay": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    if scheduled:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


@pytest.mark.parametrize("scheduled", [False, True])
def test_param_groups_have_their_own_options_and_a_leaf_of_none_stays(scheduled: bool) -> None:
    params = parameters()
    got, state = run(params, from_torch(grouped(params, scheduled)), XS, stage=0)
    same(got, by_torch(params, XS, partial(grouped, scheduled=scheduled)))
    same(got["b"], params["b"])
    assert sum(flat.numel() for flat in state.optimizer.slots["momentum_buffer"]) == 16
    optimizer = state.setup.optimizer
    assert [optimizer.group_of(path) for path in SHAPES] == [1, 0, -1, 0]
    rate = optimizer.describe(state.setup.layout.leaves)[1]
    assert f"param group 0 of 2 leaves: lr={0.3 * 0.5**STEPS if scheduled else 0.3}," in rate


class Seen(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        sizes.append([p.numel() for p in self.param_groups[0]["params"]])
        return super().step(closure)


sizes: list[list[int]] = []


def test_the_rule_steps_shards() -> None:
    params = parameters()
    ours = from_torch(Seen(params.values(), lr=0.1))
    state = run(params, ours, torch.ones(0, 2), stage=1)[1]
    sizes.clear()
    run(params, ours, torch.ones(1, 2), stage=1, state=state)
    assert sizes == [[20], [20]]  # 33 elements, and padding behind each leaf


class Failing(torch.optim.Adam):
    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.fails:
            raise RuntimeError("out of memory")


class Rude(torch.optim.SGD):
    """It writes to the gradients, and puts other tensors into the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.5)
            p.data = p - p.grad


@pytest.mark.parametrize(("cls", "fails"), [(Failing, False), (Failing, True), (Rude, False)])
def test_an_update_leaves_the_instance_and_the_state_before_as_they_were(
    cls: Any, fails: bool
) -> None:
    params = parameters()
    instance = cls(params.values(), lr=0.1)
    state: Any = fzero.init(params, from_torch(instance), stage=0)
    state, _ = fzero.grad_and_reduce(linear_loss, state)(XS[0])
    kept: Any = optree.tree_map(torch.clone, state, namespace=NAMESPACE)
    instance.fails = fails
    with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
        after = fzero.full_params(fzero.apply_gradients(state))
        assert not torch.equal(after["b"], params["b"])
        same(run(params, from_torch(instance), XS[:1], stage=0, donate=True)[0], after)
    same(state, kept)
    assert not instance.state
    assert instance.param_groups[0]["fused"] is None
    mine = instance.param_groups[0]["params"]
    assert all(a is b for a, b in zip(mine, params.values(), strict=True))
    assert all(p.grad is None for p in mine)


# 16-bit parameters


@pytest.mark.parametrize("master_weights", [True, False])
def test_sixteen_bit_parameters_are_stepped_in_fp32_if_they_have_masters(
    master_weights: bool,
) -> None:
    params, factory = parameters(torch.bfloat16), partial(torch.optim.AdamW, lr=0.01)
    got, state = run(params, from_torch(factory, master_weights=master_weights), XS, stage=0)
    want = by_torch(params, XS, lambda of: factory(list(of.values())))
    assert all(torch.equal(got[path], want[path]) for path in SHAPES) is master_weights
    wide = torch.float32 if master_weights else torch.bfloat16
    assert {x.dtype for x in state.optimizer.slots["exp_avg"]} == {wide}
    held = sum(x.numel() for x in state.optimizer.masters)
    assert held == (sum(p.numel() for p in params.values()) if master_weights else 0)


# Parameters without memory to be known by


class Partly(nn.Module):
    """A matrix, a vector, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.none = nn.Parameter(torch.zeros(0, 2))


def in_two_groups(module: nn.Module) -> torch.optim.Optimizer:
    """Made of names and parameters, as torch.optim takes them."""
    named = list(module.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in named if p.ndim == 2], "lr": 0.5},
        {"params": [(name, p) for name, p in named if p.ndim != 2], "lr": 0.25},
    ]
    return torch.optim.SGD(groups)


def stepped(params: Any, optimizer: Any, **options: Any) -> dict[str, Tensor]:
    """One step of gradients that are all one."""
    state: Any = fzero.init(params, optimizer, stage=2, **options)
    loss = lambda p: sum(x.sum() for x in p.values())  # noqa: E731
    state, _ = fzero.grad_and_reduce(loss, state)()
    return fzero.full_params(fzero.apply_gradients(state))


def test_an_optimizer_of_names_knows_parameters_without_values_and_no_other_models() -> None:
    with torch.device("meta"):
        module = Partly()
    _, params = fzero.functionalize(module)
    ones = partial(torch.full, fill_value=1.0)
    optimizer = from_torch(in_two_groups(module))
    got = stepped(params, optimizer, initializer=lambda _, leaf: ones(leaf.shape))
    assert got["layer.weight"].unique().tolist() == [0.5]
    assert got["layer.bias"].unique().tolist() == [0.75]
    with pytest.raises(LayoutError, match=r"that is not the module's[^`]*named_parameters\(\)"):
        stepped(params, from_torch(torch.optim.SGD(module.parameters(), lr=0.5)))
    module = Partly()  # with a parameter that is empty
    _, params = fzero.functionalize(module)
    got = stepped(params, from_torch(in_two_groups(module)))
    same(got["layer.bias"], module.layer.bias.detach() - 0.25)
    other = torch.optim.SGD(nn.Linear(2, 2).named_parameters(), lr=0.5)  # of other names
    with pytest.raises(LayoutError, match="that is not the module's"):
        stepped(params, from_torch(other))


def test_a_checkpoint_has_the_options_of_a_group_and_not_its_names(tmp_path: Path) -> None:
    def engine(lr: float, *, names: bool) -> Engine:
        module = nn.Linear(2, 2)
        of: Any = module.named_parameters() if names else module.parameters()
        return Engine(module, torch.optim.SGD(of, lr=lr), stage=1)

    save(tmp_path, engine(0.5, names=True))
    loaded = load(tmp_path, engine(0.1, names=False)).optimizer
    assert loaded is not None
    assert loaded.param_groups[0]["lr"] == 0.5 and "param_names" not in loaded.param_groups[0]


# Rules that need whole parameters: on one rank, and at stage 0


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "name", ["torch's adafactor", "hugging face's adafactor", "muon", "lamb", "clipped"]
)
def test_whole_leaves_are_stepped_in_their_own_shapes(name: str, ranks: int) -> None:
    cls, options = NOT_ELEMENTWISE[name]
    keep = ["a.weight"] if name == "muon" else list(SHAPES)
    params = {path: p for path, p in parameters().items() if path in keep}
    xs = integers((STEPS, ranks), 9, torch.float32)
    needs = None if name == "clipped" else "leaf"  # it needs all leaves at once
    got, _ = run(params, from_torch(partial(cls, **options), needs=needs), xs, stage=0)
    everywhere(got, by_torch(params, xs, lambda of: cls(list(of.values()), **options)), ranks)
