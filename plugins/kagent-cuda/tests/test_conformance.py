"""The emulated device keeps kagent's contract, and operators of every kind do what eager PyTorch does there."""

from __future__ import annotations

import pytest

import kagent_core
from kagent_core.capture.schemas import resolve_overload, signature_of
from kagent_core.codegen.coverage import core_operators
from kagent_core.testing.compare import assert_same
from kagent_core.testing.conformance import run_conformance
from kagent_core.testing.conformance.placements import noted
from tests.core_calls import as_eager, calls

LEAST_NATIVE = 150
"""Core ATen overloads that run on a CUDA device itself."""

OPERATORS = (
    "add",
    "softmax",
    "sum",
    "argmax",
    "addmm",
    "cumsum",
    "sort",
    "index_select",
    "nn.functional.layer_norm",
    "nn.functional.conv2d",
)


def test_the_contract(device: str) -> None:
    report = run_conformance(device, levels=[0])
    assert report.passed, [str(finding) for finding in report.failures]


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators(device: str, operator: str) -> None:
    report = run_conformance(device, levels=[2], only=f"2/{operator}")
    assert report.passed, [str(finding) for finding in report.failures]
    assert any(finding.native for finding in report.findings)


PARTS = {
    "arguments that share memory": "1/*overlap*",
    "losses": "2/nn.functional.*loss*",
    "norms": "2/*norm*",
    "fusions": "3/*softmax*",
    "faults": "5/a fault of: [af]*",
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_kit(device: str, part: str) -> None:
    pattern = PARTS[part]
    report = run_conformance(device, levels=[int(pattern[0])], only=pattern)
    assert [f"{finding.case.key}: {finding.detail}" for finding in report.failures] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_core_overloads_run_on_the_device(device: str) -> None:
    native, elsewhere = set(), {}
    with as_eager(), noted("placements") as placements:
        for signature, args in calls():
            placements.clear()
            got = kagent_core.run_op(signature, *args, device=device)
            assert_same(got, resolve_overload(signature)(*args), signature, every_stride=False)
            if placements.elsewhere:
                elsewhere[signature] = placements.elsewhere
            else:
                native.add(signature)
    assert elsewhere == {}
    core = {signature_of(overload) for overload in core_operators()}
    assert len(native & core) >= LEAST_NATIVE, f"{len(native & core)} of {len(core)}"
