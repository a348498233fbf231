"""A mixture of experts as two states of one mesh, and the same in one process."""

from __future__ import annotations

from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from tests.strategies import integers

EXPERTS, WIDTH, ROWS = 12, 3, 5
RATE = 2.0**-5

PARAMS: dict[str, Any] = {
    "dense": {"w": integers((WIDTH, WIDTH), 1, bound=2), "b": integers((WIDTH,), 2, bound=2)},
    "experts": {"up": integers((EXPERTS, WIDTH, WIDTH), 3, bound=2)},
}


def batches(ranks: int, count: int = 3) -> Tensor:
    """Rows of each rank; the first number of a row says which expert it goes to."""
    return integers((count, ranks, ROWS, WIDTH), 4, bound=4)


def expert_of(x: Tensor) -> Tensor:
    return (x[:, 0] + 4).long() % EXPERTS


def loss(p: Any, x: Tensor) -> Tensor:
    """This rank's rows through the experts of all ranks along "expert"."""
    size, rank = fzero.axis_size("expert"), fzero.axis_index("expert")
    hidden, number = x @ p["dense"]["w"], expert_of(x)
    order = number.argsort(stable=True)
    sizes = F.one_hot(number, EXPERTS).sum(0).view(size, -1).sum(1)
    rows, received = fzero.all_to_all(hidden[order], sizes=sizes, axis="expert")
    numbers, _ = fzero.all_to_all(number[order], sizes=sizes, axis="expert")
    out = torch.zeros_like(rows)
    mine = p["experts"]["up"]
    for place in range(len(mine)):
        (here,) = (numbers == rank * len(mine) + place).nonzero(as_tuple=True)
        out = out.index_put((here,), rows[here] @ mine[place])
    back, _ = fzero.all_to_all(out, sizes=received, axis="expert")
    return ((back[order.argsort()] + p["dense"]["b"]) ** 2).sum() / 32


def plain(p: Any, xs: Tensor) -> Tensor:
    """The mean over ranks of the same in one process."""
    x = xs.flatten(0, 1)
    hidden, number = x @ p["dense"]["w"], expert_of(x)
    y = torch.stack(
        [row @ p["experts"]["up"][int(n)] for row, n in zip(hidden, number, strict=True)]
    )
    return ((y + p["dense"]["b"]) ** 2).sum() / 32 / len(xs)


def meshes(mesh: fzero.Mesh) -> dict[str, fzero.Mesh]:
    return {"dense": mesh, "experts": mesh["data"]}


def optimizers() -> dict[str, Any]:
    return {"dense": fzero.optim.sgd(RATE, momentum=0.5), "experts": fzero.optim.sgd(RATE / 2)}


def mine_of(params: Any, mesh: fzero.Mesh) -> Any:
    """The dense parameters, and the experts of this rank's place."""
    along = mesh.axis.along("expert")
    of_place = optree.tree_map(lambda x: x.chunk(along.size)[along.rank], params["experts"])
    return {**params, "experts": of_place}


def after(params: Any, xs: Tensor) -> tuple[list[Tensor], Any]:
    """The losses of each update by torch.optim in one process, and the parameters after them."""
    leaves: Any = optree.tree_map(lambda x: x.clone().requires_grad_(), params)
    both = [
        torch.optim.SGD([*leaves["dense"].values()], RATE, momentum=0.5),
        torch.optim.SGD([*leaves["experts"].values()], RATE / 2),
    ]
    losses = []
    for batch in xs:
        losses.append(plain(leaves, batch))
        for one in both:
            one.zero_grad()
        losses[-1].backward()
        for one in both:
            one.step()
    return [x.detach() for x in losses], optree.tree_map(Tensor.detach, leaves)


def whole_experts(found: Tensor, mesh: fzero.Mesh) -> list[Tensor]:
    """Of what each rank has of the experts [W, n, ...] all of them, once for each place of data."""
    sizes = dict(mesh.axes)
    names = [*sizes]
    grid = found.unflatten(0, tuple(sizes.values())).movedim(names.index("data"), 0)
    return [one.flatten(0, 1) for one in grid]
