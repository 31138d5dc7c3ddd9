"""Where a config value came from, and the error messages that say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic_core import ErrorDetails

from kagent_core.config.values import UnfitError
from kagent_core.errors import ConfigError, choices, nearest

ENV_PREFIX = "KAGENT_"


@dataclass(frozen=True)
class Source:
    """Where the value of one key came from.

    Parameters
    ----------
    kind
        The kind of source.
    key
        The key as it is spelt there: an option's name, a variable's name, a key of the file.
    path
        The file, for a value out of a file.
    """

    kind: Literal["default", "option", "environment", "file"] = "default"
    key: str = ""
    path: Path | None = None

    def __str__(self) -> str:
        if self.kind == "environment":
            return f"environment {self.key}"
        return f"file {self.path} [{self.key}]" if self.kind == "file" else self.kind

    @property
    def where(self) -> str:
        """The source as the subject of an error message."""
        if self.kind == "environment":
            return f"environment variable {self.key}"
        return f"{self.path}: key '{self.key}'" if self.kind == "file" else f"option '{self.key}'"


def unknown_key(source: Source, known: Iterable[str]) -> ConfigError:
    """Build the error for a key that does not exist, from the names of the keys that do."""
    keys = {ENV_PREFIX + key.upper(): key for key in known}
    if source.kind == "environment":
        message = f"unknown environment variable {source.key}"
        spelt, names = source.key, list(keys)
    else:
        message = f"{source.where} is no configuration key"
        spelt, names = source.key.rpartition(".")[2].replace("-", "_"), list(keys.values())
    close = nearest(spelt.upper() if source.kind == "environment" else spelt.lower(), names)
    meant = f"did you mean {close!r}? " if close else ""
    return ConfigError(message, hint=f"{meant}the keys are {', '.join(sorted(names))}")


def bad_value(error: ErrorDetails, sources: Mapping[str, Source], meaning: str | None) -> ConfigError:
    """Translate one of pydantic's errors into what came, what was expected and what may be meant.

    `meaning` is the key's description: the hint where there is no better one.
    """
    key, *inner = error["loc"]
    where = sources[str(key)].where + "".join(f"[{index}]" for index in inner if isinstance(index, int))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return ConfigError(f"{where}: {cause.message}", hint=cause.hint)
    expected, hint = _expected(error)
    came = cause.came if isinstance(cause, UnfitError) and cause.came else f"is {error['input']!r}"
    return ConfigError(f"{where} {came}, expected {expected}", hint=hint or meaning)


def _expected(error: ErrorDetails) -> tuple[str, str | None]:
    """Say what a value should have been, and a hint where one close to it is right."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    cause = context.get("error")
    if isinstance(cause, UnfitError):
        return cause.expected, cause.hint
    if kind == "literal_error":
        words = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        close = nearest(str(value).lower(), words)
        return choices(words), f"did you mean {close!r}?" if close else None
    if kind == "greater_than_equal":
        return f"a whole number of at least {context['ge']}", None
    if kind.startswith("bool_"):
        close = nearest(str(value).lower(), ("true", "false"))
        return "true or false", f"did you mean {close}?" if close else None
    names = {"int": "a whole number", "string": "a string", "path": "a path", "tuple": "a list of names"}
    return names.get(kind.partition("_")[0], error["msg"]), None
