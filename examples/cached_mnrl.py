"""sentence-transformers' cached loss through the engine: many backwards, one reduction a step.

    python examples/cached_mnrl.py
    torchrun --nproc-per-node 2 examples/cached_mnrl.py --stage 2

`CachedMultipleNegativesRankingLoss` calls the model itself, and runs one backward for each
mini-batch inside the backward of its loss. Neither needs to know of the engine.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero.adapter import Engine
from pairs import Pairs, read_pairs
from words import VOCABULARY, make_tokenizer, texts_of

os.environ["HF_HUB_OFFLINE"] = "1"  # before the libraries are imported: they read it then
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel
from transformers.utils.logging import disable_progress_bar

LENGTH = 256  # bytes of a docstring, and of a function, that are read
TOKENS = 32  # of each, that the model sees
WIDTH, LAYERS, HEADS = 64, 2, 4
TOLERANCE = 1e-10  # of the cached gradient, relative, in float64

disable_progress_bar()  # of writing and reading the small model
# sentence-transformers gathers embeddings by a name that torch is about to drop.
warnings.filterwarnings("ignore", message=r"torch\.distributed\.nn\.functional\.all_gather is")


def make_model(texts: list[str]) -> SentenceTransformer:
    """Return a small BERT with random values and a mean over its tokens; nothing is downloaded.

    To be called before the process group is there: from then on transformers saves on rank 0 alone.
    """
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    with tempfile.TemporaryDirectory() as folder:  # the library wants to load from somewhere
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
        make_tokenizer(texts, TOKENS).save_pretrained(folder)
        transformer = Transformer(folder, model_kwargs={"add_pooling_layer": False})
    pooling = Pooling(transformer.get_embedding_dimension())
    return SentenceTransformer(modules=[transformer, pooling], device="cpu")


class Batches:
    """The same batches on every rank; a rank takes its share of the rows."""

    def __init__(self, model: SentenceTransformer, pairs: Pairs, size: int, seed: int) -> None:
        self.model, self.size = model, size
        self.sides = texts_of(pairs.docstrings), texts_of(pairs.codes)
        self.random = torch.Generator().manual_seed(seed)

    def next(self) -> list[dict[str, Any]]:
        """Return the features of the whole of the next batch, one dict for each side."""
        chosen = torch.randperm(len(self.sides[0]), generator=self.random)[: self.size].tolist()
        return [self.model.preprocess([side[i] for i in chosen]) for side in self.sides]


def mine(features: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return this rank's rows: a block, as the loss numbers the gathered rows by rank."""
    axis = fzero.world()

    def rows(x: Any) -> Any:
        return x.chunk(axis.size)[axis.rank] if isinstance(x, Tensor) else x

    return [{name: rows(x) for name, x in side.items()} for side in features]


def cached_loss(model: SentenceTransformer, chunk: int) -> Any:
    """Return the loss over the pairs of all ranks, which embeds `chunk` texts at a time."""
    return CachedMultipleNegativesRankingLoss(
        model, mini_batch_size=chunk, gather_across_devices=fzero.world().size > 1
    )


def train(engine: Engine, loss_fn: Any, batches: Batches, steps: int, say: Any) -> None:
    """Train: the one place where the engine is seen is around `backward`."""
    for number in range(1, steps + 1):
        with engine.coalesce():
            loss = loss_fn(mine(batches.next()), None)
            loss.backward()
        engine.step()
        if number % 10 == 0 or number == steps:
            say(f"step {number}: loss {fzero.pmean(loss.detach()).item():.3f}", flush=True)


def reductions(engine: Engine, loss_fn: Any, features: Any, *, coalesced: bool) -> float:
    """Return how often a rank's whole gradient crosses the ranks in one step."""
    window = engine.coalesce() if coalesced else nullcontext()
    with fzero.count_collectives() as log:
        with window:
            loss_fn(features, None).backward()
        engine.full_gradients()  # what still waits would be reduced here
    engine.zero_grad()
    reduced = [e.numel for e in log.of() if e.op in ("all_reduce", "reduce_scatter")]
    return sum(reduced) / sum(p.numel() for p in engine.module.parameters())


