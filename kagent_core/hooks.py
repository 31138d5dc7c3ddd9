"""Markers and manager for hooks: the only module that touches pluggy.

Plugin authors import `hookimpl` from here (also available as ``kagent_core.hookimpl``) and write functions
with the names and arguments of `kagent_core.hookspecs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import pluggy

from kagent_core.errors import PluginConflictError, PluginError, choices, nearest

PROJECT = "kagent"

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks a function of `kagent_core.hookspecs` as a hook."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of a hook."""


def reject_without_hooks(plugin: object) -> None:
    """Refuse what implements no hook at all, such as a plugin's name.

    Raises
    ------
    PluginError
        When nothing of it is named as a hook is, or marked as a hook's implementation.
    """
    for name in dir(plugin):
        # statically, so that no property of the plugin runs
        if name.startswith(f"{PROJECT}_") or hasattr(inspect.getattr_static(plugin, name, None), f"{PROJECT}_impl"):
            return
    raise PluginError(
        f"{plugin!r} is no plugin: it implements none of kagent's hooks",
        hint="give a module or an instance with methods marked @kagent_core.hookimpl; "
        "an installed plugin needs no use_plugin",
    )


class Hooks:
    """The hooks of one session, with the plugins registered on them.

    Parameters
    ----------
    specs
        The module that declares the hooks.
    """

    def __init__(self, specs: ModuleType) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(specs)
        self.call = self._manager.hook

    def register(self, plugin: object, name: str) -> None:
        """Add a plugin's hook implementations: all of them, or none when it is refused.

        Raises
        ------
        PluginConflictError
            When the name is taken, or the plugin is registered already.
        PluginError
            When it is no plugin, forgets ``@hookimpl``, implements a hook that does not exist, or takes
            arguments that the hook does not have. pluggy by itself would accept the first three in silence.
        """
        self._reject_taken(plugin, name)
        self._reject_unusable(plugin, name)
        try:
            self._manager.register(plugin, name)
        except ValueError as error:  # pluggy compares with ==
            raise PluginConflictError(f"plugin '{name}' equals one that is registered already") from error
        except pluggy.PluginValidationError as error:
            if self._manager.has_plugin(name):  # older versions of pluggy leave a part of it registered
                self._manager.unregister(name=name)
            told = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
            raise PluginError(
                f"plugin '{name}' does not fit kagent's hooks: {told}",
                hint="kagent_core.hookspecs has each hook with its arguments",
            ) from error
        try:
            self._reject_unknown(plugin, name)
        except PluginError:
            self._manager.unregister(name=name)
            raise

    def unregister(self, name: str) -> None:
        """Take a plugin's hook implementations away again."""
        self._manager.unregister(name=name)

    def implementers(self, hook: str) -> list[str]:
        """Names of the plugins that implement `hook`, in the order in which they are called."""
        caller = getattr(self._manager.hook, hook)
        return [impl.plugin_name for impl in reversed(caller.get_hookimpls())]

    def call_one(self, hook: str, plugin: str, /, **arguments: Any) -> list[Any]:
        """Call a hook on one plugin only, without anyone's wrappers.

        Returns its result in a list, which is empty when it gave none. Calls the function itself: pluggy's
        own way compares and hashes every other plugin, and so fails when one of them cannot be hashed.
        """
        given: list[Any] = []
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            if impl.plugin_name != plugin or impl.wrapper or impl.hookwrapper:
                continue
            named = {name: arguments[name] for name in impl.kwargnames if name in arguments}
            given.append(impl.function(*(arguments[name] for name in impl.argnames), **named))
        return [result for result in given if result is not None]

    def name_of(self, plugin: object) -> str | None:
        """Name under which a plugin is registered, or None."""
        found = (name for name, obj in self._manager.list_name_plugin() if obj is plugin and obj is not None)
        return next(found, None)

    def names(self) -> Iterable[str]:
        """Names of the registered plugins."""
        return [name for name, obj in self._manager.list_name_plugin() if obj is not None]

    def _specified(self) -> list[str]:
        known = [hook for hook in dir(self._manager.hook) if hook.startswith(f"{PROJECT}_")]
        return [hook for hook in known if getattr(self._manager.hook, hook).has_spec()]

    def _reject_taken(self, plugin: object, name: str) -> None:
        if name in self.names():
            raise PluginConflictError(f"two plugins are named '{name}'", hint="register one of them under another name")
        other = self.name_of(plugin)
        if other is not None:
            raise PluginConflictError(f"plugin '{name}' is registered already, as '{other}'")

    def _reject_unusable(self, plugin: object, name: str) -> None:
        if plugin is None or isinstance(plugin, type):
            came = "None" if plugin is None else f"the class {plugin.__name__}"
            raise PluginError(
                f"plugin '{name}' is {came}, not a module or an instance",
                hint=None if plugin is None else f"give an instance: {plugin.__name__}()",
            )
        for hook in self._specified():
            function = inspect.getattr_static(plugin, hook, None)
            if isinstance(function, FunctionType) and not hasattr(function, f"{PROJECT}_impl"):
                raise PluginError(
                    f"plugin '{name}' has a function {hook} that is not marked as a hook's implementation",
                    hint="put @kagent_core.hookimpl before it",
                )

    def _reject_unknown(self, plugin: object, name: str) -> None:
        for caller in self._manager.get_hookcallers(plugin) or []:
            if caller.has_spec():
                continue
            specified = self._specified()
            close = nearest(caller.name, specified)
            raise PluginError(
                f"plugin '{name}' implements '{caller.name}', which is not one of kagent's hooks",
                hint=f"did you mean '{close}'?" if close else f"the hooks are {choices(specified)}",
            )
