"""Run one cell of the matrix: compare the result of a rank with the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.tools.doctor._subjects import DTYPES, CollectiveSubject, formula
from fzero.tools.doctor._transforms import TRANSFORMS, Inputs, inputs

VERDICTS = ("right", "refused", "zero", "wrong", "crashed", "hung")
"""From good to bad: of several ranks the worst one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCheck:
    """A collective, the transform around it, and the dtype of its input."""

    subject: CollectiveSubject
    transform: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check: one of `VERDICTS`, and unless it is "right" a description."""

    verdict: str
    seen: str = ""


def run_check(check: CollectiveCheck, rank: int, world: int) -> Finding:
    """Run a check on this rank. A collective: every rank runs it.

    Exceptions become findings. Numbers are compared bit for bit: all of them are exact.
    """
    subject = check.subject
    stacked = inputs(formula(subject.kind, subject.op), world)
    transform, dtype = TRANSFORMS[check.transform], DTYPES[check.dtype]
    want = transform(formula(subject.kind, subject.op), stacked)[rank].detach().to(dtype)
    mine = Inputs(*(t[rank].to(dtype) for t in stacked))
    try:
        got = transform(subject.run, mine).detach()
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return Finding(verdict="refused", seen=f"{type(error).__name__}: {first}")
    if got.dtype == dtype and torch.equal(got, want):
        return Finding(verdict="right")
    if got.shape == want.shape and not got.any():
        return Finding(verdict="zero", seen=f"all zeros, and it must be {_some(want)}")
    seen = f"rank {rank} gets {_some(got)}, and it must be {_some(want)}"
    of = "" if got.dtype == dtype else f"; its dtype is {str(got.dtype).removeprefix('torch.')}"
    return Finding(verdict="wrong", seen=seen + of)


def worst(findings: Sequence[Finding]) -> Finding:
    """Return the worst finding of all ranks."""
    return max(findings, key=lambda finding: VERDICTS.index(finding.verdict))


def _some(x: Tensor) -> str:
    numbers = [f"{number + 0:g}" for number in x.flatten()[:4].tolist()]  # no -0
    return f"[{', '.join(numbers)}{', ...' if x.numel() > 4 else ''}]"
