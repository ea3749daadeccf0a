"""Folders and shards of weight files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from stat import S_IMODE

import pytest
import torch

from trl_april.weights import files
from trl_april.weights.files import shards, weight_folder, write_weights


def test_a_shard_exceeds_its_size_only_by_its_first_parameter():
    sizes = [4, 4, 4, 20, 1, 1]
    params = [(f"p{place}", torch.zeros(size, dtype=torch.uint8)) for place, size in enumerate(sizes)]
    assert [list(shard) for shard in shards(iter(params), 10)] == [["p0", "p1"], ["p2"], ["p3"], ["p4", "p5"]]


def test_a_server_of_another_user_in_another_folder_can_read_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with weight_folder(".") as folder:
        assert folder.is_absolute() and folder.parent == tmp_path
        write_weights(iter([("p", torch.zeros(2))]), folder)
        (file,) = folder.iterdir()
        assert (S_IMODE(folder.stat().st_mode), S_IMODE(file.stat().st_mode)) == (0o755, 0o644)


def test_a_hanging_thread_leaves_no_folder_when_its_process_ends(tmp_path):
    code = (
        "import sys, threading; from trl_april.weights.files import weight_folder; made = threading.Event()\n"
        "def hang():\n"
        "    with weight_folder(sys.argv[1]) as folder:\n"
        "        print(folder); made.set(); threading.Event().wait()\n"
        "threading.Thread(target=hang, daemon=True).start(); made.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert str(tmp_path) in done.stdout and list(tmp_path.iterdir()) == []


class TestAbandonedFolders:
    @pytest.fixture(autouse=True)
    def memory(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setattr(files, "shared_memory", lambda: str(tmp_path))
        return tmp_path

    @staticmethod
    def age(folder: Path) -> None:
        then = folder.stat().st_mtime - 2 * files.UNLOCKED_SECONDS
        os.utime(folder, (then, then))

    def test_the_folder_of_a_killed_process_is_removed_by_the_next_sync(self, memory):
        child = os.fork()
        if child == 0:
            with weight_folder(None) as folder:
                (folder / "model.safetensors").write_bytes(b"weights")
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        (left,) = memory.iterdir()
        with weight_folder(None):
            assert left.exists(), "a new folder may not be locked yet"
        self.age(left)
        with weight_folder(None) as folder:
            assert list(memory.iterdir()) == [folder]
        assert list(memory.iterdir()) == []

    def test_the_folder_of_a_running_process_stays(self, memory):
        with weight_folder(None) as folder:
            self.age(folder)
            with weight_folder(None):
                assert folder.exists()

    def test_nothing_else_is_removed(self, memory, tmp_path_factory):
        elsewhere = tmp_path_factory.mktemp("elsewhere")
        (memory / f"{files.PREFIX}link").symlink_to(elsewhere)
        (memory / f"{files.PREFIX}file").write_text("no folder")
        (memory / "other").mkdir()
        for path in (elsewhere, *memory.iterdir()):
            self.age(path)
        before = {*memory.iterdir()}
        files.remove_abandoned()
        assert {*memory.iterdir()} == before and elsewhere.is_dir()
