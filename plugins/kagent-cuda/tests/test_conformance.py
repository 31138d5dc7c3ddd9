"""The emulated device keeps kagent's contract, and operators of every kind do what eager PyTorch does there."""

from __future__ import annotations

import pytest

from kagent_core.testing.conformance import Outcome, run_conformance

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
    report = run_conformance(device, levels=[2], only="2/aten::*")
    assert [
        f"{finding.case.key}: {finding.detail}" for finding in report.findings if finding.outcome is not Outcome.PASSED
    ] == []
    native, core = report.core_operators()
    assert native >= LEAST_NATIVE, f"{native} of {core}"