def gradient_error(args: argparse.Namespace, model: Any, features: Any) -> float:
    """Return max |g - g*| / max |g*|: g cached, chunked and sharded, g* of the plain loss.

    g* is what `MultipleNegativesRankingLoss` gives for the whole batch on one process. In float64,
    without dropout.
    """
    plain = model.double().eval()
    model = copy.deepcopy(plain)
    engine = Engine(model, stage=args.stage)
    with engine.coalesce():
        cached_loss(model, args.chunk)(mine(features), None).backward()
    found = engine.full_gradients()
    MultipleNegativesRankingLoss(plain)(features, None).backward()
    exact = {path: p.grad for path, p in plain.named_parameters()}
    worst = max((found[path] - g).abs().max().item() for path, g in exact.items())
    return worst / max(g.abs().max().item() for g in exact.values())


@torch.no_grad()
def accuracy(model: Any, pool: Pairs) -> float:
    """Return how often a docstring's nearest code among `pool` is its own."""
    was_training = model.training
    model.eval()
    sides = [model.preprocess(texts_of(side)) for side in pool]
    embedded = [F.normalize(model(side)["sentence_embedding"], dim=-1) for side in sides]
    model.train(was_training)
    nearest = (embedded[0] @ embedded[1].T).argmax(1)
    return (nearest == torch.arange(len(nearest))).float().mean().item()


def main() -> None:
    """Train, print, and fail if what was claimed is not so."""
    args = parse()
    torch.manual_seed(args.seed)
    pairs, pool = read_pairs(LENGTH, count=2000)
    model = make_model(texts_of(pairs.docstrings) + texts_of(pairs.codes))
    axis = fzero.world()
    if args.batch < axis.size or args.batch % axis.size:
        raise SystemExit(f"--batch {args.batch}. Fix: a multiple of the {axis.size} ranks.")
    say = print if axis.rank == 0 else lambda *_, **__: None
    untrained, before = copy.deepcopy(model), accuracy(model, pool)
    engine = Engine(model.train(), make_optimizer, stage=args.stage)
    loss_fn = cached_loss(model, args.chunk)
    batches = Batches(model, pairs, args.batch, args.seed)
    count = sum(p.numel() for p in model.parameters())
    say(f"{count:,} parameters, stage {args.stage}, {axis.size} rank(s), {args.batch} pairs, "
        f"{args.chunk} texts in a backward")  # fmt: skip
    train(engine, loss_fn, batches, args.steps, say)
    after, chance = accuracy(model, pool), 1 / len(pool.codes)
    say(f"retrieval: {after:.1%} of {len(pool.codes)} held-out pairs first; "
        f"untrained {before:.1%}, chance {chance:.1%}")  # fmt: skip
    if not after > max(1.5 * before, 5 * chance):
        raise SystemExit(f"nothing learned in {args.steps} steps")
    features = batches.next()
    if axis.size > 1:  # alone, nothing crosses
        count_reductions(engine, loss_fn, mine(features), say)
    off = gradient_error(args, untrained, features)
    say(f"check: cached gradient is that of the uncached loss to {off:.1e} (relative, float64)")
    if not off < TOLERANCE:
        raise SystemExit(f"check: more than {TOLERANCE:.0e} off")


def count_reductions(engine: Engine, loss_fn: Any, features: Any, say: Any) -> None:
    """Print how often the gradient is reduced; end the program if it is not once."""
    once = reductions(engine, loss_fn, features, coalesced=True)
    many = reductions(engine, loss_fn, features, coalesced=False)
    say(f"one step: gradient reduced {once:.2f} x coalesced, {many:.2f} x one by one")
    if not 1 <= once < 1.01:  # with the padding of its buckets
        raise SystemExit("not one reduction in a step")


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.AdamW(params, lr=2e-3)


def at_least_one(text: str) -> int:
    """A count that is given on the command line."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--steps", type=at_least_one, default=40, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=128, help="pairs in a batch, over all ranks")
    parser.add_argument("--chunk", type=int, default=16, help="texts embedded in one go")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    return parser.parse_args()


if __name__ == "__main__":
    main()
