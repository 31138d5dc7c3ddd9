"""What plugins there are: entry points of two groups, listed without importing anything.

- ``kagent.plugins``: device plugins. The entry point's name is the device type.
- ``kagent.stages``: plugins that replace or wrap stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import importlib_metadata

from kagent_core.config import Config

DEVICE_GROUP = "kagent.plugins"
STAGE_GROUP = "kagent.stages"
PROGRAM_GROUP = "program"


class PluginState(Enum):
    """How far a plugin has come."""

    LISTED = "listed"  # known by its entry point, not imported
    LOADED = "loaded"
    BLOCKED = "blocked"  # by config
    FAILED = "failed"
    CONFLICT = "conflict"


@dataclass(frozen=True)
class PluginEntry:
    """One plugin as `kagent plugins` prints it.

    Attributes
    ----------
    name
        The entry point's name; for a device plugin, the device type.
    group
        `DEVICE_GROUP`, `STAGE_GROUP`, or `PROGRAM_GROUP` for one that the running program registers itself.
    distribution, version
        Who brings it.
    target
        Module (and attribute) that the entry point names.
    state
        How far it has come.
    reason
        Why it cannot be used, or None.
    """

    name: str
    group: str
    distribution: str
    version: str
    target: str
    state: PluginState = PluginState.LISTED
    reason: str | None = None

    @property
    def owner(self) -> str:
        """Who brings it: the distribution, or else what the entry point names."""
        return self.distribution or self.target

    @property
    def usable(self) -> bool:
        """Whether it can be used, as far as is known before it is imported."""
        return self.state in (PluginState.LISTED, PluginState.LOADED)


Key = tuple[str, str]
"""Group and name of a plugin."""

EntryPoints = Callable[[str], Iterable[Any]]


def installed_entry_points(group: str) -> Iterable[Any]:
    """Entry points of the installed distributions."""
    return importlib_metadata.entry_points(group=group)


@dataclass(frozen=True)
class ListedPlugin:
    """A plugin that was found.

    Attributes
    ----------
    entry
        What is known of it.
    point
        The entry point that loads it.
    hint
        What to do about it when it cannot be used.
    """

    entry: PluginEntry
    point: Any
    hint: str | None = None


def list_plugins(group: str, points: Iterable[Any], config: Config) -> list[ListedPlugin]:
    """Return one plugin per name: to be loaded, blocked by config, or in conflict with its namesake."""
    claims: dict[str, dict[tuple[str, str], ListedPlugin]] = {}
    for point in points:
        distribution, version = _distribution(point)
        entry = PluginEntry(point.name, group, distribution, version, point.value)
        same_name = claims.setdefault(point.name, {})
        same_name.setdefault((distribution, point.value), ListedPlugin(entry, point))
    return [_judge(list(claimants.values()), config) for claimants in claims.values()]


def _judge(claimants: list[ListedPlugin], config: Config) -> ListedPlugin:
    first = claimants[0]
    entry = first.entry
    blocked = _blocked(entry.name, config)
    if blocked is not None:
        return replace(first, entry=replace(entry, state=PluginState.BLOCKED, reason=blocked))
    if len(claimants) > 1:
        named = " and ".join(f"'{other.entry.owner}' ({other.entry.target})" for other in claimants)
        reason = f"more than one plugin is named '{entry.name}': {named}"
        entry = replace(entry, state=PluginState.CONFLICT, reason=reason)
        return replace(first, entry=entry, hint="uninstall all but one of them")
    return first


def _blocked(name: str, config: Config) -> str | None:
    if name in config.plugins_block:
        return "blocked by config: plugins_block names it"
    if config.plugins_allow is not None and name not in config.plugins_allow:
        return "blocked by config: plugins_allow does not name it"
    return None


def _distribution(point: Any) -> tuple[str, str]:
    """Return name and version of the distribution that brings an entry point; empty where unknown."""
    found = []
    for field in ("name", "version"):
        try:
            found.append(getattr(point.dist, field, None) or "")
        except (LookupError, OSError):  # its metadata lacks the field, which need not stop the plugin
            found.append("")
    return found[0], found[1]
