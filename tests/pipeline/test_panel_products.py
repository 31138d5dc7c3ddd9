"""Products with constant weights in panels, compared with eager PyTorch."""

from __future__ import annotations

import copy
import ctypes
import itertools
import mmap
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kagent_core.codegen.generic import panels
from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_core.optimize.panels import in_panels
from kagent_cpu.language import CLanguage

from .exact import check, spoiled

ACTIVATIONS = [nn.ReLU(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Hardswish(), nn.Tanh()]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def products(names: list[str]) -> int:
    """Count the products, and make sure that nothing else ran."""
    assert all(name.startswith("panel_product") for name in names), names
    return len(names)


def in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two chunks of rows be a block."""

    def blocks(product: Any, tall: int) -> tuple[int, int]:
        return 2, -(-product.left.spec.shape[0] // (2 * tall))

    monkeypatch.setattr("kagent_core.codegen.generic.panels._Product._blocks", blocks)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        *[(1, 40, 161), (1, 1, 1), (2, 40, 160), (3, 7, 5), (5, 1, 64), (7, 30, 16), (8, 9, 17), (20, 256, 65)],
        *[(49, 192, 768), (50, 64, 48), (64, 3, 100), (97, 33, 96), (131, 20, 688)],
    ],
)
def test_products_of_all_sizes(rows: int, depth: int, columns: int, bias: bool) -> None:
    x = torch.randn(rows, depth)
    assert products(check(nn.Linear(depth, columns, bias), spoiled(x) if depth > 1 else x)) == 1


@pytest.mark.parametrize("tiles", [RegisterTiles(8, 16), RegisterTiles(4, 16), RegisterTiles(4, 32)], ids=str)
def test_processors_with_other_registers(tiles: RegisterTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLanguage, "register_tiles", tiles)
    for rows, columns in itertools.product((1, 5, 14, 29), (3, 16, 41)):
        torch._dynamo.reset()
        assert products(check(nn.Linear(20, columns), spoiled(torch.randn(rows, 20)))) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_several_blocks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pairs(monkeypatch)
    for rows in (64, 200, 333):
        torch._dynamo.reset()
        assert products(check(nn.Linear(60, 200), spoiled(torch.randn(rows, 60)), threads=threads)) == 1


def test_rows_that_lie_in_any_way() -> None:
    for x in (torch.randn(40, 30).t(), torch.randn(30, 80)[:, ::2], torch.randn(30, 80)[3:, 40:], torch.randn(40)):
        torch._dynamo.reset()
        check(nn.Linear(40, 160), x if x.dim() > 1 else x.expand(9, 40))


def test_nothing_is_read_beyond_the_end_of_a_tensor() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    libc = ctypes.CDLL(None, use_errno=True)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(begin + page), ctypes.c_size_t(page), 0) == 0
    numbers = torch.frombuffer(memory, dtype=torch.float32, count=page // 4)
    for rows, depth in ((1, 5), (9, 33), (14, 16)):
        torch._dynamo.reset()
        x = numbers[page // 4 - rows * depth :].view(rows, depth)
        check(nn.Linear(depth, 70), x.copy_(torch.randn(rows, depth)))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_what_follows_is_computed_where_a_product_stores(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(40, 160), activation, nn.Linear(160, 96))
    assert products(check(model, spoiled(torch.randn(2, 7, 40)))) == 2


class Spelled(nn.Module):
    """An activation in many operators, one of which reads what another one made of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        made: torch.Tensor = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * torch.pow(y, 3.0))))
        return made


