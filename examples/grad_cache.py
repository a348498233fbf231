"""Contrastive learning with a large batch: N backward passes, one reduction, at every ZeRO stage.

    python examples/grad_cache.py
    torchrun --nproc-per-node 2 examples/grad_cache.py --stage 3 --check

GradCache (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
arXiv 2101.06983): the loss needs every embedding of the batch at once, but the encoder need not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from claims import VIRTUAL_RANKS, count, gradient_error
from pairs import Pairs, my_chunks, read_pairs
from towers import TwoTowers, accuracy

TEMPERATURE = 0.05
LR = 0.01
TOLERANCE = 1e-12  # of the check: a few roundings of float64
LENGTH = 256  # bytes of a docstring, and of a function, that are read

Step = Callable[..., tuple[Any, Tensor]]  # (state, chunks) -> (state, loss)


def info_nce(own: Tensor, axis: fzero.Axis | None = None) -> Tensor:
    """Return this rank's loss from its embeddings [b, 2, width], all ranks' being negatives.

    L_r = mean over its b pairs of -log softmax_j(s_ij)[i], where s_ij = <q_i, c_j> / T and j runs
    over the W b pairs of all ranks; and the same from code to docstring. The mean over ranks of
    L_r is the loss of the whole batch, and that mean is what `grad_and_reduce` differentiates.
    """
    axis = axis or fzero.world()
    every = fzero.all_gather(own, axis)  # [W b, 2, width], the gradient comes back summed
    target = torch.arange(len(own), device=own.device) + axis.rank * len(own)
    to_code = F.cross_entropy(own[:, 0] @ every[:, 1].T / TEMPERATURE, target)
    to_docstring = F.cross_entropy(own[:, 1] @ every[:, 0].T / TEMPERATURE, target)
    return (to_code + to_docstring) / 2


def whole_loss(apply: Callable[..., Tensor], batch: Pairs) -> Callable[[Any], Tensor]:
    """Return the plain loss of a batch: one process, no chunks, nothing cached."""
    return lambda params: info_nce(apply(params, *batch), fzero.Axis(size=1))


def make_grad_cache(apply: Callable[..., Tensor]) -> Step:
    """Return a step that adds the gradient of the whole batch's loss."""

    def grad_cache(state: fzero.TrainState, chunks: Sequence[Pairs]) -> tuple[Any, Tensor]:
        # 1. Embed every chunk. What is kept for each is its inputs: `remat` runs it again, with the
        #    same dropout, when it is pulled. Without it activations are kept. Parameters never are.
        embed = fzero.vjp(fzero.remat(apply), state)
        embedded = [embed(*chunk) for chunk in chunks]
        # 2. The loss, once. On rank r this is d(sum_s L_s) / d(r's embeddings): the transpose of
        #    all_gather sums what the losses of all ranks say about them. Nothing to rescale: a
        #    pull takes the mean over ranks, as grad_and_reduce does.
        wanted, loss = torch.func.grad_and_value(info_nce)(torch.cat([out for out, _ in embedded]))
        # 3. Pull it back, chunk by chunk. In a window gradients are added up, and cross ranks once.
        for (_, pull), part in zip(embedded, wanted.chunk(len(chunks)), strict=True):
            state = pull(state, part)
        return state, fzero.pmean(loss)

    return grad_cache


def with_update(grad_cache: Step) -> Step:
    """Return the step that ends with the optimizer's update."""

    def step_fn(state: fzero.TrainState, chunks: Sequence[Pairs]) -> tuple[Any, Tensor]:
        state, loss = grad_cache(state, chunks)
        return fzero.apply_gradients(state), loss

    return step_fn


def main() -> None:
    """Train, and print what was claimed."""
    args = parse()
    axis = fzero.world()
    say = print if axis.rank == 0 else lambda *_, **__: None
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, pool = read_pairs(LENGTH)
    train, pool = train.to(device), pool.to(device)
    if args.batch > len(train.codes):
        raise SystemExit(f"--batch {args.batch}: there are {len(train.codes)} pairs")
    apply, params = fzero.functionalize(TwoTowers(args.width).to(device))
    grad_cache = make_grad_cache(apply)
    step = fzero.shard(fzero.coalesce(with_update(grad_cache)), stage=args.stage)
    state = step.init(params, fzero.optim.adamw(LR))
    say(f"{step}, {axis.size} rank(s), {len(train.codes)} pairs, {args.chunks} chunks a rank")
    shuffle = torch.Generator().manual_seed(args.seed)
    batch = train.rows(slice(args.batch))
    for number in range(1, args.steps + 1):
        chosen = torch.randperm(len(train.codes), generator=shuffle)[: args.batch]
        batch = train.rows(chosen.to(device))
        state, loss = step(state, my_chunks(batch, args.chunks))
        if number % 10 == 0 or number == args.steps:
            say(f"step {number}: loss {loss:.3f}", flush=True)
    found, chance = accuracy(apply, fzero.full_params(state), pool), 1 / len(pool.codes)
    say(f"retrieval: {found:.1%} of {len(pool.codes)} held-out pairs first; chance {chance:.1%}")
    ranks = f"{axis.size}" if axis.size > 1 else f"{VIRTUAL_RANKS} virtual"
    say(f"one step on {ranks} ranks, what each rank sends:")
    for name, wrap in (("coalesced", fzero.coalesce), ("one by one", lambda fn: fn)):
        steps = wrap(grad_cache), wrap(with_update(grad_cache))
        say(f"  {name:10} {count(*steps, params, batch, args)}")
    if args.check:
        off = gradient_error(grad_cache, whole_loss(apply, batch), params, batch, args)
        say(f"check: cached gradient is the uncached one to {off:.1e} (relative, float64)")
        if not off < TOLERANCE:
            raise SystemExit(f"check: more than {TOLERANCE:.0e} off")


def at_least_one(text: str) -> int:
    """A count that is given on the command line."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def parse() -> argparse.Namespace:
    """Return the options; a batch that cannot be split evenly ends the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--steps", type=at_least_one, default=60, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=512, help="pairs in a batch, over all ranks")
    parser.add_argument("--chunks", type=int, default=8, help="backward passes of a rank in a step")
    parser.add_argument("--width", type=int, default=64, help="size of an embedding")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument("--check", action="store_true", help="compare with the uncached gradient")
    args = parser.parse_args()
    size = fzero.world().size
    parts = max(1, args.chunks) * (size if size > 1 else VIRTUAL_RANKS)
    if args.chunks < 1 or args.batch < 1 or args.batch % parts:
        parser.error(
            f"--batch {args.batch} --chunks {args.chunks}: every rank needs that many equal chunks."
            f" Fix: at least one chunk, and a batch that is a multiple of {parts}."
        )
    return args


if __name__ == "__main__":
    main()
