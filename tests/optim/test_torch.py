"""`from_torch`: torch.optim on flats makes the updates of torch.optim on the parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fzero.checkpoint._slots import counters_of, roles_of
from fzero.errors import LayoutError
from fzero.optim import Piece, from_torch
from tests.optim.torch_cases import ELEMENTWISE, NOT_ELEMENTWISE, Lamb
from tests.optim.torch_runs import (
    SHAPES,
    STEPS,
    Flats,
    cut,
    flats_of,
    gradients,
    leaf_of,
    one_each,
    parameters,
    run,
    torchs,
)
from tests.strategies import same, tensors


def source(style: str, cls: Any, options: dict[str, Any], params: Mapping[str, Tensor]) -> Any:
    if style == "instance":
        return cls(list(params.values()), **options)
    return functools.partial(cls, **options)


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("style", ["factory", "instance"])
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_the_bits_are_torchs(name: str, style: str, owned: bool) -> None:
    cls, options = ELEMENTWISE[name]
    params, reference = parameters(), parameters()
    torchs(cls(list(reference.values()), **options), reference, range(STEPS))
    optimizer = from_torch(source(style, cls, options, params)).bind(params)
    got, state = run(optimizer, one_each(params), params, range(STEPS), owned=owned)
    for path, want in reference.items():
        assert torch.equal(got[path], want), path
    assert int(state.count) == STEPS


def test_a_class_alone_has_its_own_defaults() -> None:
    params, reference = parameters(), parameters()
    torchs(torch.optim.AdamW(reference.values()), reference, range(STEPS))
    optimizer = from_torch(torch.optim.AdamW).bind(params)
    got, _ = run(optimizer, one_each(params), params, range(STEPS))
    same(list(got.values()), [p.detach() for p in reference.values()])


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
    optimizer = from_torch(ours).bind(params)
    assert [optimizer.group_of(path) for path in SHAPES] == [0, 1, -1, 0]
    flats = flats_of(
        {path: params[path] for path in ("a.weight", "scale")},
        {"a.bias": params["a.bias"]},
        {"b": params["b"]},
    )
    state, got = None, {}
    for step in range(STEPS):
        torchs(theirs, reference, [step])
        got, state = run(optimizer, flats, params, [step], state=state)
        for scheduler in schedulers if scheduled else ():
            scheduler.step()
    for path, want in reference.items():
        torch.testing.assert_close(got[path], want.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(got["b"], parameters()["b"])
    assert state is not None
    assert [flat.numel() for flat in state.slots["momentum_buffer"]] == [16, 0, 0]
    rate = optimizer.describe([leaf_of(path, p) for path, p in params.items()])[1]
    assert f"param group 0 of 2 leaves: lr={0.3 * 0.5**STEPS if scheduled else 0.3}," in rate


def test_hooks_of_the_instance_run_and_see_the_shards() -> None:
    params = parameters()
    instance = torch.optim.SGD(params.values(), lr=0.1)
    seen: list[list[int]] = []
    instance.register_step_pre_hook(
        lambda o, *_: seen.append([p.numel() for p in o.param_groups[0]["params"]])
    )
    run(from_torch(instance).bind(params), flats_of(params), params, [0])
    assert seen == [[33]]


class Failing(torch.optim.Adam):
    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.fails:
            raise RuntimeError("out of memory")


def test_between_updates_an_instance_is_as_its_user_left_it() -> None:
    """Also after a step that raises, which leaves what is not owned as it was."""
    params = parameters()
    instance = Failing(params.values(), lr=0.1)
    optimizer, flats = from_torch(instance).bind(params), flats_of(params)
    state = optimizer.init(flats.params, flats.pieces)
    grads = flats.grads(gradients(params, 0))
    for fails in (False, True):
        kept = copy.deepcopy((flats.params, grads, tensors(state)))
        instance.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizer.advance(flats.params, grads, state, flats.pieces)
        else:
            optimizer.advance(flats.params, grads, state, flats.pieces)
        same((flats.params, grads, tensors(state)), kept)
        assert not instance.state
        assert instance.param_groups[0]["fused"] is None
        mine = instance.param_groups[0]["params"]
        assert all(a is b for a, b in zip(mine, params.values(), strict=True))
        assert all(p.grad is None for p in mine)


class Rude(torch.optim.SGD):
    """It writes to the gradients, and puts other tensors into the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.5)
            p.data = p - p.grad


def test_only_owned_tensors_are_overwritten() -> None:
    params = parameters()
    for cls in (torch.optim.Adam, Rude):
        optimizer, flats = from_torch(cls(params.values(), lr=0.1)).bind(params), flats_of(params)
        state = optimizer.init(flats.params, flats.pieces)
        grads = flats.grads(gradients(params, 0))
        kept = copy.deepcopy((flats.params, grads, tensors(state)))
        new, after = optimizer.advance(flats.params, grads, state, flats.pieces)
        same((flats.params, grads, tensors(state)), kept)
        pointers = [x.data_ptr() for x in (*flats.params, *tensors((state.slots, state.counters)))]
        owned, then = optimizer.advance(flats.params, grads, state, flats.pieces, owned=True)
        found = [x.data_ptr() for x in (*owned, *tensors((then.slots, then.counters)))]
        assert found == pointers and owned[0] is flats.params[0]
        same((owned, tensors(then)), (new, tensors(after)))
        assert not torch.equal(owned[0], kept[0][0])


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
    optimizer = from_torch(factory, master_weights=master_weights).bind(params)
    got, state = run(optimizer, one_each(params), params, range(STEPS))
    for path, want in reference.items():
        assert torch.equal(got[path], want.to(torch.bfloat16)), path
    wide = torch.float32 if master_weights else torch.bfloat16
    assert {x.dtype for x in state.slots["exp_avg"]} == {wide}
    assert [bool(x.numel()) for x in state.masters] == [master_weights] * 4
    if master_weights:
        same(state.masters[0], reference["a.weight"].detach().flatten())


