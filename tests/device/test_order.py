"""Programs of plain PyTorch: a sound one has no report, each planted fault has one."""

from __future__ import annotations

import pytest
import torch

from tests.device import on_sim
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
