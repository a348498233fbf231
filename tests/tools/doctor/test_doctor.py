"""The doctor finds what is wrong with a collective, names it, and finds nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fzero.__main__ import main
from fzero.tools.doctor import TRANSFORMS, CollectiveSubject, DoctorReport, examine
from tests.tools.doctor import planted

pytestmark = pytest.mark.xdist_group("gloo")
DERIVATIVES = [name for name in TRANSFORMS if name != "value"]


def subjects(**runs: Any) -> list[CollectiveSubject]:
    return [CollectiveSubject(name=name, run=run, kind="reduce") for name, run in runs.items()]


@pytest.fixture(scope="module")
def report() -> DoctorReport:
    """Every fault that leaves the ranks alive, and a collective without one, on one pair."""
    planned = subjects(
        max=planted.on_a_backend_that_takes_the_largest,
        mean=planted.with_a_mean_for_a_sum,
        zero=planted.with_a_gradient_of_zero,
        own=planted.with_the_gradient_of_its_own_part,
        rank=planted.that_is_wrong_on_rank_1,
        raises=planted.that_raises_on_rank_1,
        dtype=planted.in_another_dtype,
        right=planted.that_is_right,
    )
    return examine(planned, dtypes=("fp64", "bf16", "int8"))


def found(report: DoctorReport, name: str) -> dict[tuple[str, str], tuple[str, str]]:
    return {
        (cell.transform, cell.dtype): (cell.verdict, cell.seen)
        for cell in report.cells
        if cell.collective == name
    }


def verdicts(report: DoctorReport, name: str) -> dict[str, set[str]]:
    by: dict[str, set[str]] = {}
    for (transform, _), (verdict, _) in found(report, name).items():
        by.setdefault(transform, set()).add(verdict)
    return by


def test_a_wrong_reduce_operation_is_named(report: DoctorReport) -> None:
    for dtype in ("fp64", "int8"):
        verdict, seen = found(report, "max")["value", dtype]
        assert verdict == "wrong"
        assert re.fullmatch(r"rank 0 gets \[.*\], and it must be \[.*\]", seen)
    assert all(kinds == {"wrong"} for kinds in verdicts(report, "mean").values())


def test_a_gradient_that_is_silently_zero_is_named(report: DoctorReport) -> None:
    by = verdicts(report, "zero")
    assert by.pop("value") == {"right"}
    assert by == {name: {"zero"} for name in DERIVATIVES}
    told = report.text()
    assert "FAULT: zero, grad(grad), fp64 bf16: zero: all zeros, and it" in told


def test_a_gradient_that_leaves_other_ranks_out_is_wrong_and_the_value_right(
    report: DoctorReport,
) -> None:
    by = verdicts(report, "own")
    assert by.pop("value") == {"right"}
    assert by == {name: {"wrong"} for name in DERIVATIVES}


def test_one_rank_is_enough(report: DoctorReport) -> None:
    verdict, seen = found(report, "rank")["value", "fp64"]
    assert verdict == "wrong" and seen.startswith("rank 1 gets [")
    verdict, seen = found(report, "raises")["value", "int8"]
    assert (verdict, seen) == ("refused", "NotImplementedError: no such sum")
    verdict, seen = found(report, "dtype")["value", "bf16"]
    assert verdict == "wrong" and seen.endswith("; its dtype is float32")


def test_what_is_right_is_no_fault_and_integers_have_a_value_only(report: DoctorReport) -> None:
    by = verdicts(report, "right")
    assert set(by) == set(TRANSFORMS) and all(kinds == {"right"} for kinds in by.values())
    assert ("value", "int8") in found(report, "right")
    assert ("grad", "int8") not in found(report, "right")
    assert not report and {cell.collective for cell in report.faults} == {
        *("max", "mean", "zero", "own", "rank", "raises", "dtype")
    }


@pytest.mark.slow
def test_ranks_that_die_or_wait_are_findings_and_what_follows_runs_on_new_ones() -> None:
    planned = subjects(
        dies=planted.that_ends_rank_0,
        alone=planted.that_is_alone_on_rank_0,
        right=planted.that_is_right,
    )
    report = examine(planned, dtypes=("int8",), timeout_s=20)  # the value alone
    dies, alone = report.faults
    assert dies.verdict == "crashed"
    assert dies.seen == "rank 0 ended with exit code 7"
    assert alone.verdict == "hung"
    assert re.fullmatch(r"rank \d gives no answer in 20 s", alone.seen)


def test_the_command_finds_this_installation_sound_and_prints_plain_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told and told.isascii() and "FAULT" not in told
    assert "fzero's collectives: 183 right." in told
    tables = told[: told.index("fzero's collectives: 183")].splitlines()
    assert max(map(len, tables)) <= 80
    rows = [line.split() for line in tables]
    assert rows[rows.index(["all_gather"]) + 1] == ["value", *["right"] * 7]
    assert rows[rows.index(["pmean"]) + 1] == ["value", *["right"] * 4, *["-"] * 3]


def test_json_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], report: DoctorReport
) -> None:
    monkeypatch.setattr("fzero.tools.doctor.examine", lambda: report)
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["sound"] is False and told["ranks"] == 2
    worst = next(cell for cell in told["cells"] if cell["collective"] == "max")
    assert (worst["transform"], worst["dtype"], worst["verdict"]) == ("value", "fp64", "wrong")
    assert main(["doctor"]) == 1
    assert "This installation has FAULTS." in capsys.readouterr().out
