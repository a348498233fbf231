"""The folder where a recorder keeps states."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from fzero.checkpoint.everywhere import Ranks, from_first


class StateFolder:
    """Where states are kept; one that was made for it goes when nobody holds it any more."""

    def __init__(self, ranks: Ranks, path: Path | None) -> None:
        shared = Path("/dev/shm")
        where = str(shared) if shared.is_dir() else None

        def make() -> Path:
            if path is None:
                return Path(tempfile.mkdtemp(prefix="fzero-recording-", dir=where))
            path.mkdir(parents=True, exist_ok=True)
            return path

        self.ranks = ranks
        self.path = from_first(ranks, make, what="make the folder of a recording")
        if path is None and ranks.axis.rank == 0:
            weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