# Shards: each rank has a part of a flat


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_three_ranks_make_the_updates_of_one(name: str, tells: bool) -> None:
    """The second flat is so short that ranks 1 and 2 have padding alone of it."""
    cls, options = ELEMENTWISE[name]
    params = {path: nn.Parameter(p.detach().double()) for path, p in parameters().items()}
    reference = {path: nn.Parameter(p.detach().clone()) for path, p in params.items()}
    groups = [["a.weight", "b", "a.bias"], ["scale"]]

    def made(of: dict[str, nn.Parameter]) -> Any:
        return cls([{"params": [of[path] for path in paths]} for paths in groups], **options)

    torchs(made(reference), reference, range(STEPS))
    optimizer = from_torch(made(params)).bind(params)
    whole = flats_of(*({path: params[path] for path in paths} for paths in groups))
    shards, ends, states = 11, [], []
    for rank, part in enumerate(cut(whole, 3, shards)):
        pieces = list(part.pieces)
        if rank and tells:
            pieces.append(Piece(1, leaf_of("scale", params["scale"]), 0, 0))
        held, state = part.params, optimizer.init(part.params, pieces)
        before = copy.deepcopy((held[1], [x[1] for x in state.slots.values()]))
        for step in range(STEPS):
            grads = whole.grads(gradients(params, step))
            mine = [cut(Flats(grads, []), 3, shards)[rank].params[i].double() for i in (0, 1)]
            held, state = optimizer.advance(held, mine, state, pieces, owned=True)
        ends.append(held)
        states.append(state)
        if rank:
            same((held[1], [x[1] for x in state.slots.values()]), before)
    got = whole.named(torch.cat([end[index] for end in ends]) for index in (0, 1))
    for path, want in reference.items():
        torch.testing.assert_close(got[path], want.detach(), rtol=1e-12, atol=1e-14)
    first, *others = states
    for other in others:
        same(first.counters, other.counters)  # a rank of padding alone counts too
        for key, flats in first.slots.items():
            assert [x.shape for x in flats] == [x.shape for x in other.slots[key]]


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_the_state_is_made_of_slots_and_counters_and_a_copy_of_it_goes_on(name: str) -> None:
    """As a checkpoint does it, which writes into the leaves of a new state."""
    cls, options = ELEMENTWISE[name]
    params = parameters()
    flats, other = one_each(params), flats_of(params)
    optimizer = from_torch(functools.partial(cls, **options)).bind(params)
    middle, state = run(optimizer, flats, params, range(2))
    want, _ = run(optimizer, flats, params, range(2, 5), state=state, owned=False)
    fresh = optimizer.init(flats.params, flats.pieces)
    sizes = [flat.numel() for flat in flats.params]
    roles = [roles_of(one, sizes) for one in (fresh, state)]
    assert roles[0] == roles[1]
    alone = optimizer.init(other.params, other.pieces)
    names = [{role.name for role in found} for found in (roles_of(alone, [33]), roles[0])]
    assert names[0] == names[1]
    assert all(
        value == 2 for key, value in counters_of(roles[0], tensors(state)).items() if "step" in key
    )
    for mine, theirs in zip(tensors(fresh), tensors(state), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        mine.copy_(theirs)
    again = one_each(middle)
    got, _ = run(optimizer, again, params, range(2, 5), state=fresh, owned=False)
    same(list(got.values()), list(want.values()))


# Rules that need whole parameters: on one rank, and at stage 0


@pytest.mark.parametrize(
    "name", ["torch's adafactor", "hugging face's adafactor", "muon", "lamb", "clipped"]
)
@pytest.mark.parametrize("together", [False, True])
def test_whole_leaves_are_stepped_in_their_own_shapes(name: str, together: bool) -> None:
    cls, options = NOT_ELEMENTWISE[name]
    keep = {"w", "v"} if name == "muon" else {"w", "v", "bias"}
    params = {"w": torch.randn(3, 5), "v": torch.randn(4, 2), "bias": torch.randn(4)}
    params = {path: nn.Parameter(p) for path, p in params.items() if path in keep}
    reference = {path: nn.Parameter(p.detach().clone()) for path, p in params.items()}
    torchs(cls(list(reference.values()), **options), reference, range(STEPS))
    optimizer = from_torch(functools.partial(cls, **options)).bind(params)
    flats = flats_of(params) if together else one_each(params)
    if together and "adafactor" in name:  # its row and column means are shards of no flat
        with pytest.raises(LayoutError, match="is not elementwise"):
            optimizer.init(flats.params, flats.pieces)
        return
    got, state = run(optimizer, flats, params, range(STEPS))
    for path, want in reference.items():
        assert torch.equal(got[path], want), path
    if name == "lamb":
        assert [x.numel() for x in state.slots["m"]] == [x.numel() for x in flats.params]


def test_a_part_of_a_leaf_is_refused_to_a_rule_that_is_not_elementwise() -> None:
    params = parameters()
    optimizer = from_torch(Lamb).bind(params)
    first, *_ = cut(flats_of(params), 3, 11)
    with pytest.raises(LayoutError, match=r"from_torch\(Lamb\) is not elementwise"):
        optimizer.init(first.params, first.pieces)
