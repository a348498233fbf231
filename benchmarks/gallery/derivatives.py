"""What libraries answer to programs with derivatives: the tables of docs/gallery/derivatives.md.

    python benchmarks/gallery/derivatives.py
    python benchmarks/gallery/derivatives.py --memory

Each peer's program is written as its users write it, and runs on 4 gloo processes of its own, so
that what one leaves behind harms no other. Its gradient (or H v) is compared with that of one
process that has all rows; an error is put down as it came.
"""

# ruff: noqa: E402  (the paths and the allocator come before torch)
from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system at once
os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"

import torch
import torch.distributed as dist
from ranks import run_ranks
from report import write_report
from torch import Tensor, nn

import fzero

derivatives: Any = importlib.import_module("derivatives")  # the example, not this file

RANKS, ROWS, WIDTH = 4, 96, 1536
MIB = 2**20
PEERS = ("DDP", "FSDP2", "FSDP2, kept", "DeepSpeed 3")
TRAINED = ("DDP", "FSDP2", "FSDP2, kept", "FSDP2, kept, resharded")
PROGRAMS = ("MeanFlow, jvp", "score, jvp", "score, double backward", "PINN, double backward", "H v")
OBJECTIVE = {"MeanFlow, jvp": "MeanFlow", "score, jvp": "score matching"}
OBJECTIVE |= {"score, double backward": "score matching", "PINN, double backward": "PINN"}
OBJECTIVE |= {"H v": "score matching"}


def rows_of(seed: int = 0) -> Tensor:
    """Return all rows; in fp32, which all libraries take."""
    rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(seed))
    rows[:, 4:] = rows[:, 4:].sigmoid()
    return rows


