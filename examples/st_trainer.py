"""sentence-transformers' trainer with a cached loss and a sharded model: one reduction a step.

    python examples/st_trainer.py
    torchrun --nproc-per-node 2 examples/st_trainer.py --stage 2

The loss embeds a few texts at a time and runs a backward for each of them inside of its own. With
`coalesce=True` their gradients cross the ranks once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1"}
import torch
from datasets import Dataset
from safetensors.torch import save_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import DistilBertConfig, DistilBertModel

import fzero
from fzero.integrations.transformers import sharded
from pairs import read_pairs
from words import VOCABULARY, make_tokenizer, texts_of

TOKENS, BATCH, CHUNK = 32, 32, 4  # of a text; pairs of a step; texts embedded in one go
# sentence-transformers gathers embeddings by a name that torch is about to drop.
warnings.filterwarnings("ignore", message=r"torch\.distributed\.nn\.functional\.all_gather is")


def make_model(texts: list[str]) -> SentenceTransformer:
    """Return a small DistilBERT with random values and a mean over its tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 2, "n_heads": 4}
    sizes |= {"hidden_dim": 256, "max_position_embeddings": TOKENS, "dropout": 0.0}
    bert = DistilBertModel(DistilBertConfig(**sizes, attention_dropout=0.0))
    with tempfile.TemporaryDirectory() as folder:  # the library wants to load from somewhere
        bert.config.save_pretrained(folder)
        save_file(bert.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
        make_tokenizer(texts, TOKENS).save_pretrained(folder)
        transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(64)], device="cpu")


def make_trainer(stage: int | None, folder: Path, gather: bool = True, **arguments: Any) -> Any:
    """Return a trainer: the library's own for stage None, else one whose model is sharded."""
    pairs, _ = read_pairs(256, count=512)
    sides = texts_of(pairs.docstrings), texts_of(pairs.codes)
    model = make_model(sides[0] + sides[1])
    options: dict[str, Any] = {"mini_batch_size": CHUNK, "gather_across_devices": gather}
    loss = CachedMultipleNegativesRankingLoss(model, **options)  # negatives of all ranks
    common: dict[str, Any] = {"output_dir": str(folder), "learning_rate": 2e-3, "max_steps": 12}
    common |= {"logging_steps": 1, "save_steps": 6, "report_to": [], "disable_tqdm": True}
    common |= {"per_device_train_batch_size": BATCH // fzero.world().size}
    args = SentenceTransformerTrainingArguments(**common | arguments)
    trainer_class: Any = SentenceTransformerTrainer
    if stage is not None:
        trainer_class = sharded(trainer_class, stage=stage, coalesce=True)  # <- the new line
    data = Dataset.from_dict({"anchor": sides[0], "positive": sides[1]})
    return trainer_class(model=model, args=args, train_dataset=data, loss=loss)


def main() -> None:
    """Train and save; fail if what was claimed is not so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fzero-st")
    args = parser.parse_args()
    trainer = make_trainer(args.stage, args.folder, use_cpu=not torch.cuda.is_available())
    with fzero.count_collectives() as log:
        trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    reduced = sum(e.numel for e in log.of() if e.op in ("all_reduce", "reduce_scatter"))
    count = sum(p.numel() for p in trainer.model.parameters())
    if fzero.world().rank == 0:
        saved = SentenceTransformer(str(args.folder), device="cpu")
        print(f"{fzero.world().size} rank(s), stage {args.stage}: loss {losses[0]:.3f} -> "
              f"{losses[-1]:.3f}; gradients cross {reduced / count / len(losses):.2f} x a step; "
              f"saved {sum(p.numel() for p in saved.parameters()):,} parameters")  # fmt: skip
    if not losses[-1] < losses[0]:
        raise SystemExit("nothing learned")


if __name__ == "__main__":
    main()
