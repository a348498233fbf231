"""The table of docs/gallery/dp_lora.md: bits and bytes of fzero, and what opacus answers.

    python benchmarks/gallery/dp_lora.py --out benchmarks/results

The program is that of examples/dp_lora.py: its model, its batches, three steps, on gloo processes.
It needs opacus. Each peer's program is written as its documents write it.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402
from report import write_report  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import dp_lora as example  # noqa: E402
import fzero  # noqa: E402
from tests.live_bytes import LiveBytes  # noqa: E402

STEPS, WORLDS = example.CHECKED, (1, 2, 4)
INTRO = f"""{STEPS} steps of examples/dp_lora.py. `off`: the largest difference of an adapter from
a loop over samples in plain PyTorch, without noise. `digest`: of the adapters after the steps with
noise, all seeds 0 (of ghost clipping the rank), for {" / ".join(map(str, WORLDS))} ranks.
`parameters`: bytes of them that rank 0 of {WORLDS[-1]} holds between steps. `peak`: the most bytes
that were made and alive on it in a fourth step, in which fzero has the gradients of
{example.CHUNK} samples at a time, and the others those of all of the rank.
"""


def gsm(module: nn.Module) -> Any:
    """Return opacus' module around one, whose hooks make gradients of samples."""
    from opacus import GradSampleModule

    return GradSampleModule(module)


def mine(step: int) -> torch.Tensor:
    """Return this rank's rows of a batch."""
    parts = example.drawn(step)
    return torch.cat(parts[dist.get_rank() :: dist.get_world_size()])


def of_hooks(wrap: Callable[[nn.Module], Any], noise: float) -> tuple[nn.Module, Any]:
    """Return a model and a step by per-sample gradients of hooks, with opacus' own optimizer."""
    from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer

    model = copy.deepcopy(example.model)
    wrapped = wrap(model)
    learned = [p for p in model.parameters() if p.requires_grad]
    rule = DistributedDPOptimizer(
        torch.optim.SGD(learned, lr=example.LR),
        noise_multiplier=noise,
        max_grad_norm=example.CLIP,
        expected_batch_size=example.BATCH / dist.get_world_size(),
        generator=torch.Generator().manual_seed(0),
    )

    def step(number: int) -> None:
        rows = mine(number)
        rule.zero_grad()
        example.loss_of(wrapped(rows[:, :-1]), rows).mean().backward()
        rule.step()

    return model, step


def dpddp(noise: float) -> Any:
    """opacus' own data parallelism."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP

    return of_hooks(lambda model: gsm(DPDDP(model)), noise)


def ddp(noise: float) -> Any:
    """DDP of torch around, and hooks of opacus inside."""
    return of_hooks(lambda model: nn.parallel.DistributedDataParallel(gsm(model)), noise)


def fsdp_hooks(noise: float) -> Any:
    """FSDP2, a unit for each block, and hooks of opacus around."""

    def wrap(model: nn.Module) -> Any:
        for block in model[1:3]:  # type: ignore[index]
            fully_shard(block)
        return gsm(fully_shard(model))

    return of_hooks(wrap, noise)


def fsdp_func(noise: float) -> Any:
    """FSDP2, and vmap(grad) over functional_call."""
    model = copy.deepcopy(example.model)
    for block in model[1:3]:  # type: ignore[index]
        fully_shard(block)
    fully_shard(model)
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def one(learned: Any, row: torch.Tensor) -> torch.Tensor:
        scores = torch.func.functional_call(model, learned, (row[None, :-1],))
        return example.loss_of(scores, row[None])[0]

    def step(number: int) -> None:
        each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(learned, mine(number))
        raise SystemExit(f"{len(each)} gradients: go on here")

    return model, step


def ghost_fsdp(noise: float) -> Any:
    """opacus' way for FSDP2: FSDP2Wrapper, ghost clipping, its criterion and optimizer."""
    from opacus import PrivacyEngine
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    model = FSDP2Wrapper(copy.deepcopy(example.model))
    learned = [p for p in model.parameters() if p.requires_grad]
    data = torch.utils.data.TensorDataset(example.samples)
    wrapped, rule, criterion, _ = PrivacyEngine().make_private(  # type: ignore[misc]
        module=model,
        optimizer=torch.optim.SGD(learned, lr=example.LR),
        criterion=nn.CrossEntropyLoss(),
        data_loader=torch.utils.data.DataLoader(data, batch_size=example.BATCH),
        noise_multiplier=noise,
        max_grad_norm=example.CLIP,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(dist.get_rank()),
        grad_sample_mode="ghost_fsdp",
    )

    def step(number: int) -> None:
        rows = mine(number)
        rule.zero_grad()
        scores = wrapped(rows[:, :-1])
        loss = criterion(scores.flatten(0, 1), rows[:, 1:].flatten(), shape=scores.shape)
        loss.backward()
        rule.step()

    return model, step


