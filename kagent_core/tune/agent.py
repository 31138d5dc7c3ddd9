"""Search, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kagent_core.config import Config
from kagent_core.profile.problem import size_class
from kagent_core.session import session_for
from kagent_core.tune.representative import arguments, program
from kagent_core.tune.search import Found, Progress, search
from kagent_core.tune.trials import Clock, trials


def tune(
    config: Config,
    function: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    clock: Clock = lambda event: event.elapsed_ms,
    on_progress: Progress = lambda doing, done, steps: None,
) -> list[Found]:
    """Find the fastest tile sizes and kernels for a program on the config's device, and remember them.

    They are kept by device, driver, kernel and size of problem, in the file that the ProfilerAgent has in the config's
    ``cache_dir``, in place of what was known of the same problems. Programs that are planned later, by any process,
    use them unless ``tuned`` is off.

    Parameters
    ----------
    config
        Says which device, and how kernels are made.
    function, args, kwargs
        The program. None takes products and convolutions of usual sizes; what is found for one of them then holds for
        problems of about its size.
    clock
        Times a task.
    on_progress
        Called before each trial.
    """
    usual = function is None
    if function is None:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            function, args = program, arguments()
    with trials(function, args, kwargs or {}, config, clock) as runs:
        found = search(runs, on_progress)
    session = session_for(config)
    remembered = [(each, each.problem.signature, each.problem.key) for each in found]
    if usual:
        calls = ((each, each.problem.calls[0]) for each in found)
        remembered += [(each, call.signature, size_class(call)) for each, call in calls]
    session.profiler.forget_configs(session.target, {problem for _, _, problem in remembered})
    for each, signature, problem in remembered:
        if not each.is_default:
            session.profiler.record_config(
                session.target, each.kernel or signature, problem, each.config, each.elapsed_ms
            )
    session.profiler.flush()
    return found
