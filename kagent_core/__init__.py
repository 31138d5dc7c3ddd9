"""kagent: the way to bring a new accelerator, or one hand-written kernel, to PyTorch.

Importing this package imports neither torch nor any driver; what needs them is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kagent_core.hooks import hookimpl

if TYPE_CHECKING:
    from kagent_core.api import compile, run_op
    from kagent_core.config import Config, load_config
    from kagent_core.inspect.dump import dump_extraction_context
    from kagent_core.kernels import force_launch_config, kernel
    from kagent_core.session import Session, session_for, use_plugin

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Session",
    "compile",
    "dump_extraction_context",
    "force_launch_config",
    "hookimpl",
    "kernel",
    "load_config",
    "run_op",
    "session_for",
    "use_plugin",
]

_HOMES = {
    "Config": "kagent_core.config",
    "Session": "kagent_core.session",
    "compile": "kagent_core.api",
    "dump_extraction_context": "kagent_core.inspect.dump",
    "force_launch_config": "kagent_core.kernels",
    "kernel": "kagent_core.kernels",
    "load_config": "kagent_core.config",
    "run_op": "kagent_core.api",
    "session_for": "kagent_core.session",
    "use_plugin": "kagent_core.session",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kagent_core' has no attribute '{name}'")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
