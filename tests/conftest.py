"""What every test gets: hypothesis profiles, one thread, a fixed seed, a skip without a GPU."""

from __future__ import annotations

import functools
import gc
import os

import hypothesis
import pytest
import torch

from tests import tiers

# A shared machine is slow at times, and that says nothing about a strategy: no deadline, no
# complaint about slow generation. The default profile draws the same examples in every run, so
# that a red `make test` is red again; nightly looks further and at other examples each time.
_settings = functools.partial(
    hypothesis.settings,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.register_profile("default", _settings(max_examples=10, derandomize=True))
hypothesis.settings.register_profile("nightly", _settings(max_examples=25, derandomize=False))
hypothesis.settings.register_profile("deep", _settings(max_examples=500, derandomize=False))
hypothesis.settings.load_profile(os.environ.get("FZERO_HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Use one thread: pytest-xdist's workers and the spawned ranks share the cores."""
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose what a push runs; skip tests marked `gpu` where there is none."""
    tiers.choose(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))


def pytest_collection_finish() -> None:
    """Take what was imported and collected out of the garbage collector's sight.

    It is never garbage, and to look at it takes longer than most tests that collect garbage.
    """
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Start every test from one random state, whatever ran before it."""
    torch.manual_seed(0)
