"""A simulated accelerator, "sim": memory of the host, kernels of the CPU, an order that is checked.

A test decorated with `on_sim()` runs in processes that have the device, and it alone.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.device.sim import built, missing
from tests.ranks import run_ranks

BACKEND = "cpu:gloo,sim:simccl"  # tests/rank_process.py loads the device where "sim" is in it


def on_sim(size: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a body that runs on "sim", on each of `size` ranks that have one together."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.xdist_group("sim")
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            if reason := missing():
                pytest.skip(reason)
            built()
            run_ranks(_call, size, body.__module__, body.__name__, arguments, backend=BACKEND)

        return test

    return decorate


def _call(rank: int, size: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
