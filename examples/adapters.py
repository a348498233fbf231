"""LoRA adapters, each a state of its own, over one base: they come, go, and are saved alone.

    python examples/adapters.py  # or torchrun --nproc-per-node 2 examples/adapters.py --stage 3

The base is one state, which every loss reads. The model is made from a config, and is random.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
from fzero.integrations.peft import functionalize_adapter, save_adapter

STEPS, ROWS, WORDS, LR, FOLDER = 6, 12, 8, 1e-2, f"{tempfile.gettempdir()}/fzero-adapters"
LIVES = {"x": range(3), "y": range(STEPS), "z": range(3, STEPS)}  # steps of each adapter
RULE = fzero.optim.adamw(LR, weight_decay=1e-2)

torch.manual_seed(0)
sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
sizes |= {"attn_implementation": "eager"}  # of the others vmap makes a loop
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)).double()
_, base = fzero.functionalize(model)
config = peft.LoraConfig(r=4, target_modules="all-linear")
apply, _ = functionalize_adapter(model, config)
begins = {name: functionalize_adapter(model, config)[1] for name in LIVES}
texts = {name: torch.randint(50, (STEPS, ROWS, WORDS)) for name in LIVES}


def loss_of(base: Any, adapter: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of some texts under one adapter."""
    return apply(base, adapter, input_ids=ids, labels=ids).loss


def batched_loss(base: Any, stack: Any, ids: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Return the sum of all adapters' mean losses; row i is under the adapter `which[i]`."""
    of_row = {path: adapters[which] for path, adapters in stack.items()}
    losses = torch.func.vmap(lambda adapter, row: loss_of(base, adapter, row[None]))(of_row, ids)
    return losses.sum() / ROWS * fzero.axis_size()


def updated(states: Any, name: str, loss: Any, *args: Any) -> Any:
    """Return the states after an update of one of them, by a loss that reads the base, too."""
    both = {"base": states["base"], name: states[name]}
    both, _ = fzero.grad_and_reduce(lambda p: loss(p["base"], p[name], *args), both, wrt=name)()
    return {**states, **both, name: fzero.apply_gradients(both[name])}


def trained_by_peft(name: str) -> Any:
    """Return PEFT's model after the same steps on one process."""
    made: Any = peft.get_peft_model(copy.deepcopy(model), config)
    peft.set_peft_model_state_dict(made, begins[name])
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=LR)
    for ids in (texts[name][step] for step in LIVES[name]):
        optimizer.zero_grad()
        made(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return made


def main() -> None:
    """Train, and fail if a claim is not so."""
    parser, axis = argparse.ArgumentParser(), fzero.world()
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of the base")
    stage, mine = parser.parse_args().stage, slice(axis.rank, None, axis.size)
    states: Any = {"base": fzero.init(base, fzero.optim.no_optimizer(), stage=stage)}
    for step in range(STEPS):  # in turn
        states |= {n: fzero.init(begins[n], RULE, stage=2) for n in LIVES if LIVES[n][0] == step}
        for name in sorted(states.keys() - {"base"}):
            states = updated(states, name, loss_of, texts[name][step][mine])
            if step == LIVES[name][-1]:
                save_adapter(f"{FOLDER}/{name}", states.pop(name), apply)
    both = {path: torch.stack([begins[n][path] for n in "xz"]) for path in begins["x"]}
    states["both"], which = fzero.init(both, RULE, stage=2), torch.arange(2 * ROWS) // ROWS
    for step in range(3):  # in one batch
        rows = torch.cat([texts[n][LIVES[n][step]] for n in "xz"])
        states = updated(states, "both", batched_loss, rows[mine], which[mine])
    batched, off = fzero.full_params(states["both"]), 0.0
    for name in LIVES:
        plain, ids = trained_by_peft(name), texts["y"][0]
        read = peft.PeftModel.from_pretrained(copy.deepcopy(model), f"{FOLDER}/{name}")
        off = max(off, (read(ids).logits - plain(ids).logits).abs().max().item())
        for path, x in peft.get_peft_model_state_dict(plain).items() if name in "xz" else ():
            off = max(off, (batched[path]["xz".index(name)] - x).abs().max().item())
    if axis.rank == 0:
        print("bytes on each rank:", {n: fzero.state_bytes(x)["total"] for n, x in states.items()})
        print(f"check: adapters on {axis.size} rank(s) are those of PEFT alone to {off:.1e}")
    assert off < 1e-10


if __name__ == "__main__":
    main()
