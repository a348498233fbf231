"""Time the ways to lower a collective, side by side, for each backend, world and size.

    python benchmarks/collectives.py --world 2,4 --size-kib 64,1024,4096,16384,32768

fzero picks its lowering per backend from this table: gloo's `reduce_scatter` is an all-reduce of
everything followed by a slice, and its `all_gather` a ring, so spelling them with other
operations is faster there. Sizes are those of the full buffer (reduce-scatter input, all-gather
output, all-reduce buffer), float32. Every candidate's result is checked before it is timed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lowerings import CHUNKS, FAMILIES, Buffers
from ranks import interleave, run_ranks
from report import write_report
from torch import Tensor

_INTRO = """\
Milliseconds: median over rounds of the slowest rank; in parentheses the ratio to the operation
itself, the first row. Sizes are those of the full buffer. All candidates of a column were run in
turn in the same processes, on buffers made beforehand.
"""


def _buffers(size_bytes: int, device: torch.device) -> tuple[Buffers, dict[str, Tensor]]:
    """The buffers of one size, and what each family must make of them on this rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shard_numel = size_bytes // 4 // (world * CHUNKS) * CHUNKS
    # Small integers, other ones at each place: every sum of W of them is exact in float32.
    base = (torch.arange(world * shard_numel, device=device) % 251).float().view(world, -1)
    made = Buffers(
        rank=rank,
        full=base * (rank + 1),
        shard=base[rank].clone(),
        scratch=torch.empty_like(base),
        out=torch.empty_like(base),
    )
    total = base * (world * (world + 1) // 2)
    return made, {"reduce_scatter": total[rank], "all_gather": base, "all_reduce": total}


def _problem(candidate: Callable[[], Tensor], want: Tensor) -> str:
    """'' if the candidate gives `want`, else what is wrong; all ranks must see the same."""
    try:
        return "" if torch.equal(candidate(), want) else "wrong result"
    except RuntimeError as error:  # an operation that the backend does not have, on any rank
        return f"refused: {str(error).splitlines()[0][:60]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One candidate at one size; `problem` is empty if it ran and was right."""

    family: str
    candidate: str
    size_bytes: int
    median_ms: float  # over rounds, of the slowest rank; nan if there is a problem
    problem: str


def measure(sizes_bytes: list[int], rounds: int, warmup: int, backend: str) -> list[Record]:
    """Check and time every candidate at every size; runs on every rank."""
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    records: list[Record] = []
    for size_bytes in sizes_bytes:
        for family, lowerings in FAMILIES.items():
            buffers, want = _buffers(size_bytes, device)
            candidates = {name: partial(fn, buffers) for name, fn in lowerings.items()}
            problems = {name: _problem(fn, want[family]) for name, fn in candidates.items()}
            good = {name: fn for name, fn in candidates.items() if not problems[name]}
            times = interleave(good, rounds=rounds, warmup=warmup, device=device)
            records += [
                Record(
                    family=family,
                    candidate=name,
                    size_bytes=size_bytes,
                    median_ms=math.nan if problem else statistics.median(times[name]),
                    problem=problem,
                )
                for name, problem in problems.items()
            ]
    return records


def table(records: Sequence[Record], family: str) -> str:
    """Markdown: a row for each candidate, a column for each size; `ms (ratio to the op)`."""
    sizes = sorted({record.size_bytes for record in records})
    cells = {(item.candidate, item.size_bytes): item for item in records if item.family == family}
    lines = [
        f"| {family} | " + " | ".join(f"{size / 2**20:g} MiB" for size in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    first, *_ = FAMILIES[family]
    for name in FAMILIES[family]:
        texts = [_text(cells[name, size], cells[first, size].median_ms) for size in sizes]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def _text(record: Record, op_ms: float) -> str:
    return record.problem or f"{record.median_ms:.2f} ({record.median_ms / op_ms:.2f})"


def main() -> None:
    """Parse the command line, measure every world, print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--world", default="2,4", help="numbers of ranks")
    parser.add_argument("--size-kib", default="64,1024,4096,16384,32768", help="full buffers")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder for a Markdown file")
    options = parser.parse_args()
    sizes_bytes = [int(float(size) * 1024) for size in options.size_kib.split(",")]
    tables: list[str] = []
    for world in (int(size) for size in options.world.split(",")):
        records = run_ranks(
            measure,
            world,
            sizes_bytes,
            options.rounds,
            options.warmup,
            options.backend,
            backend=options.backend,
        )
        tables.append(f"### {options.backend}, W={world}\n")
        tables += [table(records, family) for family in FAMILIES]
        print("\n".join(tables[-1 - len(FAMILIES) :]), flush=True)
    if options.out is not None:
        print(f"wrote {write_report(options.out, 'collectives', tables, intro=_INTRO)}")


if __name__ == "__main__":
    main()
