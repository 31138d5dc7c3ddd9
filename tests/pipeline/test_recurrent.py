"""LSTMs in inference on the CPU: the products with their input at once, and a generated kernel for the steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import kagent_core
from kagent_core import hookimpl, kernel
from kagent_core.codegen.register_tiles import RegisterTiles
from kagent_core.optimize.recurrent import lstm_steps, packed_lstm_weight
from kagent_core.specs import TaskFinished
from kagent_core.testing.compare import assert_as_exact, assert_same
from kagent_cpu.language import CLanguage

STEPS = "kagent::lstm_steps"
LIBRARY = "aten::mkldnn_rnn_layer"


class Tasks:
    """Signatures of what ran."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @hookimpl
    def kagent_task_finished(self, event: TaskFinished) -> None:
        self.names += [call.signature for call in event.task.calls]


@pytest.fixture(autouse=True)
def recurrent_networks_are_captured() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        yield


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="kagent", options={"device": "cpu", "threads": 1, **options})


def ran(model: nn.Module, *args: Any, **options: Any) -> list[str]:
    """Compare a network with eager PyTorch, and return what ran."""
    tasks = Tasks()
    with kagent_core.use_plugin(tasks):
        got = compiled(model, profile=True, **options)(*args)
    torch.testing.assert_close(got, model(*args), equal_nan=True)
    return tasks.names


def check(model: nn.LSTM, *args: Any) -> list[str]:
    """Compare a network with eager PyTorch and with what float64 gives, and return what ran."""
    model = model.eval()
    exact = copy.deepcopy(model).double()(*tree_map(torch.Tensor.double, args))
    assert_as_exact(compiled(model)(*args), model(*args), exact, 4, "an LSTM")
    torch._dynamo.reset()
    return ran(model, *args)