def of_fzero(stage: int) -> Any:
    """A step of the example, on its state."""

    class Held(nn.Module):
        def __init__(self, noise: float) -> None:
            super().__init__()
            example.NOISE = noise
            step = fzero.shard(example.noise(example.step_fn), stage=stage, logical_ranks=4, seed=0)
            self.step, self.state = step, step.init(example.params, fzero.optim.sgd(example.LR))

    def made(noise: float) -> Any:
        held = Held(noise)

        def step(number: int) -> None:
            held.state, _ = held.step(held.state, example.drawn(number))

        return held, step

    return made


PEERS: dict[str, Callable[[float], Any]] = {
    **{f"fzero, stage {stage}": of_fzero(stage) for stage in range(4)},
    "opacus, DifferentiallyPrivateDistributedDataParallel": dpddp,
    "opacus' hooks in DDP": ddp,
    "opacus' hooks over FSDP2": fsdp_hooks,
    "torch.func over FSDP2": fsdp_func,
    "opacus, FSDP2Wrapper and ghost clipping": ghost_fsdp,
}


def whole(x: Any) -> torch.Tensor:
    """Return a tensor, of a DTensor the whole one."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def adapters(model: Any) -> dict[str, torch.Tensor]:
    """Return the adapters of a peer, whole."""
    if hasattr(model, "state"):
        found = fzero.full_params(model.state)
    else:
        found = {n.removeprefix("_module."): whole(p.detach()) for n, p in model.named_parameters()}
    return {name: found[name] for name in example.LEARNS}


def measured(name: str) -> dict[str, Any]:
    """Return what a peer gives on the ranks of this group, or the error that it raises."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    try:
        nothing = [{n: torch.zeros_like(example.params[n]) for n in example.LEARNS}] * STEPS
        model, step = PEERS[name](0.0)
        for number in range(STEPS):
            step(number)
        found["off"] = example.apart(adapters(model), example.loop_over_samples(nothing))
        if hasattr(model, "state"):
            found["parameters"] = fzero.state_bytes(model.state)["parameters"]
        else:
            local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
            found["parameters"] = sum(p.nbytes for p in local)
        live = LiveBytes()
        with live:
            live.begin()
            step(STEPS)
        found["peak"] = live.peak
        model, step = PEERS[name](example.NOISE)
        for number in range(STEPS):
            step(number)
        flat = b"".join(x.numpy().tobytes() for x in adapters(model).values())
        found["digest"] = hashlib.sha256(flat).hexdigest()[:8]
    except Exception as error:
        text = str(error).strip() or repr(error)
        found["error"] = f"{type(error).__name__}: {text.splitlines()[0][:240]}"
    return found


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="the folder of the results")
    parser.add_argument("--only", default="", help="peers with this in their name")
    args = parser.parse_args()
    lines = ["| | off | digest | parameters | peak |", "|---|---|---|---|---|"]
    for name in [x for x in PEERS if args.only in x]:
        each = [run_ranks(measured, world, name) for world in WORLDS]
        errors = {x["error"]: None for x in each if "error" in x}
        if errors:
            lines.append(f"| {name} | {'; '.join(errors)} | | | |")
        else:
            digests = " / ".join(x["digest"] for x in each)
            off = max(x["off"] for x in each)
            last = each[-1]
            lines.append(
                f"| {name} | {off:.1e} | {digests} | {last['parameters']:,} | {last['peak']:,} |"
            )
        print(lines[-1], flush=True)
    if args.out is not None:
        intro = f"opacus {importlib.metadata.version('opacus')}. {INTRO}"
        print(write_report(args.out, "gallery-dp-lora", ["\n".join(lines) + "\n"], intro=intro))


if __name__ == "__main__":
    main()
