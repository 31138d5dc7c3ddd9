"""The kit as pytest tests: ``pytest --pyargs kagent_core.testing.conformance --kagent-device DEVICE``.

One test per case. What could not run is skipped with its reason, an expected failure is an xfail (strict), and what is
right with fallbacks passes. Every run of pytest imports this module, so it imports nothing that takes time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kagent_core.testing.conformance.case import Case, Target
    from kagent_core.testing.conformance.expected import ExpectedFailures

PACKAGE = "kagent_core.testing.conformance"
FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options."""
    group = parser.getgroup("kagent", f"kagent's conformance kit (pytest --pyargs {PACKAGE})")
    group.addoption("--kagent-device", metavar="DEVICE", help="the device to test: TYPE or TYPE:INDEX")
    group.addoption("--kagent-level", metavar="N", type=int, help="the levels up to this one; else all")
    group.addoption("--kagent-only", metavar="PATTERN", help="only these cases, such as '1/*transposed*'")
    group.addoption("--kagent-full", action="store_true", help="every sample, dtype and model: takes hours")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run of the kit that names no device."""
    if config.getoption("--kagent-device") is None and _is_asked_for(config):
        raise pytest.UsageError(
            "the conformance kit tests one device: pass --kagent-device DEVICE, such as --kagent-device fake "
            "(`kagent devices` lists those that are there)"
        )


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect cases where pytest comes to the kit's package."""
    if path != FOLDER or parent.config.getoption("--kagent-device") is None:
        return None
    collector: pytest.Collector = ConformanceKit.from_parent(parent, path=path)
    return collector


def _is_asked_for(config: pytest.Config) -> bool:
    """Whether the kit is named on the command line, and not just in a folder that is."""
    named = (argument.partition("::")[0] for argument in config.args)
    return any(argument == PACKAGE or Path(argument).resolve() == FOLDER for argument in named)


class ConformanceKit(pytest.Directory):
    """The kit's package."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test for each case."""
        device = self.config.getoption("--kagent-device")
        from kagent_core.config import load_config
        from kagent_core.errors import KagentError
        from kagent_core.session import session_for
        from kagent_core.testing.conformance.case import Target
        from kagent_core.testing.conformance.opened import registered
        from kagent_core.testing.conformance.runner import collect, up_to

        stack = ExitStack()
        self.config.add_cleanup(stack.close)
        try:
            stack.enter_context(registered(device))
            info = session_for(load_config(options={"device": device})).target
            target = Target(str(info.device), self.config.getoption("--kagent-full"))
            levels = up_to(self.config.getoption("--kagent-level"))
            cases, expected = collect(target, levels, self.config.getoption("--kagent-only"))
        except KagentError as error:
            raise pytest.UsageError(str(error)) from error
        for case in cases:
            item: pytest.Item = ConformanceItem.from_parent(self, name=case.key, case=case, target=target)
            reason = expected.reason_for(case.key)
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
            yield item


class ConformanceFailure(Exception):  # noqa: N818  the name of what it is
    """A case failed; the text says how."""


class ConformanceItem(pytest.Item):
    """One case."""

    def __init__(self, *, case: Case, target: Target, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._case = case
        self._target = target

    def runtest(self) -> None:
        """Run the case.

        Raises
        ------
        ConformanceFailure
            When it fails.
        """
        from kagent_core.testing.conformance.case import Outcome
        from kagent_core.testing.conformance.runner import run_case

        finding = run_case(self._case, self._target, _none_expected())
        if finding.outcome is Outcome.COULD_NOT_RUN:
            pytest.skip(finding.detail)
        if finding.outcome is Outcome.FAILED:
            self.add_report_section("call", "script that reproduces it", finding.script)
            raise ConformanceFailure(finding.detail)
        if finding.detail:
            self.user_properties.append((finding.outcome.value, finding.detail))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show what failed, without the kit's own frames."""
        if isinstance(excinfo.value, ConformanceFailure):
            return f"case {self._case.key} on {self._target.device}: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Tell where it is from."""
        return FOLDER, None, f"{self._target.device} {self._case.key}"


def _none_expected() -> ExpectedFailures:
    from kagent_core.testing.conformance.expected import ExpectedFailures

    return ExpectedFailures()  # that a failure is expected, pytest's own mark says
