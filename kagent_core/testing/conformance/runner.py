"""Running the kit: collects cases, runs them one by one, and says what came of each."""

from __future__ import annotations

import fnmatch
import importlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from kagent_core.config import load_config
from kagent_core.errors import ConfigError
from kagent_core.testing.conformance.case import LEVELS, CannotRunError, Case, Finding, Outcome, Ran, Target
from kagent_core.testing.conformance.expected import ExpectedFailures, expected_of, read_expected
from kagent_core.testing.conformance.report import Report, versions

LEVEL_MODULES = ("contract", "packing", "operators", "fusion", "models", "endurance")
"""Where each level's ``cases(target)`` is, by position in `LEVELS`."""


def run_conformance(
    device: str,
    levels: Collection[int] | None = None,
    full: bool = False,
    only: str | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    *,
    on_start: Callable[[Sequence[Case]], None] | None = None,
    doing: Callable[[Case], None] | None = None,
    expected: Path | ExpectedFailures | None = None,
) -> Report:
    """Run the conformance kit on a device.

    Whatever a case raises becomes a finding. The device type ``fake`` is `kagent_core.testing.FakeDevice` where no
    plugin brings it.

    Parameters
    ----------
    device
        As users name it.
    levels
        Positions in `LEVELS`; all by default.
    full
        Whether every sample, dtype and model is tried.
    only
        Pattern of the keys of the cases to run, such as ``1/*transposed*``.
    on_finding
        Called with each finding.
    on_start
        Called with the cases before the first one runs.
    doing
        Called with each case before it runs.
    expected
        The list of expected failures, or a file with one; by default what the device's plugin brings.

    Raises
    ------
    DeviceError, PluginError
        When there is no such device, or it cannot be opened.
    ConfigError
        When a level does not exist, no case fits `only`, or the list of expected failures is wrong.
    """
    from kagent_core.session import session_for
    from kagent_core.testing.conformance.opened import registered
    from kagent_core.testing.conformance.placements import noted

    started, clock = datetime.now(UTC), time.perf_counter()
    levels = checked_levels(levels)
    with registered(device), noted("kagent-conformance-run") as placements:
        info = session_for(load_config(options={"device": device})).target
        target = Target(str(info.device), full)
        cases, listed = collect(target, levels, only, expected)
        if on_start is not None:
            on_start(cases)
        findings = []
        for case in cases:
            if doing is not None:
                doing(case)
            placements.clear()
            finding = replace(run_case(case, target, listed), native=frozenset(placements.native))
            findings.append(finding)
            if on_finding is not None:
                on_finding(finding)
    return Report(
        target=target,
        info=info,
        levels=levels,
        only=only,
        findings=tuple(findings),
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - clock,
        versions=versions(),
    )


def up_to(level: int | None) -> tuple[int, ...]:
    """Return the levels up to one, itself included; all for None.

    Raises
    ------
    ConfigError
        When it does not exist.
    """
    if level is None:
        return checked_levels(None)
    checked_levels([level])
    return tuple(range(level + 1))


def checked_levels(levels: Collection[int] | None) -> tuple[int, ...]:
    """Return levels in order, each once.

    Raises
    ------
    ConfigError
        When one does not exist.
    """
    for level in levels or ():
        if level not in range(len(LEVELS)):
            named = ", ".join(f"{number} ({name})" for number, name in enumerate(LEVELS))
            raise ConfigError(f"there is no level {level} of conformance", hint=f"the levels are {named}")
    return tuple(sorted(set(range(len(LEVELS)) if levels is None else levels)))


def cases_of(target: Target, levels: Collection[int]) -> Iterator[Case]:
    """Yield the cases of some levels, in order."""
    for level in levels:
        module = importlib.import_module(f"kagent_core.testing.conformance.{LEVEL_MODULES[level]}")
        yield from module.cases(target)


def collect(
    target: Target,
    levels: Collection[int],
    only: str | None = None,
    expected: Path | ExpectedFailures | None = None,
) -> tuple[list[Case], ExpectedFailures]:
    """Return the cases to run and the expected failures, checked against each other.

    Raises
    ------
    ConfigError
        When no case fits `only`, or the list of expected failures is wrong.
    """
    listed = expected if isinstance(expected, ExpectedFailures) else None
    if listed is None:
        listed = expected_of(target.device) if expected is None else read_expected(Path(str(expected)))
    cases = list(cases_of(target, levels))
    listed.check(
        [case.key for case in cases],
        levels,
        lambda: (case.key for case in cases_of(Target(target.device, full=True), levels)),
    )
    if only is None:
        return cases, listed
    chosen = [case for case in cases if fnmatch.fnmatchcase(case.key, only)]
    if not chosen:
        raise ConfigError(
            f"no case fits the pattern '{only}'",
            hint="a case's key is LEVEL/NAME, such as '0/bytes come back*'; * stands for any text",
        )
    return chosen, listed


def run_case(case: Case, target: Target, expected: ExpectedFailures) -> Finding:
    """Run one case and say what came of it."""
    reason = expected.reason_for(case.key)
    clock = time.perf_counter()
    script = ""
    try:
        ran = case.run(target)
        outcome, detail = (Outcome.FALLBACK if ran.fallbacks else Outcome.PASSED), _told(ran)
        if reason is not None:
            outcome, detail = Outcome.UNEXPECTED, f"it passes, though it is listed as failing: {reason}"
    except CannotRunError as error:
        outcome, detail = Outcome.COULD_NOT_RUN, str(error)
    except Exception as error:  # noqa: BLE001  whatever a case raises is a finding
        outcome, detail = Outcome.FAILED, _failure(error)
        script = _script_of(case, target)
        if reason is not None:
            outcome, detail = Outcome.EXPECTED, f"{reason} ({detail})"
    return Finding(case, outcome, detail, time.perf_counter() - clock, script)


def _told(ran: Ran) -> str:
    return "; ".join([*(f"{signature}: {reason}" for signature, reason in ran.fallbacks), *filter(None, [ran.note])])


def _failure(error: Exception) -> str:
    message = str(error).strip()
    if isinstance(error, AssertionError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _script_of(case: Case, target: Target) -> str:
    try:
        return case.script(target)
    except Exception as error:  # noqa: BLE001  the failure is worth more than its script
        return f"# no script could be written for {case.key}: {_failure(error)}\n"
