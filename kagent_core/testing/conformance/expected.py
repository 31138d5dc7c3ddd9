"""Expected failures: what a plugin's authors know of, with the reasons, as data in the plugin.

The file is ``conformance.toml``, beside the module that the plugin's entry point names:

.. code-block:: toml

    [[expected]]
    case = "2/linalg.svd*"
    reason = "the vendor's library has no singular value decomposition of float64"

``case`` is a case's key, or a pattern of keys (``*``, ``?``).
"""

from __future__ import annotations

import fnmatch
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kagent_core.errors import ConfigError, choices, nearest
from kagent_core.listing import DEVICE_GROUP

FILE_NAME = "conformance.toml"
_KEYS = ("case", "reason")


@dataclass(frozen=True)
class ExpectedFailure:
    """One entry of the file.

    Attributes
    ----------
    case
        Key of a case, or a pattern.
    reason
        Why it fails.
    """

    case: str
    reason: str

    def matches(self, key: str) -> bool:
        """Whether it is about a case."""
        return fnmatch.fnmatchcase(key, self.case)


@dataclass(frozen=True)
class ExpectedFailures:
    """A plugin's list.

    Attributes
    ----------
    entries
        In the file's order; the first that matches a case gives the reason.
    path
        The file; None where there is none.
    """

    entries: tuple[ExpectedFailure, ...] = ()
    path: Path | None = None

    def reason_for(self, key: str) -> str | None:
        """Return why a case is known to fail, or None where it is not."""
        return next((entry.reason for entry in self.entries if entry.matches(key)), None)

    def check(self, known: Sequence[str], levels: Iterable[int], more: Callable[[], Iterable[str]]) -> None:
        """Refuse an entry that is about no case at all, for a case that was renamed is no longer expected to fail.

        Parameters
        ----------
        known
            Keys of the cases that were collected.
        levels
            The levels that they were collected from; entries about others are left alone.
        more
            Gives the keys of every case of these levels at full size; asked only where `known` does not suffice.

        Raises
        ------
        ConfigError
            For such an entry, with the nearest key that there is.
        """
        prefixes = tuple(f"{level}/" for level in levels)
        stale = [
            (number, entry)
            for number, entry in enumerate(self.entries, 1)
            if entry.case.startswith(prefixes) and not any(map(entry.matches, known))
        ]
        if not stale:
            return
        everything = list(more())
        for number, entry in stale:
            if not any(map(entry.matches, everything)):
                close = nearest(entry.case, everything)
                raise ConfigError(
                    f"{self.path}: entry {number} of [[expected]] is about case '{entry.case}', which there is not",
                    hint=f"did you mean '{close}'?"
                    if close
                    else "`kagent conformance --json -` prints every case's key",
                )


def read_expected(path: Path) -> ExpectedFailures:
    """Read a list of expected failures.

    Raises
    ------
    ConfigError
        For a file that cannot be read, and for anything in it that is not as it must be: names the file, the entry and
        the nearest valid key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    for key in table.keys() - {"expected"}:
        raise ConfigError(f"{path} has the key '{key}', which is not known", hint="its entries are [[expected]]")
    entries = table.get("expected", [])
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: 'expected' is {entries!r}, expected entries [[expected]]")
    return ExpectedFailures(tuple(_entry(path, n, entry) for n, entry in enumerate(entries, 1)), path)


def _entry(path: Path, number: int, entry: Any) -> ExpectedFailure:
    where = f"{path}: entry {number} of [[expected]]"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}, expected a table with {choices(_KEYS)}")
    for key in entry.keys() - set(_KEYS):
        close = nearest(key, _KEYS)
        hint = f"did you mean '{close}'?" if close else f"the keys are {choices(_KEYS)}"
        raise ConfigError(f"{where} has the key '{key}', which is not known", hint=hint)
    for key in _KEYS:
        value = entry.get(key)
        if not isinstance(value, str) or not value.strip():
            came = "has none" if value is None else f"has {value!r}"
            raise ConfigError(f"{where} must have a text as '{key}', and {came}")
    level = entry["case"].partition("/")[0]
    if not level.isdigit() and not level.startswith(("*", "?", "[")):
        raise ConfigError(
            f"{where} has the case '{entry['case']}', which begins with no level",
            hint="a case's key is LEVEL/NAME, such as '2/linalg.svd*'",
        )
    return ExpectedFailure(entry["case"], entry["reason"])


def expected_of(device: str) -> ExpectedFailures:
    """Return the list that a device's plugin brings; an empty one where it brings none.

    The file lies beside the module that the plugin's entry point names. For a plugin that the running program
    registers itself, beside the module of the device's runtime.

    Raises
    ------
    ConfigError
        As `read_expected`.
    DeviceError, PluginError
        When there is no such device.
    """
    from kagent_core.config import load_config
    from kagent_core.session import session_for

    session = session_for(load_config(options={"device": device}))
    target = session.target.device
    module = type(session.open(target).runtime).__module__
    for entry in session.plugins.entries():
        if entry.group == DEVICE_GROUP and entry.name == target.type and entry.usable:
            module = entry.target.partition(":")[0]
    place = _file_of(module)
    if place is None or not (path := place.parent / FILE_NAME).is_file():
        return ExpectedFailures()
    return read_expected(path)


def _file_of(module: str) -> Path | None:
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is None:
        spec = importlib.util.find_spec(module) if module != "__main__" else None
        loaded = spec.origin if spec is not None else None
    return Path(loaded) if loaded else None
