"""The config key ``kernels``: kernels of a project's own, as source files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kagent_core.config.values import _SIGNATURE, FrozenMapping, UnfitError, _named_device
from kagent_core.errors import choices, nearest
from kagent_core.layout import ANY_STRIDES, CHANNELS_LAST, CHANNELS_LAST_3D, CONTIGUOUS, Layout

EXAMPLE = '{"aten::gelu" = { device = "cpu", file = "gelu.c" }}'

LAYOUTS: Mapping[str, Layout] = {
    "any": ANY_STRIDES,
    "contiguous": CONTIGUOUS,
    "channels-last": CHANNELS_LAST,
    "channels-last-3d": CHANNELS_LAST_3D,
}
"""Layouts as the config spells them."""


@dataclass(frozen=True)
class KernelEntry:
    """One kernel of the config.

    Attributes
    ----------
    device
        A type, or one device.
    path
        The source file.
    text
        What is in it.
    options
        Further keywords of `kagent_core.kernel` by name, hashable.
    origin
        Where it is configured.
    """

    device: str
    path: Path
    text: str
    options: tuple[tuple[str, Any], ...] = ()
    origin: str = field(default="config key kernels", compare=False)

    def keywords(self) -> dict[str, Any]:
        """Return the options as `kagent_core.kernel` takes them."""
        return {name: _thawed(name, value) for name, value in self.options}

    def spelled(self) -> dict[str, Any]:
        """Return the entry as the config spells it."""
        options = {name: dict(value) if name in _TABLES else _listed(value) for name, value in self.options}
        return {"device": self.device, "file": str(self.path), **options}


class ConfiguredKernels(FrozenMapping[tuple[KernelEntry, ...]]):
    """From a signature to the kernels that the config has for it."""

    __slots__ = ()

    def __str__(self) -> str:
        return json.dumps(self.spelled()) if self._items else ""

    def spelled(self) -> dict[str, Any]:
        """Return the kernels as the config spells them."""
        told = {signature: [entry.spelled() for entry in entries] for signature, entries in self._items.items()}
        return {signature: entries[0] if len(entries) == 1 else entries for signature, entries in told.items()}

    @classmethod
    def _parse(cls, value: object) -> Self:
        if isinstance(value, str):
            value = _parse_json(value)
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise UnfitError("a table of signatures and kernels", f"for example {EXAMPLE}")
        entries: dict[str, tuple[KernelEntry, ...]] = {}
        for signature, given in value.items():
            if not isinstance(signature, str) or not _SIGNATURE.fullmatch(signature):
                raise UnfitError("signatures such as 'aten::add.Tensor'", came=f"has {signature!r}")
            several = given if isinstance(given, (list, tuple)) else [given]
            entries[signature] = tuple(_entry(signature, one) for one in several)
        return cls(entries)


def anchored(value: object, directory: Path, origin: str) -> object:
    """Return what a file says of kernels, with paths that start at its directory and the place where it says so."""
    if not isinstance(value, Mapping):
        return value

    def anchor(signature: object, entry: object) -> object:
        if not isinstance(entry, Mapping):
            return entry
        file = entry.get("file")
        moved = {"file": directory / file} if isinstance(file, str) and file and not file.startswith("~") else {}
        return {"origin": f"{origin} of '{signature}'", **entry, **moved}

    return {
        signature: [anchor(signature, one) for one in given] if isinstance(given, list) else anchor(signature, given)
        for signature, given in value.items()
    }


# -- one entry


def _entry(signature: str, given: object) -> KernelEntry:
    if not isinstance(given, Mapping):
        raise UnfitError("a table with a device and a file", f"for example {EXAMPLE}", came=_came(given, signature))
    for name in given:
        if name not in _CHECKS:
            close = nearest(str(name), _CHECKS)
            known = ", ".join(sorted(set(_CHECKS) - {"origin"}))
            meant = f"did you mean '{close}'?" if close else None
            raise UnfitError(f"the keys {known}", meant, came=f"has '{name}' for '{signature}'")
    for name in ("device", "file"):
        if name not in given:
            raise UnfitError("a device and a file", f"for example {EXAMPLE}", came=f"has no '{name}' for '{signature}'")
    checked = {name: _checked(name, value, signature) for name, value in given.items()}
    path, origin = checked.pop("file"), checked.pop("origin", "config key kernels")
    device = checked.pop("device")
    return KernelEntry(device, path, _read(path, signature), tuple(sorted(checked.items())), origin)


def _checked(name: str, value: object, signature: str) -> Any:
    try:
        return _CHECKS[name](value)
    except UnfitError as error:
        raise UnfitError(error.expected, error.hint, came=f"has {name} = {_shown(value)} for '{signature}'") from None


def _read(path: Path, signature: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        told = f"has the file '{path}' for '{signature}' ({error.strerror})"
    except UnicodeDecodeError as error:
        told = f"has the file '{path}' for '{signature}' ({error.reason})"
    raise UnfitError("a source file that can be read", "a relative path starts at the config file", came=told)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UnfitError("a string")
    return value


def _device(value: object) -> str:
    return _named_device(_text(value))


def _file(value: object) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise UnfitError("a path")
    try:
        return Path(value).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise UnfitError("a path", str(error)) from None


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnfitError("a whole number")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise UnfitError("a list of names")
    return tuple(value)


def _layout(value: object) -> str:
    if value not in LAYOUTS:
        close = nearest(str(value), LAYOUTS)
        raise UnfitError(choices(LAYOUTS), f"did you mean '{close}'?" if close else None)
    return str(value)


def _table_of(check: Callable[[object], Any]) -> Callable[[object], tuple[tuple[str, Any], ...]]:
    def check_table(value: object) -> tuple[tuple[str, Any], ...]:
        if not isinstance(value, Mapping):
            raise UnfitError("a table")
        return tuple(sorted((str(name), check(item)) for name, item in value.items()))

    return check_table


def _constant(value: object) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_constant(item) for item in value)
    if not isinstance(value, (bool, int, float, str)):
        raise UnfitError("a number, a string or a list of them")
    return value


_TABLES: Mapping[str, Callable[[object], Any]] = {
    "derived": _table_of(_text),
    "only": _table_of(_constant),
    "types": _table_of(_text),
    "layouts": _table_of(_layout),
}

_CHECKS: Mapping[str, Callable[[object], Any]] = {
    "device": _device,
    "file": _file,
    "prototype": _text,
    "name": _text,
    "dtypes": _names,
    "ignore": _names,
    "optional": _names,
    "layout": _layout,
    "priority": _number,
    "origin": _text,
    **_TABLES,
}


def _thawed(name: str, value: Any) -> Any:
    if name == "layout":
        return LAYOUTS[value]
    if name == "layouts":
        return {tensor: LAYOUTS[layout] for tensor, layout in value}
    return dict(value) if name in _TABLES else value


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: object) -> str:
    return repr(str(value)) if isinstance(value, Path) else repr(value)


def _came(given: object, signature: str) -> str:
    return f"has {given!r} for '{signature}'"


def _parse_json(text: str) -> object:
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UnfitError("a JSON object of signatures and kernels", str(error)) from None
