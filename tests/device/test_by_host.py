"""A group without a backend for the device: its collectives go through host memory, and say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero.collectives import lowering
from tests.device import on_sim
from tests.device.order import checked
from tests.gpu import training
from tests.gpu.bodies import DRIVERS, STAGES
from tests.gpu.training import Params, Task


def of_the_user(device: str, group: Any) -> Params:
    """What collectives of each kind give: whole buffers, pairs, parts of any size."""
    rank, axis = dist.get_rank(), fzero.ranks.mesh.axis_of(DeviceMesh.from_group(group, device))
    x = (torch.arange(6.0) * (-1.0) ** rank).to(device)
    calls = lowering.begin_all_to_all, lowering.begin_all_gather
    made = [call([x], axis).wait()[0] for call in calls]
    made += lowering.begin_extremum([x], axis, "pmax").wait()
    made += lowering.begin_permute([x], axis, [0], [1]).wait()
    made += lowering.begin_permute([x], axis, [0, 1], [0, 1]).wait()
    made += lowering.begin_uneven_all_to_all([x], axis, [1, 5], [[1, 1], [5, 5]][rank]).wait()
    made += lowering.begin_uneven_all_to_all([x], axis, [6, 0], [[6, 6], [0, 0]][rank]).wait()
    made += lowering.broadcast([x], axis, 1)
    return training.on_cpu({str(i): x for i, x in enumerate(made)})


@on_sim(2)
def test_collectives_by_the_backend_of_the_device_have_the_bits_of_the_cpu() -> None:
    with checked() as order:
        got = of_the_user("sim", dist.group.WORLD)
    order.require_none()
    training.check_close(got, of_the_user("cpu", dist.group.WORLD), error=0.0)


@on_sim(2)
def test_a_group_of_gloo_alone_gives_the_bits_of_the_cpu_and_says_so_once() -> None:
    group: Any = dist.new_group(backend="gloo")
    rank = dist.get_rank()

    def found(device: str) -> list[Params]:
        mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("dp",))
        return [
            DRIVERS[driver](Task(stage=stage, steps=2, dtype=dtype), rank, device, mesh)
            for stage, driver in zip(STAGES, [*DRIVERS] * 2, strict=True)
            for dtype in (torch.float64, torch.bfloat16)
        ]

    lowering._say_by_host.cache_clear()
    message = "on sim go through host memory"
    with pytest.warns(UserWarning, match=message) as said, checked() as order:
        got = [*found("sim"), of_the_user("sim", group)]
    assert len(said) == 1
    order.require_none()
    for one, wanted in zip(got, [*found("cpu"), of_the_user("cpu", group)], strict=True):
        training.check_close(one, wanted, error=0.0)
