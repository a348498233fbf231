"""States of AdamW kept encoded: the time of an update, and the loss that training comes to.

    python benchmarks/bench_states.py --updates 200

The model is the byte-level GPT of examples/train, 2 layers of width 96, and the text is that of
docs/. Times are those that one thread computes, so that other work of the machine counts less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import write_report
from torch import Tensor

import fzero

ROOT = Path(__file__).parents[1]
NUMEL, CONTEXT, ROWS = 10_000_000, 32, 16
STATES: dict[str, Any] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "int8()": fzero.codecs.int8(),
    "dynamic8()": fzero.codecs.dynamic8(),
    "dynamic8(stochastic=True)": fzero.codecs.dynamic8(stochastic=True),
}
_INTRO = """\
Milliseconds of an update of 10M parameters on one thread, the best of 4; bytes of both moments of a
parameter of the GPT; its validation loss in nats after {updates} updates, and beside fp32's. The
last row is bitsandbytes' own optimizer.
"""


def update_ms(state_dtype: Any) -> float:
    """Time an update of one large leaf."""
    rule = fzero.optim.adamw(1e-3, state_dtype=state_dtype)
    state = fzero.init({"w": torch.randn(NUMEL)}, rule, stage=0)
    flats, held = list(state.params.flats), state.optimizer
    grads = [torch.randn_like(flats[0])]
    return best(lambda: rule.advance(flats, grads, held, (), owned=True))


def peer_ms() -> float:
    """Time bitsandbytes' 8-bit AdamW."""
    import bitsandbytes

    p = torch.nn.Parameter(torch.randn(NUMEL))
    p.grad = torch.randn(NUMEL)
    return best(bitsandbytes.optim.AdamW8bit([p], 1e-3).step)


def best(call: Callable[[], Any]) -> float:
    """Return the fewest milliseconds of the processor that a call took."""
    times = []
    for _ in range(4):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def trained(state_dtype: Any, updates: int) -> tuple[float, float]:
    """Return the validation loss after training, and the bytes of moments of a parameter."""
    from train.gpt import GPT, GPTConfig

    texts = b"".join(path.read_bytes() for path in sorted(ROOT.glob("docs/**/*.md")))
    data = torch.frombuffer(bytearray(texts), dtype=torch.uint8)
    cut = int(0.95 * len(data))
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=96, heads=4, context=CONTEXT))
    apply, params = fzero.functionalize(model)

    def batch(source: Tensor, seed: int, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, len(source) - CONTEXT - 1, (rows,), generator=generator)
        return torch.stack([source[i : i + CONTEXT + 1] for i in starts]).long()

    def loss(p: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(apply(p, x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    rule = fzero.optim.adamw(
        lambda k: 2e-3 * min(1.0, (k + 1) / 40) * (1 - 0.9 * k / updates),
        betas=(0.9, 0.98),
        weight_decay=0.1,
        state_dtype=state_dtype,
    )
    state = fzero.init(params, rule, stage=0)
    for k in range(updates):
        state, _ = fzero.grad_and_reduce(loss, state)(batch(data[:cut], k, ROWS))
        state = fzero.apply_gradients(state)
    whole = fzero.full_params(state)
    with torch.no_grad():
        losses = [float(loss(whole, batch(data[cut:], 10**6 + k, 64))) for k in range(8)]
    numel = sum(p.numel() for p in model.parameters())
    return sum(losses) / len(losses), fzero.state_bytes(state)["optimizer"] / numel


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "examples"))
    torch.set_num_threads(1)
    lines = ["| states | ms | bytes | loss | of fp32's |", "|---|---|---|---|---|"]
    first = 0.0
    for name, state_dtype in STATES.items():
        ms = update_ms(state_dtype)
        loss, nbytes = trained(state_dtype, args.updates)
        first = first or loss
        lines.append(f"| {name} | {ms:.0f} | {nbytes:.2f} | {loss:.4f} | {loss / first:.4f} |")
        print(lines[-1], flush=True)
    lines.append(f"| bitsandbytes | {peer_ms():.0f} | | | |")
    intro, table = _INTRO.format(updates=args.updates), "\n".join(lines)
    print(intro, table, sep="\n")
    if args.out is not None:
        print(f"wrote {write_report(args.out, 'states', [table], intro=intro)}")


if __name__ == "__main__":
    main()
