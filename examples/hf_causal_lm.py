"""A Hugging Face language model under the engine, unchanged, at every ZeRO stage.

    python examples/hf_causal_lm.py
    torchrun --nproc-per-node 2 examples/hf_causal_lm.py --stage 3 --checkpointing reentrant --check

The model is made from a config (nothing is downloaded) and learns the bytes of the Python standard
library, which every machine has.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fzero
from fzero.adapter import Engine
from train.text import read_corpus

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: it reads it then
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 256  # a token is a byte
LENGTH = 64  # bytes of a sample
WIDTH, LAYERS, HEADS = 64, 2, 4
HELD_OUT = 128  # samples of other files that the claim is made on
TOLERANCE = 1e-10  # of the check: float64, through a few updates of AdamW
CHECKED_STEPS = 3


def make_model(name: str) -> nn.Module:
    """Return a small GPT-2 (its head tied to its embedding) or Llama, with random values."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.1}
    sizes["use_cache"] = False  # a cache is for generation
    if name == "gpt2":
        sizes |= {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes))
    sizes |= {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=LENGTH))


def prepare(model: Any, checkpointing: str) -> None:
    """Switch on training, and recomputation, as with transformers alone."""
    model.loss_type = "ForCausalLM"  # what it takes anyway, but for GPT-2 not without a warning
    model.train()
    if checkpointing != "none":
        how = {"use_reentrant": checkpointing == "reentrant"}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    """Return the optimizer: the engine takes any, or its class, or a function such as this."""
    return torch.optim.AdamW(params, lr=5e-3, betas=(0.9, 0.95))


class Batches:
    """The same windows of a text on every rank; a rank takes its share of each batch."""

    def __init__(self, text: Tensor, size: int, seed: int) -> None:
        self.text, self.size = text, size
        self.random = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """Return the whole of the next batch: [size, LENGTH] int64."""
        begins = torch.randint(len(self.text) - LENGTH, (self.size, 1), generator=self.random)
        return self.text[begins + torch.arange(LENGTH)].long()


