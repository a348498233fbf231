"""Run the matrix of `fzero.certify` for fzero, DDP, FSDP2 and DeepSpeed, on gloo processes.

    python benchmarks/bench_matrix.py --world 2 --out benchmarks/results

Every contestant trains one small model with whole numbers in the same cells, on W processes, and
is compared with the step of one process: plain torch.autograd and torch.optim. Each is used as
its documentation says. The exit status is 1 if a cell of fzero differs.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix.deepspeed_peer import DeepSpeed, is_installed
from matrix.peers import Ddp, Fsdp2
from matrix.table import LEGEND, markdown
from ranks import run_ranks
from report import write_report
from torch import nn

import fzero
from fzero.adapter import Engine
from fzero.tools.certify import CellResult
from fzero.tools.certify.command import MODELS, batch

WINDOWS = ("each", "coalesce", "accumulate")
CONTESTANTS = ("fzero step", "fzero engine", "DDP", "FSDP2", "DeepSpeed")


def on_gloo(body: Callable[[int], Any], world: int) -> list[Any]:
    """Call `body(rank)` on this rank, and return what it gave on every one."""
    mine: tuple[Any, str, str] = (None, "", "")
    try:
        mine = (body(dist.get_rank()), "", "")
    except Exception as error:
        mine = (None, type(error).__name__, str(error))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    for rank, (_, kind, text) in enumerate(everyone):
        if kind == "NotImplementedError":
            raise NotImplementedError(text)
        if kind:
            raise RuntimeError(f"rank {rank} raised {kind}: {text}")
    return [value for value, _, _ in everyone]


def _engine_of(name: str, window: str, backwards: int) -> Any:
    if name == "DeepSpeed":
        return functools.partial(DeepSpeed, window=window, backwards=backwards)
    if name in ("DDP", "FSDP2"):
        return functools.partial({"DDP": Ddp, "FSDP2": Fsdp2}[name], backwards=backwards)
    return Engine


def measure(name: str, backwards: int, axes: dict[str, Any]) -> tuple[CellResult, ...]:
    """Run all cells of one contestant on this rank; all ranks get the same results."""
    model, cells = MODELS["dyadic"], []
    module: Any = model.make()
    module.shift = nn.Parameter(module.shift.detach().reshape(1))  # FSDP2 takes no scalar
    module.always = True  # all ranks use the same layers
    driver: dict[str, Any] = {"drivers": "step"}
    for window in WINDOWS:
        if name != "fzero step":
            driver = {"drivers": "engine", "engine": _engine_of(name, window, backwards)}
        report = fzero.certify(
            module,
            model.loss,
            batch,
            optimizer=functools.partial(torch.optim.SGD, lr=model.lr, momentum=0.5),
            on_ranks=on_gloo,
            full=True,
            worlds=dist.get_world_size(),
            micro_batches=backwards,
            windows=window,
            loss_scales="1",
            buckets="64",
            offload="none",
            meshes="flat",
            reductions="mean",
            wires="own",
            **driver,
            **axes,
        )
        cells += report.cells
    return tuple(cells)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", default="2", help="numbers of ranks")
    parser.add_argument("--backwards", type=int, default=2, help="backward calls of an update")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="names")
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages")
    parser.add_argument("--precisions", default="fp64,fp32,bf16,autocast", help="dtypes")
    parser.add_argument("--out", type=Path, default=None, help="folder for a Markdown file")
    parser.add_argument("--label", default="", help="at the end of that file's theme")
    return parser


def main() -> int:
    """Run every contestant in processes of its own; 1 if a cell of fzero differs."""
    parser = _parser()
    options = parser.parse_args()
    names = options.contestants.split(",")
    if unknown := [name for name in names if name not in CONTESTANTS]:
        parser.error(f"no contestant is called {unknown[0]!r}; choose from {CONTESTANTS}")
    axes = {"stages": options.stages.split(","), "precisions": options.precisions.split(",")}
    tables, wrong = [], False
    for world in map(int, options.world.split(",")):
        found: dict[str, tuple[CellResult, ...]] = {}
        for name in names:
            if name == "DeepSpeed" and not is_installed():
                print("Skipped DeepSpeed: it is not installed (pip install 'fzero[bench]')")
                continue
            found[name] = run_ranks(measure, world, name, options.backwards, axes)
            failed = [cell for cell in found[name] if cell.failed]
            print(f"W={world} {name}: {len(found[name])} cells, {len(failed)} differ", flush=True)
            wrong = wrong or (name.startswith("fzero") and bool(failed))
        tables.append(markdown(world, options.backwards, found))
        print(tables[-1], flush=True)
        if options.out is not None:
            label = f"-{options.label}" if options.label else ""
            theme = f"matrix-n{options.backwards}{label}"
            print(f"wrote {write_report(options.out, theme, tables, intro=LEGEND)}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
