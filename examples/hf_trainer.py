"""Hugging Face's Trainer, or TRL's SFTTrainer, on a model that ZeRO shards: one line is new.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py --stage 3 --trainer sft

The model is made from a config (nothing is downloaded) and learns the docstrings of the Python
standard library, which every machine has.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import fzero
from fzero.integrations.transformers import sharded
from pairs import read_pairs
from words import VOCABULARY, make_tokenizer, texts_of

WORDS, HELD_OUT = 24, 64  # of a text; texts that the claim is made on


def make_model() -> LlamaForCausalLM:
    """Return a small Llama with random values."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, eos_token_id=3, bos_token_id=2))


def make_trainer(kind: str, stage: int | None, folder: Path, **arguments: Any) -> Any:
    """Return a trainer: the library's own for stage None, else one whose model is sharded."""
    texts = texts_of(read_pairs(256, count=512)[0].docstrings)
    tokenizer = make_tokenizer(texts, WORDS)
    tokenizer.eos_token = "[SEP]"
    common: dict[str, Any] = {"output_dir": str(folder), "learning_rate": 3e-3, "logging_steps": 1}
    common |= {"max_grad_norm": 1.0, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    common |= {"use_cpu": not torch.cuda.is_available(), "report_to": [], "disable_tqdm": True}
    common |= {"gradient_accumulation_steps": 2, "max_steps": 20, "save_steps": 10}
    common |= {"per_device_train_batch_size": 16 // fzero.world().size}
    common |= {"per_device_eval_batch_size": 16 // fzero.world().size} | arguments
    trainer_class: Any
    if kind == "sft":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        trainer_class, args = SFTTrainer, SFTConfig(**common, max_length=WORDS, bf16=False)
        data: Any = [Dataset.from_dict({"text": x}) for x in (texts[HELD_OUT:], texts[:HELD_OUT])]
        more = {"processing_class": tokenizer}
    else:
        trainer_class, args, more = transformers.Trainer, TrainingArguments(**common), {}
        ids = tokenizer(texts, padding="max_length", truncation=True)["input_ids"]
        rows = [{"input_ids": row, "labels": [x or -100 for x in row]} for row in ids]
        data = rows[HELD_OUT:], rows[:HELD_OUT]
    if stage is not None:
        trainer_class = sharded(trainer_class, stage=stage)  # <- the new line
    train, valid = data
    return trainer_class(
        model=make_model(), args=args, train_dataset=train, eval_dataset=valid, **more
    )


def main() -> None:
    """Train, save, resume; fail if what was claimed is not so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--trainer", default="hf", choices=["hf", "sft"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fzero-hf")
    args = parser.parse_args()
    trainer = make_trainer(args.trainer, args.stage, args.folder)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    prompt = torch.tensor([[2]], device=trainer.args.device)
    made = trainer.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_length=9)
    trainer.save_model()
    resumed = make_trainer(args.trainer, args.stage, args.folder)
    resumed.train(resume_from_checkpoint=str(args.folder / "checkpoint-10"))
    again = resumed.evaluate()["eval_loss"]
    if fzero.world().rank == 0:
        saved = LlamaForCausalLM.from_pretrained(args.folder)
        print(f"{fzero.world().size} rank(s), stage {args.stage}: held-out loss {before:.3f} -> "
              f"{after:.3f}; {again:.3f} when resumed; generated {made.shape[1]} tokens; "
              f"saved {sum(p.numel() for p in saved.parameters()):,} parameters")  # fmt: skip
    if not (after < before and abs(after - again) < 1e-3):
        raise SystemExit("nothing learned, or another model when resumed")


if __name__ == "__main__":
    main()