def mine(batch: Tensor) -> Tensor:
    """Return this rank's rows."""
    axis = fzero.world()
    return batch[axis.rank :: axis.size]


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte, as the model itself computes it."""
    return model(input_ids=batch, labels=batch).loss


def evaluate(engine: Engine, text: Tensor) -> float:
    """Return the loss on a text that was not trained on, [n, LENGTH]."""
    engine.module.eval()
    with torch.no_grad():
        loss = loss_of(engine, text.long())
    engine.module.train()
    return loss.item()


def unigram_entropy(train: Tensor, valid: Tensor) -> float:
    """Return the loss on `valid` of the best model that does not look at what came before."""
    counts = torch.bincount(train.long(), minlength=VOCABULARY) + 1.0
    return F.cross_entropy(counts.log().expand(valid.numel(), -1), valid.flatten().long()).item()


def train(engine: Engine, batches: Batches, steps: int, say: Any, device: str) -> int:
    """Train; return the bytes of gradients that this rank held before the last update."""
    held = 0
    for number in range(1, steps + 1):
        loss = loss_of(engine, mine(batches.next().to(device)))
        if number % 2:  # the two are the same
            loss.backward()
        else:
            engine.backward(loss)
        held = sum(engine.memory_report().gradients.values())
        engine.step()
        if number % 10 == 0 or number == steps:
            say(f"step {number}: loss {fzero.pmean(loss.detach()).item():.3f}", flush=True)
    return held


def claimed_bytes(stage: int, params: int, size: int) -> dict[str, int]:
    """Return the bytes per rank that ZeRO promises for AdamW in float32 (see `Engine`)."""
    shard = -(-params // size)
    return {
        "parameters": 4 * (shard if stage == 3 else params),
        "gradients": 4 * (shard if stage else params),
        "optimizer": 8 * (shard if stage else params),
    }


def update_error(args: argparse.Namespace, text: Tensor, device: str) -> float:
    """Return the largest difference from plain PyTorch on the whole batch, after some updates.

    Both start from the same values, in float64; plain PyTorch uses neither ranks nor recompute.
    """
    torch.manual_seed(args.seed)
    plain = make_model(args.model).double().to(device)
    model = copy.deepcopy(plain)
    prepare(plain, "none")
    prepare(model, args.checkpointing)
    engine = Engine(model, make_optimizer, stage=args.stage)
    optimizer = make_optimizer(plain.parameters())
    batches = Batches(text, args.batch, args.seed)
    for _ in range(CHECKED_STEPS):
        batch = batches.next().to(device)
        loss_of(engine, mine(batch)).backward()
        engine.step()
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
    found = engine.full_parameters()
    return max((found[path] - p).abs().max().item() for path, p in plain.named_parameters())


def main() -> None:
    """Train, print, and fail if what was claimed is not so."""
    args = parse()
    axis = fzero.world()
    say = print if axis.rank == 0 else lambda *_, **__: None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = read_corpus(cap_bytes=2_000_000)
    torch.manual_seed(args.seed)
    model = make_model(args.model).to(device)
    prepare(model, args.checkpointing)
    count = sum(p.numel() for p in model.parameters())
    engine = Engine(model, make_optimizer, stage=args.stage)
    say(f"{type(model).__name__}, {count:,} parameters, stage {args.stage}, {axis.size} rank(s), "
        f"checkpointing {args.checkpointing}")  # fmt: skip
    batches = Batches(corpus.train, args.batch, args.seed)
    gradients = train(engine, batches, args.steps, say, device)
    check_bytes(engine, count, gradients, say)
    held_out = corpus.valid[: HELD_OUT * LENGTH].view(-1, LENGTH)
    unigram = unigram_entropy(corpus.train, held_out)
    found = evaluate(engine, held_out.to(device))
    say(f"held-out text: loss {found:.3f}; bytes alone {unigram:.3f}, "
        f"nothing known {math.log(VOCABULARY):.3f}")  # fmt: skip
    if not found < unigram:
        raise SystemExit(f"nothing learned: {found:.3f} on held-out text in {args.steps} steps")
    if args.check:
        off = update_error(args, corpus.train, device)
        say(f"check: {CHECKED_STEPS} updates are those of plain PyTorch to {off:.1e} (float64)")
        if not off < TOLERANCE:
            raise SystemExit(f"check: more than {TOLERANCE:.0e} off")


def check_bytes(engine: Engine, count: int, gradients: int, say: Any) -> None:
    """Print what this rank holds and what it should; end the program where it is more."""
    report = engine.memory_report()
    held = {
        "parameters": sum(report.parameters.values()),
        "gradients": gradients,
        "optimizer": sum(report.optimizer.values()),
    }
    wanted = claimed_bytes(engine.stage, count, fzero.world().size)
    say("bytes on each rank: " + ", ".join(f"{kind} {n:,}" for kind, n in held.items()))
    whole = claimed_bytes(0, count, 1)
    say("  without ZeRO:     " + ", ".join(f"{kind} {n:,}" for kind, n in whole.items()))
    for kind, n in held.items():
        if not wanted[kind] <= n < 1.02 * wanted[kind]:  # 2 % for padding and step counts
            raise SystemExit(f"{kind}: {n:,} bytes, and {wanted[kind]:,} claimed")


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
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--model", default="gpt2", choices=["gpt2", "llama"])
    ways = ["none", "reentrant", "nonreentrant"]
    parser.add_argument("--checkpointing", default="none", choices=ways, help="of activations")
    parser.add_argument("--steps", type=at_least_one, default=40, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, over all ranks")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument("--check", action="store_true", help="compare with plain PyTorch")
    args = parser.parse_args()
    size = fzero.world().size
    if args.batch < size or args.batch % size:
        parser.error(f"--batch {args.batch}: Fix: a multiple of the {size} ranks.")
    return args


if __name__ == "__main__":
    main()
