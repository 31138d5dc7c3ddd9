"""Tools for testing devices and the core itself."""

from __future__ import annotations

from typing import Any

from kagent_core import hookspecs
from kagent_core.hooks import Hooks


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
