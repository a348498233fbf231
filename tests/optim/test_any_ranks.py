"""What an update makes of given gradients has the same bits at any stage, on any ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import fzero
from tests.optim import any_ranks
from tests.optim.any_ranks import PLACES, Place, everywhere, same_bits

O = torch.optim  # noqa: E741
F32, BF16 = torch.float32, torch.bfloat16


def _of(cls: Any, **options: Any) -> Callable[[], Any]:
    return lambda: fzero.optim.from_torch(partial(cls, **options))


def _low(rule: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    return partial(rule, 1e-2, master_weights=False, **options)


def _eight(block: int = 256, smallest: int = 100, **how: Any) -> Any:
    return fzero.optim.Encoding(fzero.codecs.dynamic8(block, **how), smallest)


def _both_encoded() -> Any:
    rules = {"low": optim.adamw(1e-2, state_dtype=_eight(40)), "rest": optim.adamw(1e-2)}
    return optim.partition(rules, lambda x: "low" if x.path in ("w", "v") else "rest")


def _both() -> Any:
    rules = {"matrix": fzero.optim.muon(1e-2, dtype=F32), "rest": fzero.optim.adamw(1e-2)}
    return fzero.optim.partition(rules, lambda x: "matrix" if len(x.shape) == 2 else "rest")


def _masked() -> Any:
    return fzero.optim.adamw(
        1e-2,
        decay_mask=lambda leaf: len(leaf.shape) > 1,
        groups=[(lambda leaf: leaf.path == "v", {"lr": 0.1})],
    )


optim = fzero.optim
RULES: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "sgd": (partial(optim.sgd, 1e-2), F32),
    "nesterov": (partial(optim.sgd, 1e-2, momentum=0.9, nesterov=True, weight_decay=0.1), F32),
    "adam": (partial(optim.adam, 1e-2, weight_decay=0.1), F32),
    "adamw": (partial(optim.adamw, 1e-2), F32),
    "adamw, masters": (partial(optim.adamw, 1e-2), BF16),
    "adamw, bf16 moments": (partial(optim.adamw, 1e-2, state_dtype=BF16), F32),
    "adamw, bf16": (_low(optim.adamw), BF16),
    "adamw, 8 bits": (partial(optim.adamw, 1e-2, state_dtype=fzero.codecs.int8()), F32),
    "adamw, 8 bits, rounded by chance": (
        lambda: optim.adamw(1e-2, state_dtype=_eight(stochastic=True)),
        BF16,
    ),
    "adamw, 8 bits, bf16": (lambda: _low(optim.adamw, state_dtype=_eight(48))(), BF16),
    "nesterov, 4 bits": (
        partial(
            optim.sgd,
            1e-2,
            momentum=0.9,
            nesterov=True,
            state_dtype=optim.Encoding(fzero.codecs.int4(), 1),
        ),
        F32,
    ),
    "AdamW, 8 bits": (
        lambda: optim.from_torch(partial(O.AdamW, amsgrad=True), state_dtype=_eight()),
        F32,
    ),
    "RMSprop, 8 bits": (
        lambda: optim.from_torch(
            partial(O.RMSprop, lr=1e-2, momentum=0.9, centered=True), state_dtype=_eight()
        ),
        F32,
    ),
    "SGD, 8 bits": (
        lambda: optim.from_torch(partial(O.SGD, lr=1e-2, momentum=0.9), state_dtype=_eight()),
        BF16,
    ),
    "8 bits for some": (_both_encoded, F32),
    "adamw, rounded by chance": (_low(optim.adamw, stochastic_rounding=True), BF16),
    "adamw, options by leaf": (_masked, F32),
    "nesterov, bf16": (_low(optim.sgd, momentum=0.9, nesterov=True, weight_decay=0.1), BF16),
    "lion": (partial(optim.lion, 1e-2, weight_decay=0.1), F32),
    "lion, bf16": (_low(optim.lion), BF16),
    "muon and adamw": (_both, F32),
    "adafactor": (lambda: optim.adafactor(), F32),
    "shampoo": (lambda: optim.shampoo(1e-2, batch_dims=0), F32),
    "soap": (lambda: optim.soap(1e-2, refresh_every=2, batch_dims=0), F32),
    "AdamW": (_of(O.AdamW, lr=1e-2, amsgrad=True), F32),
    "RMSprop": (_of(O.RMSprop, lr=1e-2, momentum=0.9, centered=True), F32),
    "RMSprop, bf16": (
        lambda: optim.from_torch(partial(O.RMSprop, lr=1e-2), master_weights=False),
        BF16,
    ),
    "Adagrad": (_of(O.Adagrad, lr=1e-2, weight_decay=0.1), F32),
    "Adadelta": (_of(O.Adadelta, lr=1e-2), F32),
    "NAdam": (_of(O.NAdam, lr=1e-2), F32),
    "RAdam": (_of(O.RAdam, lr=1e-2), F32),
    "Adamax": (_of(O.Adamax, lr=1e-2), F32),
    "ASGD": (_of(O.ASGD, lr=1e-2), F32),
    "Rprop": (_of(O.Rprop, lr=1e-2), F32),
}


@pytest.mark.parametrize("name", RULES)
def test_parameters_slots_and_norms_have_the_same_bits(name: str) -> None:
    rule, dtype = RULES[name]
    clipped = partial(fzero.clip, max_norm=100.0)
    expected = everywhere(PLACES[0], rule, dtype=dtype, step=clipped)
    for place in PLACES[1:]:
        same_bits(everywhere(place, rule, dtype=dtype, step=clipped), expected, str(place))


LARGE = {"w": (301, 303), "b": (40_001,), "m": (65, 200), "n": (65, 200), "s": ()}


def _muon_in_parts() -> Any:
    rows = {"w": [100, 101, 100], "m": [20, 45], "n": None}
    matrices = optim.muon(1e-2, split=lambda leaf: rows[leaf.path], dtype=F32, master_weights=False)
    rest = optim.sgd(1e-2, momentum=0.9, master_weights=False)
    rules = {"matrix": matrices, "rest": rest}
    return optim.partition(rules, lambda x: "matrix" if len(x.shape) == 2 else "rest")


def _first(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(p) for p in params]


def _update(grads: Any, state: Any, params: Any) -> tuple[list[torch.Tensor], Any]:
    state = [0.9 * m + torch.sigmoid(g) for m, g in zip(state, grads, strict=True)]
    return [torch.add(-1e-2 * m, p, alpha=-1e-3) for m, p in zip(state, params, strict=True)], state


ON_THREADS: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "adamw": RULES["adamw"],
    "options by leaf": RULES["adamw, options by leaf"],
    "nesterov, bf16": RULES["nesterov, bf16"],
    "lion, bf16": RULES["lion, bf16"],
    "RMSprop, bf16": RULES["RMSprop, bf16"],
    "Adadelta, bf16": (
        lambda: optim.from_torch(partial(O.Adadelta, lr=1e-2), master_weights=False),
        BF16,
    ),
    "muon and adamw": (_both, F32),
    "muon of parts of leaves, and sgd, bf16": (_muon_in_parts, BF16),
    "adafactor": (lambda: optim.adafactor(), F32),
    "a pair": (lambda: (_first, _update), BF16),
}


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ON_THREADS)
def test_on_several_threads_they_have_them_too(name: str, threads: int) -> None:
    rule, dtype = ON_THREADS[name]
    given: dict[str, Any] = {"dtype": dtype, "shapes": LARGE, "updates": range(2)}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = everywhere(Place(), rule, **given)
        for place in (Place(2, 0), Place(2, 2), Place(3, 3)):
            same_bits(everywhere(place, rule, **given), expected, str(place))
    finally:
        torch.set_num_threads(before)


def test_without_blocks_they_have_not() -> None:
    """The same comparison finds what blocks are for: kernels and norms that round otherwise."""
    with mock.patch.object(any_ranks, "blocks", nullcontext):
        one, three = (
            everywhere(place, partial(optim.adamw, 1e-2)) for place in (Place(), Place(3, 3))
        )
    for kind in ("slots", "norms"):
        with pytest.raises(AssertionError, match="bytes differ"):
            same_bits(three[kind], one[kind])
