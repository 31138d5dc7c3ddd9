"""``kagent tune``: tile sizes and kernels that are fast on a device, found by measuring and kept for later.

With ``--json``, a list with one object per problem: ``problem``, ``signature``, ``default_ms``, ``elapsed_ms``,
``tiles`` (an object; empty: the device's own), ``kernel`` (null: a generated one) and ``refused`` (an object: what, and
why).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kagent_core.cli.output import JsonOption, counted, make_console, make_table, print_json, print_remark
from kagent_core.config import Config, load_config

if TYPE_CHECKING:
    from rich.console import Console

    from kagent_core.tune.search import Found

_SHOWN_REASONS = 3


def tune_command(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="TYPE or TYPE:INDEX.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FILE.py[:FUNCTION]",
            help="Tune the products of this program: `model` and `inputs` of the file, or what FUNCTION() returns.",
        ),
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Forget what was found for the device before.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the tile sizes of products, convolutions and attention that are fastest on a device, and remember them.

    Without a model, usual sizes are measured, and what is found holds for sizes like them. Programs that are
    compiled later use what was found, in every process, as long as the config key tuned is on.
    """
    from kagent_core.session import session_for

    config = load_config({"device": device})
    if forget:
        session = session_for(config)
        session.profiler.forget_configs(session.target)
        make_console(stderr=True).print(f"forgot what was tuned for {session.target.device}")
        if model is None:
            return
    console = make_console()
    found = _tuned(console, config, model)
    if as_json:
        print_json([_as_dict(each) for each in found])
    else:
        _print_found(console, found, config)


def _tuned(console: Console, config: Config, model: str | None) -> list[Found]:
    from kagent_core.bench.console import progress_bars
    from kagent_core.cli.needs import load_program, program_arguments
    from kagent_core.tune.agent import tune

    function: Callable[..., Any] | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    if model is not None:
        function, inputs = load_program(model)
        args, kwargs = program_arguments(inputs)
    with progress_bars(console) as progress:
        bar = progress.add_task(f"tuning {config.device}")

        def show(doing: str, done: int, steps: int) -> None:
            progress.update(bar, description=f"{config.device}: {doing}", completed=done, total=steps)

        return tune(config, function, args, kwargs, on_progress=show)


def _print_found(console: Console, found: Sequence[Found], config: Config) -> None:
    table = make_table("problem", "device's own, ms>", "chosen, ms>", "what was chosen")
    for each in sorted(found, key=lambda one: -one.default_ms):
        chosen = f"kernel '{each.kernel}'" if each.kernel else ", ".join(f"{name} {size}" for name, size in each.tiles)
        times = f"{each.default_ms:.3f}", f"{each.elapsed_ms:.3f}" if chosen else "-"
        table.add_row(each.problem.key, *times, chosen or "the device's own")
    if not found:
        print_remark(
            console,
            f"nothing to tune: no kernel that {config.device} takes has tile sizes; with generated_kernels = "
            f"'{config.generated_kernels}', products may come from a library",
        )
        return
    console.print(table)
    faster = sum(not each.is_default for each in found)
    print_remark(
        console,
        f"{faster} of {counted(len(found), 'problem')} are faster so than with the device's own tile sizes, and are "
        f"remembered in {config.cache_dir}",
    )
    reasons = {reason: what for each in found for what, reason in each.refusals.items()}
    for reason, what in list(reasons.items())[:_SHOWN_REASONS]:
        print_remark(console, f"left out: {what}: {reason}")
    if len(reasons) > _SHOWN_REASONS:
        print_remark(console, f"left out for {len(reasons) - _SHOWN_REASONS} other reasons: KAGENT_LOGS=profile=info")


def _as_dict(found: Found) -> dict[str, Any]:
    return {
        "problem": found.problem.key,
        "signature": found.problem.signature,
        "default_ms": round(found.default_ms, 4),
        "elapsed_ms": round(found.elapsed_ms, 4),
        "tiles": dict(found.tiles),
        "kernel": found.kernel,
        "refused": found.refusals,
    }
