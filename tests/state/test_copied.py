"""A copy of a state, of an engine's too, is a functional state of its own."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from fzero.errors import DonatedError
from tests.oracle import square_loss
from tests.ranks import run_ranks
from tests.strategies import integers, same, tensors


def _saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "torch.save": _saved,
}
CODECS = fzero.Compress(gradients=fzero.codecs.int8())
OPTIONS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1, masters, clipped": {"stage": 1, "half": True, "max_norm": 0.125},
    "2, of 8 bits, a residual": {
        "stage": 2,
        "state_dtype": fzero.codecs.dynamic8(),
        "compress": CODECS,
    },
    "3, in host memory": {
        "stage": 3,
        "offload": fzero.Offload(optimizer="cpu", gradients="cpu", params="cpu"),
    },
    "3, on disk, frozen": {
        "stage": 3,
        "offload": fzero.Offload(optimizer="disk", params="disk", folder="/tmp"),
        "frozen": True,
    },
}


def _copied(rank: int, size: int, how: str, given: dict[str, Any]) -> None:
    torch.manual_seed(3)
    options = dict(given)
    module = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    if options.pop("half", False):
        module = module.bfloat16()
    module[0].weight.requires_grad_(not options.pop("frozen", False))
    apply, _ = fzero.functionalize(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.125)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # it wraps `step`
    engine = Engine(module, optimizer, **options)
    optimizer.register_step_post_hook(lambda *_: None)  # which no pickle takes
    dtype = next(module.parameters()).dtype
    x = torch.arange(5.0 * (2 + rank)).view(-1, 5).to(dtype) / 8

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply(params, x).float().square().sum()

    def step() -> dict[str, Tensor]:
        engine.backward(engine(x).float().square().sum())
        engine.step()
        return {k: v.clone() for k, v in fzero.full_params(engine.state).items()}

    step()
    scheduler.step()
    snapshot = COPIES[how](engine.state)
    wanted = step()
    for _ in range(2):  # it is not used up, and nothing of it is the engine's
        reduced, _ = fzero.grad_and_reduce(loss, snapshot)(x)
        made = fzero.full_params(fzero.apply_gradients(reduced))
        assert all(torch.equal(made[k], v) for k, v in wanted.items()), (made, wanted)
    step()
    engine.state = copy.deepcopy(snapshot)
    again = step()
    assert all(torch.equal(again[k], v) for k, v in wanted.items())


@pytest.mark.smoke
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_copy_of_the_state_of_an_engine_goes_on_by_itself(
    options: dict[str, Any], size: int
) -> None:
    for how in COPIES:
        run_ranks(_copied, size, how, options)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_stack_has_its_slots_and_a_donated_state_has_no_copy(how: str) -> None:
    def train(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        return fzero.apply_gradients(fzero.grad_and_reduce(square_loss, state)(x)[0]), x

    train = fzero.compress(gradients=fzero.codecs.int8())(train)
    step = fzero.simulate(fzero.shard(train, stage=2, donate=True), world_size=2)
    xs = integers((2,), 4).float() / 8
    state, _ = step(step.init({"w": torch.ones(3, 3)}, fzero.optim.adam(0.125)), xs)
    kept = COPIES[how](state)
    assert kept.slots["residual"].value.flats[0].any()
    new, _ = step(state, xs)
    same(tensors(new), tensors(step(kept, xs)[0]))
    assert "phase='idle', donated)" in repr(state) and "donated" not in repr(new)
    with pytest.raises(DonatedError, match=r"Fix: go on with the state [\s\S]*copy.deepcopy"):
        COPIES[how](state)
