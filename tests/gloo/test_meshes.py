"""Axes that are not the world: halves of a mesh, groups without a CPU backend, other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero.adapter import Engine
from fzero.collectives import assert_same_everywhere, gather_objects, performer_of
from fzero.ranks import mesh
from tests.failing import fails_in_backward
from tests.gpu import training as t
from tests.gpu.training import Task
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

DRIVERS = {"engine": t.by_engine, "functional step": t.by_function}
HALVES = (
    Task(stage=2, steps=3, adam=False),
    Task(stage=3, steps=2, backwards=3, max_norm=0.5, checkpoint="nonreentrant"),
)


def my_half() -> DeviceMesh:
    """The mesh of ranks 0 and 1, or that of ranks 2 and 3."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "dp"))["dp"]


def halves_body(rank: int, world_size: int, driver: str) -> None:
    half = rank // 2
    found = DRIVERS[driver](HALVES[half], rank, "cpu", my_half())
    wanted = t.by_hand(HALVES[half], [2 * half, 2 * half + 1], "cpu")
    t.check_close(found, wanted)


@pytest.mark.parametrize("driver", DRIVERS)
def test_two_halves_of_a_mesh_train_other_models_at_the_same_time(driver: str) -> None:
    run_ranks(halves_body, 4, driver)


def overlapping_body(rank: int, world_size: int) -> Any:
    """Rank 1 is in two meshes, and so in more groups than ranks 0 and 2."""
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    found = {}
    for some, ranks in ((first, (0, 1)), (second, (1, 2))):
        if rank in ranks:
            params = {"w": torch.full((3,), float(rank))}
            state = fzero.init(params, fzero.optim.sgd(0.1), stage=3, mesh=some)
            found[ranks] = fzero.full_params(state)["w"][0].item()
    return found


def test_ranks_in_other_numbers_of_groups_make_one_together() -> None:
    found = run_ranks(overlapping_body, 3)
    assert found == [{(0, 1): 0.0}, {(0, 1): 0.0, (1, 2): 1.0}, {(1, 2): 1.0}]


def half_that_fails_body(rank: int, world_size: int) -> str:
    """Rank 0 raises in a backward; ranks 2 and 3 train on."""
    engine = Engine(nn.Linear(3, 3), torch.optim.SGD, stage=2, mesh=my_half())
    loss = engine(torch.ones(2, 3)).sum()
    try:
        engine.backward(
            loss * float("nan")
            if rank
            else fails_in_backward(loss, ZeroDivisionError("on purpose"))
        )
        engine.step()
    except (ZeroDivisionError, fzero.AxisError) as error:
        return type(error).__name__
    return "stepped"


def test_an_error_in_one_half_of_a_mesh_is_not_the_other_half_s() -> None:
    found = run_ranks(half_that_fails_body, 4)
    assert found == ["ZeroDivisionError", "PeerFailedError", "stepped", "stepped"]


def no_cpu_backend_body(rank: int, world_size: int) -> list[Any]:
    """A group that takes CUDA tensors only, as one that a user made with "nccl" does."""
    group: Any = dist.new_group([0, 1], backend="cuda:gloo")
    with pytest.raises(RuntimeError, match=r"(?i)no backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=group)
    axis = mesh.axis_of(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pair",)))
    performer = performer_of(axis)
    assert performer is not None
    assert_same_everywhere(["the same"], axis, what="a test")
    with pytest.raises(fzero.AxisError, match="rank 0 has 0, rank 1 has 1"):
        assert_same_everywhere([str(rank)], axis, what="a test")
    backends = [dist.get_backend_config(x.group()) for x in (performer.axis, performer.data)]
    assert "cpu:gloo" in backends[0].split(",") and backends[1] == "cuda:gloo"
    return [sorted(performer.call("a call", 7 + rank)), gather_objects({"rank": rank}, axis)]


def test_ranks_agree_over_a_group_of_their_own_where_that_of_the_data_has_no_cpu_backend() -> None:
    wanted = [[7, 8], [{"rank": 0}, {"rank": 1}]]
    assert run_ranks(no_cpu_backend_body, 2) == [wanted, wanted]


class OnThread(torch.autograd.Function):
    """fn(*xs), whose backward computes all of it anew, on a thread as autograd has for a GPU."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], *xs: Tensor) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(*xs)
        return fn(*xs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        xs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        found: list[Any] = []

        def run() -> None:
            with torch.enable_grad():
                found.extend(torch.autograd.grad(ctx.fn(*xs), xs, dy))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return None, *found


W = torch.arange(1.0, 8.0, dtype=torch.float64)


class Summed(nn.Module):
    """y = psum(w x) over the ranks of the axis."""

    def __init__(self, axis: fzero.Axis | None = None) -> None:
        super().__init__()
        self.w, self.axis = nn.Parameter(W.clone()), axis

    def forward(self, x: Tensor) -> Tensor:
        return OnThread.apply(lambda w, x: fzero.psum(w * x, self.axis), self.w, x)


def thread_body(rank: int, world_size: int, stage: int, driver: str) -> tuple[list[float], int]:
    """The gradient of sum_i c psum(w x)_i, and how many all-reduces were counted.

    On the axis x is 2, 5 (ranks 2 and 3: 3, 6) and c is 1, 2: sums over all four ranks differ. A
    functional step says which axis is meant; under an engine, where it is the world, the module.
    """
    half, place = divmod(rank, 2)
    x = torch.full((7,), 2.0 + half + 3 * place, dtype=torch.float64, requires_grad=True)
    module = Summed(mesh.axis_of(my_half()) if driver == "engine" else None)
    with fzero.count_collectives() as log:
        if driver == "engine":
            engine = Engine(module, torch.optim.SGD, stage=stage, mesh=my_half())
            (engine(x).sum() * (1 + place)).backward()
            gradient = engine.full_gradient("w")
            engine.close()
        else:
            apply, params = fzero.functionalize(module)
            state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage, mesh=my_half())
            loss = fzero.grad_and_reduce(lambda p: apply(p, x).sum() * (1 + place), state)
            gradient = fzero.gradients(loss()[0])["w"]
    sums = [event for event in log.events if event.op == "all_reduce"]
    return gradient.tolist(), len(sums)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_on_another_thread_finds_its_axis_its_values_and_its_log(
    stage: int, driver: str
) -> None:
    found = run_ranks(thread_body, 4, stage, driver)
    # mean over the axis of x_r (c_0 + c_1); psum runs in the forward, again in the backward, and
    # its adjoint is a psum, too.
    first, second = (2 + 5) / 2 * 3, (3 + 6) / 2 * 3
    assert found == [([first] * 7, 3)] * 2 + [([second] * 7, 3)] * 2
