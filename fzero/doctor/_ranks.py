"""Ranks on this machine that run checks: processes of their own, which may crash."""

from __future__ import annotations

import datetime
import logging
import pickle
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fzero.doctor._check import Check, Finding, run, worst
from fzero.errors import AxisError

WAIT = datetime.timedelta(minutes=5)  # for another rank; a check that waits longer raises


def findings(checks: Sequence[Check], *, world: int) -> list[Finding]:
    """Return what comes of each check: of all ranks the worst finding.

    Raises `AxisError` where a rank cannot start, or ends before its last check.
    """
    with tempfile.TemporaryDirectory(prefix="fzero-doctor-") as name:
        folder = Path(name)
        try:
            mp.spawn(_serve, args=(list(checks), world, folder), nprocs=world)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            check = folder / f"check of {error.error_index}"
            where = f"in {check.read_text()}" if check.is_file() else "before its first check"
            raise AxisError(
                f"rank {error.error_index} of {world} ended {where}: "
                f"{str(error).strip().splitlines()[-1]}.",
                cause="a collective that crashes; before the first check a host name that leads "
                "to no address of this machine, or a sandbox without sockets.",
                fix="export GLOO_SOCKET_IFNAME=lo, and run it again; or use another version of "
                "torch.",
            ) from None
        return pickle.loads((folder / "found").read_bytes())


def _serve(rank: int, checks: Sequence[Check], world: int, folder: Path) -> None:
    """Run the checks on one rank; rank 0 writes down what came of them."""
    warnings.simplefilter("ignore")  # what is deprecated in torch is not what is looked for
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=WAIT)
    answers = dist.new_group(backend="gloo", timeout=2 * WAIT)
    found = []
    for check in checks:
        (folder / f"check of {rank}").write_text(
            f"{check.subject.name}, {check.transform}, {check.dtype}"
        )
        each: list = [None] * world
        dist.all_gather_object(each, run(check, rank, world), group=answers)  # ranks stay in step
        found.append(worst(each))
    if rank == 0:
        (folder / "found").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
