"""``kagent bench fused``: chains of operators through kagent, eager PyTorch and `torch.compile`'s default backend."""

from __future__ import annotations

import fnmatch
import gc
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
import torch._inductor.config
from rich.console import Console
from torch._inductor.utils import fresh_cache

from kagent_core.bench.chains import CHAINS, SIZES, Chain
from kagent_core.bench.console import measured, progress_bars
from kagent_core.bench.figures import describe_machine
from kagent_core.bench.functions import bind, own_function, reason_for
from kagent_core.bench.fused_figures import FusedFigures, RowFigures
from kagent_core.bench.fused_tables import print_fused
from kagent_core.bench.memory import CallMemory, measure_memory
from kagent_core.bench.timing import calls_per_round, one_thread, time_calls
from kagent_core.config import load_config
from kagent_core.errors import KagentError, nearest
from kagent_core.session import Session, session_for

MOST_CALLS = 500

TOLERANCES: dict[str, dict[str, Any]] = {"inductor": {"rtol": 1e-4, "atol": 1e-4}}
"""Where not those of the dtype. inductor adds long columns up one by one, which is less exact than eager's sum; what
is asked here is only whether it computed the same."""

Call = Callable[[], object]


def run(console: Console, rows: str | None, sizes: str | None, rounds: int, json_path: Path | None) -> None:
    """Measure on the CPU, print the tables and, when asked to, write the figures down.

    Parameters
    ----------
    console
        Where to print.
    rows, sizes
        Names of chains and of sizes with commas between them; chains may be patterns, as for files. None: all.
    rounds
        Rounds that count.
    json_path
        File for the figures as JSON.

    Raises
    ------
    KagentError
        When a name is unknown, a contender computes something wrong, the CPU cannot be used, or the file cannot be
        written.
    """
    chains = [chain for chain in CHAINS if chain.name in chosen(rows, [c.name for c in CHAINS], "--rows", "row")]
    chosen_sizes = chosen(sizes, SIZES, "--sizes", "size")
    measured(json_path, lambda: measure(console, chains, chosen_sizes, rounds), print_fused, console)


def measure(console: Console, chains: Sequence[Chain], sizes: Sequence[str], rounds: int) -> FusedFigures:
    """Measure chains at several sizes in one thread, with a progress bar on a terminal.

    Parameters
    ----------
    console
        For the progress bar.
    chains, sizes
        What to measure.
    rounds
        Rounds that count.
    """
    started = time.perf_counter()
    with one_thread(), torch.no_grad(), torch.random.fork_rng(devices=()), progress_bars(console) as progress:
        torch.manual_seed(0)
        with torch._inductor.config.patch(compile_threads=1):  # no pool of compiling processes
            task = progress.add_task("compiling and calling chains", total=len(chains) * len(sizes))
            _compile_something()
            figures = []
            for chain in chains:
                for size in sizes:
                    figures.append(_measure(chain, size, rounds))
                    progress.advance(task)
        return FusedFigures(describe_machine(), rounds, figures, time.perf_counter() - started)


def _compile_something() -> None:
    """Import what the compilers are made of, before a clock runs."""
    with _Compilers() as compilers:
        for name in ("kagent", "inductor"):
            _try(name, compilers.compile(name, lambda x: torch.sin(x) + 1, (torch.ones(64),)), {})


def _measure(chain: Chain, size: str, rounds: int) -> RowFigures:
    shape = chain.shapes[size]
    args = chain.make_inputs(shape, chain.dtype)
    contenders: dict[str, Call] = {"eager": bind(chain.function, args)}
    first_call_ms: dict[str, float] = {}
    unavailable: dict[str, str] = {}
    with _Compilers() as compilers:
        # kagent goes first: what the two share, such as PyTorch's own caches, is warm for its peer
        for name in ("kagent", "inductor"):
            call = compilers.compile(name, chain.function, args)
            elapsed_ms = _try(name, call, unavailable)
            if elapsed_ms is not None:
                first_call_ms[name], contenders[name] = elapsed_ms, call
        _check(f"{chain.name} {size}", chain, args, contenders)
        per_call = time_calls(contenders, calls_per_round(contenders["eager"], MOST_CALLS), rounds)
        memory = compilers.memory(list(contenders), chain, args)
    dtype = str(chain.dtype).removeprefix("torch.")
    return RowFigures(chain.name, size, shape, dtype, per_call, first_call_ms, memory, unavailable)


