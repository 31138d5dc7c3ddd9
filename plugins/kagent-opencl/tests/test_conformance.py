"""The plugin under the conformance kit: a selection that takes little time. ``make conformance-full`` runs it all."""

from __future__ import annotations

import pytest

from kagent_core.testing.conformance import Outcome, Report, run_conformance

LEAST_NATIVE = 150
"""Core ATen overloads that run on an OpenCL device itself."""

PARTS = {
    "contract": "0/*",
    "arguments that share memory": "1/*overlap*",
    "losses": "2/nn.functional.*loss*",
    "norms": "2/*norm*",
    "softmax": "3/*softmax*",
    "a model": "4/encoder*",
    "faults": "5/a fault of: [af]*",
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_kit(device: str, part: str) -> None:
    pattern = PARTS[part]
    report = run_conformance(device, [int(pattern[0])], only=pattern)
    assert [f"{finding.case.key}: {finding.detail}" for finding in report.failures] == []
    assert right(report) >= 2


def right(report: Report) -> int:
    """How many cases were as they must be."""
    return sum(finding.outcome in (Outcome.PASSED, Outcome.FALLBACK) for finding in report.findings)


# -- core ATen, overload by overload


@pytest.mark.slow
def test_core_overloads_run_on_the_device(device: str) -> None:
    report = run_conformance(device, levels=[2], only="2/aten::*")
    assert [
        f"{finding.case.key}: {finding.detail}" for finding in report.findings if finding.outcome is not Outcome.PASSED
    ] == []
    native, core = report.core_operators()
    assert native >= LEAST_NATIVE, f"{native} of {core}"
