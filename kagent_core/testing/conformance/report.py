"""What a run found, for people and for machines.

As JSON (``Report.as_dict``; the schema is ``report-1.schema.json`` beside this module), an object with

``schema``
    1. A change that a reader has to know of has another number.
``device``, ``name``, ``emulated``, ``plugin``
    The device, as ``kagent devices`` lists it.
``versions``
    Of kagent, torch and Python, and the platform.
``started``, ``seconds``
    When the run began (ISO 8601, UTC), and how long it took.
``full``, ``only``
    Whether it was the full size; the pattern of the cases, or null for all.
``level``, ``badge``, ``passed``
    The level that the device has (null for none), the line that says it, and whether nothing failed unexpectedly.
``levels``
    One object per level that was run: ``level``, ``title``, ``cases``, and how many of them had each outcome
    (``native``, ``fallback``, ``failed``, ``expected``, ``unexpected``, ``could_not_run``).
``core_operators``
    Of core ATen's overloads, those that ran on the device in a case that was right (``native``), and all (``of``).
``findings``
    One object per case: ``case`` (its key), ``level``, ``family``, ``outcome``, ``detail``, ``seconds``, and
    ``script``, which is empty where the case did not fail.
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kagent_core.specs import DeviceInfo
from kagent_core.testing.conformance.case import LEVELS, Finding, Outcome, Target

SCHEMA = 1
OPERATORS = LEVELS.index("operators")

FIELDS = {
    Outcome.PASSED: "native",
    Outcome.FALLBACK: "fallback",
    Outcome.FAILED: "failed",
    Outcome.EXPECTED: "expected",
    Outcome.UNEXPECTED: "unexpected",
    Outcome.COULD_NOT_RUN: "could_not_run",
}
"""What each outcome is called where they are counted."""


_NOT_RIGHT = (Outcome.FAILED, Outcome.EXPECTED, Outcome.UNEXPECTED)


@dataclass(frozen=True)
class Counts:
    """How many cases of a level or a family had each outcome."""

    cases: int
    native: int = 0
    fallback: int = 0
    failed: int = 0
    expected: int = 0
    unexpected: int = 0
    could_not_run: int = 0

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Counts:
        """Count findings."""
        counted = Counter(FIELDS[finding.outcome] for finding in findings)
        return cls(counted.total(), **counted)

    @property
    def right(self) -> int:
        """Cases that passed, on the device or with fallbacks."""
        return self.native + self.fallback

    @property
    def flawless(self) -> bool:
        """Whether something passed, and nothing failed but what the plugin's list says, with reasons."""
        return self.right > 0 and self.failed == self.unexpected == 0


