"""Run one cell of the matrix: compare the result of a rank with the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.tools.doctor._subjects import DTYPES, OPS, CollectiveSubject, formula
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
    want = _expected(check, stacked, subject.op)[rank]
    mine = Inputs(*(t[rank].to(DTYPES[check.dtype]) for t in stacked))
    try:
        got = TRANSFORMS[check.transform](subject.run, mine).detach()
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return Finding(verdict="refused", seen=f"{type(error).__name__}: {first}")
    if _same(got, want, check):
        return Finding(verdict="right")
    if got.shape == want.shape and not got.any():
        return Finding(verdict="zero", seen=f"all zeros, and it must be {_some(want)}")
    seen = f"rank {rank} gets {_some(got)}, and it must be {_some(want)}"
    return Finding(verdict="wrong", seen=seen + _resembles(got, check, stacked, rank, want))


def worst(findings: Sequence[Finding]) -> Finding:
    """Return the worst finding of all ranks."""
    return max(findings, key=lambda finding: VERDICTS.index(finding.verdict))


def _expected(check: CollectiveCheck, stacked: Inputs, op: str) -> Tensor:
    return TRANSFORMS[check.transform](formula(check.subject.kind, op), stacked).detach()


def _same(got: Tensor, want: Tensor, check: CollectiveCheck) -> bool:
    """Return whether `got` equals `want` bit for bit, in the dtype of the check."""
    dtype = DTYPES[check.dtype]
    return got.dtype == dtype and got.shape == want.shape and torch.equal(got, want.to(dtype))


def _resembles(
    got: Tensor, check: CollectiveCheck, stacked: Inputs, rank: int, want: Tensor
) -> str:
    """Return the name of a common fault that gives these numbers, if there is one."""
    if got.dtype != DTYPES[check.dtype]:
        return f"; its dtype is {str(got.dtype).removeprefix('torch.')}"
    for factor in (len(stacked.x), 1 / len(stacked.x)):
        if _same(got, factor * want, check):
            return f"; it is {factor:g} times what it must be"
    if check.subject.kind in ("gather", "exchange", "shift"):
        return ""
    for op in OPS:
        other = _expected(check, stacked, op)[rank]
        if op != check.subject.op and _same(got, other, check):
            return f"; it is what {op.upper()} over ranks gives, not {check.subject.op.upper()}"
    return ""


def _some(x: Tensor) -> str:
    numbers = [f"{number + 0:g}" for number in x.flatten()[:4].tolist()]  # no -0
    return f"[{', '.join(numbers)}{', ...' if x.numel() > 4 else ''}]"
