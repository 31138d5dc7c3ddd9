"""Reading the configuration from its three sources, and telling which of them said what."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_settings import EnvSettingsSource

from kagent_core.config.kernels import ConfiguredKernels, anchored
from kagent_core.config.model import Config
from kagent_core.config.source import ENV_PREFIX, Source, unknown_key
from kagent_core.config.values import LaunchConfigs
from kagent_core.errors import ConfigError

CONFIG_VARIABLE = "KAGENT_CONFIG"
PROJECT_FILE = "kagent.toml"
PYPROJECT_FILE = "pyproject.toml"

_KEYS = Config.model_fields
_PATH_KEYS = ("cache_dir", "dump")


def load_config(
    options: Mapping[str, Any] | None = None, *, config_file: str | os.PathLike[str] | None = None
) -> Config:
    """Read the configuration; see `kagent_core.config` for the sources and their order.

    Parameters
    ----------
    options
        Keys and values that win over every other source.
    config_file
        The file to read instead of the one that the current directory leads to. Where its name is
        ``pyproject.toml``, its table ``[tool.kagent]`` is read.

    Raises
    ------
    ConfigError
        For an unknown key or a bad value in any source, and for a file that cannot be read.
    """
    return load_config_with_sources(options, config_file=config_file)[0]


def load_config_with_sources(
    options: Mapping[str, Any] | None = None, *, config_file: str | os.PathLike[str] | None = None
) -> tuple[Config, dict[str, Source]]:
    """Read the configuration as `load_config` does, and return with it the source of every key's value."""
    values: dict[str, Any] = {}
    sources = dict.fromkeys(_KEYS, Source())
    for layer in (_file_layer(config_file), _environment_layer(), _option_layer(options)):
        said = {key: source for key, (source, _) in layer.items()}
        settings = {key: value for key, (_, value) in layer.items()}
        Config(_sources=said, **settings)  # a mistake is told even where a higher source hides it
        values |= settings
        sources |= said
    return Config(_sources=sources, **values), sources


class ConfigRow(NamedTuple):
    """One line of the configuration as a table."""

    key: str
    value: str
    source: str
    description: str


def config_rows(config: Config, sources: Mapping[str, Source]) -> list[ConfigRow]:
    """Return the configuration as rows, each value as the key's environment variable would spell it."""
    return [
        ConfigRow(key, _as_text(getattr(config, key)), str(sources.get(key, Source())), field.description or "")
        for key, field in _KEYS.items()
    ]


def _as_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (ConfiguredKernels, LaunchConfigs)):
        return str(value)
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return ",".join(value) if isinstance(value, tuple) else str(value)


# What one source says: for each key, where it is spelt, and its value.
_Layer = dict[str, tuple[Source, Any]]


def _named_layer(settings: Mapping[str, tuple[Source, Any]]) -> _Layer:
    """Replace the spelling of each key by its name, and refuse what is no key or comes twice."""
    layer: _Layer = {}
    for spelt, (source, value) in settings.items():
        key = spelt.replace("-", "_")
        if key not in _KEYS:
            raise unknown_key(source, _KEYS)
        if key in layer:
            raise ConfigError(f"{source.where} repeats '{layer[key][0].key}'", hint="keep one of the two spellings")
        layer[key] = (source, value)
    return layer


def _option_layer(options: Mapping[str, Any] | None) -> _Layer:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"options is {options!r}, expected a mapping", hint='for example {"device": "cpu"}')
    return _named_layer({str(key): (Source("option", str(key)), value) for key, value in options.items()})


def _environment_layer() -> _Layer:
    spelt = {name.upper(): name for name in os.environ if name.upper().startswith(ENV_PREFIX)}
    spelt.pop(CONFIG_VARIABLE, None)
    sources = {name.removeprefix(ENV_PREFIX).lower(): Source("environment", text) for name, text in spelt.items()}
    for key, source in sources.items():
        if key not in _KEYS:
            raise unknown_key(source, _KEYS)
    return {key: (sources[key], value) for key, value in EnvSettingsSource(Config)().items()}


def _file_layer(config_file: str | os.PathLike[str] | None) -> _Layer:
    named = config_file or os.environ.get(CONFIG_VARIABLE)
    path = _named_file(named) if named else _find_file()
    if path is None:
        return {}
    table = _table(path)
    if table is None:
        raise ConfigError(f"{path} has no table [tool.kagent]", hint="add it, or name another config file")
    prefix = "tool.kagent." if path.name == PYPROJECT_FILE else ""
    settings = {spelt: (Source("file", prefix + spelt, path), value) for spelt, value in table.items()}
    layer = _named_layer(settings)
    for key in _PATH_KEYS:
        source, value = layer.get(key, (None, None))
        if source and isinstance(value, str) and value and not value.startswith("~"):
            layer[key] = (source, path.parent / value)  # a file's relative path starts where the file is
    if "kernels" in layer:
        source, value = layer["kernels"]
        layer["kernels"] = (source, anchored(value, path.parent, source.where))
    return layer


def _named_file(named: str | os.PathLike[str]) -> Path:
    try:
        return Path(named).expanduser().absolute()
    except (OSError, RuntimeError) as error:  # no such user, or the current directory was deleted
        raise ConfigError(f"cannot read the config file {named}: {error}", hint="give its whole path") from None


def _find_file() -> Path | None:
    """Return the project's file: in the nearest directory, from the current one upwards, that has either."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the current directory was deleted
        return None
    for directory in (here, *here.parents):
        own, shared = directory / PROJECT_FILE, directory / PYPROJECT_FILE
        if _is_file(own):
            return own
        # Another project's pyproject.toml may be broken: it is ours to judge only when it speaks of kagent.
        if _is_file(shared) and "kagent" in _read(shared) and _table(shared) is not None:
            return shared
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError:  # a directory above that we may not look into
        return False


def _table(path: Path) -> dict[str, Any] | None:
    """Return the settings in a file, or None for a ``pyproject.toml`` without any."""
    try:
        table = tomllib.loads(_read(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", hint="correct the file at that place") from None
    if path.name != PYPROJECT_FILE:
        return table
    tool = table.get("tool", {})
    settings = tool.get("kagent") if isinstance(tool, dict) else None
    if settings is not None and not isinstance(settings, dict):
        raise ConfigError(f"{path}: tool.kagent is {settings!r}, expected a table", hint="write [tool.kagent]")
    return settings


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {path}: {error.strerror}",
            hint=f"name another file with {CONFIG_VARIABLE}, or none with {CONFIG_VARIABLE}={os.devnull}",
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
