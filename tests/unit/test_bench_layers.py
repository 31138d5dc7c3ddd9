"""The benchmark of layers measures what it says."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from kagent_core.bench import layers
from kagent_core.bench.layers import Copies, LayerCase, convolution, lstm, product

SMALL = (product(3, 8, 20), convolution(9, 6, 16, 3), lstm(3, 2, 16))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_case_counts_what_its_layer_computes(case: LayerCase) -> None:
    made = case.make()(torch.randn(case.shape))
    weights = sum(weight.numel() for weight in case.make().parameters() if weight.dim() > 1)
    places = made.numel() // made.shape[1 if made.dim() == 4 else -1]
    assert case.operations == 2 * weights * places


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_both_contenders_are_measured(case: LayerCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MOST_COPIES", 2)
    times = layers.measure(case, rounds=2)
    assert list(times) == ["oneDNN", "generated"]
    assert all(0 < ms < 1e4 for ms in times.values())


def test_copies_have_weights_of_their_own_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "WEIGHTS_NBYTES", 8 * 20 * 4 * 3)
    copies = Copies(product(3, 8, 20).make)
    one, two, three = (layer.weight for layer in copies.layers)
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    assert len(copies(torch.randn(3, 8))) == 3


def test_the_table_has_a_row_for_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "measure", lambda case, rounds: {"oneDNN": 2.0, "generated": 1.0})
    text = io.StringIO()
    layers.print_cases(Console(file=text, width=110), "product: rows × depth × columns", SMALL[:1])
    assert "3 × 8 × 20" in text.getvalue()
    assert "2000.0" in text.getvalue()
    assert "2.00" in text.getvalue()
