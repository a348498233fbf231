"""Programs for an engine and for a functional step: backwards, windows, dtypes, places, meshes."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

import fzero
from fzero.state import OptimizerOver, Reshard
from tests.optim.torch_cases import Lamb
from tests.strategies import keeps, seeds, stages

RULES: dict[str, Callable[..., Any]] = {
    "sgd": functools.partial(fzero.optim.sgd, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": functools.partial(fzero.optim.adamw, lr=0.01, weight_decay=0.1),
    "lion": functools.partial(fzero.optim.lion, lr=0.01, weight_decay=0.1),
}
CLASSES: dict[str, Callable[..., Any]] = {
    "torch sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "torch adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
WHOLE: dict[str, Callable[..., Any]] = {"lamb": functools.partial(Lamb, lr=0.1)}
"""Those that need whole parameters."""


class Part(NamedTuple):
    """Some backwards, each reduced at once, or all of them together."""

    window: bool
    backwards: int


class Plan(NamedTuple):
    """The backwards of one update."""

    parts: tuple[Part, ...]
    micro_batches: int = 1  # the update is by the mean over so many times all parts
    one_window: bool = False  # around everything, the update too

    @property
    def rows(self) -> int:
        """How many there are; each has one row of the batch."""
        return self.micro_batches * sum(part.backwards for part in self.parts)

    @property
    def adds_in_one_order(self) -> bool:
        """Whether both drivers add the same numbers in the same order.

        An engine has a window for each micro-batch, a functional step one around them all: each
        of those windows must have one backward.
        """
        return not self.one_window or self.micro_batches in (1, self.rows)


class Options(NamedTuple):
    """What may change bits, and must change those of both drivers."""

    max_norm: float | None = None
    bucket_bytes: int = 100
    ordered: bool = False
    reshard: Reshard = True
    replicas: int = 1  # of a mesh of two dims, where they divide the ranks
    over: OptimizerOver = "shard"

    def mesh(self) -> tuple[int, int]:
        ranks = fzero.axis_size()
        replicas = math.gcd(self.replicas, ranks)
        return replicas, ranks // replicas


class Numbers(NamedTuple):
    """How 16-bit parameters and optimizer states are held."""

    masters: bool = True
    state_dtype: torch.dtype | None = None
    rounding: bool = False  # by chance

    @property
    def options(self) -> dict[str, Any]:
        return {
            "master_weights": self.masters,
            "state_dtype": self.state_dtype,
            "stochastic_rounding": self.rounding,
        }


class Run(NamedTuple):
    """What both drivers are told to do."""

    stage: int
    optimizer: str  # of RULES, CLASSES or WHOLE
    dtype: str
    plan: Plan
    options: Options = Options()
    numbers: Numbers = Numbers()
    away: str = ""  # what of the state is on disk: o(ptimizer), g(radients), p(arams)
    seed: int = 0

    @property
    def offload(self) -> fzero.Offload:
        kinds = {"o": "optimizer", "g": "gradients", "p": "params"}
        homes: dict[str, Any] = {kinds[letter]: "disk" for letter in self.away}
        return fzero.Offload(**homes, folder=tempfile.gettempdir())


parts = st.lists(st.builds(Part, st.booleans(), st.integers(1, 2)), min_size=1, max_size=3)
plans = st.builds(Plan, parts.map(tuple), st.integers(1, 3), st.booleans())
runs = st.builds(
    Run,
    stage=stages,
    optimizer=st.sampled_from([*RULES, *CLASSES, *WHOLE]),
    dtype=st.sampled_from(["fp32", "bf16", "mixed"]),
    plan=plans.filter(lambda plan: plan.adds_in_one_order),
    options=st.builds(
        Options,
        max_norm=st.sampled_from([None, 0.05, 100.0]),
        bucket_bytes=st.sampled_from([16, 100, 2**20]),
        ordered=st.booleans(),
        reshard=keeps,
        replicas=st.integers(1, 4),
        over=st.sampled_from(["shard", "all"]),
    ),
    numbers=st.sampled_from(
        [
            Numbers(),
            Numbers(masters=False),
            Numbers(state_dtype=torch.bfloat16),
            Numbers(masters=False, state_dtype=torch.float32),
        ]
    ),
    away=st.sampled_from(["", "", "o", "g", "og"]),
    seed=seeds,
)


ALONE, TOGETHER = Part(window=False, backwards=1), Part(window=True, backwards=2)
LOW = Options(max_norm=0.05, ordered=True)


CHOSEN = (
    Run(0, "torch adamw", "fp32", Plan((ALONE, TOGETHER)), LOW),
    Run(1, "adamw", "bf16", Plan((TOGETHER, ALONE), micro_batches=2)),
    Run(1, "torch sgd", "mixed", Plan((ALONE,), one_window=True), LOW),
    Run(2, "torch sgd", "mixed", Plan((ALONE,), micro_batches=3, one_window=True)),
    Run(2, "lion", "bf16", Plan((TOGETHER,)), LOW, Numbers(masters=False)),
    Run(2, "torch adamw", "bf16", Plan((ALONE, TOGETHER)), Options(ordered=True)),
    Run(3, "sgd", "bf16", Plan((TOGETHER, ALONE)), Options(reshard=False, ordered=True)),
    Run(3, "torch adamw", "mixed", Plan((ALONE,), micro_batches=2), LOW),
    Run(3, "lion", "fp32", Plan((TOGETHER,), one_window=True), Options(reshard="window")),
    Run(1, "adamw", "mixed", Plan((ALONE, TOGETHER)), Options(0.05, 16, True, replicas=2)),
    Run(3, "torch adamw", "bf16", Plan((ALONE, ALONE)), LOW._replace(replicas=2, over="all")),
    Run(2, "lamb", "fp32", Plan((ALONE, TOGETHER)), LOW),
    Run(3, "lamb", "bf16", Plan((ALONE,)), LOW._replace(replicas=2)),
)
