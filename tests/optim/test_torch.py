"""`from_torch`: torch.optim on flats makes the updates of torch.optim on the parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.checkpoint import load, save
from fzero.errors import LayoutError
from fzero.optim import from_torch
from fzero.state import NAMESPACE
from tests.optim.torch_cases import ELEMENTWISE, NOT_ELEMENTWISE, Lamb
from tests.optim.torch_runs import (
    SHAPES,
    STEPS,
    gradients,
    parameters,
    run,
    torchs,
    with_gradients,
)
from tests.strategies import same


def source(style: str, cls: Any, options: dict[str, Any], params: Mapping[str, Tensor]) -> Any:
    if style == "instance":
        return cls(list(params.values()), **options)
    return functools.partial(cls, **options) if options else cls


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("style", ["factory", "instance"])
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_the_bits_are_torchs(name: str, style: str, donate: bool) -> None:
    cls, options = ELEMENTWISE[name]
    params, reference = parameters(), parameters()
    torchs(cls(list(reference.values()), **options), reference, range(STEPS))
    optimizer = from_torch(source(style, cls, options, params))
    got, state = run(optimizer, params, range(STEPS), donate=donate)
    for path, want in reference.items():
        assert torch.equal(got[path], want), path
    assert int(state.optimizer.count) == STEPS


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_three_ranks_make_the_updates_of_one_which_goes_on_from_their_checkpoint(
    name: str, tmp_path: Path
) -> None:
    """The second group is so short that ranks 1 and 2 have padding alone of it."""
    cls, options = ELEMENTWISE[name]

    def made(of: dict[str, nn.Parameter]) -> Any:
        groups = [["a.weight", "b", "a.bias"], ["scale"]]
        return cls([{"params": [of[path] for path in paths]} for paths in groups], **options)

    params, reference = parameters(torch.float64), parameters(torch.float64)
    theirs, ours = made(reference), from_torch(made(params))
    torchs(theirs, reference, range(2))
    got, state = run(ours, params, range(2), ranks=3, stage=2)
    for path, want in reference.items():
        expected = want.detach().expand(3, *want.shape)
        torch.testing.assert_close(got[path], expected, rtol=1e-12, atol=1e-14)
    for counters in state.optimizer.counters.values():
        for each in counters:  # a rank of padding alone counts too
            assert torch.equal(each, each[:1].expand_as(each))
    save(tmp_path, state)
    torchs(theirs, reference, range(2, 5))
    alone = load(tmp_path, run(ours, params, [])[1])
    got, _ = run(ours, params, range(2, 5), state=alone)
    for path, want in reference.items():
        torch.testing.assert_close(got[path], want.detach(), rtol=1e-12, atol=1e-14)


# Param groups, schedulers, hooks


def grouped(params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups of unlike options; "b" is in neither."""
    return torch.optim.SGD(
        [
            {"params": [params["scale"], params["a.weight"]], "lr": 0.3, "momentum": 0.9},
            {"params": [params["a.bias"]], "weight_decay": 0.5},
        ],
        lr=0.05,
    )


@pytest.mark.parametrize("scheduled", [False, True])
def test_param_groups_have_their_own_options_and_a_leaf_of_none_stays(scheduled: bool) -> None:
    params, reference = parameters(), parameters()
    theirs, ours = grouped(reference), grouped(params)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (theirs, ours)]
    state, got = None, {}
    for step in range(STEPS):
        torchs(theirs, reference, [step])
        got, state = run(from_torch(ours), params, [step], state=state)
        for scheduler in schedulers if scheduled else ():
            scheduler.step()
    for path, want in reference.items():
        assert torch.equal(got[path], want), path
    assert torch.equal(got["b"], parameters()["b"])
    assert state is not None
    assert sum(flat.numel() for flat in state.optimizer.slots["momentum_buffer"]) == 16
    optimizer = state.setup.optimizer
    assert [optimizer.group_of(path) for path in SHAPES] == [0, 1, -1, 0]
    rate = optimizer.describe(state.setup.layout.leaves)[1]
    assert f"param group 0 of 2 leaves: lr={0.3 * 0.5**STEPS if scheduled else 0.3}," in rate


def test_hooks_of_the_instance_run_and_see_the_shards() -> None:
    params = parameters()
    instance = torch.optim.SGD(params.values(), lr=0.1)
    seen: list[list[int]] = []
    instance.register_step_pre_hook(
        lambda o, *_: seen.append([p.numel() for p in o.param_groups[0]["params"]])
    )
    run(from_torch(instance), params, [0], ranks=2, stage=1)
    assert seen == [[20], [20]]  # 33 elements, and padding behind each leaf


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
    state = with_gradients(fzero.init(params, from_torch(instance), stage=0), params, 0)
    instance.fails = fails
    kept: Any = optree.tree_map(torch.clone, state, namespace=NAMESPACE)
    with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
        after = fzero.full_params(fzero.apply_gradients(state))
        assert not torch.equal(after["b"], params["b"])
        donated, _ = run(from_torch(instance), params, [0], donate=True)
        same(donated, after)
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
    params = parameters(torch.bfloat16)
    reference = parameters(torch.bfloat16)
    if master_weights:
        reference = {path: nn.Parameter(p.detach().float()) for path, p in reference.items()}
    theirs = torch.optim.AdamW(list(reference.values()), lr=0.01, fused=True)
    for step in range(STEPS):
        for p, g in zip(reference.values(), gradients(params, step).values(), strict=True):
            p.grad = g.to(p.dtype)
        theirs.step()
    factory = functools.partial(torch.optim.AdamW, lr=0.01)
    got, state = run(from_torch(factory, master_weights=master_weights), params, range(STEPS))
    for path, want in reference.items():
        assert torch.equal(got[path], want.to(torch.bfloat16)), path
    wide = torch.float32 if master_weights else torch.bfloat16
    assert {x.dtype for x in state.optimizer.slots["exp_avg"]} == {wide}
    held = sum(x.numel() for x in state.optimizer.masters)
    assert held == (sum(p.numel() for p in params.values()) if master_weights else 0)


# Rules that need whole parameters: on one rank, and at stage 0


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize(
    "name", ["torch's adafactor", "hugging face's adafactor", "muon", "lamb", "clipped"]
)
def test_whole_leaves_are_stepped_in_their_own_shapes(name: str, ranks: int) -> None:
    cls, options = NOT_ELEMENTWISE[name]
    keep = ["a.weight"] if name == "muon" else list(SHAPES)
    params = {path: p for path, p in parameters().items() if path in keep}
    reference = {path: p for path, p in parameters().items() if path in keep}
    torchs(cls(list(reference.values()), **options), reference, range(STEPS))
    got, _ = run(from_torch(functools.partial(cls, **options)), params, range(STEPS), ranks=ranks)
    for path, want in reference.items():
        assert torch.equal(got[path], want.expand_as(got[path])), path


def test_parts_of_leaves_are_refused_to_a_rule_that_is_not_elementwise() -> None:
    with pytest.raises(LayoutError, match=r"from_torch\(Lamb\) is not elementwise"):
        run(from_torch(Lamb), parameters(), [], ranks=3, stage=1)
