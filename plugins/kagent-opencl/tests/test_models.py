"""Whole models run on an OpenCL device alone, and give eager PyTorch's results."""

from __future__ import annotations

import pytest

from kagent_core.testing.conformance.case import Target
from kagent_core.testing.conformance.models import check_model, inference, real_weights

from .architectures import NAMES, architecture

NIGHTLY = ("mobilenet_v2",)
"""Models that take long, and whose operators are in others."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n in NIGHTLY else n for n in NAMES])
def test_inference(device: str, name: str) -> None:
    ran = check_model(inference, architecture(name), Target(device))
    assert ran.fallbacks == ()


@pytest.mark.slow
def test_inference_with_real_weights(device: str) -> None:
    ran = check_model(inference, real_weights(), Target(device))
    assert ran.fallbacks == ()