def by_double_backward(name: str) -> Callable[[Any, Tensor], Tensor]:
    """Return the objective as it is written without forward mode: `autograd.grad`."""

    def slope(y: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    def score(net: Any, rows: Tensor) -> Tensor:
        x, v = rows[:, :2].clone().requires_grad_(), rows[:, 2:4].sign()
        s = net(x)
        return ((v * slope((s * v).sum(1), x)).sum(1) + s.square().sum(1) / 2).mean()

    def pinn(net: Any, rows: Tensor) -> Tensor:
        x = (2 * rows[:, :1]).requires_grad_()
        start = torch.zeros_like(x[:1]).requires_grad_()
        u, u0 = net(x), net(start)
        bend, slope0 = slope(slope(u, x), x), slope(u0, start)
        return (bend + u).square().mean() + (u0.square() + (slope0 - 1).square()).mean()

    return {"score matching": score, "PINN": pinn}[name]


def loss_of(program: str) -> Callable[[Any, Tensor], Tensor]:
    """Return (network, rows) -> loss, as the program writes it."""
    name = OBJECTIVE[program]
    if "double" in program:
        return by_double_backward(name)
    if program == "H v":
        return lambda net, rows: net(rows[:, :2]).square().sum(1).mean()
    return derivatives.OBJECTIVES[name][1]


def model_of(program: str) -> nn.Module:
    """Return the same network on every rank."""
    torch.manual_seed(0)
    return derivatives.OBJECTIVES[OBJECTIVE[program]][0]()


def direction(model: nn.Module) -> list[Tensor]:
    """Return the v of H v, in the order of the parameters."""
    return [torch.linspace(-1, 1, p.numel()).reshape(p.shape) for p in model.parameters()]


def hessian_times(loss: Tensor, params: Any, v: Any) -> list[Tensor]:
    """Return H v as users of `autograd.grad` write it."""
    first = torch.autograd.grad(loss, params, create_graph=True)
    along = torch.stack([(g * x).sum() for g, x in zip(first, v, strict=True)]).sum()
    return list(torch.autograd.grad(along, params))


def exact(program: str) -> list[Tensor]:
    """Return the gradient (or H v) of one process, all rows."""
    model, loss = model_of(program), loss_of(program)
    if program == "H v":
        return hessian_times(loss(model, rows_of()), [*model.parameters()], direction(model))
    loss(model, rows_of()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def wrapped(peer: str, model: nn.Module) -> Any:
    """Return the model as the peer wraps it."""
    if peer == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if peer.startswith("FSDP2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        keep = {"reshard_after_forward": False} if "kept" in peer else {}
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **keep)
        found: Any = fully_shard(model, mesh=mesh, **keep)
        if "kept" in peer:  # what pytorch#172543 is answered
            found.set_reshard_after_backward(False)
        return found
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": ROWS // RANKS,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def whole(x: Any) -> Tensor:
    """Return all of a tensor that may be a DTensor."""
    full = getattr(x, "full_tensor", None)
    return full() if full else x


def answer(peer: str, program: str) -> str:
    """Return what the peer says: how far off it is, or its error."""
    try:
        wanted = exact(program)
        model, loss = model_of(program), loss_of(program)
        net = wrapped(peer, model)
        mine = rows_of()[dist.get_rank() :: RANKS]
        params: Any = [*model.parameters()]
        if program == "H v":
            v: Any = direction(model_of(program))
            if peer.startswith("FSDP2"):
                from torch.distributed.tensor import distribute_tensor

                v = [
                    distribute_tensor(x, p.device_mesh, p.placements)
                    for x, p in zip(v, params, strict=True)
                ]
            found = [whole(x) for x in hessian_times(loss(net, mine), params, v)]
        elif peer == "DeepSpeed 3":
            from deepspeed.utils import safe_get_full_grad

            net.backward(loss(net, mine))
            found = [safe_get_full_grad(p) for p in params]
        else:
            loss(net, mine).backward()
            found = [whole(p.grad) for p in params]
        return distance(found, wanted)
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {first.strip()[:170]}"


def distance(found: list[Any], wanted: list[Tensor]) -> str:
    """Return how far off, relative to the largest element of each parameter."""
    missing = [at for at, x in enumerate(found) if x is None]
    if missing:
        return f"no gradient for {len(missing)} of {len(found)} parameters"
    off = max(
        ((x - y).abs().max() / y.abs().max()).item()
        for x, y in zip(found, wanted, strict=True)
        if y.abs().max()
    )
    return f"equal to {off:.1e}" if off < 1e-4 else f"**wrong**: off by {off:.2g}, without a word"


def of_fzero(stage: int, program: str) -> str:
    """Return how far off fzero is: the same program by a functional step."""
    model, loss = model_of(program), loss_of(program)
    wanted, names = exact(program), [name for name, _ in model.named_parameters()]
    apply, params = fzero.functionalize(model)

    def of_rows(p: Any, rows: Tensor) -> Tensor:
        return loss(lambda *x: apply(p, *x), rows)

    v = dict(zip(names, direction(model), strict=True))
    fn = derivatives.times(of_rows, v) if program == "H v" else of_rows

    def step_fn(state: Any, rows: Tensor) -> Any:
        found, _ = fzero.grad_and_reduce(fn, state)(rows)
        return state, fzero.full_gradients(found)

    step = fzero.shard(step_fn, stage=stage)
    state = step.init(params, fzero.optim.sgd(0.1))
    _, found = step(state, rows_of()[dist.get_rank() :: RANKS])
    return distance([found[name] for name in names], wanted)


def of_bits(stage: int, program: str, alone: Any) -> Any:
    """Return the gradient with logical ranks; `alone`: that of one process, or None to get it."""
    model, loss = model_of(program), loss_of(program)
    apply, params = fzero.functionalize(model)
    v = dict(zip((n for n, _ in model.named_parameters()), direction(model), strict=True))

    def of_rows(p: Any, rows: Tensor) -> Tensor:
        return loss(lambda *x: apply(p, *x), rows)

    fn = derivatives.times(of_rows, v) if program == "H v" else of_rows

    def step_fn(state: Any, rows: Tensor) -> Any:
        found, _ = fzero.grad_and_reduce(fn, state)(rows)
        return state, fzero.full_gradients(found)

    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    step = fzero.shard(step_fn, stage=stage, logical_ranks=RANKS)
    _, found = step(step.init(params, fzero.optim.sgd(0.1)), rows_of().chunk(size)[rank])
    if alone is None:
        return found
    return "the same bits" if all(torch.equal(found[n], alone[n]) for n in alone) else "other bits"


def all_of_fzero(stage: int) -> str:
    """Return a row of the table."""
    return " | ".join(of_fzero(stage, program) for program in PROGRAMS)


def all_bits(stage: int, alone: Any) -> str:
    """Return a row of the table."""
    return " | ".join(of_bits(stage, program, alone[program]) for program in PROGRAMS)


class Wide(nn.Module):
    """The network of a program, wide enough for a rank's memory to be that of its parameters."""

    def __init__(self, program: str) -> None:
        super().__init__()
        of_small = [x for x in model_of(program).modules() if isinstance(x, nn.Linear)]
        ends = of_small[0].in_features, of_small[-1].out_features
        widths = [ends[0], *[WIDTH] * 7, ends[1]]
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))

    def forward(self, *parts: Tensor) -> Tensor:
        """Return what the network says of points; MeanFlow has times r and t beside them."""
        x = torch.cat(parts, dim=1)
        for layer in self.layers[:-1]:
            x = layer(x).tanh()
        return self.layers[-1](x)


