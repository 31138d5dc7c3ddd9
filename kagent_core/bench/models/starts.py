"""Starts contenders in processes of their own: first with nothing in any cache, then with what the first one left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kagent_core.bench.models.contenders import EAGER
from kagent_core.bench.models.worker import Start, StartRequest

MOST_SECONDS = 1800
"""That a start may take."""


class StartError(Exception):
    """Why a contender did not start, in a line."""


def measure_starts(
    model: str, contender: str, batch: int | None, threads: int, directory: Path
) -> tuple[Start, Start | None]:
    """Start a contender twice, and return what both starts took; the second is None for eager PyTorch.

    Parameters
    ----------
    model, contender, batch, threads
        As in `StartRequest`.
    directory
        An empty one. Afterwards it has what the contender caches or exports.

    Raises
    ------
    StartError
        When it cannot run the model.
    """
    cold = _start(model, contender, batch, threads, directory)
    return cold, None if contender == EAGER else _start(model, contender, batch, threads, directory)


def _start(model: str, contender: str, batch: int | None, threads: int, directory: Path) -> Start:
    with tempfile.TemporaryDirectory(prefix="kagent-bench-") as folder:
        result = Path(folder, "start.json")
        request = StartRequest(model, contender, batch, threads, str(directory), str(result))
        command = [sys.executable, "-m", "kagent_core.bench.models.worker", request.as_json()]
        number = str(threads)
        environment = os.environ | {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise StartError(f"it was not ready after {MOST_SECONDS} s") from error
        if done.returncode != 0:
            raise StartError(reason_in(done.stderr) or f"its process ended with status {done.returncode}")
        return Start(**json.loads(result.read_text(encoding="utf-8")))


def reason_in(stderr: str) -> str:
    r"""Return what an uncaught exception said, of all that a process wrote: the first line after the last traceback.

    Examples
    --------
    >>> reason_in("Traceback (most recent call last):\n  File ...\nValueError: no\nmore of it\n")
    'ValueError: no'
    """
    _, _, last = stderr.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in last.splitlines() if line.strip()]
    return next(
        (line.strip() for line in lines if not line.startswith((" ", "\t"))), lines[-1].strip() if lines else ""
    )