class Residual(nn.Module):
    """A block of a transformer's: what is added at last was there before the products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(40, 96), nn.Linear(96, 40), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.drop(self.down(functional.gelu(self.up(x))))
        return made


class Gated(nn.Module):
    """A product that is multiplied with what becomes of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(40, 96, bias=False), nn.Linear(40, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional.silu(self.gate(x)) * self.up(x)
        return made


class Scaled(nn.Module):
    """A product that is scaled by a tensor of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 96)

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * by


def test_operators_that_read_more_than_a_product() -> None:
    assert products(check(Spelled(), spoiled(torch.randn(2, 7, 40)))) == 1
    assert products(check(Residual(), spoiled(torch.randn(2, 7, 40)))) == 2
    assert products(check(Gated(), spoiled(torch.randn(2, 7, 40)))) == 2
    assert products(check(Scaled(), spoiled(torch.randn(2, 7, 40)), torch.tensor(3.0))) == 1


def test_what_lies_otherwise_is_not_seen_in_the_shape_of_a_product() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(40, 96)

        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear(x) * other
            return made

    x = torch.randn(2, 7, 40)
    for other in (torch.randn(7, 2, 96).transpose(0, 1), torch.randn(7, 1), torch.randn(96), torch.randn(2, 1, 96)):
        torch._dynamo.reset()
        check(Turned(), x, other)


def test_a_product_that_is_used_twice_is_kept() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(40, 160)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            made: torch.Tensor = torch.relu(y) + y.sum(-1, keepdim=True) + torch.sigmoid(y)
            return made

    check(Twice(), torch.randn(2, 7, 40))


@torch.no_grad()
def test_changed_and_shared_weights_are_laid_out_again() -> None:
    first, second, third = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)
    third.weight = first.weight
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third).eval()
    run, x = torch.compile(model, backend="kagent", options={"device": "cpu"}), torch.randn(9, 40)
    changes = (lambda: None, lambda: first.weight.data.mul_(-2), lambda: second.bias.data.numpy().fill(3))
    for change in changes:
        change()
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_any_number_of_rows() -> None:
    model = nn.Sequential(nn.Linear(40, 96), nn.GELU(), nn.Linear(96, 33)).eval()
    run = torch.compile(model, backend="kagent", options={"device": "cpu"}, dynamic=True)
    for rows in (5, 130, 1, 0, 49):
        x = torch.randn(rows, 40)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error::UserWarning")
def test_sizes_that_nobody_knows_are_those_that_the_graph_computes() -> None:
    """A view in the shape of a product takes its number of rows from the graph: PyTorch warns of raw symbols in one."""
    layer = nn.Linear(64, 64).eval()
    function = lambda x: functional.gelu(layer(x) + x)
    compiled = torch.compile(function, backend="kagent", options={"device": "cpu"}, dynamic=True)
    with torch.no_grad():
        for count in (3, 4, 7):
            x = torch.randn(count, 8, 64)
            torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 30, 16), (3, 41, 33), (65, 31, 130), (333, 60, 200)])
def test_sums_of_several_stretches(
    rows: int, depth: int, columns: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "DEEP", 20)
    monkeypatch.setattr(panels, "STRETCH", 10)
    in_pairs(monkeypatch)
    model = nn.Sequential(nn.Linear(depth, columns), nn.ReLU())
    assert products(check(model, spoiled(torch.randn(rows, depth)), threads=threads)) == 1


@torch.no_grad()
def test_long_sums_are_as_exact_as_eagers() -> None:
    model, x = nn.Linear(9000, 40).eval(), torch.rand(7, 9000)
    model.weight.abs_()
    exact = copy.deepcopy(model).double()(x.double())
    got = torch.compile(model, backend="kagent", options={"device": "cpu"})(x)
    assert (got - exact).abs().max() <= 2 * (model(x) - exact).abs().max()


def test_few_columns_of_many_rows_are_left_to_the_library() -> None:
    assert any("_linear_pointwise" in name for name in check(nn.Linear(300, 17), torch.randn(2000, 300)))


def test_operator_runs_without_a_generated_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kagent_cpu.generate.takes_panels", lambda _: False)
    (name,) = check(nn.Linear(40, 70), spoiled(torch.randn(5, 40)))
    assert name == "kagent::panel_product"


def test_other_types_are_left_to_the_library() -> None:
    model, x = nn.Linear(40, 64).double().eval(), torch.randn(5, 40, dtype=torch.float64)
    run = torch.compile(model, backend="kagent", options={"device": "cpu"})
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize(("columns", "width"), [(64, 64), (65, 64), (5, 16), (100, 48)])
def test_operator_means_a_product(columns: int, width: int) -> None:
    weight, x, bias = torch.randn(7, columns), torch.randn(3, 7), torch.randn(columns)
    laid_out = in_panels(weight.t().contiguous().t(), width)
    assert laid_out.is_contiguous()
    assert laid_out.shape == (-(-columns // width), 7, width)
    op = torch.ops.kagent.panel_product
    torch.testing.assert_close(op(x, laid_out, columns), x @ weight)
    torch.testing.assert_close(op(x, laid_out, columns, bias), x @ weight + bias)
    torch.library.opcheck(op.default, (x, laid_out, columns, bias), test_utils=("test_schema", "test_faketensor"))
