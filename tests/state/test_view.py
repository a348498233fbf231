"""What a state says of itself: stage, phase, shapes and bytes; never its numbers."""

from __future__ import annotations

from typing import Any

import optree
import torch
from hypothesis import given
from torch import Tensor

import fzero
from fzero.state import NAMESPACE, Phase
from tests.strategies import learns, stages, trees, unique, worlds

PARAMS = {
    "w": torch.full((3, 5), 0.125),
    "b<>": torch.full((4,), 0.125, dtype=torch.bfloat16),
    "ids": torch.full((2,), 77),
}


def total(p: Any) -> Tensor:
    return sum((x.double().sum() for x in p.values()), torch.zeros(()))


def test_repr_shows_stage_phase_shapes_and_bytes() -> None:
    state = fzero.init(PARAMS, fzero.optim.adam(0.1), stage=2)
    assert repr(state).splitlines() == [
        "TrainState(stage=2, axis 'dp' (local, 1 ranks), step=0, phase='idle')",
        "  3 leaves (1 frozen), 21 elements in 3 groups",
        "  parameters replicated, 84 bytes",
        "  gradients  none, 0 bytes",
        "  optimizer  sharded, 176 bytes",
        "  window     closed, 0 bytes",
    ]
    state, _ = fzero.grad_and_reduce(total, state)()
    assert "phase='gradients ready'" in repr(state)
    assert "  gradients  sharded, 76 bytes" in repr(state)
    assert "step=1, phase='idle'" in repr(fzero.apply_gradients(state))

    @fzero.coalesce
    def step_fn(state: Any) -> Any:
        for _ in range(2):
            state, _ = fzero.grad_and_reduce(total, state)()
        assert state.phase is Phase.LOCAL and "phase='local gradients'" in repr(state)
        assert "  window     open, 2 backwards, 76 bytes" in repr(state)
        return state, None

    step_fn(fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=0))


@given(tree=trees(), stage=stages, ranks=worlds)
def test_views_and_bytes_are_those_of_the_tensors_and_show_no_number_of_one(
    tree: Any, stage: int, ranks: int
) -> None:
    """Strings must be the same from every rank: a view does not depend on the rank."""

    def body() -> Any:
        state: Any = fzero.init(tree, fzero.optim.adam(0.1), stage=stage)
        leaves = optree.tree_leaves(state, namespace=NAMESPACE)
        held = sum(x.nbytes for x in leaves) - state.step.nbytes
        return [repr(state), state._repr_html_()], fzero.state_bytes(state), held

    texts, found, held = fzero.simulate(body, world_size=ranks)()
    frozen = sum(not learns(x) for x in unique(tree))
    numel = sum(x.numel() for x in unique(tree))
    for text in texts:
        assert "tensor(" not in text
        assert f"stage={stage}" in text and f"{ranks} ranks" in text
        assert f"{len(unique(tree))} leaves ({frozen} frozen), {numel:,} elements" in text
    assert found["total"].tolist() == held.tolist()
    parts = [found[kind] for kind in ("parameters", "gradients", "optimizer", "window")]
    assert torch.stack(parts).sum(0).tolist() == held.tolist()


def test_html_has_a_row_for_each_group_and_escapes_names() -> None:
    page = fzero.init(PARAMS, fzero.optim.sgd(0.1), stage=0)._repr_html_()
    assert "<td>w</td><td>1</td><td>15 x 1</td><td>float32</td><td></td>" in page
    assert "<td>b&lt;&gt;</td><td>1</td><td>4 x 1</td><td>bfloat16</td><td></td>" in page
    assert "<td>ids</td><td>1</td><td>2 x 1</td><td>int64</td><td>frozen</td>" in page
    assert "<td>parameters</td><td>replicated, 84 bytes</td>" in page
    for tag in ("table", "tr", "td", "th", "b"):
        assert page.count(f"<{tag}>") == page.count(f"</{tag}>")


def test_a_state_shows_itself_inside_a_transform_and_with_a_rank_dim() -> None:
    step = fzero.shard(lambda s: (s, None), stage=1)
    state: Any = step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.1))

    def inside(count: Tensor) -> Tensor:
        assert "step=?" in repr(state.replace(step=count))
        return count

    torch.func.vmap(inside)(torch.tensor([1.0, 2.0]))
    stacked = fzero.simulate(step, world_size=3).init({"w": torch.ones(4)}, fzero.optim.sgd(0.1))
    assert "step=[0, 0, 0]" in repr(stacked)
