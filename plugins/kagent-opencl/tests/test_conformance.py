"""The plugin under the conformance kit: a selection that takes little time. ``make conformance-full`` runs it all."""

from __future__ import annotations

import pytest

import kagent_core
from kagent_core.capture.schemas import resolve_overload, signature_of
from kagent_core.codegen.coverage import core_operators
from kagent_core.testing.compare import assert_same
from kagent_core.testing.conformance import Outcome, Report, run_conformance
from kagent_core.testing.conformance.placements import noted
from tests.core_calls import as_eager, calls

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
    native, elsewhere = set(), {}
    with as_eager(), noted("placements") as placements:
        for signature, args in calls():
            placements.clear()
            got = kagent_core.run_op(signature, *args, device=device)
            want = resolve_overload(signature)(*args)
            assert_same(got, want, signature, every_stride=False)
            if placements.elsewhere:
                elsewhere[signature] = placements.elsewhere
            else:
                native.add(signature)
    assert elsewhere == {}
    core = {signature_of(overload) for overload in core_operators()}
    assert len(native & core) >= LEAST_NATIVE, f"{len(native & core)} of {len(core)}"
