"""Transforms that a user writes: saved, resharded, mirrored, and gone on with elsewhere."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.checkpoint import Mirror, load, load_universal, save, save_universal
from tests.checkpoint.test_reshard import equal
from tests.covering import covered
from tests.transforms.page import MADE
from tests.transforms.test_written_transforms import (
    batches,
    close,
    full,
    kept_of,
    plain,
    run,
)

reshard: Any = fzero.reshard


@covered(
    kind=sorted(MADE),
    ranks=[1, 2, 3, 4],
    stage=range(4),
    then=[(1, 3), (2, 2), (3, 0), (4, 1)],
    by=["file", "reshard", "mirror"],
)
def test_goes_on_at_another_place_as_plain_torch(
    kind: str, ranks: int, stage: int, then: tuple[int, int], by: str, tmp_path: Path
) -> None:
    given = batches(6, wild=4 if kind == "outliers" else None)
    made, (size, to) = MADE[kind][0](), then
    state = run([made], ranks, stage, given[:3])
    like = run([made], size, to, [])
    if by == "file":
        save(tmp_path, state)
        found = load(tmp_path, like)
    elif by == "mirror":
        Mirror(tmp_path, every=1).update(state)
        found, _ = Mirror(tmp_path, every=1).restore(like)
    else:
        found = reshard(state, stage=to, mesh=(1, size))
        save(tmp_path, state)
        equal(found, load(tmp_path, like))
    found = run([made], size, to, given[3:], found)
    want, (one,) = plain([kind], given)
    close(full(found, size), want)
    if one.kept is not None:
        close(kept_of(found, made.name, size), one.kept)


def test_an_average_that_is_added_begins_at_the_parameters_that_were_loaded(
    tmp_path: Path,
) -> None:
    given, ema = batches(3), MADE["ema"][0]()
    save(tmp_path, run([], 2, 1, given))
    with pytest.warns(UserWarning, match="it has no ema/.*, which the state keeps"):
        found = load(tmp_path, run([ema], 3, 3, []))
    (mean,) = kept_of(found, "ema", 3).values()
    values = full(found, 3)
    for path, x in mean.items():
        torch.testing.assert_close(x.to(values[path].dtype), values[path])
    save(tmp_path, found)
    with pytest.warns(UserWarning, match="it has ema/.*, which the state does not keep"):
        assert not load(tmp_path, run([], 2, 0, [])).slots


def test_a_format_of_others_has_no_place_for_it(tmp_path: Path) -> None:
    ema = MADE["ema"][0]()
    params = {"w": torch.arange(6.0)}

    def init() -> Any:
        step: Any = fzero.shard(ema(lambda state: (state, None)), stage=1)
        return fzero.simulate(step, world_size=2).init(params, fzero.optim.adam(0.1))

    with pytest.warns(UserWarning, match=r"save_universal: .* has no place for ema/"):
        save_universal(tmp_path, init())
    with pytest.warns(UserWarning, match=r"load_universal: .* has no place for ema/"):
        found = load_universal(tmp_path, init())
    (mean,) = kept_of(found, "ema", 2).values()
    assert torch.equal(mean["w"], params["w"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "whole", found)
        load(tmp_path / "whole", init())
