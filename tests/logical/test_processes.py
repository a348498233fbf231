"""Law 18 on real ranks: processes that talk over gloo, against one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.logical.programs import Place, Program, differs, run, trained
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("gloo")

PROGRAMS = {
    "plain": Program(logical=4, dropout=0.4),
    "uneven": Program(logical=6, sizes=(1, 2, 3, 1, 2, 3), dropout=0.4, calls=2, coalesce=0),
    "weighted": Program(
        logical=4, weighted=True, calls=2, scale="dynamic", overflows=(0, 2), donate=True
    ),
    "low": Program(logical=6, dtype=torch.bfloat16, cast=torch.bfloat16, rule="sgd"),
}


def body(rank: int, world_size: int, program: Program, stages: list[int]) -> list[Any]:
    return [run(program, Place(ranks=world_size, stage=stage)) for stage in stages]


@pytest.mark.smoke
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_processes_have_the_bits_of_one_rank(name: str, ranks: int) -> None:
    program = PROGRAMS[name]
    alone = trained(program, Place())
    stages = [0, 2, 3]
    for found in run_ranks(body, ranks, program, stages):
        for stage, one in zip(stages, found, strict=True):
            assert differs(alone, one) == [], f"stage {stage} on {ranks} ranks"
