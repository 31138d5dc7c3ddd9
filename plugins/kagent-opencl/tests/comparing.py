"""What a device gives for a function, compared with eager PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import kagent_core
from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.testing.operator_samples import operator_calls, variants

Function = Callable[..., Any]


def run(device: str, function: Function, *args: Any) -> list[torch.Tensor]:
    """Return what a function gives on the device, where nothing of it may run elsewhere."""
    session = session_for(load_config({"device": device}))
    torch._dynamo.reset()
    session.reports.clear()
    with torch.no_grad():
        made = torch.compile(function, backend="kagent", options={"device": device}, dynamic=False)(*args)
    assert [fall.signature for report in session.reports for fall in report.fallbacks] == []
    return list(made) if isinstance(made, tuple) else [made]


def check(device: str, function: Function, *args: Any) -> None:
    """Compare with eager PyTorch."""
    wanted = function(*args)
    for got, want in zip(run(device, function, *args), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def check_samples(
    device: str,
    signature: str,
    dtypes: Sequence[torch.dtype],
    samples: int,
    first_only: bool = False,
    contiguous: bool = False,
) -> None:
    """Compare what an operator gives for the samples of the operator database, laid out in several ways, with eager.

    Parameters
    ----------
    device
        Its name.
    signature
        The operator's.
    dtypes
        Of the samples.
    samples
        Their number for each dtype.
    first_only
        Only the first result has one right value.
    contiguous
        Whether eager PyTorch gets its arguments so: its own kernel does not look at the strides of all of them.
    """
    calls = operator_calls(signature, dtypes, samples=samples)
    assert calls
    for call in calls:
        for variant in itertools.islice(variants(call), 5):
            args, kwargs = variant.copied()
            try:
                if contiguous:
                    args = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, args)
                wanted = variant.overload(*args, **kwargs)
            except (RuntimeError, IndexError):
                continue
            args, kwargs = variant.copied()
            made = kagent_core.run_op(signature, *args, device=device, **kwargs)
            if first_only:
                made, wanted = made[0], wanted[0]
            torch.testing.assert_close(made, wanted, equal_nan=True, msg=lambda text, v=variant: f"{v}\n{text}")
