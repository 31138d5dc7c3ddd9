"""Random numbers on an OpenCL device: the CPU's generated ones, in vectors and beside them, and nothing falls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import kagent_core
from kagent_core.config import load_config
from kagent_core.session import session_for

Function = Callable[..., Any]


def run(device: str, function: Function, *args: Any, seed: int = 0, **options: Any) -> list[torch.Tensor]:
    """Return what a function gives on a device that draws by itself, where nothing of it may run elsewhere."""
    given = {"device": device, "random_numbers": "device" if device == "cpu" else "auto", **options}
    session = session_for(load_config(given))
    torch._dynamo.reset()
    session.reports.clear()
    torch.manual_seed(seed)
    with torch.no_grad():
        made = torch.compile(function, backend="kagent", options=given, dynamic=False)(*args)
    assert [fall.signature for report in session.reports for fall in report.fallbacks] == []
    return list(made) if isinstance(made, tuple) else [made]


EXACT: dict[str, Function] = {
    "rand": torch.rand_like,
    "uniform": lambda x: x.clone().uniform_(1, 3),
    "dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "bernoulli": lambda x: torch.bernoulli(x.abs().clamp(max=1)),
    "bernoulli.p": lambda x: torch.bernoulli(x, 0.7),
    "randint": lambda x: torch.randint_like(x, -100, 1000),
    "randint, wide": lambda x: torch.randint(-(2**62), 2**62, x.shape),
    "rrelu": lambda x: functional.rrelu(x, training=True),
}
CLOSE: dict[str, Function] = {
    "randn": torch.randn_like,
    "normal": lambda x: torch.normal(x, x.abs()),
    "log_normal": lambda x: x.clone().log_normal_(0.1, 0.2),
    "exponential": lambda x: x.clone().exponential_(2),
    "cauchy": lambda x: x.clone().cauchy_(),
    "geometric": lambda x: x.clone().geometric_(0.4),
}


TYPES = (torch.float64, torch.float16, torch.bfloat16)
CASES = [(name, torch.float32) for name in (*EXACT, *CLOSE)]
CASES += [(name, dtype) for name in ("rand", "uniform", "dropout", "bernoulli", "randn") for dtype in TYPES]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_they_are_those_of_generated_c(device: str, name: str, dtype: torch.dtype) -> None:
    function = EXACT.get(name) or CLOSE[name]

    def every(*tensors: torch.Tensor) -> Any:
        made = [function(x) for x in tensors]
        return tuple(part for each in made for part in (each if isinstance(each, tuple) else (each,)))

    args = [torch.randn(shape).to(dtype) for shape in ((), (0,), (17,), (3, 5000))]
    for made, want in zip(run(device, every, *args), run("cpu", every, *args), strict=True):
        assert (made.dtype, made.shape) == (want.dtype, want.shape)
        exact = {"rtol": 0, "atol": 0} if name in EXACT else {}
        # a tangent near its pole differs by what its angle does
        torch.testing.assert_close(made, want, **({"rtol": 1e-2, "atol": 1e-3} if name == "cauchy" else exact))


def test_a_strided_result_has_the_same_numbers(device: str) -> None:
    x = torch.ones(40, 30)
    [made] = run(device, lambda x: functional.dropout(x.t()[1:, ::2], 0.5, True), x)
    [want] = run("cpu", lambda x: functional.dropout(x.t()[1:, ::2], 0.5, True), x)
    assert torch.equal(made, want)
    assert made.stride() == want.stride()


def test_any_launch_config_gives_the_same_numbers(device: str) -> None:
    x = torch.ones(5000)

    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5, True) + 1

    wanted = run(device, function, x)
    session = session_for(load_config({"device": device}))
    torch._dynamo.reset()
    for items in ("1,1,1/1,1,1", "3,1,1/2,1,1", "64,1,1/4,1,1"):
        forced = {"aten::native_dropout+aten::add.Tensor": items}
        [made] = run(device, function, x, launch_configs=forced)
        assert torch.equal(made, wanted[0])
    assert session.reports[-1].fallbacks == ()


def test_a_replay_draws_anew_and_repeats_from_a_seed(device: str) -> None:
    compiled = kagent_core.compile(lambda x: functional.dropout(x, 0.5, True), device=device)
    torch._dynamo.reset()
    x = torch.ones(3000)
    torch.manual_seed(1)
    made = [compiled(x) for _ in range(4)]
    assert len({tuple(each.tolist()) for each in made}) == 4
    torch.manual_seed(1)
    assert all(torch.equal(compiled(x), each) for each in made)


@pytest.mark.parametrize("signature", ["aten::rand", "aten::randn"])
def test_one_operator(device: str, signature: str) -> None:
    torch.manual_seed(2)
    first, second = (kagent_core.run_op(signature, [100], device=device) for _ in range(2))
    torch.manual_seed(2)
    assert torch.equal(kagent_core.run_op(signature, [100], device=device), first)
    assert not torch.equal(first, second)


class Dropped(torch.nn.Module):
    """A block of a transformer, with dropout wherever one has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.block = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = functional.dropout(self.embedding(tokens), 0.1, self.training)
        made: torch.Tensor = self.head(self.block(embedded).mean(1))
        return made


def test_training_with_dropout_runs_on_the_device_alone(device: str) -> None:
    torch.manual_seed(0)
    model = Dropped()
    tokens = torch.randint(50, (32, 12))
    labels = (tokens[:, 0] > 24).long()
    session = session_for(load_config({"device": device}))
    torch._dynamo.reset()
    session.reports.clear()
    compiled = kagent_core.compile(model, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = functional.cross_entropy(compiled(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert [fall.signature for report in session.reports for fall in report.fallbacks] == []
    assert losses[-1] < 0.5 * losses[0]
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_numbers_drawn(device: str) -> None:
    """Without the device's numbers there is no eager result to compare with: the mask is read off the result."""
    x = torch.randn(64, 48, requires_grad=True)
    weight = torch.randn(48, 32, requires_grad=True)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x @ weight, 0.25, True)

    out = kagent_core.compile(function, device=device)(x, weight)
    torch._dynamo.reset()
    given = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, weight), given)
    mask = (out.detach() != 0) / 0.75
    want = torch.autograd.grad((x @ weight) * mask, (x, weight), given)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_eagers_own_numbers(device: str) -> None:
    def function(x: torch.Tensor) -> Any:
        return functional.dropout(x, 0.3, True), torch.randn_like(x), torch.randint(9, (5,))

    x = torch.randn(20, 5)
    torch.manual_seed(3)
    wanted = function(x)
    torch.manual_seed(3)
    torch._dynamo.reset()
    made = kagent_core.compile(function, device=device, random_numbers="eager")(x)
    assert all(map(torch.equal, made, wanted))
