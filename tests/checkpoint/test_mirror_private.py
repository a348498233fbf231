"""A `Mirror` reads and writes in folders of its own user alone, and leaves none for ever."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import fzero
from fzero.checkpoint import CheckpointError, Mirror, mirror
from fzero.checkpoint.mirror import LOCK, process_of
from fzero.errors import LayoutError
from tests.checkpoint.states import make
from tests.checkpoint.test_mirror import copies, mirror_of

STATE = make({"w": torch.ones(3)}, stage=0)
STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives a folder away")


def refused(folder: Path, match: str) -> None:
    for call in (lambda mirror: mirror.update(STATE), lambda mirror: mirror.restore(STATE)):
        with pytest.raises(LayoutError, match=match) as caught:
            call(mirror_of(folder))
        assert "Fix: give a folder of your own" in str(caught.value)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o1777, 0o770, 0o720):
        tmp_path.chmod(mode)
        refused(tmp_path, r"can be written by others \(d")
        if not mode & stat.S_ISVTX:
            refused(tmp_path / "below", rf"{tmp_path} can be written by others")
    tmp_path.chmod(0o1777)  # as /tmp is
    mirror_of(tmp_path / "below").update(STATE)
    (tmp_path / "below" / mirror.host_name()).chmod(0o777)
    refused(tmp_path / "below", rf"{mirror.host_name()} can be written")


def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangles").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    refused(tmp_path / "link", "link is a link")
    refused(tmp_path / "dangles", "dangles is a link")
    refused(tmp_path / "file", "file is no folder")
    assert not (tmp_path / "nowhere").exists()
    mirror_of(tmp_path / "link" / "below").update(STATE)  # on the way to it: a link of one's own
    (tmp_path / "real").chmod(0o777)
    refused(tmp_path / "link" / "below", "real can be written by others")


@as_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    mirror_of(base).update(STATE, extra={"next": 1})
    own = base / mirror.host_name()
    for folder in (own, base, tmp_path):
        os.chown(folder, STRANGER, STRANGER)
        refused(base, rf"{folder} belongs to the user \w+")
        os.chown(folder, 0, 0)
    (tmp_path / "way").symlink_to(base)
    os.chown(tmp_path / "way", STRANGER, STRANGER, follow_symlinks=False)
    refused(tmp_path / "way" / "below", "way is a link of the user")
    assert mirror_of(base).restore(STATE)[1] == {"next": 1}


def test_to_another_user_it_is_a_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(tmp_path, "belongs to the user|can be written by others")


def test_what_it_makes_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        one = mirror_of(tmp_path / "a" / "b")
        one.update(STATE)
        assert one._flight is not None
        one._flight.handle.result()
    finally:
        os.umask(before)
    (copy,) = copies(tmp_path / "a" / "b")
    for folder in (copy, *copy.parents[:3]):
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700


def test_a_link_at_the_next_name_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    one = mirror_of(tmp_path / "base")
    one.update(STATE)
    assert one._home is not None
    folder, attempt = one._home.folder, one._home.attempt
    name = f"writing-{attempt}-update-000002-rank-00000-of-00001-after-000001"
    (folder / name).symlink_to(victim)
    one.update(STATE)
    with pytest.raises(CheckpointError, match="File exists"):
        one.update(STATE)
    (folder / f"ended-00000-{attempt}").symlink_to(tmp_path / "made")
    one._ends()
    assert not any(victim.iterdir()) and not (tmp_path / "made").exists()


def _by_link(copy: Path, aside: Path) -> None:
    copy.rename(aside)
    copy.symlink_to(aside)


def _file_by_link(copy: Path, aside: Path) -> None:
    (file,) = copy.rglob("*.distcp")
    _by_link(file, aside)


def _opened(copy: Path, aside: Path) -> None:
    copy.chmod(0o770)


def _given_away(copy: Path, aside: Path) -> None:
    os.chown(copy, STRANGER, STRANGER)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_by_link, "is a link"),
        (_file_by_link, "is a link"),
        (_opened, "can be written by others"),
        pytest.param(_given_away, "belongs to the user", marks=as_root),
    ],
)
def test_a_copy_that_is_not_this_users_file_is_not_read(
    change: Callable[[Path, Path], None], match: str, tmp_path: Path
) -> None:
    one = mirror_of(tmp_path / "base")
    one.update(STATE)
    assert one._flight is not None
    one._flight.handle.result()
    (copy,) = copies(tmp_path / "base")
    change(copy, tmp_path / "aside")
    with pytest.raises(CheckpointError, match=rf"(?s)no update is whole.*{match}"):
        mirror_of(tmp_path / "base").restore(STATE)


# What programs that are gone have left.


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of /dev/shm."""
    for module in (mirror, mirror):
        monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield tmp_path
    for folder in tmp_path.iterdir():
        mirror.let_go(folder)


