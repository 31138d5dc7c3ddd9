"""The search: one tile size after the other, every problem of a program at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kagent_core.errors import KagentError, LaunchConfigError
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import KernelDescriptor, LaunchConfig
from kagent_core.specs.tiles import Tiles, checked_tiles, spelled_tiles
from kagent_core.tune.trials import Problem, Trials, refused

log = get_logger("profile")

AXES: Mapping[str, Sequence[int]] = {
    "columns": (16, 32, 64),
    "rows": (4, 6, 8, 12),
    "blocks": (2, 4, 8, 16),
    "depth": (128, 256, 512),
    "queries": (8, 16, 32, 64),
    "keys": (16, 32, 64),
    "lanes": (32, 64, 128),
    "block_rows": (32, 64, 128),
    "block_columns": (32, 64, 128),
    "block_depth": (8, 16, 32),
    "thread_rows": (4, 8),
    "thread_columns": (4, 8),
}
"""What is tried of each tile size, in the order in which they are tried. Sizes that a device's kernels do not have
change no text, and so cost nothing."""

WORTH_IT = 0.97
"""What a choice may take of the time of the device's own: less of a gain may be chance."""

CONFIRMATIONS = 4
"""How often what was chosen and the device's own are measured again at the end."""

Progress = Callable[[str, int, int], None]
"""Told what is tried, how many trials are done, and of how many."""


@dataclass
class Found:
    """What was found for one problem.

    Attributes
    ----------
    problem
        What was searched for.
    default_ms
        With the device's own tile sizes, or None where its kernel has none.
    elapsed_ms
        With what was chosen.
    tiles
        Chosen tile sizes; empty: the device's own.
    kernel
        The kernel that is faster than all generated ones; None where none is.
    refusals
        What the device refused, and why.
    """

    problem: Problem
    default_ms: float
    elapsed_ms: float
    tiles: Tiles = ()
    kernel: str | None = None
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def is_default(self) -> bool:
        """Whether nothing is faster than what the device takes by itself."""
        return not self.tiles and self.kernel is None

    @property
    def config(self) -> LaunchConfig:
        """What is remembered."""
        return LaunchConfig(tiles=self.tiles) if self.kernel is None else LaunchConfig()


def search(trials: Trials, on_progress: Progress = lambda doing, done, steps: None) -> list[Found]:
    """Find what is fastest for each problem of a program.

    Parameters
    ----------
    trials
        The program.
    on_progress
        Called before each trial.
    """
    steps = sum(map(len, AXES.values())) + 3
    on_progress("the device's own", 0, steps)
    problems = trials.problems()
    times = trials.times({})
    found = {problem.key: Found(problem, times[problem.key], times[problem.key]) for problem in problems}
    seen = {key: {_text(trials, each, ())} for key, each in found.items()}
    done = 1
    for name, sizes in AXES.items():
        for size in sizes:
            on_progress(f"{name} = {size}", done, steps)
            done += 1
            tried = _new(trials, found.values(), seen, name, size)
            for key, elapsed_ms in _try_tiles(trials, tried, found).items():
                if elapsed_ms < found[key].elapsed_ms:
                    found[key].tiles, found[key].elapsed_ms = tried[key], elapsed_ms
    on_progress("again, to be sure", done, steps)
    _confirm(trials, found)
    on_progress("other kernels", done + 1, steps)
    _try_kernels(trials, found)
    return list(found.values())


def _new(
    trials: Trials, found: Iterable[Found], seen: Mapping[str, set[str]], name: str, size: int
) -> dict[str, Tiles]:
    """Return the tile sizes to try: those that make a kernel which was not tried yet."""
    tried: dict[str, Tiles] = {}
    for each in found:
        tiles = checked_tiles({**dict(each.tiles), name: size})
        text = _text(trials, each, tiles)
        if text and text not in seen[each.problem.key]:
            seen[each.problem.key].add(text)
            tried[each.problem.key] = tiles
    return tried


def _text(trials: Trials, found: Found, tiles: Tiles) -> str:
    """Return a kernel's text; an empty one where the device refuses it, or its kernel is not a generated one."""
    try:
        return trials.text(found.problem, tiles)
    except LaunchConfigError as error:
        _refuse(found, spelled_tiles(tiles), error)
        return ""


def _try_tiles(trials: Trials, tiles: Mapping[str, Tiles], found: Mapping[str, Found]) -> dict[str, float]:
    """Return the times of what is tried. When the device refuses a kernel, halves find out which one it is."""
    if not tiles:
        return {}
    try:
        times = trials.times(tiles)
    except KagentError as error:
        if len(tiles) == 1:
            [(key, sizes)] = tiles.items()
            _refuse(found[key], spelled_tiles(sizes), error)
            return {}
        pairs = list(tiles.items())
        halves = (dict(pairs[: len(pairs) // 2]), dict(pairs[len(pairs) // 2 :]))
        return {key: time for half in halves for key, time in _try_tiles(trials, half, found).items()}
    return {key: times[key] for key in tiles}


def _confirm(trials: Trials, found: Mapping[str, Found]) -> None:
    """Measure what was chosen again, next to the device's own: what is not clearly faster is given up."""
    chosen = {key: each.tiles for key, each in found.items() if each.tiles}
    if not chosen:
        return
    for _ in range(CONFIRMATIONS):  # in turn, so that a machine that is busy for a while is equally slow for both
        for key, elapsed_ms in trials.times({}).items():
            if key in found:
                found[key].default_ms = min(found[key].default_ms, elapsed_ms)
        for key, elapsed_ms in _try_tiles(trials, chosen, found).items():
            found[key].elapsed_ms = min(found[key].elapsed_ms, elapsed_ms)
    for each in found.values():
        if each.elapsed_ms > WORTH_IT * each.default_ms:
            each.tiles, each.elapsed_ms = (), each.default_ms


def _try_kernels(trials: Trials, found: Mapping[str, Found]) -> None:
    for each in found.values():
        for kernel in trials.alternatives(each.problem):
            _try_kernel(trials, kernel, each)


def _try_kernel(trials: Trials, kernel: KernelDescriptor, found: Found) -> None:
    """Take another kernel where it is faster than the generated one with its best tile sizes."""
    try:
        elapsed_ms = trials.times({}, [kernel])[found.problem.key]
    except KagentError as error:
        _refuse(found, kernel.name, error)
        return
    log.debug("%s: kernel '%s' takes %.3f ms", found.problem.key, kernel.name, elapsed_ms)
    if elapsed_ms < WORTH_IT * found.elapsed_ms:
        found.kernel, found.elapsed_ms = kernel.name, elapsed_ms


def _refuse(found: Found, what: str, error: KagentError) -> None:
    reason = refused(error)
    log.info("%s: '%s' is left out: %s", found.problem.key, what, reason)
    found.refusals[what] = reason
