"""The types of config values: what each accepts, and what it says of a value that it does not."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from pydantic_settings import NoDecode

from kagent_core.config.logspec import parse_log_spec
from kagent_core.errors import LaunchConfigError, choices, nearest
from kagent_core.specs import LaunchConfig
from kagent_core.specs.tiles import spelled_tiles

_DEVICE_TYPE = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:\d+)?", re.ASCII)
_SIGNATURE = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.\w+)?", re.ASCII)
_LAUNCH_CONFIG = re.compile(r"(\d+),(\d+),(\d+)/(\d+),(\d+),(\d+)(?:/(\d+))?", re.ASCII)
_NBYTES = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KkMGT])(i?))?B", re.ASCII)
_TILE = re.compile(r"(\w+)=(-?\d+)", re.ASCII)

FUSION_RULES = ("pointwise", "prologue", "epilogue", "strips", "resources", "views", "recompute")
"""The rules of the fusion analysis that can be switched off one by one."""


class UnfitError(ValueError):
    """A value that a validator of this module refuses: what it expected instead, and what may be meant.

    `came` says what is wrong where that is only a part of the value.
    """

    def __init__(self, expected: str, hint: str | None = None, *, came: str | None = None) -> None:
        super().__init__(expected)
        self.expected = expected
        self.hint = hint
        self.came = came


Value = TypeVar("Value")


class FrozenMapping(Mapping[str, Value]):
    """A frozen, hashable mapping from text; equal to any mapping with the same items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Value] = MappingProxyType({})) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._items!r})"

    def spelled(self) -> dict[str, Any]:
        """Return the items as the config spells them."""
        return dict(self._items)

    @classmethod
    @abstractmethod
    def _parse(cls, value: object) -> Self:
        """Return the mapping that a value of the config stands for."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._parse, serialization=core_schema.plain_serializer_function_ser_schema(cls.spelled)
        )


class Placement(FrozenMapping[str]):
    """From signature to device."""

    __slots__ = ()

    @classmethod
    def _parse(cls, value: object) -> Self:
        if isinstance(value, str):
            value = _parse_pairs(value, ",", "signature", "SIGNATURE=DEVICE", "aten::sort=cpu")
        if not isinstance(value, Mapping):
            raise UnfitError("a table of signatures and devices", 'for example {"aten::sort" = "cpu"}')
        for signature, device in value.items():
            if not isinstance(signature, str) or not _SIGNATURE.fullmatch(signature):
                raise UnfitError("signatures such as 'aten::add.Tensor'", came=f"has {signature!r}")
            try:
                _named_device(device)
            except UnfitError as error:
                came = f"has {device!r} for '{signature}'"
                raise UnfitError(error.expected, error.hint, came=came) from None
        return cls(value)


class LaunchConfigs(FrozenMapping[LaunchConfig]):
    """From a kernel's name, or a signature, to the launch config that is forced on it."""

    __slots__ = ()

    def __str__(self) -> str:
        return ";".join(f"{kernel}={spelled}" for kernel, spelled in self.spelled().items())

    def spelled(self) -> dict[str, str]:
        """Return the configs as text, such as ``4,4,1/16,16,1/2048``."""
        return {kernel: _spell_launch_config(config) for kernel, config in self._items.items()}

    @classmethod
    def _parse(cls, value: object) -> Self:
        if isinstance(value, str):
            value = _parse_pairs(value, ";", "kernel", "KERNEL=GRID/BLOCK", "aten::mm=4,4,1/16,16,1")
        if not isinstance(value, Mapping):
            raise UnfitError("a table of kernels and launch configs", 'for example {"aten::mm" = "4,4,1/16,16,1"}')
        configs: dict[str, LaunchConfig] = {}
        for kernel, config in value.items():
            if not isinstance(kernel, str) or not kernel or re.search(r"[;=\s]", kernel):
                raise UnfitError("names of kernels, or signatures", came=f"has {kernel!r}")
            configs[kernel] = _launch_config(kernel, config)
        return cls(configs)


def _launch_config(kernel: str, value: object) -> LaunchConfig:
    if isinstance(value, LaunchConfig):
        return value
    if not isinstance(value, str):
        raise _no_launch_config(kernel, value)
    launch, has_tiles, tiles = value.replace(" ", "").partition("tiles:")
    sizes = _tile_sizes(kernel, value, tiles) if has_tiles else {}
    match = _LAUNCH_CONFIG.fullmatch(launch)
    if match is None and (launch or not has_tiles):
        raise _no_launch_config(kernel, value)
    numbers = [int(number or 0) for number in match.groups()] if match is not None else [1, 1, 1, 1, 1, 1, 0]
    if 0 in numbers[:6]:
        raise UnfitError("at least one block and one thread in each direction", came=f"has {value!r} for '{kernel}'")
    grid, block = (numbers[0], numbers[1], numbers[2]), (numbers[3], numbers[4], numbers[5])
    try:
        return LaunchConfig(grid, block, numbers[6], sizes)
    except LaunchConfigError as error:
        told, _, expected = error.message.partition(", expected ")
        raise UnfitError(expected, error.hint, came=f"has {value!r} for '{kernel}': {told}") from None