@dataclass(frozen=True)
class Report:
    """What a run of the kit found.

    Attributes
    ----------
    target, info
        The device.
    levels
        Those that were run.
    only
        Pattern of the cases that were run; None for all of these levels.
    findings
        One per case, in order.
    started
        When, in ISO 8601 and UTC.
    seconds
        How long it took.
    versions
        Of what took part.
    """

    target: Target
    info: DeviceInfo
    levels: tuple[int, ...]
    only: str | None
    findings: tuple[Finding, ...]
    started: str
    seconds: float
    versions: dict[str, str]

    @property
    def level(self) -> int | None:
        """The highest level that the device has: it and all before it were run whole, and are flawless."""
        reached = None
        for level in range(len(LEVELS)):
            if self.only is not None or level not in self.levels or not self.counts(level).flawless:
                break
            reached = level
        return reached

    @property
    def passed(self) -> bool:
        """Whether nothing failed but what the plugin's list says, and nothing passed that it says fails."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        """What failed unexpectedly, and what passed unexpectedly."""
        return [finding for finding in self.findings if finding.outcome in (Outcome.FAILED, Outcome.UNEXPECTED)]

    def counts(self, level: int) -> Counts:
        """Count a level's outcomes."""
        return Counts.of(finding for finding in self.findings if finding.case.level == level)

    def families(self) -> dict[tuple[int, str], Counts]:
        """Count outcomes by level and family."""
        keys = dict.fromkeys((finding.case.level, finding.case.family) for finding in self.findings)
        return {
            key: Counts.of(f for f in self.findings if (f.case.level, f.case.family) == key) for key in sorted(keys)
        }

    def core_operators(self) -> tuple[int, int]:
        """Count the core ATen overloads that ran on the device itself in a case that was right, and all that there are.

        Views are among them, of which nothing runs; operators that capture takes apart are not.
        """
        from kagent_core.capture.schemas import signature_of
        from kagent_core.codegen.coverage import core_operators

        core = {signature_of(overload) for overload in core_operators()}
        ran = {name for f in self.findings if f.outcome in (Outcome.PASSED, Outcome.FALLBACK) for name in f.native}
        return len(core & ran), len(core)

    def badge(self) -> str:
        """Return the result in one line: ``level 3, 412/677 native, 0 wrong``.

        What is native of how many is about the cases of the operator level that could run, and is left out where that
        was not run. Wrong is what failed unexpectedly.
        """
        whole, operators = Counts.of(self.findings), self.counts(OPERATORS)
        parts = ["no level" if self.level is None else f"level {self.level}"]
        if self.only is not None:
            parts = [f"{whole.cases} cases of a part"]
        elif self.levels[0] != 0:
            parts = [f"levels {', '.join(map(str, self.levels))} alone"]
        if operators.cases:
            parts.append(f"{operators.native}/{operators.cases - operators.could_not_run} native")
        parts.append(f"{whole.failed} wrong")
        if whole.expected:
            parts.append(f"{whole.expected} expected to fail")
        if whole.unexpected:
            parts.append(f"{whole.unexpected} listed as failing but right")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON's types; the module says what is in it."""
        native, core = self.core_operators()
        return {
            "schema": SCHEMA,
            "device": str(self.info.device),
            "name": self.info.name,
            "emulated": self.info.emulated,
            "plugin": self.info.plugin,
            "versions": self.versions,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "full": self.target.full,
            "only": self.only,
            "level": self.level,
            "badge": self.badge(),
            "passed": self.passed,
            "levels": [{"level": level, "title": LEVELS[level], **vars(self.counts(level))} for level in self.levels],
            "core_operators": {"native": native, "of": core},
            "findings": [
                {
                    "case": finding.case.key,
                    "level": finding.case.level,
                    "family": finding.case.family,
                    "outcome": FIELDS[finding.outcome],
                    "detail": finding.detail,
                    "seconds": round(finding.seconds, 3),
                    "script": finding.script,
                }
                for finding in self.findings
            ],
        }

    def to_json(self) -> str:
        """Return `as_dict` as text."""
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def to_html(self) -> str:
        """Return a page that needs no other file."""
        from jinja2 import Environment, StrictUndefined

        text = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        page: str = environment.from_string(text).render(
            report=self,
            titles=LEVELS,
            fields=FIELDS,
            families=self.families(),
            failures=[finding for finding in self.findings if finding.outcome in _NOT_RIGHT],
            missing=[finding for finding in self.findings if finding.outcome is Outcome.COULD_NOT_RUN],
            fallbacks=[finding for finding in self.findings if finding.outcome is Outcome.FALLBACK],
        )
        return page

    def write_scripts(self, folder: Path) -> list[Path]:
        """Write the script of each case that failed into a folder, and return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        written: dict[Path, str] = {}
        for finding in self.findings:
            if not finding.script:
                continue
            stem = re.sub(r"[^\w.-]+", "-", finding.case.key).strip("-")
            path, number = folder / f"{stem}.py", 1
            while path in written:
                number += 1
                path = folder / f"{stem}-{number}.py"
            written[path] = finding.script
            path.write_text(finding.script, encoding="utf-8")
        return list(written)


def versions() -> dict[str, str]:
    """Return the versions of what takes part in a run."""
    import torch

    from kagent_core import __version__

    return {
        "kagent": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