@pytest.mark.parametrize("sizes", [(2, 1, 1, 5), (1, 3, 5, 7), (2, 4, 8, 16), (5, 8, 3, 33), (3, 17, 20, 40)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_all_sizes_of_steps_batches_and_states(sizes: tuple[int, ...], bias: bool) -> None:
    steps, batch, depth, width = sizes
    x = torch.randn(steps, batch, depth)
    assert check(nn.LSTM(depth, width, bias=bias), x).count(STEPS) == 1


@pytest.mark.parametrize("options", [{"batch_first": True}, {"bidirectional": True}, {"num_layers": 3, "dropout": 0.5}])
@pytest.mark.parametrize("given", [False, True])
def test_layers_directions_and_given_states(options: dict[str, Any], given: bool) -> None:
    model = nn.LSTM(6, 10, **options)
    x = torch.randn(4, 5, 6)
    states = model.num_layers * (1 + model.bidirectional)
    shape = (states, 4 if model.batch_first else 5, 10)
    args = (x, (torch.randn(shape), torch.randn(shape))) if given else (x,)
    assert check(model, *args).count(STEPS) == states


def test_sequences_and_states_that_are_views() -> None:
    x = torch.randn(3, 3, 12).permute(2, 1, 0)[::2]
    states = (torch.randn(8, 3, 1).permute(2, 1, 0), torch.randn(1, 3, 16)[..., ::2])
    check(nn.LSTM(3, 8), x, states)


def test_a_state_that_is_given_is_not_written() -> None:
    model, x = nn.LSTM(4, 8).eval(), torch.randn(3, 2, 4)
    states = (torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    before = [state.clone() for state in states]
    run = compiled(model)
    first = [tensor.clone() for tensor in tree_leaves(run(x, states))]
    assert_same(list(states), before, "states")
    assert_same(tree_leaves(run(x, states)), first, "a second call")


def test_numbers_that_saturate_the_gates_and_nan_and_infinities() -> None:
    model, x = nn.LSTM(4, 8).eval(), torch.randn(5, 7, 4)
    x[:, 0] *= 1e4
    x[1, 1, 2], x[2, 2, 0], x[3, 3, 1] = math.nan, math.inf, -math.inf
    states = (torch.randn(1, 7, 8), torch.randn(1, 7, 8))
    states[1][0, 4, 3], states[1][0, 5, 0], states[0][0, 6, 1] = math.inf, -1e30, math.nan
    assert STEPS in ran(model, x, states)


def test_states_that_are_small_are_as_exact_as_large_ones() -> None:
    model = nn.LSTM(4, 8, bias=False).eval()
    x = torch.randn(3, 2, 4) * 1e-6
    got, want = compiled(model)(x)[0], model.double()(x.double())[0]
    assert ((got - want).abs() / want.abs()).max() < 1e-5


def test_changed_weights_are_noticed() -> None:
    model, x = nn.LSTM(4, 8).eval(), torch.randn(3, 2, 4)
    run = compiled(model)
    torch.testing.assert_close(run(x), model(x))
    model.weight_hh_l0.data.mul_(-1)
    model.bias_ih_l0.data.add_(1)
    torch.testing.assert_close(run(x), model(x))


def test_sequences_of_any_length() -> None:
    model = nn.LSTM(4, 8, batch_first=True).eval()
    run = torch.compile(model, backend="kagent", dynamic=True, options={"device": "cpu", "threads": 1})
    for batch, steps in ((2, 3), (2, 5), (2, 9), (7, 4)):
        x = torch.randn(batch, steps, 4)
        torch.testing.assert_close(run(x), model(x))


states_with_a_dimension_too_many = pytest.mark.xfail(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="PyTorch before 2.13 takes these LSTMs apart wrongly, for every backend: its pull request 185716",
)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(lambda: nn.LSTM(4, 8, proj_size=3), {}, marks=states_with_a_dimension_too_many),
        pytest.param(lambda: nn.LSTM(4, 8, dtype=torch.float64), {}, marks=states_with_a_dimension_too_many),
        (lambda: nn.LSTM(4, 8, dtype=torch.bfloat16), {}),
        (lambda: nn.LSTM(4, 8), {"threads": 8}),
        (lambda: nn.LSTM(4, 8), {"generated_kernels": "off"}),
        (lambda: nn.LSTM(4, 8), {"fold_constants": False}),
        (lambda: nn.LSTM(4, 2048), {}),
    ],
    ids=["projections", "float64", "bfloat16", "more threads than tiles", "no kernels", "no folding", "a large state"],
)
def test_what_stays_with_the_library(make: Any, options: dict[str, Any]) -> None:
    model = make().eval()
    x = torch.randn(3, 2, 4, dtype=model.weight_ih_l0.dtype)
    names = ran(model, x, **options)
    stepwise = model.proj_size or x.dtype is torch.float64  # as capture takes it apart
    assert STEPS not in names
    assert stepwise or LIBRARY in names


def test_a_kernel_of_the_users_is_not_rewritten_away() -> None:
    called: list[int] = []

    @kernel(LIBRARY, device="cpu")
    def mine(*args: Any) -> Any:
        called.append(1)
        return torch.ops.aten.mkldnn_rnn_layer(*args)

    try:
        names = ran(nn.LSTM(4, 8).eval(), torch.randn(3, 2, 4))
    finally:
        mine.unregister()
    assert called
    assert STEPS not in names


@pytest.mark.parametrize("tiles", [RegisterTiles(8, 16), RegisterTiles(4, 16), RegisterTiles(4, 32)], ids=str)
def test_processors_with_other_registers(tiles: RegisterTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLanguage, "register_tiles", tiles)
    for batch, width in ((1, 1), (2, 9), (13, 24)):
        torch._dynamo.reset()
        assert STEPS in check(nn.LSTM(5, width), torch.randn(3, batch, 5))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_operator_gives_without_a_kernel_what_the_library_gives(reverse: bool) -> None:
    """Where the kernel is not taken, as in a run operator by operator, the operator itself is."""
    model, x = nn.LSTM(4, 9), torch.randn(3, 2, 4)
    hx, cx = torch.randn(1, 2, 9), torch.randn(1, 2, 9)
    projected = x @ model.weight_ih_l0.t() + model.bias_ih_l0 + model.bias_hh_l0
    packed = packed_lstm_weight(model.weight_hh_l0, (3, 9, 16))
    weights = [model.weight_ih_l0, model.weight_hh_l0, model.bias_ih_l0, model.bias_hh_l0]
    want = torch.ops.aten.mkldnn_rnn_layer(x, *weights, hx, cx, reverse, [], 2, 9, 1, True, False, False, False)[:3]
    got = torch.ops.kagent.lstm_steps(projected, packed, hx, cx, reverse)
    torch.testing.assert_close(list(got), list(want))
    assert_same(list(got), list(lstm_steps(projected, packed, hx, cx, reverse)), "the operator")
    fakes = torch.ops.kagent.lstm_steps(*(tensor.to("meta") for tensor in (projected, packed, hx, cx)), reverse)
    assert [(fake.shape, fake.stride()) for fake in fakes] == [(one.shape, one.stride()) for one in got]
