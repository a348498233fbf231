"""DP-SGD of LoRA over a frozen base, at stage 3: the same bits on 1, 2, 3 and 4 ranks.

    python examples/dp_lora.py
    torchrun --nproc-per-node 2 examples/dp_lora.py --stage 3

A small transformer knows the sequences that are public (lora_words.py). Adapters learn those that
are private: the gradient of each sequence is clipped, their sum gets noise, and a batch is a
Poisson sample, as an accountant of epsilon takes it to be. Where opacus is installed (`pip install
opacus`) it tells epsilon, and is compared with. Abadi et al., arXiv 1607.00133.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.util
import itertools
from typing import Any

import torch
from torch import Tensor

import fzero
from lora_words import WORDS, loss_of, make_model, texts

SAMPLES, BATCH, CHUNK, STEPS, CHECKED = 512, 64, 8, 40, 3
LOGICAL, LR, CLIP, NOISE, DELTA = 4, 1.0, 1.0, 1.5, 1e-5  # noise of deviation NOISE x CLIP
SEED = 0  # of batches and noise, for all to repeat; a private run draws it, and tells nobody
TOLERANCE = 1e-12
torch.set_num_threads(1)  # bits depend on how many threads a kernel has
torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
public, private = torch.randperm(WORDS), torch.randperm(WORDS)  # which word follows which
model = make_model(public, device)
samples, held_out = texts(SAMPLES, private).to(device), texts(256, private).to(device)
apply, params = fzero.functionalize(model)
LEARNS = [name for name, p in model.named_parameters() if p.requires_grad]
Leaves = dict[str, Tensor]


def drawn(step: int) -> list[Tensor]:
    """Return the batch of a step, rows for each logical rank: sample i is of rank i % LOGICAL.

    Each sample is in it with a chance of BATCH / SAMPLES, whatever becomes of the others.
    """
    random = torch.Generator().manual_seed(fzero.fold_in(SEED, step))
    is_in = (torch.rand(SAMPLES, generator=random) < BATCH / SAMPLES).to(device)
    return [samples[rank::LOGICAL][is_in[rank::LOGICAL]] for rank in range(LOGICAL)]


def of_each(params: Any, rows: Tensor) -> tuple[Leaves, Tensor]:
    """Return the gradients of each row by the adapters, [n, *shape], and the losses [n]."""

    def one(learned: Any, row: Tensor) -> Tensor:
        return loss_of(apply({**params, **learned}, row[None, :-1]), row[None])[0]

    learned = {name: params[name] for name in LEARNS}
    return torch.func.vmap(torch.func.grad_and_value(one), in_dims=(None, 0))(learned, rows)


def clipped(params: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss whose gradient is this logical rank's sum of clip(g_i), and the sum of losses.

    The gradients of CHUNK samples are held at a time.
    """
    total = {name: torch.zeros_like(params[name]) for name in LEARNS}
    losses = torch.zeros((), dtype=torch.double, device=device)
    for chunk in rows.split(CHUNK) if len(rows) else ():
        with torch.no_grad():  # a derivative is taken inside, and none of it
            each, values = of_each(params, chunk)
            norm = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
            factor = (CLIP / (norm + 1e-6)).clamp(max=1)  # opacus' formula: a norm may be zero
            for name, g in each.items():
                total[name] += torch.einsum("n,n...->...", factor, g)
            losses += values.sum()
    return sum((params[name] * total[name]).sum() for name in LEARNS), losses  # type: ignore


def add_noise(slots: Any, grads: Any, ctx: fzero.Context) -> Any:
    """Divide the sum by BATCH, with its noise: `grads` is the mean over the logical ranks."""

    def noisy(name: str, g: Tensor) -> Tensor:
        return (LOGICAL * g + NOISE * CLIP * ctx.normal(name, SEED).to(g.dtype)) / BATCH

    return slots, {name: noisy(name, g) for name, g in grads.items()}


noise = fzero.transform(name="noise", reduced=add_noise)


def step_fn(state: fzero.TrainState, parts: list[Tensor]) -> tuple[fzero.TrainState, Tensor]:
    """Make one step of DP-SGD on the rows of the logical ranks that this rank carries."""
    mine = [parts[rank] for rank in fzero.logical_ranks()]
    call = fzero.grad_and_reduce(clipped, state, has_aux=True, sizes=[len(part) for part in mine])
    state, (_, losses) = call(torch.cat(mine))
    return fzero.apply_gradients(state), LOGICAL * fzero.logical_mean(losses) / BATCH