def status_mib(field: str) -> float:
    """Return VmRSS or VmHWM of this process."""
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def resharded(kind: str, net: Any) -> None:
    """Free the whole parameters that are kept, which an update makes old."""
    if kind.endswith("resharded"):
        for module in net.modules():
            if hasattr(module, "reshard"):  # of FSDP2; it is not recursive
                module.reshard()


def memory(kind: str, program: str) -> str:
    """Return the memory of a rank above that before the model: after a step, and at its peak.

    Each is the median of five steps, after two that are not measured, of the rank with most. Of
    what was freed nothing is counted: it is given back to the system after each step.
    """
    warm = torch.nn.Linear(2, 2)
    warm(torch.ones(1, 2)).sum().backward()
    loss = loss_of(program)
    before = status_mib("VmRSS")
    rows = rows_of()[dist.get_rank() :: RANKS] if kind != "one process" else rows_of()
    if kind.startswith("fzero"):
        apply, params = fzero.functionalize(Wide(program))

        def of_rows(p: Any, rows: Tensor) -> Tensor:
            return loss(lambda *x: apply(p, *x), rows)

        def step_fn(state: Any, rows: Tensor) -> Any:
            state, value = fzero.grad_and_reduce(of_rows, state)(rows)
            return fzero.apply_gradients(state), value

        step = fzero.shard(step_fn, stage=int(kind[-1]))
        held = [step.init(params, fzero.optim.adam(1e-4))]
        del params, apply
        apply = fzero.functionalize(Wide(program).to("meta"))[0]

        def one_step() -> None:
            held[0] = step(held[0], rows)[0]
    else:
        model: Any = Wide(program)
        net = wrapped(kind, model) if kind in TRAINED else model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

        def one_step() -> None:
            loss(net, rows).backward()
            optimizer.step()
            optimizer.zero_grad()
            resharded(kind, net)

    for _ in range(2):
        one_step()
    gc.collect()
    found = []
    for _ in range(5):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        one_step()
        peak = status_mib("VmHWM") - before
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed, more or less of it by chance
        found.append([status_mib("VmRSS") - before, peak])
    most = torch.tensor(found).median(0).values
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return f"{most[0]:.0f}, {most[1]:.0f}"


def trained(peer: str, program: str) -> str:
    """Return how far the parameters are from one process after three steps, or an error."""
    loss, rows = loss_of(program), rows_of()

    def three_steps(net: Any, model: nn.Module, rows: Tensor) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for number in range(3):
            try:
                loss(net, rows).backward()
            except Exception as error:
                first = next(line for line in str(error).splitlines() if line.strip())
                raise RuntimeError(f"step {number + 1}: {type(error).__name__}: {first}") from error
            optimizer.step()
            optimizer.zero_grad()
            resharded(peer, net)
        return [whole(p.detach()) for p in model.parameters()]

    plain, model = model_of(program), model_of(program)
    wanted = three_steps(plain, plain, rows)
    try:
        return distance(
            three_steps(wrapped(peer, model), model, rows[dist.get_rank() :: RANKS]), wanted
        )
    except RuntimeError as error:
        return str(error)[:300]


