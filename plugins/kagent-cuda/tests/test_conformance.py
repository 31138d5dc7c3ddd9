"""The emulated device keeps kagent's contract, and operators of every kind do what eager PyTorch does there."""

from __future__ import annotations

import pytest

from kagent_core.testing.conformance import run_conformance

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
