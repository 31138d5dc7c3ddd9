"""Level 3: fused kernels give what unfused ones give, and both give what eager PyTorch gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kagent_core.testing.compare import MismatchError, assert_same, copy_arguments
from kagent_core.testing.conformance.case import Case, Ran, Target
from kagent_core.testing.conformance.chains import CHAINS, Chain
from kagent_core.testing.conformance.literals import literal, wrapped
from kagent_core.testing.conformance.programs import Program, random_program, run_program, valid_steps
from kagent_core.testing.conformance.reproduction import script_head
from kagent_core.testing.conformance.running import OnDevice, assert_right, quiet, widened

LEVEL = 3
CALLS = 2
PROGRAMS, FULL_PROGRAMS = 20, 500
"""How many random programs are tried."""

FULL_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MOST_FUEL = 1024
"""Fusions of one chain or program, at most."""
IDLE = ("clone", 0, 0, 0)
"""The step that takes another one's place in a program that is shortened."""

Tensors = Sequence[torch.Tensor]
Compare = Callable[[Any, Any, str, bool], None]
"""Compares what came with what was to come; gets a name for it, and whether all strides count."""


def cases(target: Target) -> list[Case]:
    """Return a case for each chain and for each of some random programs."""
    count = FULL_PROGRAMS if target.full else PROGRAMS
    return [*map(chain_case, CHAINS), *map(program_case, range(count))]


def chain_case(chain: Chain) -> Case:
    """Return the case of one chain."""
    run, script = functools.partial(_check_chain, chain), functools.partial(_chain_script, chain)
    return Case(LEVEL, chain.name, chain.family, run, script)


def program_case(seed: int) -> Case:
    """Return the case of one random program."""
    run, script = functools.partial(_check_program, seed), functools.partial(_program_script, seed)
    return Case(LEVEL, f"random program {seed}", "random programs", run, script)


# -- fused, unfused, eager


@dataclass
class Counts:
    """Kernel launches of what ran, and what ran elsewhere."""

    unfused: int = 0
    fused: int = 0
    fallbacks: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.unfused} kernels unfused, {self.fused} fused"


def check_fusion(function: Callable[..., Any], given: Tensors, target: Target, compare: Compare) -> Counts:
    """Compare a function with fusion and without it with eager PyTorch: results, and arguments afterwards.

    Raises
    ------
    MismatchError
        At the first difference. Where only fusion makes it, the message says from which fused pair on.
    """
    theirs = copy_arguments(given)
    want = (function(*theirs), theirs)
    counts = Counts()
    unfused = OnDevice(target, fusion=False)
    _check_kind("unfused", function, given, want, unfused, compare)
    fused = OnDevice(target, fusion=True)
    try:
        _check_kind("fused", function, given, want, fused, compare)
    except MismatchError as error:
        told = _first_wrong_fusion(function, given, want, target, compare)
        raise MismatchError(f"{error}{told}", error.element) from None
    counts.unfused, counts.fused = unfused.tasks, fused.tasks
    counts.fallbacks = tuple(sorted(dict(unfused.fallbacks() + fused.fallbacks()).items()))
    return counts


def _check_kind(
    kind: str, function: Callable[..., Any], given: Tensors, want: Any, device: OnDevice, compare: Compare
) -> None:
    def called(*tensors: Any) -> Any:  # a function of its own: Dynamo keeps what it compiled with the function
        return function(*tensors)

    try:
        with device.watched(), torch.no_grad():
            compiled = device.compiled(called, fullgraph=True)  # a graph break would let eager PyTorch in unseen
            for call in range(CALLS):
                mine = copy_arguments(given)
                got = compiled(*mine)
                compare(got, want[0], f"{kind}, result of call {call}", device.host_memory)
                compare(mine, want[1], f"{kind}, arguments after call {call}", device.host_memory)
    except MismatchError:
        raise
    except Exception as error:
        error.add_note(f"with fusion {'on' if kind == 'fused' else 'off'}")
        raise


def _first_wrong_fusion(
    function: Callable[..., Any], given: Tensors, want: Any, target: Target, compare: Compare
) -> str:
    """Say how much fuel it takes to make a result wrong."""

    def is_wrong(fuel: int) -> bool:
        device = OnDevice(target, fusion=True, fusion_fuel=fuel)
        try:
            _check_kind("fused", function, given, want, device, compare)
        except Exception:  # noqa: BLE001 - wrong in whatever way
            return True
        return False

    right, wrong = 0, MOST_FUEL
    if is_wrong(right) or not is_wrong(wrong):
        return ""
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (right, middle) if is_wrong(middle) else (middle, wrong)
    return f"; it is right with fusion_fuel={right}, and wrong with fusion_fuel={wrong}"


# -- chains


@dataclass(frozen=True)
class Trial:
    """Inputs of a chain: of one kind, and of one dtype."""

    kind: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kind} inputs of {str(self.dtype).removeprefix('torch.')}"


