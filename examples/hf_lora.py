"""PEFT's LoRA under the Trainer of transformers, with a base in 4 bits that ZeRO shards.

    python examples/hf_lora.py
    torchrun --nproc-per-node 2 examples/hf_lora.py --stage 3

Of the script without fzero one line changes. The model is made from a config, and is random.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fzero
from fzero.integrations.transformers import sharded

WORDS, ROWS, STEPS = 12, 16, 6


def make_base() -> LlamaForCausalLM:
    """Return a small Llama with random values."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def make_trainer(stage: int | None, folder: Path, **arguments: Any) -> Any:
    """Return a trainer: the library's own for stage None, else one whose model is sharded."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    texts = torch.randint(3, 64, (64, WORDS), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": ids, "labels": ids} for ids in texts]
    common: dict[str, Any] = {"output_dir": str(folder), "learning_rate": 1e-2, "max_steps": STEPS}
    common |= {"per_device_train_batch_size": ROWS // fzero.world().size, "save_steps": STEPS // 2}
    common |= {"use_cpu": not torch.cuda.is_available(), "report_to": [], "disable_tqdm": True}
    common |= {"activation_checkpointing": True, "logging_steps": 1}
    trainer: Any = Trainer
    if stage is not None:
        trainer = sharded(Trainer, stage=stage, frozen=fzero.codecs.nf4(block=64))  # <- is new
    return trainer(
        model=peft.get_peft_model(make_base(), config),  # type: ignore[arg-type]
        args=TrainingArguments(**(common | arguments)),
        train_dataset=rows,
        eval_dataset=rows[:ROWS],
    )


def main() -> None:
    """Train, save, resume, and fail if a claim is not so."""
    parser, axis = argparse.ArgumentParser(), fzero.world()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fzero-lora")
    args = parser.parse_args()

    trainer = make_trainer(args.stage, args.folder)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model()
    resumed = make_trainer(args.stage, args.folder)
    resumed.train(resume_from_checkpoint=str(args.folder / f"checkpoint-{STEPS // 2}"))
    after, again = trainer.evaluate()["eval_loss"], resumed.evaluate()["eval_loss"]
    (engine,) = trainer.accelerator.engines
    held, values = fzero.state_bytes(engine.state), engine.full_state_dict()

    read: Any = peft.PeftModel.from_pretrained(make_base(), args.folder)
    decoded = {path: x for path, x in values.items() if ".lora_" not in path}
    assert not read.load_state_dict(decoded, strict=False).unexpected_keys
    with torch.no_grad():
        ids = torch.stack([row["input_ids"] for row in trainer.eval_dataset])
        loss = read(input_ids=ids, labels=ids).loss.item()
    if axis.rank == 0:
        share = f"{held['parameters']:,} of {4 * sum(x.numel() for x in values.values()):,}"
        print(f"{axis.size} rank(s), stage {args.stage}: loss {before:.4f} -> {after:.4f}, "
              f"{again:.4f} when resumed, {loss:.4f} read by PEFT; "
              f"bytes of parameters on each rank: {share}")  # fmt: skip
    if not (after < before and abs(after - again) < 1e-4 and abs(after - loss) < 1e-4):
        raise SystemExit("nothing learned, or another adapter when resumed or read")


if __name__ == "__main__":
    main()
