"""Each of ten planted bugs is named by the tools that the example claims, and by no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_examples_small import FOLDER, run

TIER_INPUTS = ("examples",)  # tests/tiers.py: a push that changes them runs these tests

TOOLS = ("certify", "diff", "prove", "plan", "record")
NAMED = {  # beside the table of the example: what it prints has to agree with both
    "loss_twice": "certify diff record",
    "mean_of_means": "diff record",
    "one_rank": "certify diff prove plan record",
    "bf16_moments": "plan record",
    "adapter_by_parts": "certify diff record",
    "dropout_redrawn": "diff record",
    "counted_twice": "diff record",
    "clip_first": "certify diff plan record",
    "padding_counted": "diff record",
    "stale_scheduler": "diff record",
}
QUICK = ("one_rank", "clip_first")
SAID = {  # the operation or the count by which a bug is named
    "loss_twice": "backward 1, ranks 0, 1 of loss",
    "mean_of_means": "step 1 of loss",
    "one_rank": "reduce_scatter 1 -> 0",
    "bf16_moments": "optimizer 456 -> 232",
    "adapter_by_parts": "parameter b.weight[8, 3] of state",
    "dropout_redrawn": "parameter head.bias[0] of gradient",
    "counted_twice": "parameter expert_bias",
    "clip_first": "all_reduce 1 -> 0",
    "padding_counted": "step 1 of loss",
    "stale_scheduler": "the states differ from update 2 on",
}


@pytest.mark.parametrize(
    "bug", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in NAMED]
)
def test_each_bug_is_named_by_these_tools_alone(bug: str) -> None:
    said = run(f"silent_bugs.py --bug {bug}").splitlines()
    assert said[0].startswith(f"{bug}: loss ")
    assert said[-1] == "check: 0 bug(s) are named by other tools than is claimed"
    answers = {line.split()[0]: line.split(" s  ", 1)[1] for line in said[1:-1]}
    assert tuple(answers) == TOOLS
    assert " ".join(tool for tool in TOOLS if answers[tool] != "-") == NAMED[bug]
    assert any(SAID[bug] in answer for answer in answers.values()), answers


@pytest.mark.parametrize("name", ["silent_bugs.py", "planted.py"])
def test_each_file_is_at_most_200_lines(name: str) -> None:
    assert len((Path(FOLDER) / name).read_text(encoding="utf-8").splitlines()) <= 200
