"""``kagent bench models``: measures models, prints the tables, and writes the figures down."""

from __future__ import annotations

import importlib.metadata
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor.config
from rich.console import Console

from kagent_core.bench.console import measured, progress_bars
from kagent_core.bench.figures import describe_machine
from kagent_core.bench.functions import measure_functions
from kagent_core.bench.fused import chosen
from kagent_core.bench.models import contenders as known
from kagent_core.bench.models.figures import ModelFigures, ModelsFigures
from kagent_core.bench.models.machine import measure_machine
from kagent_core.bench.models.measuring import Plan, measure_model
from kagent_core.bench.models.tables import print_models
from kagent_core.bench.models.where import measure_report_cost
from kagent_core.bench.models.zoo import BY_NAME, ZooModel, model_of_file
from kagent_core.errors import KagentError

FUNCTION_ROUNDS = 20


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Attributes
    ----------
    models, contenders
        Names or patterns with commas between them; None: all, or, with a program, only the program.
    program
        ``FILE.py:FUNCTION`` of a model of the user's own.
    threads, batch, rounds
        See `kagent_core.bench.models.measuring.Plan`.
    starts
        Whether compile times and memory are measured.
    where
        Whether to tell where kagent's time goes.
    """

    models: str | None = None
    contenders: str | None = None
    program: str | None = None
    threads: int = 1
    batch: int | None = None
    rounds: int = 20
    starts: bool = True
    where: bool = False

    def named_models(self) -> list[tuple[ZooModel, str]]:
        """Return the models, each with what another process is told for it.

        Raises
        ------
        KagentError
            When there is no such model, or a batch is asked of a program, whose inputs are what they are.
        """
        if self.program is not None and self.batch is not None:
            raise KagentError(
                f"--batch {self.batch} is no use with --model: '{self.program}' makes its own inputs",
                hint="let the function return inputs of that batch",
            )
        names = [] if self.models is None and self.program else chosen(self.models, list(BY_NAME), "--models", "model")
        models = [(BY_NAME[name], name) for name in names]
        if self.program is not None:
            own = model_of_file(self.program)
            own.build()  # a program that cannot be built is told now
            models.append((own, self.program))
        return models

    def named_contenders(self) -> list[known.Contender]:
        """Return who runs the models; eager PyTorch always does.

        Raises
        ------
        KagentError
            When there is no such contender, or kagent is none of them and ``where`` asks for its time.
        """
        names = chosen(self.contenders, list(known.BY_NAME), "--contenders", "contender")
        if self.where and known.KAGENT not in names:
            raise KagentError(
                f"--where tells where kagent's time goes, and --contenders {self.contenders} leaves it out",
                hint=f"--contenders {self.contenders},{known.KAGENT}",
            )
        return [one for one in known.CONTENDERS if one.name in names or one.name == known.EAGER]


def run(console: Console, asked: Asked, json_path: Path | None) -> None:
    """Measure, print the tables and, when asked to, write the figures down.

    Parameters
    ----------
    console
        Where to print.
    asked
        What to measure.
    json_path
        File for the figures as JSON.

    Raises
    ------
    KagentError
        When a name is unknown or the file cannot be written; and, after everything, when kagent could not run a model
        or computed something else.
    """
    models, contenders = asked.named_models(), asked.named_contenders()
    figures = measured(json_path, lambda: measure(console, models, contenders, asked), print_models, console)
    _reject_failures(figures.models)


def measure(
    console: Console, models: Sequence[tuple[ZooModel, str]], contenders: Sequence[known.Contender], asked: Asked
) -> ModelsFigures:
    """Measure models on the CPU, with a progress bar on a terminal.

    Parameters
    ----------
    console
        For the progress bar.
    models, contenders
        What to call and who calls it.
    asked
        How.
    """
    began = time.perf_counter()
    where = asked.where
    with _settings(asked.threads), tempfile.TemporaryDirectory(prefix="kagent-bench-") as folder:
        machine = measure_machine() if where else None
        cost = measure_report_cost(Path(folder, "cost"), asked.rounds) if where else None
        plan = Plan(contenders, asked.threads, asked.batch, asked.rounds, asked.starts, cost)
        measured: list[ModelFigures] = []
        with progress_bars(console) as progress:
            bar = progress.add_task("measuring models", total=len(models) * plan.steps)
            for number, (model, program) in enumerate(models):

                def tell(step: str, name: str = model.name) -> None:
                    progress.update(bar, description=f"{name}: {step}", advance=1)

                measured.append(measure_model(model, program, plan, Path(folder, str(number)), tell))
                progress.update(bar, completed=(number + 1) * plan.steps)
        functions = measure_functions(FUNCTION_ROUNDS) if where else ()
        return ModelsFigures(
            describe_machine(),
            asked.threads,
            asked.rounds,
            [one.name for one in contenders],
            _versions(contenders),
            measured,
            machine,
            functions,
            time.perf_counter() - began,
        )


@contextmanager
def _settings(threads: int) -> Iterator[None]:
    """Compute without gradients, in some threads, and let inductor compile without a pool of processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):
            yield
    finally:
        torch.set_num_threads(before)


def _versions(contenders: Sequence[known.Contender]) -> dict[str, str]:
    """Return the versions of the engines that are installed."""
    found = {}
    for name in [one.name for one in contenders if one.name in known.ENGINES]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _reject_failures(models: Sequence[ModelFigures]) -> None:
    failures = {model.name: model.unavailable[known.KAGENT] for model in models if known.KAGENT in model.unavailable}
    if failures:
        name, reason = next(iter(failures.items()))
        raise KagentError(
            f"kagent has no figure for {', '.join(failures)}; for {name}: {reason}",
            hint="run it alone, with --models; KAGENT_LOGS=debug says what kagent does",
        )
