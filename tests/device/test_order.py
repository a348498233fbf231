"""Programs of plain PyTorch: a sound one has no report, each planted fault has one."""

from __future__ import annotations

import ctypes
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device import on_sim
from tests.device.backend import Work
from tests.device.order import checked
from tests.device.programs import FAULTS, SOUND


@pytest.mark.parametrize("program", SOUND)
@on_sim(2)
def test_a_sound_program_has_no_report(program: str) -> None:
    with checked() as order:
        SOUND[program](order)
    order.require_none()


@pytest.mark.parametrize("program", FAULTS)
@on_sim(2)
def test_a_fault_is_reported_with_both_places(program: str) -> None:
    kind, run = FAULTS[program]
    with checked() as order:
        run(order)
    assert {report.kind for report in order.reports} == {kind}, [*map(str, order.reports)]
    assert all("programs.py" in report.place for report in order.reports)


@on_sim(2)
def test_a_report_names_the_parameter() -> None:
    with checked() as order:
        FAULTS["a_step_under_a_gather"][1](order)
    assert "of 0.weight" in order.reports[0].what
    assert "all_gather (reads on stream" in str(order.reports[0])


@on_sim()
def test_a_copy_to_pinned_memory_of_before_is_over_when_that_is_freed() -> None:
    there = torch.empty(8, pin_memory=True)
    with checked() as order:
        there.copy_(torch.ones(8, device="sim"), non_blocking=True)
        del there  # its bytes are given back: nobody writes to them later
        assert not order.copies


@on_sim()
def test_memory_that_a_collection_frees_under_the_checker_is_there_until_it_has_looked() -> None:
    there = [torch.empty(1 << 24, pin_memory=True)]  # of this size it is unmapped when given back
    move = ctypes.memmove

    def collecting(*args: Any) -> Any:
        there.clear()
        return move(*args)

    with checked(), pytest.MonkeyPatch.context() as patch:
        there[0].copy_(torch.ones(1 << 24, device="sim"), non_blocking=True)
        patch.setattr(ctypes, "memmove", collecting)
        torch.sim.synchronize()
    assert not there


@on_sim()
def test_a_node_of_backward_has_the_place_of_the_call_and_no_look_at_other_threads() -> None:
    """`sys._current_frames` has a lock while it makes objects: a collection that asks it waits."""
    x: Any = torch.ones(4, device="sim", requires_grad=True)
    y = (x * 2).sum()
    with checked() as order, pytest.MonkeyPatch.context() as patch:
        patch.delattr(sys, "_current_frames")
        y.backward()
        with torch.Stream("sim"):
            x.grad.add(1)
    assert "in test_a_node_of_backward" in order.reports[0].other_place


@on_sim(2)
def test_two_threads_wait_for_one_collective() -> None:
    time.sleep(0.3 * dist.get_rank())  # so that both of rank 0 find it under way
    x = torch.ones(4, device="sim")
    work = dist.all_reduce(x, async_op=True)

    def waited(_: int) -> float:
        work.wait()
        return x.sum().item()

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(waited, range(2))] == [8.0, 8.0]


def test_a_collective_that_failed_raises_for_each_that_waits() -> None:
    def wait() -> None:
        raise RuntimeError("a rank is gone")

    nowhere: Any = None
    work = Work([], nowhere)
    work.works.append(SimpleNamespace(wait=wait))
    work.finish.append(lambda: pytest.fail("it gave a result"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a rank is gone"):
            work.complete()
