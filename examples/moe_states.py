"""Experts as a state of their own, with other values at each place along "expert".

    python examples/moe_states.py
    torchrun --nproc-per-node 4 examples/moe_states.py --experts 2 --stage 3

Three updates of both states by one loss; the number of places divides the ranks and 12 experts.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero

ROWS, WIDTH, EXPERTS, STEPS = 48, 8, 12, 3

torch.manual_seed(0)
batches = torch.randn(STEPS, 2, ROWS, WIDTH).double()  # rows, and what they should become
router, out = torch.randn(WIDTH, EXPERTS).double(), torch.randn(WIDTH, WIDTH).double() / 3
up, down = torch.randn(2, EXPERTS, WIDTH, WIDTH).double() / 3
params = {"dense": {"router": router, "out": out}, "experts": {"up": up, "down": down}}


def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over this rank's rows: all ranks have as many."""
    size, held = fzero.axis_size("expert"), len(p["experts"]["up"])
    share, number = (x @ p["dense"]["router"]).softmax(-1).max(-1)
    order = number.argsort(stable=True)
    sizes = F.one_hot(number, EXPERTS).sum(0).view(size, -1).sum(1)  # rows for each place
    rows, received = fzero.all_to_all(x[order], sizes=sizes, axis="expert")
    numbers, _ = fzero.all_to_all(number[order], sizes=sizes, axis="expert")
    made = torch.zeros_like(rows)
    for mine in range(held):
        (here,) = (numbers == fzero.axis_index("expert") * held + mine).nonzero(as_tuple=True)
        hidden = torch.tanh(rows[here] @ p["experts"]["up"][mine])
        made = made.index_put((here,), hidden @ p["experts"]["down"][mine])
    back, _ = fzero.all_to_all(made, sizes=received, axis="expert")
    return F.mse_loss((back[order.argsort()] * share[:, None]) @ p["dense"]["out"], y)


def update(states: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
    """Make one update of both states by one loss."""
    states, value = fzero.grad_and_reduce(loss, states)(x, y)
    return fzero.apply_gradients(states), fzero.pmean(value)


def train(mesh: fzero.Mesh, stage: int) -> Any:
    """Return all parameters after the updates: dense ones, and those of all experts."""
    stages = {"dense": stage, "experts": min(stage, 2)}
    step = fzero.shard(update, stage=stages, mesh={"dense": mesh, "experts": mesh["data"]})
    ranks, places = mesh.axis, mesh.axis.along("expert")
    mine = {path: x.chunk(places.size)[places.rank] for path, x in params["experts"].items()}
    rules = {"dense": fzero.optim.adam(0.01), "experts": fzero.optim.sgd(0.1, momentum=0.9)}
    states = step.init({"dense": params["dense"], "experts": mine}, rules)
    for batch in batches:
        states, _ = step(states, *(x.chunk(ranks.size)[ranks.rank] for x in batch))
    held = fzero.full_params(states)
    held["experts"] = {path: fzero.all_gather(x, places) for path, x in held["experts"].items()}
    return held


def one_process() -> Any:
    """Return them after the same updates by torch.optim, each row with its expert's matrices."""
    p = {name: {k: x.clone() for k, x in one.items()} for name, one in params.items()}
    for x in (*p["dense"].values(), *p["experts"].values()):
        x.requires_grad_()
    adam = torch.optim.Adam(p["dense"].values(), 0.01)
    sgd = torch.optim.SGD(p["experts"].values(), 0.1, momentum=0.9)
    for x, y in batches:
        share, number = (x @ p["dense"]["router"]).softmax(-1).max(-1)
        hidden = torch.einsum("nd,ndh->nh", x, p["experts"]["up"][number]).tanh()
        made = torch.einsum("nh,nhd->nd", hidden, p["experts"]["down"][number])
        for rule in (adam, sgd):
            rule.zero_grad()
        F.mse_loss((made * share[:, None]) @ p["dense"]["out"], y).backward()
        for rule in (adam, sgd):
            rule.step()
    return p


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--experts", type=int, help='places along "expert"; default the ranks')
    asked, size = parser.parse_args(), fzero.world().size
    many = asked.experts or size
    found = train(fzero.Mesh({"data": size // many, "expert": many}), asked.stage)
    pairs = [(found[name][k], x) for name, one in one_process().items() for k, x in one.items()]
    worst = max(float((got - x).detach().abs().max()) for got, x in pairs)
    if fzero.world().rank == 0:
        print(f"{many} place(s) along 'expert', on {size} rank(s) at stage {asked.stage}")
        print(f"check: {STEPS} updates equal those of one process to {worst:.1e}")
    if worst > 1e-11:
        raise SystemExit("not the same")
