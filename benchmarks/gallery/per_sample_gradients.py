"""Gradients by sample: the most bytes that a rank holds, by way, stage and number of samples.

    PYTHONPATH=.:benchmarks python benchmarks/gallery/per_sample_gradients.py

Two virtual ranks, a model of 4 equal layers, chunks of 2 samples. What opacus holds is measured
where it is installed, on one process, as its users write it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from report import hardware, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fzero
from tests.drivers import each_rank
from tests.live_bytes import LiveBytes
from tests.transforms.test_per_sample_gradients import WIDTH, P, clipped_sum_of, network

ROOT = Path(__file__).parents[2]
SAMPLES, CHUNK = (16, 64), 2
_INTRO = """\
The most bytes that are held beyond state and batch while the clipped sum of a rank's gradients is
made, in P, the bytes of all parameters (4 layers of 64 x 64, fp32), on 2 virtual ranks; chunks of
2 samples, so that the gradients of a chunk are 2 P and the sum is 1 P. Counted after each
operation, by storages.
"""


def peak(way: str, stage: int, samples: int) -> float:
    """Return what one of two ranks holds, in P."""
    apply, params = fzero.functionalize(network())
    clipped_sum = clipped_sum_of(apply, CHUNK, at_once="chunk_size" in way)
    peaks: list[int] = []

    def body(rank: int) -> Tensor:
        state = fzero.init(params, fzero.optim.sgd(0.1), stage=stage, units=apply.units)
        x = torch.randn(samples, WIDTH)
        for _ in range(2):  # the first one records the order of gathers
            with LiveBytes() as live:
                live.begin()
                if way.startswith("full_params"):
                    clipped_sum(fzero.full_params(state), x)
                else:
                    fzero.evaluate(clipped_sum, state)(x)
        peaks.append(live.peak)
        return torch.zeros(())

    each_rank(body, 2)
    return max(peaks) / P


def opacus_peak(mode: str, samples: int) -> float:
    """Return what opacus holds in a backward and a step, beyond parameters and batch, in P."""
    opacus: Any = importlib.import_module("opacus")
    manager: Any = importlib.import_module("opacus.utils.batch_memory_manager")
    module: Any = network()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(samples, WIDTH), torch.zeros(samples).long())
    loss_fn: Any = nn.CrossEntropyLoss()
    made: Any = opacus.PrivacyEngine().make_private(
        module=module,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=samples),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        criterion=loss_fn,
        grad_sample_mode="ghost" if mode == "ghost" else "hooks",
    )
    module, optimizer, *rest, loader = made
    loss_fn = rest[0] if rest else loss_fn

    def epoch(batches: Any) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(module(x), y).backward()
            optimizer.step()

    with LiveBytes() as live:
        live.begin()
        if mode == "BatchMemoryManager":
            with manager.BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=CHUNK, optimizer=optimizer
            ) as parts:
                epoch(parts)
        else:
            epoch(loader)
    return live.peak / P


def main() -> None:
    """Measure, and write the results."""
    rows = []
    for way in ("evaluate, loop", "full_params, loop", "evaluate, vmap(chunk_size=2)"):
        for samples in SAMPLES:
            cells = " | ".join(f"{peak(way, stage, samples):.2f}" for stage in range(4))
            rows.append(f"| {way} | {samples} | {cells} |")
    head = "| way | samples | stage 0 | 1 | 2 | 3 |\n|---|---|---|---|---|---|\n"
    tables = [head + "\n".join(rows) + "\n"]
    peers = []
    for mode in ("hooks", "BatchMemoryManager", "ghost"):
        try:
            cells = " | ".join(f"{opacus_peak(mode, samples):.2f}" for samples in SAMPLES)
        except Exception as error:
            cells = f"{type(error).__name__}: {str(error).splitlines()[0]} | "
        peers.append(f"| {mode} | {cells} |")
    peer_head = "| opacus, one process, whole parameters | 16 samples | 64 |\n|---|---|---|\n"
    tables.append(peer_head + "\n".join(peers) + "\n")
    try:
        opacus_version = importlib.metadata.version("opacus")
    except importlib.metadata.PackageNotFoundError:
        opacus_version = "not installed"
    date = datetime.date.today().isoformat()
    path = ROOT / f"benchmarks/results/gallery-per-sample-gradients_{hardware()}_{date}.md"
    title = f"# gallery-per-sample-gradients, {hardware()}, {date}\n"
    command = "    PYTHONPATH=.:benchmarks python benchmarks/gallery/per_sample_gradients.py\n"
    path.write_text(
        "\n".join([title, command, f"{versions()}, opacus {opacus_version}.\n", _INTRO, *tables])
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
