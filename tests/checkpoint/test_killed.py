"""Who is killed while it writes, at any call that changes the disk, leaves all old or all new."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KILLED = """
import builtins, os, shutil, signal, sys, torch, fzero
from pathlib import Path
from fzero.checkpoint import export_safetensors, import_safetensors, load, save
torch.set_num_threads(1)
kind, folder = sys.argv[1], Path(sys.argv[2])
def one(value):
    return fzero.init({"w": torch.full((9,), value)}, fzero.optim.sgd(1.0), stage=0)
def in_places(value):
    mesh = fzero.Mesh({"data": 1, "expert": 2})
    def begin():
        own = value + mesh.axis.along("expert").rank / 8
        return fzero.init(
            {"w": torch.full((9,), own)}, fzero.optim.sgd(1.0), stage=1, mesh=mesh["data"]
        )
    return fzero.simulate(begin, world_size=2)()
def values(state):
    return tuple(sorted({*state.params.flats[0].reshape(-1).tolist()} - {0.0}))
if kind == "export":
    make = one
    def write(value):
        export_safetensors(folder, make(value), max_shard_bytes=8)
    def read():
        return import_safetensors(folder, make(5.0))
else:
    make = {"save": one, "places": in_places}[kind]
    def write(value):
        save(folder, make(value))
    def read():
        return load(folder, make(5.0))
def dying(real):
    def call(*args, **kwargs):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **kwargs)
    return call
names = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir")
old, new = (values(make(x)) for x in (1.0, 2.0))
killed = 0
write(1.0)
while True:
    child = os.fork()
    if not child:
        left = killed
        for name in names:
            setattr(os, name, dying(getattr(os, name)))
        shutil.rmtree, builtins.open = dying(shutil.rmtree), dying(open)
        write(2.0)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = values(read())
    assert found in (old, new) and (status or found == new), (killed, status, found)
    print(killed, found == new)
    if not status:
        break
    if found == new:
        write(1.0)
    killed += 1
write(1.0)
print(*sorted(str(x.relative_to(folder)) for x in folder.rglob("[!.]*") if "data-" not in str(x)))
"""


@pytest.mark.parametrize("kind", ["save", "places", "export"])
def test_all_old_or_all_new(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("model_ema.safetensors", "model-best.safetensors", "modeling.safetensors"):
        (folder / name).touch()
    (folder / "expert=0of3").mkdir()
    (folder / "expert=0of3" / "checkpoint.json").touch()
    command = [sys.executable, "-c", KILLED, kind, str(folder)]
    ended = subprocess.run(command, timeout=200, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    *rounds, last = ended.stdout.splitlines()
    found = [line.split()[1] for line in rounds]
    assert found[0] == "False" and found[-1] == "True" and len(found) > 8, found
    there = last.split()
    assert {"expert=0of3/checkpoint.json", "model_ema.safetensors", "model-best.safetensors"} <= {
        *there
    }
    exported = [name for name in there if "-of-" in name and not name.startswith(".partial")]
    assert len(exported) == (kind == "export")
