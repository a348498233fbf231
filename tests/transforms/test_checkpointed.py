"""torch's own checkpoints inside a loss, and functions that run a backward of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero
from fzero._skeleton import _pool
from fzero.functional import functionalize

PLACES: list[tuple[int, int, Any]] = [(0, 1, True), (0, 2, True), (2, 2, True)] + [
    (3, 2, reshard) for reshard in (True, False, "window")
]


class Blocks(nn.Module):
    """Checkpointed blocks; the first one's input depends on no parameter."""

    def __init__(self, *, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.reentrant, self.whole = reentrant, whole

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            block = layer if self.whole else lambda y, layer=layer: torch.tanh(layer(y))
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(("stage", "ranks", "reshard"), PLACES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_checkpointed_module_needs_no_edit(
    stage: int, ranks: int, reshard: Any, reentrant: bool, whole: bool
) -> None:
    torch.manual_seed(3)
    module = Blocks(reentrant=reentrant, whole=whole)
    x = torch.randn(ranks, 3, 4, dtype=torch.float64)
    for one in x:
        (module(one).square().mean() / ranks).backward()
    wanted = {path: p.grad for path, p in module.named_parameters()}
    apply, params = functionalize(module)

    def run(x: Tensor) -> Any:
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage, reshard_after_forward=reshard)
        for _ in range(2):  # the second call may not find what the first one left
            state, _ = fzero.grad_and_reduce(lambda p, x: apply(p, x).square().mean(), state)(x)
        return fzero.gradients(state)

    for path, found in fzero.simulate(run, world_size=ranks)(x).items():
        want = wanted[path]
        assert want is not None
        assert torch.allclose(found[0], 2 * want, rtol=1e-11), path


def test_a_skeleton_is_lent_again_unless_a_checkpoint_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    make = _pool.Pool._make
    monkeypatch.setattr(_pool.Pool, "_make", lambda pool: made.append(1) or make(pool))
    modules: list[nn.Module] = [
        nn.Sequential(nn.Conv1d(2, 3, 1), nn.GroupNorm(1, 3)),
        nn.LSTM(4, 3, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
        Blocks(reentrant=False, whole=True),
    ]
    counts = []
    for module, shape in zip(modules, [(1, 2, 4), (2, 1, 4), (2, 1, 4), (2, 4)], strict=True):
        dtype = next(module.parameters()).dtype
        apply, params = functionalize(module)
        made.clear()
        for _ in range(4):
            out = apply(params, torch.ones(shape, dtype=dtype))
            (out[0] if isinstance(out, tuple) else out).sum()
        counts.append(len(made))
    assert counts[:3] == [0, 0, 0]
    assert counts[3] > 0


class Remembers(nn.Module):
    """Appends to its own lists, as mixtures of experts and caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.losses: list[Tensor] = []
        self.seen: dict[str, list[Tensor]] = {"x": []}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.losses.append(y.square().mean())
        self.seen["x"].append(x)
        return y.sum() + sum(self.losses) + len(self.seen["x"])


def test_what_a_forward_appends_to_its_own_containers_is_forgotten() -> None:
    module = Remembers()
    apply, params = functionalize(module)
    x = torch.ones(3, 2)
    assert len({apply(params, x).item() for _ in range(3)}) == 1
    assert module.losses == [] and module.seen == {"x": []}


class Inner(torch.autograd.Function):
    """x -> x^2, and a backward of its own for a weight that is no input of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.local = (weight * 3).sum()
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.local.backward()
        return 2 * x * dy, None


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_leaves_keep_their_gradients(ranks: int) -> None:
    def run(_: Tensor) -> Any:
        outside = torch.ones(2, requires_grad=True)
        outside.grad = torch.tensor([7.0, 7.0])
        state = fzero.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1), stage=2)

        def loss(p: Any) -> Tensor:
            return Inner.apply(outside, p["w"]).sum() + p["w"].sum()

        state, _ = fzero.grad_and_reduce(loss, state)()
        return fzero.gradients(state)["w"], outside.grad

    found, outside = fzero.simulate(run, world_size=ranks)(torch.zeros(ranks))
    assert found[0].tolist() == [4.0, 4.0]
    assert outside[0].tolist() == [7.0, 7.0]


def test_a_loss_by_no_parameter_of_the_state_is_told() -> None:
    module = nn.Linear(2, 1)
    _, params = functionalize(module)
    state = fzero.init(params, fzero.optim.sgd(0.1), stage=0)
    with pytest.warns(UserWarning, match="by no parameter of the state"):
        fzero.grad_and_reduce(lambda p, x: module(x).sum(), state)(torch.ones(2))
