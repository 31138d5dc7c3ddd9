"""The short ways in: compile a model, run one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kagent_core.backend import kagent
from kagent_core.capture.schemas import resolve_overload
from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_core.single import run_overload


def compile(
    model: Callable[..., Any],
    device: str | None = None,
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **options: Any,
) -> Any:
    """Return ``torch.compile(model, backend="kagent")`` with kagent's options, checked at once.

    Parameters
    ----------
    model
        A module or a function.
    device
        Where to run: ``auto``, a type, or ``type:index``; None leaves it to environment and config files.
    dynamic, fullgraph
        As for `torch.compile`.
    **options
        Any other config key.

    Raises
    ------
    ConfigError, DeviceError, PluginError
        Before anything is compiled.

    Examples
    --------
    >>> import torch, kagent_core
    >>> double = kagent_core.compile(lambda x: x + x, device="cpu")
    >>> double(torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """
    given = dict(options) if device is None else {"device": device, **options}
    session_for(load_config(options=given))
    # the function itself: torch's first look-up of a backend by its name fails when several threads make it at once
    return torch.compile(model, backend=kagent, dynamic=dynamic, fullgraph=fullgraph, options=given)


def run_op(signature: str, *args: Any, device: str | None = None, **kwargs: Any) -> Any:
    """Take one operator through the whole pipeline and return what it returns.

    Parameters
    ----------
    signature
        The exact overload: ``aten::addmm``, ``aten::add.Tensor``.
    *args, **kwargs
        The operator's own arguments, tensors in host memory among them.
    device
        Where to run it; None leaves it to environment and config files.

    Returns
    -------
    Any
        As the operator itself returns it. No gradient is recorded.

    Raises
    ------
    SignatureError
        When the installed torch has no such overload.
    KagentError
        As the agents raise.

    Examples
    --------
    >>> import torch, kagent_core
    >>> kagent_core.run_op("aten::add.Tensor", torch.tensor([1.0]), torch.tensor([2.0]), alpha=10, device="cpu")
    tensor([21.])
    """
    overload = resolve_overload(signature)
    session = session_for(load_config(options={} if device is None else {"device": device}))
    return run_overload(session, overload, args, kwargs)
