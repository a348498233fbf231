"""Graphs from a file: they have the bits of the step, nothing is traced, a misfit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.compile import _api
from fzero.errors import AxisError, LayoutError, MismatchError
from tests.adapter.on_ranks import on_ranks
from tests.compile.test_compile import WRAPS, leaves, params, step_fn
from tests.strategies import same

RULE = fzero.optim.sgd(
    lambda count: 2.0 ** -(6 + count),
    momentum=0.5,
    groups=[(lambda leaf: leaf.path == "w1", {"lr": lambda count: 2.0 ** -(8 - count)})],
)
XS = torch.ones(2)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever traces fails."""
    monkeypatch.setattr(_api, "recorded", None)


def follow(step: Any, fast: Any, batches: list[Tensor], rule: Any = RULE) -> None:
    """Both steps have the same bits."""
    state, other = (step.init(params(), rule) for _ in range(2))
    for xs in batches:
        (state, aux), (other, found) = step(state, xs), fast(other, xs)
        same(leaves(other), leaves(state))
        assert torch.equal(found["loss"], aux["loss"]) and found["count"] == aux["count"]


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_it_has_the_bits_of_the_step(stage: int, donate: bool, tmp_path: Path) -> None:
    step = fzero.shard(WRAPS["clipped"](step_fn), stage=stage, donate=donate)
    state = step.init(params(), RULE)
    path = fzero.export(step, tmp_path / "step.json")(state, XS)
    assert not fzero.full_params(state)["w0"].isnan().any()  # an export uses nothing up
    fast = fzero.compile(step, exported=path, backend="eager")
    follow(step, fast, [XS, 2 * XS, 3 * XS])


@on_ranks(2)
def test_ranks_run_the_file_that_one_process_wrote_for_them(rank: int, world_size: int) -> None:
    run_the_file(rank, world_size)


@pytest.mark.slow
@on_ranks(3, 4)
def test_more_ranks_and_a_mesh_do(rank: int, world_size: int) -> None:
    run_the_file(rank, world_size, mesh=(2, 2) if world_size == 4 else None)


def run_the_file(rank: int, world_size: int, mesh: Any = None) -> None:
    step = fzero.shard(step_fn, stage=3, mesh=mesh)
    alone = fzero.simulate(step, world_size=world_size)
    path = Path(f"step-{rank}.json")
    fzero.export(alone, path)(alone.init(params(), RULE), torch.ones(world_size, 2))
    fast = fzero.compile(step, exported=path, backend="eager")
    path.unlink()
    follow(step, fast, [torch.tensor([k + rank, 2.0 * rank]) for k in range(2)])
    state = step.init(params(), RULE)
    with pytest.raises(LayoutError if rank == 1 else MismatchError, match=r"args|different calls"):
        fast(state, torch.ones(3 if rank == 1 else 2))