def train(stage: int, steps: int) -> Leaves:
    """Return the adapters after some steps on the ranks that there are."""
    step = fzero.shard(noise(step_fn), stage=stage, logical_ranks=LOGICAL, seed=SEED)
    state = step.init(params, fzero.optim.sgd(LR))
    for number in range(steps):
        state, _ = step(state, drawn(number))
    whole = fzero.full_params(state)
    return {name: whole[name] for name in LEARNS}


def noise_alone(steps: int) -> list[Leaves]:
    """Return the noise of each of the first updates: what they do without any gradient."""
    zeros, add = {name: torch.zeros_like(params[name]) for name in LEARNS}, fzero.add_gradients
    step = fzero.shard(noise(lambda s: (fzero.apply_gradients(add(s, zeros)), None)), stage=0)
    state, values = step.init(zeros, fzero.optim.sgd(1.0)), [zeros]
    for _ in range(steps):
        state, _ = step(state)
        values.append(fzero.full_params(state))
    return [{name: a[name] - b[name] for name in LEARNS} for a, b in itertools.pairwise(values)]


def loop_over_samples(added: list[Leaves]) -> Leaves:
    """Return the adapters of plain PyTorch after steps with given noise: a backward a sample."""
    plain = copy.deepcopy(model)
    learned = {name: p for name, p in plain.named_parameters() if name in LEARNS}
    for number, total in enumerate(added):
        for row in torch.cat(drawn(number)).split(1):
            g = torch.autograd.grad(loss_of(plain(row[:, :-1]), row)[0], [*learned.values()])
            norm = torch.cat([x.flatten() for x in g]).norm().item()
            factor = min(1.0, CLIP / (norm + 1e-6)) / BATCH
            total = {name: total[name] + factor * x for name, x in zip(learned, g, strict=True)}
        with torch.no_grad():
            for name, p in learned.items():
                p -= LR * total[name]
    return learned


def opacus_steps(added: list[Leaves]) -> tuple[Leaves, float]:
    """Return the adapters of opacus after the same steps, and how far a gradient g_i is off."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    theirs = copy.deepcopy(model)
    learned = {name: p for name, p in theirs.named_parameters() if name in LEARNS}
    wrapped, rule = GradSampleModule(theirs), torch.optim.SGD(learned.values(), lr=LR)
    options = {"noise_multiplier": 0.0, "max_grad_norm": CLIP, "expected_batch_size": BATCH}
    private_rule, off = DPOptimizer(rule, **options), 0.0
    for number, noises in enumerate(added):
        rows = torch.cat(drawn(number))
        each, _ = of_each(dict(theirs.named_parameters()), rows)
        loss_of(wrapped(rows[:, :-1]), rows).mean().backward()
        off = max(off, apart(each, {name: p.grad_sample for name, p in learned.items()}))
        private_rule.pre_step()  # clips, and adds the noise of its own, which is zero
        for name, p in learned.items():
            p.grad += noises[name]
        rule.step()
        private_rule.zero_grad()
    return learned, off


def epsilon() -> float:
    """Return the epsilon of the whole training, at DELTA."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    for _ in range(STEPS):
        accountant.step(noise_multiplier=NOISE, sample_rate=BATCH / SAMPLES)
    return accountant.get_epsilon(DELTA)


def apart(one: Leaves, other: Leaves) -> float:
    """Return the largest difference."""
    return max((one[name] - other[name]).abs().max().item() for name in one)


def main() -> None:
    """Train, and fail if a claim is not so."""
    parser, axis = argparse.ArgumentParser(), fzero.world()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    stage, say = parser.parse_args().stage, print if axis.rank == 0 else lambda *_: None

    learned = train(stage, STEPS)
    right = (apply({**params, **learned}, held_out[:, :-1]).argmax(-1) == held_out[:, 1:]).double()
    digest = hashlib.sha256(b"".join(x.cpu().numpy().tobytes() for x in learned.values()))
    say(f"{right.mean():.1%} of the next words right; the adapters are {digest.hexdigest()[:16]}")

    found, added = train(stage, CHECKED), noise_alone(CHECKED)
    off = apart(found, loop_over_samples(added))
    if importlib.util.find_spec("opacus"):
        theirs, of_one = opacus_steps(added)
        say(f"epsilon {epsilon():.2f} at delta {DELTA:g}; opacus' steps are these to "
            f"{apart(found, theirs):.1e}, its gradients of samples to {of_one:.1e}")  # fmt: skip
        off = max(off, of_one, apart(found, theirs))
    say(f"check: {CHECKED} steps on {axis.size} rank(s) are those of a loop over samples, with the "
        f"same noise, to {off:.1e}")  # fmt: skip
    if not (right.mean() > 0.8 and off < TOLERANCE):
        raise SystemExit("not learned, or not the same")


if __name__ == "__main__":
    main()
