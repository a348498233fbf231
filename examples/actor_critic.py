"""Actor-critic: two train states at two stages, updated from one loss.

    python examples/actor_critic.py
    torchrun --nproc-per-node 2 examples/actor_critic.py

The world is a corridor: an episode begins in the middle, and the right end is the one to find. The
actor says how likely a step to the right is, the critic what an episode is still worth.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero

END, MOVES, EPISODES, STEPS = 8, 24, 36, 40
DISCOUNT, TOLERANCE = 0.95, 1e-9
STAGES, RATES = {"actor": 2, "critic": 3}, {"actor": 3e-2, "critic": 1e-1}


torch.manual_seed(0)
layers = [nn.Linear(END + 1, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(-2)]  # place -> number
models = {name: copy.deepcopy(nn.Sequential(*layers).double()) for name in STAGES}
applies, params = {}, {}
for name, model in models.items():
    applies[name], params[name] = fzero.functionalize(model)
chance = torch.rand(STEPS + 8, EPISODES, MOVES, dtype=torch.float64)  # the last 8 are held out


@torch.no_grad()
def play(actor: Any, chance: Tensor) -> list[Tensor]:
    """Return of each move [n, MOVES]: what it saw, if it went right, its worth, if it counts."""
    place, moves = torch.full((len(chance),), END // 2), []
    for draw in chance.T:
        seen, running = F.one_hot(place, END + 1).double(), (place > 0) & (place < END)
        right = draw < applies["actor"](actor, seen).sigmoid()
        place = torch.where(running, place + 2 * right - 1, place)
        moves.append((seen, right, (running & (place == END)).double(), running))
    columns = zip(*moves, strict=True)
    seen, right, worth, running = (torch.stack(column, dim=1) for column in columns)
    for i in reversed(range(MOVES - 1)):  # the reward is 1 at the right end, and later worth less
        worth[:, i] += DISCOUNT * worth[:, i + 1]
    return [seen, right, worth, running]


def loss(params: Any, seen: Tensor, right: Tensor, worth: Tensor, running: Tensor) -> Tensor:
    """Return the loss of both networks on moves that were made."""
    logit, value = (applies[name](params[name], seen) for name in ("actor", "critic"))
    surprise = worth - value
    chosen = F.logsigmoid(torch.where(right, logit, -logit))
    return ((surprise.square() - chosen * surprise.detach()) * running).mean()


def step_fn(states: Any, chance: Tensor) -> Any:
    """Play this rank's episodes, then update both networks."""
    played = play(fzero.full_params(states["actor"]), chance)
    states, _ = fzero.grad_and_reduce(loss, states)(*played)
    return fzero.apply_gradients(states), None


def plain_training() -> Any:
    """Return both networks after the same steps in plain PyTorch: one process, all episodes."""
    own = {name: dict(model.named_parameters()) for name, model in models.items()}
    groups: Any = [{"params": [*own[name].values()], "lr": rate} for name, rate in RATES.items()]
    optimizer = torch.optim.Adam(groups)
    for draws in chance[:STEPS]:
        optimizer.zero_grad()
        loss(own, *play(own["actor"], draws)).backward()
        optimizer.step()
    return own


def main() -> None:
    """Train, and fail if a claim is not so."""
    axis = fzero.world()
    say = print if axis.rank == 0 else lambda *_: None

    step = fzero.shard(step_fn, stage=STAGES)
    states = step.init(params, {name: fzero.optim.adam(rate) for name, rate in RATES.items()})
    for draws in chance[:STEPS]:
        states, _ = step(states, draws[axis.rank :: axis.size])

    found, new = fzero.full_params(states), chance[STEPS:].flatten(0, 1)
    first, last = ((play(p["actor"], new)[2][:, 0] > 0).double().mean() for p in (params, found))
    say(f"the right end is reached in {first:.0%} of new episodes untrained, in {last:.0%} trained")
    off = max((found[name][key] - p).abs().max().item()
              for name, exact in plain_training().items() for key, p in exact.items())  # fmt: skip
    say(f"check: {STEPS} steps on {axis.size} rank(s) are those of plain PyTorch to {off:.1e}")
    if not (first < 0.7 and last > 0.95 and off < TOLERANCE):
        raise SystemExit("not learned, or not the same")


if __name__ == "__main__":
    main()