def _tile_sizes(kernel: str, value: str, text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = _TILE.fullmatch(part)
        if match is None:
            raise UnfitError(
                "tile sizes as NAME=SIZE pairs",
                "write them as 'tiles: rows=4,columns=16'",
                came=f"has {value!r} for '{kernel}', with '{part}'",
            )
        if match[1] in sizes:
            raise UnfitError("each tile size once", came=f"has {value!r} for '{kernel}', with '{match[1]}' twice")
        sizes[match[1]] = int(match[2])
    return sizes


def _no_launch_config(kernel: str, value: object) -> UnfitError:
    return UnfitError(
        "a launch config",
        "write grid and block as 'x,y,z/x,y,z', with the shared bytes behind them if any: '4,4,1/16,16,1/2048'; tile "
        "sizes as 'tiles: rows=4,columns=16', alone or behind that",
        came=f"has {value!r} for '{kernel}'",
    )


def as_launch_config(kernel: str, value: object) -> LaunchConfig:
    """Return the launch config that a program gives a kernel, as a value or spelled as the config spells it.

    Raises
    ------
    LaunchConfigError
        When it is neither.
    """
    try:
        return _launch_config(kernel, value)
    except UnfitError as error:
        came = (error.came or f"has {value!r}").removeprefix("has ")
        came = came.replace(f"{value!r} for '{kernel}'", repr(value), 1)
        told = f"the launch config for '{kernel}' is {came}, expected {error.expected}"
        raise LaunchConfigError(told, hint=error.hint) from None


def _spell_launch_config(config: LaunchConfig) -> str:
    tiles = spelled_tiles(config.tiles) if config.tiles else ""
    if config.has_only_tiles:
        return tiles
    shared = f"/{config.shared_nbytes}" if config.shared_nbytes else ""
    launch = f"{','.join(map(str, config.grid))}/{','.join(map(str, config.block))}{shared}"
    return f"{launch} {tiles}" if tiles else launch


def _parse_pairs(text: str, separator: str, what: str, form: str, example: str) -> object:
    """Read pairs such as ``aten::sort=cpu,aten::topk=cpu``, or the same as a JSON object.

    Parameters
    ----------
    text
        To read.
    separator
        Between pairs.
    what
        Stands left in them.
    form, example
        Of a pair, for messages.
    """
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise UnfitError(f"JSON ({error})") from None
    pairs: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(separator))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise UnfitError(f"{form} pairs", f"for example '{example}'", came=f"has '{pair}'")
        if key in pairs:
            raise UnfitError(f"each {what} once", came=f"has '{key}' twice")
        pairs[key] = value
    return pairs


def _named_device(device: object) -> str:
    if isinstance(device, str) and _DEVICE.fullmatch(device) and device.partition(":")[0] != "auto":
        return device
    raise UnfitError("a device TYPE or TYPE:INDEX, such as 'cpu' or 'cuda:0'", _device_meant(device))


def _device(device: str) -> str:
    if device == "auto":
        return device
    try:
        return _named_device(device)
    except UnfitError as error:
        raise UnfitError(f"'auto' or {error.expected}", error.hint) from None


def _device_meant(device: object) -> str | None:
    """Guess what a misspelt device was to be: ``CUDA``, ``cuda-0`` and ``cuda:`` are near enough."""
    guess = re.sub(r"[^a-z0-9_]+", ":", str(device).strip().lower()).strip(":")
    fits = _DEVICE.fullmatch(guess) and guess.partition(":")[0] != "auto"
    return f"did you mean {guess!r}?" if fits else None


def _device_types(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _DEVICE_TYPE.fullmatch(name):
            guess = name.lower().partition(":")[0]
            hint = f"did you mean {guess!r}?" if _DEVICE_TYPE.fullmatch(guess) else None
            raise UnfitError("device types such as 'cuda', without an index", hint, came=f"has {name!r}")
    return names


def _fusion_rules(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise UnfitError("at least one rule", "fusion = false switches all of them off")
    for name in names:
        if name not in FUSION_RULES:
            close = nearest(name.lower(), FUSION_RULES)
            raise UnfitError(choices(FUSION_RULES), f"did you mean {close!r}?" if close else None, came=f"has {name!r}")
    return names


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(filter(None, (part.strip() for part in value.split(","))))
    return value


def _whole_number(value: object) -> object:
    if isinstance(value, bool):  # Python's True is an int, but `threads = true` is a mistake
        raise UnfitError("a whole number")
    return value


def _absolute(path: Path) -> Path:
    # A config is a key of caches, so it must mean the same after the program changes its directory.
    try:
        return path.expanduser().absolute()
    except (OSError, RuntimeError) as error:  # no such user, or the current directory was deleted
        raise UnfitError("a path", str(error)) from None


def _not_empty(value: object) -> object:
    if value == "":  # which pathlib reads as the current directory
        raise UnfitError("a path")
    return value


def _log_spec(spec: str) -> str:
    parse_log_spec(spec)
    return spec


def _nbytes(value: object) -> object:
    if isinstance(value, bool):
        raise UnfitError("a number of bytes")
    if not isinstance(value, str) or value.strip().isdecimal():
        return value
    match = _NBYTES.fullmatch(value.strip())
    if match is None:
        raise UnfitError("a number of bytes", "write it as 4294967296, '4GiB' or '512 MB'")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index((prefix or " ").lower()))


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Number = Annotated[int, BeforeValidator(_whole_number)]
Nbytes = Annotated[int, BeforeValidator(_nbytes)]
Directory = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_absolute)]

Device = Annotated[str, AfterValidator(_device)]
NamedDevice = Annotated[str, AfterValidator(_named_device)]
DeviceTypes = Annotated[Names, AfterValidator(_device_types)]
FusionRules = Annotated[Names, AfterValidator(_fusion_rules)]
LogSpec = Annotated[str, AfterValidator(_log_spec)]