def trials(chain: Chain, full: bool) -> Iterator[Trial]:
    """Yield what a chain is tried with."""
    for dtype in FULL_DTYPES if full else FULL_DTYPES[:1]:
        yield from (Trial(kind, dtype) for kind in chain.kinds)


def _check_chain(chain: Chain, target: Target) -> Ran:
    found = [_check_trial(chain, trial, target) for trial in trials(chain, target.full)]
    fallbacks = dict(pair for counts in found for pair in counts.fallbacks)
    return Ran(tuple(sorted(fallbacks.items())), str(found[0]))


def _check_trial(chain: Chain, trial: Trial, target: Target) -> Counts:
    given = chain.inputs(trial.kind, trial.dtype)

    @functools.cache
    def exact() -> tuple[Any, Any]:
        wide = widened(copy_arguments(given))
        return chain.function(*wide), wide

    def compare(got: Any, want: Any, what: str, every_stride: bool) -> None:
        assert_right(got, want, what, lambda: exact()["arguments" in what], every_stride)

    try:
        return check_fusion(chain.function, given, target, compare)
    except MismatchError as error:
        raise MismatchError(f"{trial}: {error}", error.element) from None


def _chain_script(chain: Chain, target: Target) -> str:
    tried = list(trials(chain, target.full))
    trial = next((trial for trial in tried if _raises(_check_trial, chain, trial, target)), tried[0])
    given = literal(chain.inputs(trial.kind, trial.dtype))
    lines = ["", "", chain.source, "", *_comparing_lines(given, chain.name.replace(" ", "_"), target)]
    return "\n".join([_head(f"{chain.name}, {trial}", target), *lines])


def _raises(function: Callable[..., Any], *args: Any) -> bool:
    try:
        function(*args)
    except Exception:  # noqa: BLE001 - whatever it is, the script is to show it
        return True
    return False


# -- random programs


def _check_program(seed: int, target: Target) -> Ran:
    with quiet():
        arguments, program = random_program(seed)
        counts = check_program(arguments, program, target)
    return Ran(counts.fallbacks, f"{len(program)} steps, {counts}")


def check_program(arguments: Tensors, program: Program, target: Target) -> Counts:
    """Compare a program's every tensor, with fusion and without it, with eager PyTorch's.

    Raises
    ------
    MismatchError
        At the first difference.
    """
    types = {tensor.dtype for tensor in run_program(program, copy_arguments(arguments))}

    def compare(got: Any, want: Any, what: str, every_stride: bool) -> None:
        assert_same(got, want, what, every_stride=False, made_from=types)

    return check_fusion(functools.partial(_results, program), arguments, target, compare)


def _results(program: Program, *given: torch.Tensor) -> list[torch.Tensor]:
    return run_program(program, given)[len(given) :]


def _program_script(seed: int, target: Target) -> str:
    with quiet():
        arguments, program = random_program(seed)
        program = _shortened(arguments, program, target)
    used = ["def function(*given):", "    return run_program(program, given)[len(given) :]"]
    steps = [f"    {step!r}," for step in program]
    lines = ["", "program = [", *steps, "]", "", "", *used, "", ""]
    head = _head(f"random program {seed}", target, {"kagent_core.testing.conformance.programs": ["run_program"]})
    return "\n".join([head, *lines, *_comparing_lines(literal(tuple(arguments)), "function", target)])


def _shortened(arguments: Tensors, program: Program, target: Target) -> Program:
    """Leave out steps for as long as the program fails: a script is read by a person.

    A step that later ones count on stays where it is, as a copy of the first tensor.
    """
    if not _raises(check_program, arguments, program, target):
        return program
    for place in [(), (IDLE,), ()]:
        for position in reversed(range(len(program))):
            shorter = [*program[:position], *place, *program[position + 1 :]]
            kept = shorter != program and valid_steps(arguments, shorter) == shorter
            if kept and _raises(check_program, arguments, shorter, target):
                program = shorter
    return program


# -- scripts


def _head(told: str, target: Target, imports: dict[str, list[str]] | None = None) -> str:
    compare = {"kagent_core.testing.compare": ["assert_same", "copy_arguments"]}
    return script_head(f"{told}, fused and unfused", target, compare | (imports or {}))


def _comparing_lines(given: str, function: str, target: Target) -> list[str]:
    every_stride = OnDevice(target).host_memory
    return [
        wrapped(f"given = {given}"),
        "for fusion in (False, True):",
        '    options = {"device": DEVICE, "fusion": fusion}',
        f'    through_kagent = torch.compile({function}, backend="kagent", options=options)',
        "    for _ in range(2):  # the first call builds a plan, the second replays it",
        "        ours, theirs = copy_arguments(given), copy_arguments(given)",
        f"        want, got = {function}(*theirs), through_kagent(*ours)",
        f'        assert_same(got, want, f"result with fusion={{fusion}}", every_stride={every_stride})',
        f'        assert_same(ours, theirs, f"arguments with fusion={{fusion}}", every_stride={every_stride})',
        "    torch._dynamo.reset()",
        "",
    ]