def test_constants_and_devices_are_in_the_file(tmp_path: Path) -> None:
    table = torch.tensor([[1.5, -2.0], [0.25, 3.0]])

    def train(state: Any, x: Tensor, *, shift: Tensor) -> tuple[Any, Any]:
        def loss(p: Any) -> Tensor:
            made = torch.zeros(2, 2, device=p["w"].device, dtype=torch.float32)
            made[0] = 1
            return ((p["w"] * x + table).clamp(max=float("inf")) * made + shift).sum()

        state, value = fzero.grad_and_reduce(loss, state)()
        return fzero.apply_gradients(state), (value, {"two": [value, 2]}, None)

    step = fzero.shard(train, stage=0)
    state = step.init({"w": torch.ones(2, 2)}, fzero.optim.lion(0.5))
    x, shift = torch.ones(2), torch.full((), -1.0)
    path = fzero.export(step, tmp_path / "step.json")(state, x, shift=shift)
    fast = fzero.compile(step, exported=path, backend="eager")
    (new, aux), (other, found) = step(state, x, shift=shift), fast(state, x, shift=shift)
    same(leaves(other), leaves(new))
    assert found == aux and type(found) is tuple


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    step = fzero.shard(step_fn, stage=2)
    state = step.init(params(), RULE)
    path = fzero.export(step, tmp_path / "step.json")(state, XS)
    fast = fzero.compile(step, exported=path, backend="eager")
    for arguments, seen in {
        (
            state,
            torch.ones(3),
        ): r"made for args\[0\] = float32\[2\](.*) has args(.*)\[3\]",
        (state, XS.double()): r"has args\[0\] = float64",
        (state, XS, 3): r"has args\[1\] = 3",
        (step.init({"w0": XS}, RULE), XS): r"made for (.*) this call has w0 \(2,\)",
        (step.init(params(), fzero.optim.sgd(0.5)), XS): r"this call has optimizer sgd\(lr=0.5",
    }.items():
        with pytest.raises(LayoutError, match=seen):
            fast(*arguments)
    with pytest.raises(LayoutError, match=r"made of shard(.*) is shard(.*)coalesce"):
        fzero.compile(fzero.shard(fzero.coalesce(step_fn), stage=2), exported=path)
    two = fzero.simulate(step, world_size=2)
    fzero.export(two, path)(two.init(params(), RULE), torch.ones(2, 2))
    with pytest.raises(LayoutError, match=r"made for axis 'dp' \(virtual, 2 ranks\)"):
        fzero.compile(step, exported=path, backend="eager")(state, XS)


def test_options_that_would_do_nothing_and_steps_that_cannot_be_are_refused(tmp_path: Path) -> None:
    step = fzero.shard(step_fn, stage=0)
    path = tmp_path / "step.json"
    with pytest.raises(LayoutError, match=r"export: gather_bytes=-1"):
        fzero.export(step, path, gather_bytes=-1)
    with pytest.raises(LayoutError, match=r"compile: bucket_bytes=True"):
        fzero.compile(step, bucket_bytes=True)
    with pytest.raises(LayoutError, match=r"fzero.export around compile"):
        fzero.export(fzero.compile(step), path)
    two = fzero.simulate(step, world_size=2)
    with pytest.raises(AxisError, match=r"export of a step on one rank, with the stacked state"):
        fzero.export(step, path)(two.init(params(), RULE), torch.ones(2, 2))
    fzero.export(step, path)(step.init(params(), RULE), XS)
    with pytest.raises(
        LayoutError, match=r"bucket_bytes or gather_bytes(.*)\n(.*)\n(.*)fzero.export"
    ):
        fzero.compile(step, exported=path, bucket_bytes=1)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    step = fzero.shard(step_fn, stage=0)
    path = fzero.export(step, tmp_path / "step.json")(step.init(params(), RULE), XS)
    head, text = path.read_text().splitlines()
    other = json.dumps(json.loads(head) | {"torch": "1.0.0"})
    for content, seen in {
        "": "not enough values",
        f"{head}\n{text[:-9]}": "not what was written",
        f"{head}\n{text.replace('mul', 'add', 1)}": "not what was written",
        f"{other}\n{text}": "torch 1.0.0 wrote it",
        "[]\n{}": "cannot be run",
        text: "not enough values",
    }.items():
        path.write_text(content)
        with pytest.raises(LayoutError, match=seen):
            fzero.compile(step, exported=path)
    path.unlink()
    with pytest.raises(LayoutError, match="No such file"):
        fzero.compile(step, exported=path)


def test_what_is_no_whole_step_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    def only_gradients(state: Any, x: Tensor) -> tuple[Any, Tensor]:
        return fzero.grad_and_reduce(lambda p: (p["w0"] * x).sum(), state)()

    def odd(state: Any, x: Tensor) -> tuple[Any, Any]:
        return step_fn(state, x)[0], nn.Identity()

    path = tmp_path / "step.json"
    for fn, seen in ((only_gradients, "states like those"), (odd, "returns a Identity in its aux")):
        step = fzero.shard(fn, stage=0)
        with pytest.raises(LayoutError, match=seen):
            fzero.export(step, path)(step.init(params(), RULE), torch.ones(1))
    assert not list(tmp_path.iterdir())
