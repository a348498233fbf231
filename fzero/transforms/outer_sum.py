"""The sum over replicas of how far they have moved, as it is or encoded.

    linear          x [n] -> encode -> reduced as it is -> decode
    not linear      x [n] -> rows [R, m] -> encode -> all-to-all -> decode, sum [m]
                    sum [m] -> encode -> all-gather -> decode [R m] -> [n]

All replicas decode the same, so their anchors stay equal, bit for bit. Nothing is kept of what
encoding loses: the next outer update starts from the anchors that were made of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.collectives import reduce_many, start_all_to_all, start_gather
from fzero.ranks.mesh import Axis
from fzero.state import Setup
from fzero.state.codec import Codec, decoded, encoded, sum_of


def sum_over_replicas(setup: Setup, moved: Sequence[Tensor], replicas: Axis) -> list[Tensor]:
    """sum_r(moved_r), on every replica: [n] -> [n] each. A collective."""
    codec = setup.reduction.codec
    if codec is None or replicas.size == 1:
        return reduce_many(moved, replicas, ordered=setup.reduction.ordered)
    add = _reduced if codec.linear else _exchanged
    return [add(codec, x, replicas, setup.reduction.ordered) for x in moved]


def _reduced(codec: Codec, x: Tensor, replicas: Axis, ordered: bool) -> Tensor:
    buffer, form = encoded(codec, x.view(1, -1))
    total = reduce_many([buffer], replicas, ordered=ordered)[0]
    return decoded(codec, total, form, x.dtype).reshape(-1)


def _exchanged(codec: Codec, x: Tensor, replicas: Axis, _: bool) -> Tensor:
    rows = torch.nn.functional.pad(x, (0, -x.numel() % replicas.size)).view(replicas.size, -1)
    buffer, form = encoded(codec, rows)
    (received,) = start_all_to_all([buffer.reshape(-1)], replicas).wait()
    own = sum_of(codec, form.rows_of(received), form, x.dtype)
    buffer, form = encoded(codec, own.view(1, -1))
    (received,) = start_gather([buffer.reshape(-1)], replicas).wait()
    return decoded(codec, form.rows_of(received), form, x.dtype).reshape(-1)[: x.numel()]