def in_a_child(do: Callable[[], None]) -> int:
    """Fork a process that is killed when it has done something; return its number."""
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            do()
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return pid


def copied() -> None:
    one = Mirror(every=1)
    one.update(STATE)
    assert one._flight is not None
    one._flight.handle.result()


def test_the_next_run_sweeps_the_copies_of_one_that_was_killed(memory: Path) -> None:
    in_a_child(copied)
    (left,) = memory.iterdir()
    assert len(copies(left)) == 1
    one = Mirror(every=1)
    one.update(STATE)
    (own,) = memory.iterdir()
    assert own != left
    one.close()
    assert not any(memory.iterdir())


def test_copies_stay_while_anybody_may_come_back(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of torchrun lives, and its ranks are gone: they will be started again."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    in_a_child(copied)  # this process is its parent: the agent
    (left,) = memory.iterdir()
    mirror.sweep_gone()
    assert left.exists()
    assert (left / LOCK).read_text() == process_of(os.getpid())

    def restored() -> None:
        assert Mirror(every=1).restore(STATE)[0] is not STATE

    in_a_child(restored)
    assert left.exists()


def keepers() -> dict[str, tuple[str, bool]]:
    """{what: (who keeps a folder whose lock is free, whether it is swept)}."""
    boot, spaces, pid, start = process_of(os.getpid()).split()
    gone = in_a_child(lambda: None)
    return {
        "this process": (f"{boot} {spaces} {pid} {start}", False),
        "gone": (f"{boot} {spaces} {gone} {start}", True),
        "another process of that number": (f"{boot} {spaces} {pid} {int(start) - 1}", True),
        "before the boot": (f"before {spaces} {pid} {start}", True),
        "another container": (f"{boot} pid:[1],time:[1] {gone} {start}", False),
        "not known": ("unknown", False),
        "all": (f"{boot} {spaces} -1 {start}", False),
        "nobody": ("", True),
    }


def test_who_keeps_a_folder(memory: Path) -> None:
    for what, (keeper, swept) in keepers().items():
        folder = memory / f"fzero-mirror-{os.geteuid()}-a"
        mirror.hold(folder, "test", keeper)
        (folder / "copy").touch()
        mirror.sweep_gone()
        assert folder.exists(), what
        mirror.let_go(folder)
        other = os.open(folder / LOCK, os.O_RDWR)  # of a rank that lives, without its agent
        import fcntl

        fcntl.flock(other, fcntl.LOCK_SH)
        mirror.sweep_gone()
        assert folder.exists(), what
        os.close(other)
        mirror.sweep_gone()
        assert folder.exists() != swept, what
        mirror.remove_folder(folder)


def test_what_is_not_of_this_user_or_kind_is_not_swept(memory: Path) -> None:
    gone = f"before {process_of(os.getpid()).partition(' ')[2]}"
    names = (f"fzero-mirror-{os.geteuid() + 1}-a", f"fzero-other-{os.geteuid()}-a")
    for name in (*names, f"fzero-mirror-{os.geteuid()}-open"):
        mirror.hold(memory / name, "test", gone)
        mirror.let_go(memory / name)
    (memory / f"fzero-mirror-{os.geteuid()}-open").chmod(0o777)
    (memory / f"fzero-mirror-{os.geteuid()}-link").symlink_to(memory / names[0])
    mirror.sweep_gone()
    assert len([*memory.iterdir()]) == 4
    (memory / f"fzero-mirror-{os.geteuid()}-open").chmod(0o700)
    mirror.sweep_gone()
    assert len([*memory.iterdir()]) == 3


def test_a_replay_that_was_killed_is_swept_by_the_next_one(memory: Path) -> None:
    step = fzero.record(fzero.shard(lambda state: (state, None), stage=0), every=1)
    step(step.init({"w": torch.ones(2)}, fzero.optim.sgd(0.5)))
    (kept,) = step.recording.kept

    def killed() -> None:
        with kept.as_checkpoint():
            os.kill(os.getpid(), signal.SIGKILL)

    in_a_child(killed)
    (left,) = memory.iterdir()
    assert left.name.startswith(f"fzero-replay-{os.geteuid()}-")
    with kept.as_checkpoint() as path:
        assert [*memory.iterdir()] == [path.parent] != [left]
        mirror.sweep_gone()
        assert path.exists()
    assert not any(memory.iterdir())


def test_a_folder_that_another_program_sweeps_while_it_is_made_is_made_again(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep removes an empty folder: here between its making and the look at its owner."""
    look, swept = mirror.why_not_private, []

    def once(folder: Path) -> str:
        if folder.parent == memory and not swept:
            swept.append(folder)
            folder.rmdir()
        return look(folder)

    monkeypatch.setattr(mirror, "why_not_private", once)
    folder = mirror.new_folder(mirror.REPLAY)
    assert swept == [folder] and (folder / LOCK).exists()
    mirror.remove_folder(folder)
