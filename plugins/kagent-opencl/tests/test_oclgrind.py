"""Kernels under Oclgrind, which interprets them: no access beside a buffer, no race, of work-items or work-groups."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("oclgrind_programs.py")
OPTIONS = ("--data-races", "--uniform-writes", "--num-threads", "1", "--max-errors", "20")


def oclgrind(what: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Run the script under Oclgrind; return what it prints, and what Oclgrind has to say."""
    command = shutil.which("oclgrind")
    assert command is not None, "oclgrind is not installed: apt-get install oclgrind"
    log = folder / "oclgrind.log"
    arguments = [command, *OPTIONS, "--log", str(log), sys.executable, str(SCRIPT), what]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told, log.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["vectors", "groups"])
def test_no_kernel_reads_or_writes_beside_its_buffers_or_races(what: str, tmp_path: Path) -> None:
    told, log = oclgrind(what, tmp_path)
    assert log == ""
    assert len(told["ran"]) >= 35
    assert told["left"] == [], "kernels of the plugin's own that no program of oclgrind_programs runs"


@pytest.mark.slow
def test_no_thread_races_another_for_rows_beyond_shared_memory(tmp_path: Path) -> None:
    told, log = oclgrind("long rows", tmp_path)
    assert log == ""
    assert len(told["ran"]) >= 11


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("write behind", "Invalid write of size 4 at global memory address"),
        ("read before", "Invalid read of size 4 at global memory address"),
        ("race", "Write-write data race at global memory address"),
        ("race in a group", "Write-write data race at local memory address"),
    ],
)
def test_a_planted_fault_is_found(fault: str, expected: str, tmp_path: Path) -> None:
    _, log = oclgrind(fault, tmp_path)
    assert expected in log
    assert "planted" in log