def kept_or(place: Path, measure: Callable[[], str]) -> str:
    """Return what was measured before, or measure it and keep it."""
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(measure())
        print(f"{place.name}: {place.read_text()}", flush=True)
    return place.read_text()


def steps_and_memory(kept: Path) -> list[str]:
    """Return two tables: what peers answer in three steps, and memory where they answer."""
    programs = PROGRAMS[:-1]  # no peer answers H v
    head = [f"| | {' | '.join(programs)} |", "|---" * (len(programs) + 1) + "|"]
    steps = {
        (peer, program): kept_or(
            kept / f"steps of {peer}, {program}",
            lambda peer=peer, program=program: in_ranks(trained, peer, program),
        )
        for peer in TRAINED
        for program in programs
    }
    rows = [
        f"| {peer} | {' | '.join(steps[peer, program] for program in programs)} |"
        for peer in TRAINED
    ]
    found = []
    for kind in ("one process", *(f"fzero, stage {s}" for s in range(4)), *TRAINED):
        world = 1 if kind == "one process" else RANKS
        cells = [
            kept_or(
                kept / f"{kind}, {program}",
                lambda kind=kind, program=program, world=world: in_ranks(
                    memory, kind, program, world=world
                ),
            )
            if steps.get((kind, program), "equal").startswith("equal")
            else "-"
            for program in programs
        ]
        found.append(f"| {kind} | {' | '.join(cells)} |")
    count = sum(p.numel() for p in Wide("score, jvp").parameters())
    intro = (
        f"\nMemory of a rank in MiB above that before the model, after a step and at its peak:"
        f" medians of five steps, of that of {RANKS} ranks which has most."
        f" {count / 1e6:.1f} million parameters ({count * 4 / MIB:.0f} MiB) with Adam."
        " `-`: an error, see above.\n"
    )
    return ["\n".join([*head, *rows]), intro, "\n".join([*head, *found]), ""]


def in_ranks(fn: Callable[..., Any], *args: Any, world: int = RANKS) -> str:
    """Run on processes of their own; what ends a process is an answer as well."""
    try:
        return run_ranks(fn, world, *args)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"the process ended: {lines[-1][:170] if lines else type(error).__name__}"


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--memory", action="store_true", help="measure steps and memory instead")
    parser.add_argument("--kept", type=Path, default=Path("/tmp/derivatives"), help="of --memory")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.memory:
        intro = (
            f"{RANKS} gloo processes, {ROWS} rows in all, fp32. First, how far the parameters are"
            " from those of one process after three steps of SGD, or the error. `resharded`:"
            " `reshard()` of each module after each update.\n"
        )
        tables = steps_and_memory(args.kept)
        print(write_report(args.out, "gallery-derivatives-memory", tables, intro=intro).read_text())
        return
    alone = {s: {p: of_bits(s, p, None) for p in PROGRAMS} for s in (0, 3)}  # no ranks yet
    rows = [f"| | {' | '.join(PROGRAMS)} |", "|---" * (len(PROGRAMS) + 1) + "|"]
    for stage in range(4):
        found = in_ranks(all_of_fzero, stage)
        rows.append(f"| fzero, stage {stage} | {found} |")
    for stage in (0, 3):
        found = in_ranks(all_bits, stage, alone[stage])
        rows.append(f"| fzero, stage {stage}, `logical_ranks=4` | {found} |")
    for peer in PEERS:
        found = [in_ranks(answer, peer, program).replace("|", "/") for program in PROGRAMS]
        rows.append(f"| {peer} | {' | '.join(found)} |")
        print(rows[-1], flush=True)
    intro = (
        f"{RANKS} gloo processes, {ROWS} rows in all, fp32. A cell says how far the gradient"
        " (or H v) is from one process's, relative to the largest element of a parameter."
        " `FSDP2, kept` has `reshard_after_forward=False` and `set_reshard_after_backward(False)`:"
        " whole parameters stay.\n"
    )
    path = write_report(args.out, "gallery-derivatives", ["\n".join(rows), ""], intro=intro)
    print(path.read_text())


if __name__ == "__main__":
    main()
