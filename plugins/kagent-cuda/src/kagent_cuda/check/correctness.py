"""Whether operators, models and training compute what eager PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.testing.compare import MismatchError, assert_as_exact, assert_same
from kagent_cuda.check.models import Decoder, Model, models, parameters
from kagent_cuda.check.operators import Group, groups
from kagent_cuda.check.sections import Row, Tell
from kagent_cuda.check.setting import Setting

DTYPES = (torch.float32, torch.bfloat16)
STEPS = 4
LOSS_TOLERANCE = 1e-4


def check_operators(setting: Setting, tell: Tell) -> None:
    """Compare a selection of operators, in programs that make many results each."""
    _exact_products()
    for group in groups(setting.tiny):
        for dtype in group.dtypes:
            tell(_check_group(setting, group, dtype))


def check_models(setting: Setting, tell: Tell) -> None:
    """Compare what models make of small inputs, without gradients."""
    _exact_products()
    for dtype in DTYPES[: 1 if setting.tiny else None]:
        for model in models(setting.tiny):
            tell(_check_model(setting, model, dtype))


def check_training(setting: Setting, tell: Tell) -> None:
    """Compare some steps of training: losses, gradients and parameters."""
    _exact_products()
    losses, trained = _train(setting, setting.compile)
    expected, kept = _train(setting, lambda function: function)
    worst = max(abs(one - two) / abs(two) for one, two in zip(losses, expected, strict=True))
    failed = None if worst <= LOSS_TOLERANCE else f"losses {losses}, eager's are {expected}"
    for name, value in trained.items():
        if failed is None and not torch.allclose(value, kept[name], rtol=1e-3, atol=1e-4):
            failed = f"{name} is another one than eager's after {len(losses)} steps"
    name = "words to words, AdamW" if setting.tiny else "decoder, AdamW"
    tell(Row(name, {"steps": len(losses), "loss": f"{losses[0]:.4f} → {losses[-1]:.4f}"}, failed))


def _exact_products() -> None:
    torch.backends.cudnn.allow_tf32 = False  # eager's convolutions would not be float32's


def _check_group(setting: Setting, group: Group, dtype: torch.dtype) -> Row:
    torch.manual_seed(0)
    args = group.inputs(dtype)
    placed = tuple(arg.to(setting.place) for arg in args)
    name = f"{group.name}, {_spelled(dtype)}"
    functions = dict(group.program)
    fallbacks = _Fallbacks(setting)
    wrong: dict[str, str] = {}
    try:
        results = _to_host(
            setting.compile(lambda *given: [function(*given) for function in functions.values()])(*placed)
        )
        made = dict(zip(functions, results, strict=True))
    except Exception as error:  # noqa: BLE001  one operator may fail for all: each is tried alone
        made = _one_by_one(setting, functions, placed, wrong)
        if not wrong:
            wrong["all at once"] = _first_line(error)
    for operator, result in made.items():
        told = _compare(functions[operator], result, args, placed)
        if told is not None:
            wrong[operator] = told
    failed = "; ".join(f"{operator}: {told}" for operator, told in wrong.items()) or None
    figures = {"operators": len(functions), "right": len(functions) - len(wrong), "fallbacks": fallbacks.count()}
    return Row(name, figures, failed)


def _one_by_one(
    setting: Setting, functions: dict[str, Callable[..., Any]], placed: tuple[Tensor, ...], wrong: dict[str, str]
) -> dict[str, Any]:
    made = {}
    for operator, function in functions.items():
        try:
            made[operator] = _to_host(setting.compile(function)(*placed))
        except Exception as error:  # noqa: BLE001  it is told, and the others are tried
            wrong[operator] = _first_line(error)
    return made


def _compare(
    function: Callable[..., Any], result: Any, args: tuple[Tensor, ...], placed: tuple[Tensor, ...]
) -> str | None:
    """Return how a result differs from eager's where it is not at least about as exact; None where it is right."""
    eager = _to_host(function(*placed))
    try:
        assert_same(result, eager, every_stride=False)
    except MismatchError as error:
        told = str(error).strip(": ")
    else:
        return None
    if not any(arg.is_floating_point() for arg in args):
        return told
    exact = function(*(arg.double() if arg.is_floating_point() else arg for arg in args))
    try:
        assert_as_exact(result, eager, exact, _times(args), "")
    except MismatchError:
        return told
    return None


def _times(args: tuple[Tensor, ...]) -> float:
    """How many times eager's error is allowed: more for half types, which are rounded more often."""
    return 3.0 if any(arg.is_floating_point() and arg.dtype.itemsize < 4 for arg in args) else 2.0


def _check_model(setting: Setting, model: Model, dtype: torch.dtype) -> Row:
    name = f"{model.name}, {_spelled(dtype)}"
    fallbacks = _Fallbacks(setting)
    with torch.no_grad():
        module, args = model.build(dtype, setting.place)
        exact_module, exact_args = model.build(torch.float64, torch.device("cpu"))
        exact_module.load_state_dict(module.state_dict())  # the same weights, rounded as they are
        exact_args = tuple(_rounded(one, two) for one, two in zip(args, exact_args, strict=True))
        compiled = setting.compile(module)
        got, eager, exact = compiled(*args), module(*args), exact_module(*exact_args)
        again = compiled(*args)
    got, again, eager = _to_host(got), _to_host(again), _to_host(eager)
    errors = [float((one.double() - exact).square().mean().sqrt()) for one in (got, eager)]
    figures = {"error": f"{errors[0]:.2e}", "eager's": f"{errors[1]:.2e}", "fallbacks": fallbacks.count()}
    failed = None
    try:
        assert_as_exact(got, eager, exact, 3.0 if dtype.itemsize < 4 else 2.0, "result")
        assert_same(again, got, "the second call's")
    except MismatchError as error:
        failed = str(error)
    return Row(name, figures, failed)


def _rounded(arg: Tensor, exact: Tensor) -> Tensor:
    return arg.cpu().double() if arg.is_floating_point() else exact


def _train(
    setting: Setting, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a small model that says which token comes next, and return its losses and parameters."""
    words, length = (11, 6) if setting.tiny else (101, 32)
    torch.manual_seed(0)
    if setting.tiny:
        module: nn.Module = nn.Sequential(nn.Embedding(words, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, words))
    else:
        module = Decoder(2, 64, 4, words, length)
    module = module.to(setting.place)
    tokens = torch.randint(0, words, (3, length)).to(setting.place)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def loss_of(given: Tensor) -> Tensor:
        return functional.cross_entropy(module(given)[:, :-1].flatten(0, 1), given[:, 1:].flatten())

    step, losses = compiled(loss_of), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(tokens)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, parameters(module)


class _Fallbacks:
    """Counts operators that ran elsewhere, from here on."""

    def __init__(self, setting: Setting) -> None:
        self._reports = session_for(load_config(options=setting.options)).reports
        self._before = len(self._reports)

    def count(self) -> int:
        """Return how many there were."""
        return sum(len(report.fallbacks) for report in list(self._reports)[self._before :])


def _to_host(result: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, result)


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    told = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {told[0]}"
