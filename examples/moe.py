"""A mixture of experts on ranks: each token travels to its expert, however many it gets.

    python examples/moe.py
    torchrun --nproc-per-node 2 examples/moe.py --stage 3

No capacity, no token dropped, no padding: an all_to_all with sizes sends each rank as many rows as
the router says. An expert may get none, and one rank all. W has to divide the 12 experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from one_process import compare

ROWS, WIDTH, EXPERTS = 48, 8, 12

torch.manual_seed(0)
params: dict[str, Tensor] = {
    "router": torch.randn(WIDTH, EXPERTS).double(),
    "up": torch.randn(EXPERTS, WIDTH, 2 * WIDTH).double() / 3,
    "down": torch.randn(EXPERTS, 2 * WIDTH, WIDTH).double() / 3,
}
whole = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()


def expert(p: Any, number: int, x: Tensor) -> Tensor:
    """Return what one expert makes of its rows [n, width]; n may be 0."""
    return torch.tanh(x @ p["up"][number]) @ p["down"][number]


def routed(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expert of each row, and by how much its result counts."""
    share, number = (x @ p["router"]).softmax(-1).max(-1)
    return number, share[:, None]


def mixture(p: Any, x: Tensor) -> Tensor:
    """Return what the experts of all ranks along "expert" make of this rank's rows."""
    size, rank = fzero.axis_size("expert"), fzero.axis_index("expert")
    number, share = routed(p, x)
    order = number.argsort(stable=True)
    sizes = F.one_hot(number, EXPERTS).sum(0).view(size, -1).sum(1)  # rows for each rank
    rows, received = fzero.all_to_all(x[order], sizes=sizes, axis="expert")
    numbers, _ = fzero.all_to_all(number[order], sizes=sizes, axis="expert")
    out = torch.zeros_like(rows)
    for mine in range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size):
        (here,) = (numbers == mine).nonzero(as_tuple=True)
        out = out.index_put((here,), expert(p, mine, rows[here]).to(out.dtype))
    back, _ = fzero.all_to_all(out, sizes=received, axis="expert")
    return back[order.argsort()] * share


def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over this rank's rows: all ranks have as many."""
    return F.mse_loss(fzero.remat(mixture)(dict(p), x), y)


def plain(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the same of one process: each row by its expert, one after another."""
    number, share = routed(p, x)
    made = [expert(p, int(n), row[None]) for n, row in zip(number, x, strict=True)]
    return F.mse_loss(torch.cat(made) * share, y)


def piece(x: Tensor, rank: int, size: int) -> Tensor:
    """Return the rows that a rank reads."""
    return x.chunk(size)[rank]


if __name__ == "__main__":
    compare(loss, plain, params, whole, axis="expert", piece=piece)
