"""A process that starts one contender on one model: how long until the first result, and what memory it takes.

It is run as ``python -m kagent_core.bench.models.worker REQUEST``, the request being that of `StartRequest.as_json`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kagent_core.bench.models.contenders import BY_NAME as CONTENDERS
from kagent_core.bench.models.process_memory import forget_peak, peak_nbytes, resident_nbytes
from kagent_core.bench.models.zoo import BY_NAME as MODELS
from kagent_core.bench.models.zoo import model_of_file

CALLS = 3


@dataclass(frozen=True)
class StartRequest:
    """What a process is to start.

    Attributes
    ----------
    model
        Name of a model, or ``FILE.py:FUNCTION``.
    contender
        Name of a contender.
    batch
        None: the model's own.
    threads
        That it may use.
    directory
        Of caches and exported files: empty, or left by an earlier process.
    result
        File for what was measured.
    """

    model: str
    contender: str
    batch: int | None
    threads: int
    directory: str
    result: str

    def as_json(self) -> str:
        """Return the request as one argument of a command."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Start:
    """What was measured of one start.

    Attributes
    ----------
    imports_s
        Seconds to import what the contender is made of.
    compile_s
        Seconds from there, with the model in memory, to the first result, less what another call takes.
    starting_nbytes
        By how much the process grew at most up to the first result.
    calling_nbytes
        By how much it had grown at most during later calls: what is kept, such as packed weights, among it.
        Both None where the system does not tell.
    """

    imports_s: float
    compile_s: float
    starting_nbytes: int | None
    calling_nbytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "imports_s": round(self.imports_s, 3),
            "compile_s": round(self.compile_s, 3),
            "starting_nbytes": self.starting_nbytes,
            "calling_nbytes": self.calling_nbytes,
        }


def start(request: StartRequest) -> Start:
    """Start a contender in this process, in which it has not been before."""
    torch.set_num_threads(request.threads)
    contender = CONTENDERS[request.contender]
    model = MODELS[request.model] if request.model in MODELS else model_of_file(request.model)
    began = time.perf_counter()
    contender.load()
    imports_s = time.perf_counter() - began
    module, args = model.build(request.batch)
    with torch.no_grad():
        gc.collect()
        before = resident_nbytes()
        forget_peak()
        began = time.perf_counter()
        call = contender.prepare(module, args, Path(request.directory), request.threads)
        first_s = time.perf_counter() - began
        starting = peak_nbytes()
        gc.collect()
        forget_peak()
        seconds = []
        for _ in range(CALLS):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return Start(imports_s, first_s - min(seconds), _growth(starting, before), _growth(peak_nbytes(), before))


def _growth(later: int | None, before: int | None) -> int | None:
    return None if later is None or before is None else max(0, later - before)


def main() -> None:
    """Do what the command line asks for."""
    request = StartRequest(**json.loads(sys.argv[1]))
    Path(request.result).write_text(json.dumps(asdict(start(request))), encoding="utf-8")


if __name__ == "__main__":
    main()
