"""kagent as the default backend of ``torch.compile``, for programs that name none."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kagent_core.inspect.logs import get_logger

log = get_logger("capture")

_DYNAMO_OPTIONS = frozenset({"guard_filter_fn"})
"""Options that `torch.compile` takes out itself, whatever the backend."""


@contextmanager
def default_backend(options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Make kagent the backend of every `torch.compile` call that names none.

    Covers functions, decorators with and without arguments, and ``nn.Module.compile()``. A call that names a
    backend keeps it. A call's ``mode`` is passed on. Its ``options``, when it names no backend, are meant for
    torch's default compiler: they are dropped, with a warning that names them.

    Parameters
    ----------
    options
        kagent's options for these calls, such as ``{"device": "opencl:0"}``.

    Examples
    --------
    >>> import torch
    >>> from kagent_core.default_backend import default_backend
    >>> with default_backend({"device": "cpu"}):
    ...     double = torch.compile(lambda x: 2 * x)
    >>> double(torch.ones(3))
    tensor([2., 2., 2.])
    """
    backend = _bind(options or {})
    original = torch.compile

    @functools.wraps(original)
    def compile_with_default(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") is None:
            kwargs["backend"] = backend
            kwargs["options"] = _without_foreign(kwargs.get("options"))
        return original(*args, **kwargs)

    torch.compile = compile_with_default
    try:
        yield
    finally:
        torch.compile = original


def _bind(options: Mapping[str, Any]) -> Any:
    """Return kagent's backend with its options bound: `torch.compile` refuses options next to a mode."""
    from kagent_core.backend import kagent

    @functools.wraps(kagent)
    def backend(graph: Any, example_inputs: Any, *, mode: Any = None, options: Any = options) -> Any:
        return kagent(graph, example_inputs, mode=mode, options=options)

    return backend


def _without_foreign(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Drop the options that a call without a backend gives to torch's default compiler."""
    if options is None:
        return None
    foreign = [name for name in options if name not in _DYNAMO_OPTIONS]
    if foreign:
        log.warning(
            "torch.compile was given options for torch's default compiler, in whose place kagent runs; "
            "they are dropped: %s",
            ", ".join(foreign),
        )
    return {name: value for name, value in options.items() if name in _DYNAMO_OPTIONS} or None
