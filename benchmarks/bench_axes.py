"""Time attention over a sequence on ranks, and weigh what it keeps: Ulysses and ring.

    python benchmarks/bench_axes.py --world 2,4 --tokens 1024,4096,16384 --out benchmarks/results

A forward and a backward of attention (4 heads of 64) by fzero's collectives, and by the same
exchange written with torch.distributed directly, as autograd Functions. Both are checked against
each other before they are timed. Bytes are those that autograd saves on a rank, views counted once;
the last column divides them by those of one rank that attends to all tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import interleave, run_ranks
from report import write_report
from torch import Tensor

import fzero

HEADS, WIDTH = 4, 64
SECONDS = 20  # of rounds for one kind and length, as far as two rounds take less
_INTRO = """\
Milliseconds of a forward and a backward: median over rounds of the slowest rank, and the best
round; the ratio is fzero's best to the direct one's best.
"""


class AllToAll(torch.autograd.Function):
    """[W, ..] -> [W, ..] by one call of torch.distributed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Exchange."""
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Exchange back."""
        return AllToAll.apply(dy.contiguous())


class Shift(torch.autograd.Function):
    """One step around the ring, or back, by a send and a receive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int) -> Tensor:
        """Send and receive."""
        ctx.step = step
        out, rank, size = torch.empty_like(x), dist.get_rank(), dist.get_world_size()
        send = dist.P2POp(dist.isend, x, (rank + step) % size)
        receive = dist.P2POp(dist.irecv, out, (rank - step) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """The other way round."""
        return Shift.apply(dy.contiguous(), -ctx.step), None


def exchanged(x: Tensor, split: int, concat: int) -> Tensor:
    """`fzero.all_to_all`, written directly."""
    size = dist.get_world_size()
    chunks = x.unflatten(split, (size, -1)).movedim(split, 0).contiguous()
    return AllToAll.apply(chunks).movedim(0, concat).flatten(concat, concat + 1)


def by_fzero(x: Tensor, split: int, concat: int) -> Tensor:
    """The same by fzero."""
    return fzero.all_to_all(x, split_dim=split, concat_dim=concat)


def shifted(x: Tensor) -> Tensor:
    """A step around the ring by fzero."""
    size = fzero.axis_size()
    return fzero.ppermute(x, [(r, (r + 1) % size) for r in range(size)])


def ulysses(exchange: Callable[[Tensor, int, int], Tensor], qkv: Tensor) -> Tensor:
    """Attend: qkv is [3, heads, tokens / W, width], and the result [heads, tokens / W, width]."""
    return exchange(F.scaled_dot_product_attention(*exchange(qkv, 1, 2)), 1, 0)


def ring(shift: Callable[[Tensor], Tensor], qkv: Tensor) -> Tensor:
    """Attend in a ring with a running softmax; a block is computed again in the backward."""
    q, kv = qkv[0], qkv[1:]
    top = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for turn in range(dist.get_world_size()):
        kv = shift(kv) if turn else kv
        top, total, out = fzero.remat(_block)(q, kv, top, total, out)
    return out / total


def _block(q: Tensor, kv: Tensor, top: Tensor, total: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    scores = q @ kv[0].mT / WIDTH**0.5
    highest = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
    less, part = (top - highest).exp(), (scores - highest).exp()
    return highest, total * less + part.sum(-1, keepdim=True), out * less + part @ kv[1]


KINDS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "Ulysses": {"fzero": partial(ulysses, by_fzero), "direct": partial(ulysses, exchanged)},
    "ring": {
        "fzero": partial(ring, shifted),
        "direct": partial(ring, lambda x: Shift.apply(x.contiguous(), 1)),
    },
}


def saved_bytes(fn: Callable[[Tensor], Tensor], qkv: Tensor) -> int:
    """Return the bytes that autograd keeps of `fn` until the backward."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = fn(qkv)
    del out
    return sum(kept.values())


def measure(tokens: int, rounds: int) -> list[tuple[str, dict[str, list[float]], int, int]]:
    """Return (kind, {contestant: milliseconds}, bytes on a rank, bytes of one) of each kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.randn(3, HEADS, tokens, WIDTH)
    mine = whole.chunk(size, 2)[rank].clone().requires_grad_()
    alone = saved_bytes(lambda x: F.scaled_dot_product_attention(*x), whole.requires_grad_())
    found = []
    for kind, contestants in KINDS.items():
        start = time.perf_counter()
        grads = [
            torch.autograd.grad(fn(mine).square().sum(), mine)[0] for fn in contestants.values()
        ]
        torch.testing.assert_close(*grads)
        took = torch.tensor(time.perf_counter() - start)  # of a round, and what is slow at first
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        fits = min(max(int(SECONDS / took.item()), 2), rounds)

        def run(fn: Callable[[Tensor], Tensor]) -> None:
            torch.autograd.grad(fn(mine).square().sum(), mine)

        timed = {name: partial(run, fn) for name, fn in contestants.items()}
        times = interleave(timed, rounds=fits, warmup=min(fits // 5, 2))
        found.append((kind, times, saved_bytes(contestants["fzero"], mine), alone))
    return found


def main() -> None:
    """Measure each world and length, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", default="2,4", help="numbers of ranks")
    parser.add_argument("--tokens", default="1024,4096,16384", help="lengths of the sequence")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None, help="folder for a Markdown file")
    options = parser.parse_args()
    lines = ["| | W | tokens | fzero | direct | ratio of the best | MB saved | of one rank |"]
    lines.append("|---" * 8 + "|")
    for world in map(int, options.world.split(",")):
        for tokens in map(int, options.tokens.split(",")):
            for kind, times, here, alone in run_ranks(measure, world, tokens, options.rounds):
                cells = [
                    f"{statistics.median(times[name]):.1f} ({min(times[name]):.1f})"
                    for name in ("fzero", "direct")
                ]
                ratio = min(times["fzero"]) / min(times["direct"])
                cells += [f"{ratio:.2f}", f"{here / 1e6:.2f}", f"{here / alone:.2f}"]
                lines.append(f"| {kind} | {world} | {tokens} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    if options.out is not None:
        tables = ["\n".join(lines) + "\n"]
        print(f"wrote {write_report(options.out, 'axes', tables, intro=_INTRO)}")


if __name__ == "__main__":
    main()
