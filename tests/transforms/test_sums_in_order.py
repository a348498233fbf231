"""Sums and norms of a user's transform have the same bits at any stage, on any ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.errors import LayoutError
from tests.optim.any_ranks import PLACES, Place, everywhere, gradients, params, same_bits

SHAPES = {"w": (37, 45), "rows": (7, 128), "b": (450,), "s": (), "few": (90, 3), "none": (0, 4)}


def _init(given: dict[str, Tensor], ctx: fzero.Context) -> dict[str, Any]:
    made = {name: torch.zeros(()) for name in ("sum", "twice", "all", "some", "leaf")}
    return {**made, "row": {k: torch.zeros(p.shape) for k, p in given.items()}}


def _measure(slots: Any, grads: dict[str, Tensor], ctx: fzero.Context) -> tuple[Any, Any]:
    by_leaf = ctx.norm(grads, by="leaf")
    rows = ctx.norm(grads, by="row")
    some = {k: grads[k] for k in sorted(grads) if k != "w"}
    return {
        "sum": ctx.sum(grads),
        "twice": ctx.sum({"a": {k: g.abs() for k, g in grads.items()}, "b": grads}),
        "all": ctx.norm(grads),
        "some": ctx.norm(some),
        "leaf": torch.stack([by_leaf[k] for k in sorted(grads)]).sum(),
        "row": {k: x.to(slots["row"][k].dtype) for k, x in rows.items()},
    }, grads


measured = fzero.transform(name="measured", init=_init, reduced=_measure)


def _run(place: Place, dtype: torch.dtype) -> Any:
    return everywhere(
        place,
        lambda: fzero.optim.sgd(0.1),
        shapes=SHAPES,
        dtype=dtype,
        transforms=[measured],
        each=lambda state: fzero.slots(state, "measured"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_sums_of_pieces_have_the_same_bits(dtype: torch.dtype) -> None:
    expected = _run(PLACES[0], dtype)
    for place in PLACES[1:]:
        same_bits(_run(place, dtype), expected, str(place))


def test_they_are_the_sums() -> None:
    found = _run(Place(3, 2), torch.float32)["found"][0]
    grads = gradients(torch.float32, 0, params(torch.float32, SHAPES))
    every = torch.cat([g.double().reshape(-1) for g in grads.values()])
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["sum"].double(), every.sum(), rtol=0, atol=1e-2)
    close(found["all"].double(), every.norm())
    for k, g in grads.items():
        if g.numel():
            rows = g.double().reshape(g.shape[0] if g.ndim > 1 else 1, -1)
            wanted = rows.norm(dim=1, keepdim=True).expand(rows.shape).reshape(g.shape)
            close(found["row"][k].double(), wanted)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda grads, ctx: ctx.sum(list(grads.values())),
        lambda grads, ctx: ctx.sum(torch.ones(3)),
        lambda grads, ctx: ctx.norm({k: g[:1] for k, g in grads.items()}),
    ],
)
def test_what_has_no_place_in_a_leaf_is_refused(wrong: Any) -> None:
    def reduced(slots: Any, grads: Any, ctx: Any) -> Any:
        wrong(grads, ctx)
        return slots, grads

    one = fzero.transform(name="wrong", reduced=reduced)
    with pytest.raises(LayoutError, match="the order of a sum is that of the elements"):
        everywhere(
            Place(2, 2), lambda: fzero.optim.sgd(0.1), transforms=[one], shapes=SHAPES, updates=[0]
        )
