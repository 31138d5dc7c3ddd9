"""Tools for testing devices and the core itself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kagent_core import hookspecs
from kagent_core.hooks import Hooks

if TYPE_CHECKING:
    from kagent_core.testing.fake import FakeDevice, FakeRuntime

__all__ = ["FakeDevice", "FakeRuntime", "call_hook"]


def __getattr__(name: str) -> Any:
    if name in ("FakeDevice", "FakeRuntime"):  # they need torch, which calling hooks does not
        return getattr(importlib.import_module("kagent_core.testing.fake"), name)
    raise AttributeError(f"module 'kagent_core.testing' has no attribute '{name}'")


def call_hook(plugin: object, hook: str, **arguments: Any) -> Any:
    """Call one hook on one plugin, with nothing else registered.

    Parameters
    ----------
    plugin
        A module or an object with hook implementations.
    hook
        Name of the hook.
    **arguments
        The hook's arguments.

    Returns
    -------
    Any
        A list of results, or one result (or None) for a hook of which only the first result counts.

    Raises
    ------
    PluginError
        When the plugin does not fit kagent's hooks.
    """
    hooks = Hooks(hookspecs)
    hooks.register(plugin, "plugin")
    return getattr(hooks.call, hook)(**arguments)
