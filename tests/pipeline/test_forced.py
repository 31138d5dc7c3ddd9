"""Running every graph a second time with generated kernels: that it happens, and that it can fail."""

from __future__ import annotations

import pytest
import torch

from kagent_core.codegen.rules import RULES
from kagent_core.codegen.table import LoweringKind, Rule

from .forced import generated_everywhere
from .traced import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OFF = {"device": "cpu", "generated_kernels": "off"}


def test_each_call_of_a_graph_has_a_twin() -> None:
    run = compiled(torch.relu, **OFF)
    with generated_everywhere() as names:
        run(torch.randn(3))
        run(torch.randn(3))
    assert len(names) == 2
    run(torch.randn(3))
    assert len(names) == 2


@pytest.mark.parametrize("whole_models", [False, True])
def test_a_wrong_kernel_is_found(whole_models: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Rule("aten::relu", LoweringKind.POINTWISE, lambda self: self.op("min", 0))
    monkeypatch.setitem(RULES._rules, "aten::relu", wrong)
    run = compiled(torch.relu, **OFF)
    x = torch.randn(11, 3 + whole_models)  # shapes that no other test's kernel was made for
    with (
        generated_everywhere(whole_models=whole_models),
        pytest.raises(AssertionError, match="generated kernels everywhere"),
    ):
        run(x)