class _Compilers:
    """kagent and the default backend, each with an empty cache, inside a ``with`` block."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kagent-bench-"))
            stack.enter_context(fresh_cache(dir=directory))
            stack.callback(self._forget)
            torch._dynamo.reset()
            options = {"device": "cpu", "cache_dir": str(Path(directory, "kagent"))}
            self._session: Session = session_for(load_config(options=options))
            self._session.open(self._session.target.device)  # a process does that once
            self._arguments: dict[str, dict[str, Any]] = {
                "kagent": {"backend": "kagent", "options": options},
                "inductor": {"backend": "inductor"},
            }
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def compile(self, name: str, function: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> Call:
        """Return a call of a function that is compiled when it is first called."""
        return bind(torch.compile(own_function(function), **self._arguments[name]), args)

    def memory(self, names: Sequence[str], chain: Chain, args: tuple[torch.Tensor, ...]) -> dict[str, CallMemory]:
        """Return what a call of each contender needs; each is compiled anew, from its cache."""
        calls = {
            name: bind(chain.function, args) if name == "eager" else self.compile(name, chain.function, args)
            for name in names
        }
        return measure_memory(calls)

    def _forget(self) -> None:
        torch._dynamo.reset()
        gc.collect()
        self._session.close_abandoned()


def _try(name: str, call: Call, unavailable: dict[str, str]) -> float | None:
    """Call for the first time and return the milliseconds; where a peer cannot compile, enter why and return None."""
    started = time.perf_counter()
    try:
        call()
    except torch._dynamo.exc.TorchDynamoException as error:
        if name == "kagent":
            raise
        # a peer that is missing, as the default backend is without a C++ compiler, is no failure of ours
        unavailable[name] = reason_for(error)
        return None
    return (time.perf_counter() - started) * 1e3


def _check(row: str, chain: Chain, args: tuple[torch.Tensor, ...], contenders: dict[str, Call]) -> None:
    """Compare every contender's result with eager's.

    Raises
    ------
    KagentError
        When one is wrong.
    """
    expected = chain.function(*args)
    for name, call in contenders.items():
        result = call()
        assert isinstance(result, torch.Tensor)
        try:
            if chain.dtype.itemsize < 4:
                _check_half(result, expected, chain.function(*(arg.double() for arg in args)))
            else:
                torch.testing.assert_close(result, expected, **TOLERANCES.get(name, {}))
        except AssertionError as error:
            raise KagentError(
                f"{name} computes row '{row}' wrong: {' '.join(str(error).split())}",
                hint="run it alone, with --rows; KAGENT_LOGS=codegen=debug prints kagent's kernels",
            ) from error


def _check_half(result: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Check a result of a half type, which a compiler may round less often than eager PyTorch does.

    Where terms cancel, results that are as good as eager's are far from it, relatively. So its error is compared.
    """
    torch.testing.assert_close(result, eager, rtol=math.inf, atol=math.inf)  # dtype and shape
    error, eagers = ((one.double() - exact).abs().max().item() for one in (result, eager))
    assert error <= 3 * eagers, f"error of {error:.3g}, and eager's is {eagers:.3g}"


def chosen(names: str | None, known: Sequence[str], option: str, noun: str) -> list[str]:
    """Return the known names that are asked for."""
    if names is None:
        return list(known)
    patterns = [pattern.strip() for pattern in names.split(",")]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            close = nearest(pattern, known)
            raise KagentError(
                f"{option} names '{pattern}', which is no {noun}" + (f"; did you mean '{close}'?" if close else ""),
                hint=f"the {noun}s are {', '.join(known)}",
            )
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
