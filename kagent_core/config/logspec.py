"""The syntax of ``KAGENT_LOGS``: which component logs at which level."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kagent_core.errors import ConfigError, choices, nearest

TRACE = 5
LOG_COMPONENTS = ("capture", "schedule", "extract", "execute", "profile", "plugins", "codegen")
LOG_LEVELS: Mapping[str, int] = MappingProxyType({"error": 40, "warning": 30, "info": 20, "debug": 10, "trace": TRACE})


def parse_log_spec(spec: str) -> dict[str, int]:
    """Parse the syntax of ``KAGENT_LOGS`` into the level of each component that it names.

    Items are separated by commas, in upper or lower case: ``component=level``, a bare component (at DEBUG),
    or a bare level, for every component that has no item of its own.

    Raises
    ------
    ConfigError
        For a component or level that does not exist.

    Examples
    --------
    >>> parse_log_spec("extract, execute=trace")
    {'extract': 10, 'execute': 5}
    """
    everything: dict[str, int] = {}
    named: dict[str, int] = {}
    for item in filter(None, (part.strip().lower() for part in spec.split(","))):
        component, equals, level = (part.strip() for part in item.partition("="))
        if not equals and item in LOG_LEVELS:
            everything = dict.fromkeys(LOG_COMPONENTS, LOG_LEVELS[item])
        elif component not in LOG_COMPONENTS:
            known = LOG_COMPONENTS if equals else (*LOG_COMPONENTS, *LOG_LEVELS)
            kind = "component" if equals else "component or level"
            raise ConfigError(f"unknown log {kind} '{component}' in '{spec}'", hint=_pick(component, known))
        elif equals and level not in LOG_LEVELS:
            raise ConfigError(f"unknown log level '{level}' in '{spec}'", hint=_pick(level, LOG_LEVELS))
        else:
            named[component] = LOG_LEVELS[level] if equals else LOG_LEVELS["debug"]
    return everything | named


def _pick(word: str, known: Mapping[str, int] | tuple[str, ...], noun: str = "one") -> str:
    """Say the nearest of the known words, where there is one, and all of them."""
    close = nearest(word, known)
    return f"{f'did you mean {close!r}? ' if close else ''}use {noun} of {choices(known)}"
