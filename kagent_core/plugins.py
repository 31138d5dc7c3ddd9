"""Loading of plugins: the only door through which devices come in.

`kagent_core.listing` finds them without importing any. A device plugin is imported when its device type is
wanted, a stage plugin when the first program is compiled. A plugin that cannot be used is data, not a crash:
its state and the reason are in `PluginManager.entries`.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from kagent_core import hookspecs
from kagent_core.config import Config
from kagent_core.device import CONTRACT_VERSION, ArgumentPacker, LaunchConfigDeriver, OpenDevice, Runtime
from kagent_core.errors import (
    DeviceError,
    KagentError,
    PluginConflictError,
    PluginError,
    choices,
)
from kagent_core.hooks import Hooks
from kagent_core.inspect.logs import get_logger
from kagent_core.listing import (
    DEVICE_GROUP,
    PROGRAM_GROUP,
    STAGE_GROUP,
    EntryPoints,
    Key,
    PluginEntry,
    PluginState,
    installed_entry_points,
    list_plugins,
)
from kagent_core.registry import KernelRegistry
from kagent_core.registry.operators import check_placed
from kagent_core.specs import Device, DeviceInfo

__all__ = [
    "DEVICE_GROUP",
    "PROGRAM_GROUP",
    "STAGE_GROUP",
    "EntryPoints",
    "PluginEntry",
    "PluginManager",
    "PluginState",
    "installed_entry_points",
]

log = get_logger("plugins")


class PluginManager:
    """The plugins of one session.

    Parameters
    ----------
    config
        Says which plugins are allowed or blocked.
    extra
        Plugins that the running program registers itself, by name.
    entry_points
        Where entry points come from; the installed distributions by default.
    """

    def __init__(
        self,
        config: Config,
        extra: Sequence[tuple[str, object]] = (),
        entry_points: EntryPoints = installed_entry_points,
    ) -> None:
        self.config = config
        self.hooks = Hooks(hookspecs)
        self._lock = threading.RLock()
        self._points: dict[Key, Any] = {}
        self._entries: dict[Key, PluginEntry] = {}
        self._hints: dict[Key, str | None] = {}
        self._hook_names: dict[Key, str] = {}
        self._program_types: dict[str, str] = {}
        self._infos: dict[str, tuple[DeviceInfo, ...]] = {}
        self._opened: dict[Device, OpenDevice] = {}
        for group in (DEVICE_GROUP, STAGE_GROUP):
            for listed in list_plugins(group, entry_points(group), config):
                key = (group, listed.entry.name)
                self._entries[key] = listed.entry
                self._points[key] = listed.point
                self._hints[key] = listed.hint
        for name, plugin in extra:
            self._add_program_plugin(name, plugin)
        self._warn_of_unknown_names()

    # -- listing

    def entries(self) -> list[PluginEntry]:
        """Every plugin that is known, by group and name."""
        return [self._entries[key] for key in sorted(self._entries)]

    def device_types(self) -> list[str]:
        """Names of the device types that usable plugins bring, without importing them."""
        listed = {entry.name for entry in self._device_plugins() if entry.usable}
        return sorted(listed | self._program_types.keys())

    def devices(self) -> list[DeviceInfo]:
        """Every device of every plugin, available or not. Imports all device plugins.

        Never raises because of a plugin: one that cannot be used is listed as a device that is not available.
        """
        infos: list[DeviceInfo] = []
        for device_type in sorted({entry.name for entry in self._device_plugins()} | self._program_types.keys()):
            try:
                infos += self._devices_of(device_type)
            except KagentError as error:
                entry = self._entries[DEVICE_GROUP, device_type]
                reason = entry.reason or error.message
                infos.append(DeviceInfo(Device(device_type), "-", reason=reason, plugin=entry.owner))
        return infos

    # -- choosing and opening

    def resolve(self, name: str) -> DeviceInfo:
        """Return the device that a user's text names.

        ``auto`` is the first usable device that is neither emulated nor of the fallback device's type, else
        the fallback device; a type is its first usable device, an emulated one only if there is no other;
        ``type:index`` is that device.

        Raises
        ------
        DeviceError
            When there is no such device, or it cannot be opened here; says which there are.
        PluginError
            When the plugin that brings the type cannot be used.
        """
        try:
            return self._resolve(name)
        except DeviceError as error:
            key = self._key_naming(name)
            if key is None:
                raise
            raise DeviceError(f"config key {key}: {error.message}", hint=error.hint) from error

    def _resolve(self, name: str) -> DeviceInfo:
        if name == "auto":
            return self._choose()
        wanted = Device.parse(name)
        hint = "`kagent devices` lists every device"
        infos = self._devices_of(wanted.type)
        if not infos:
            owner = self._entries[DEVICE_GROUP, wanted.type].owner
            raise DeviceError(f"there is no device '{name}': the plugin '{owner}' finds none here", hint=hint)
        fitting = [info for info in infos if wanted.index in (None, info.device.index or 0)]
        if not fitting:
            there = choices(str(info.device) for info in infos)
            raise DeviceError(f"there is no device '{name}'; '{wanted.type}' has {there}", hint=hint)
        usable = [info for info in fitting if info.available]
        if not usable:
            raise DeviceError(f"device '{name}' cannot be used: {fitting[0].reason}", hint=hint)
        return min(usable, key=lambda info: info.emulated)

    def open(self, info: DeviceInfo) -> OpenDevice:
        """Open a device, once: ask its plugin for registry, packer, deriver, runtime and printer.

        Raises
        ------
        PluginError
            When its plugin does not give one of them, or something else in its place.
        DeviceError
            When one of them cannot be made.
        """
        with self._lock:
            if info.device in self._opened:
                return self._opened[info.device]
            registry = self._provide("kagent_kernel_registry", info, KernelRegistry)
            registry.freeze()
            opened = OpenDevice(
                info=info,
                registry=registry,
                packer=self._provide("kagent_argument_packer", info, ArgumentPacker),
                deriver=self._provide("kagent_launch_config_deriver", info, LaunchConfigDeriver),
                printer=self._ask_provider("kagent_code_printer", info),
                optimizer=self._ask_provider("kagent_graph_optimizer", info),
                # last: when any of the others fails, there is no open runtime to close
                runtime=self._provide("kagent_runtime", info, Runtime),
            )
            self._opened[info.device] = opened
            log.info("opened %s (%s)", info.device, info.name)
            return opened

    def load_stages(self) -> None:
        """Import the plugins that replace or wrap stages.

        Raises
        ------
        PluginError
            When one of them is broken: leaving it out would silently change how programs run.
        ConfigError
            When the config places an operator of ATen that the installed torch does not have.
        """
        check_placed(self.config.placement)
        for key, entry in sorted(self._entries.items()):
            if entry.group == STAGE_GROUP and entry.state is not PluginState.BLOCKED:
                self._load(key)

    def close(self) -> None:
        """Close every opened device. One that cannot be closed is told as a WARNING."""
        with self._lock:
            for opened in self._opened.values():
                try:
                    opened.runtime.close()
                except Exception as error:  # noqa: BLE001  the other devices must be closed all the same
                    log.warning("closing %s failed: %s", opened.device, _told(error))
            self._opened.clear()

    # -- listing, inside

    def _device_plugins(self) -> list[PluginEntry]:
        return [entry for entry in self._entries.values() if entry.group == DEVICE_GROUP]

    def _add_program_plugin(self, name: str, plugin: object) -> None:
        key = (PROGRAM_GROUP, name)
        rival = self._entries.get((DEVICE_GROUP, name))
        if rival is not None and rival.state is not PluginState.BLOCKED:
            raise PluginConflictError(
                f"two plugins are named '{name}': one that this program registers, and '{rival.owner}' "
                f"({rival.target})",
                hint="register yours under another name",
            )
        target = getattr(plugin, "__name__", type(plugin).__name__)
        self.hooks.register(plugin, name)
        self._hook_names[key] = name
        self._entries[key] = PluginEntry(name, PROGRAM_GROUP, "", "", target, PluginState.LOADED)
        if name not in self.hooks.implementers("kagent_devices"):
            return
        self._check_contract(key)
        infos = self._ask_devices(key)
        for device_type in sorted({info.device.type for info in infos}):
            self._reject_claimed(device_type, name)
            self._program_types[device_type] = name
            self._infos[device_type] = tuple(info for info in infos if info.device.type == device_type)

    def _reject_claimed(self, device_type: str, name: str) -> None:
        installed = self._entries.get((DEVICE_GROUP, device_type))
        if installed is not None and installed.state is not PluginState.BLOCKED:
            raise PluginConflictError(
                f"two plugins claim the device type '{device_type}': '{name}', which this program registers, "
                f"and '{installed.owner}' ({installed.target})",
                hint=f"give yours another type, or block the other: plugins_block = ['{device_type}']",
            )
        if device_type in self._program_types:
            raise PluginConflictError(
                f"two plugins that this program registers claim the device type '{device_type}': "
                f"'{self._program_types[device_type]}' and '{name}'",
                hint="give one of them another type",
            )

    def _warn_of_unknown_names(self) -> None:
        """Tell of names in the config that no plugin bears; on another machine one may."""
        names = {name for _, name in self._entries}
        for key in ("plugins_allow", "plugins_block"):
            self._warn_of_unknown(key, getattr(self.config, key) or (), names, "plugin is named so")
        types = {entry.name for entry in self._device_plugins()} | self._program_types.keys()
        self._warn_of_unknown("emulate", self.config.emulate, types, "plugin brings that device type")

    def _warn_of_unknown(self, key: str, given: Iterable[str], known: set[str], why: str) -> None:
        for name in sorted(set(given) - known):
            close = _close(name, known)
            meant = f"; did you mean '{close}'?" if close else ""
            log.warning("config key %s has '%s', but no %s%s", key, name, why, meant)

    def _key_naming(self, name: str) -> str | None:
        """The config's key, other than ``device``, that names a device; None when none does."""
        if name == self.config.device:
            return None
        if name == self.config.fallback_device:
            return "fallback_device"
        placed = (signature for signature, device in self.config.placement.items() if device == name)
        return next((f"placement of {signature}" for signature in placed), None)

    def _devices_of(self, device_type: str) -> tuple[DeviceInfo, ...]:
        with self._lock:
            if device_type in self._infos:
                return self._infos[device_type]
            key = (DEVICE_GROUP, device_type)
            if key not in self._entries:
                self._no_such_type(device_type)
            self._load(key)
            infos = self._ask_devices(key)
            self._check_types(key, infos)
            self._infos[device_type] = infos
            return infos

    def _ask_devices(self, key: Key) -> tuple[DeviceInfo, ...]:
        owner, name = self._entries[key].owner, self._hook_names[key]
        if name not in self.hooks.implementers("kagent_devices"):
            self._fail(key, "it does not implement kagent_devices")
        try:
            given = self.hooks.call_one("kagent_devices", name, config=self.config)
            infos = [info for found in given for info in (found if _is_collection(found) else [found])]
        except Exception as error:  # noqa: BLE001  whatever a plugin raises here is data about its devices
            self._fail(key, f"listing its devices failed: {_told(error)}", _hint(error), error)
        wrong = [found for found in given if not _is_collection(found)]
        wrong += [info for info in infos if not isinstance(info, DeviceInfo)]
        if wrong:
            hint = "return [DeviceInfo(Device('mydevice', 0), 'its name')], of kagent_core.specs"
            self._fail(key, f"kagent_devices gave {wrong[0]!r}, expected a list of DeviceInfo", hint)
        return tuple(replace(info, plugin=info.plugin or owner) for info in infos)

    def _check_types(self, key: Key, infos: Iterable[DeviceInfo]) -> None:
        hint = "a device plugin's devices have the type that its entry point is named after"
        for device_type in {info.device.type for info in infos} - {key[1]}:
            rival = self._entries.get((DEVICE_GROUP, device_type))
            if rival is not None:
                other = f"'{rival.owner}' ({rival.target})"
                reason = f"it claims the device type '{device_type}', which {other} brings"
                self._fail(key, reason, hint, state=PluginState.CONFLICT)
            reason = f"it lists a device of type '{device_type}', but its entry point is named '{key[1]}'"
            self._fail(key, reason, hint)

    def _no_such_type(self, device_type: str) -> NoReturn:
        known = self.device_types()
        unusable = [entry for entry in self._device_plugins() if not entry.usable]
        if not known and not unusable:
            raise DeviceError(
                f"device '{device_type}' was asked for, but no device plugin is installed",
                hint="install one, such as `pip install kagent-cpu`",
            )
        close = _close(device_type, [*known, *(entry.name for entry in unusable)])
        told = "".join(f"; '{entry.name}' cannot be used: {entry.reason}" for entry in unusable)
        raise DeviceError(
            f"no installed plugin brings the device type '{device_type}'; there is {choices(known)}{told}",
            hint=(f"did you mean '{close}'? " if close else "")
            + "a device type comes with its plugin; `kagent plugins` lists those that are installed",
        )

    # -- loading, inside

    def _load(self, key: Key) -> None:
        with self._lock:
            entry = self._entries[key]
            if entry.state is PluginState.LOADED:
                return
            if entry.state is not PluginState.LISTED:
                raise self._refusal(key)
            try:
                plugin = self._points[key].load()
            except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a plugin's import raises is its affair
                self._fail(key, f"import failed: {_told(error)}", _hint(error), error)
            self._register(key, plugin)
            self._check_contract(key)
            self._entries[key] = replace(entry, state=PluginState.LOADED)
            log.debug("loaded plugin %s from %s %s", entry.name, entry.owner, entry.version)

    def _register(self, key: Key, plugin: object) -> None:
        group, name = key
        # one module can be both a device plugin and a stage plugin; its hooks are registered once
        registered = self.hooks.name_of(plugin)
        if registered is None:
            others = ((DEVICE_GROUP, name), (PROGRAM_GROUP, name))
            taken = group == STAGE_GROUP and any(other in self._entries for other in others)
            registered = f"{name} (stages)" if taken else name
            try:
                self.hooks.register(plugin, registered)
            except Exception as error:  # noqa: BLE001  reading its attributes runs the plugin's own code
                self._fail(key, _told(error), _hint(error), error)
        self._hook_names[key] = registered

    def _check_contract(self, key: Key) -> None:
        name = self._hook_names[key]
        try:
            versions = self.hooks.call_one("kagent_contract_version", name)
        except Exception as error:  # noqa: BLE001  whatever a plugin raises is its affair
            self._fail(key, f"kagent_contract_version failed: {_told(error)}", _hint(error), error)
        if versions == [CONTRACT_VERSION]:
            return
        if not versions:
            reason = "it does not say which contract version it was written for"
            self._fail(key, reason, f"implement kagent_contract_version and return {CONTRACT_VERSION}")
        [version] = versions
        reason = f"it was written for contract version {version!r}, and this core has {CONTRACT_VERSION}"
        if not isinstance(version, int):
            self._fail(key, reason, f"kagent_contract_version must return {CONTRACT_VERSION}")
        self._fail(key, reason, f"upgrade {'the plugin' if version < CONTRACT_VERSION else 'kagent-torch'}")

    def _fail(
        self,
        key: Key,
        reason: str,
        hint: str | None = None,
        cause: BaseException | None = None,
        state: PluginState = PluginState.FAILED,
    ) -> NoReturn:
        """Note that a plugin cannot be used, take its hooks away again, and raise."""
        self._entries[key] = replace(self._entries[key], state=state, reason=reason)
        self._hints[key] = hint
        name = self._hook_names.pop(key, None)
        if name is not None:
            self.hooks.unregister(name)
        log.debug("plugin %s failed: %s", key[1], reason)
        raise self._refusal(key) from cause

    def _refusal(self, key: Key) -> PluginError:
        entry = self._entries[key]
        kind = PluginConflictError if entry.state is PluginState.CONFLICT else PluginError
        who = f"'{entry.name}' ({entry.owner})"
        hint = self._hints.get(key)
        if entry.state is PluginState.BLOCKED:
            blocks = entry.name in self.config.plugins_block
            hint = f"take '{entry.name}' out of plugins_block" if blocks else f"add '{entry.name}' to plugins_allow"
        return kind(f"plugin {who} cannot be used: {entry.reason}", hint=hint)

    # -- opening, inside

    def _provide(self, hook: str, info: DeviceInfo, expected: type) -> Any:
        given = self._ask_provider(hook, info)
        if given is None:
            raise PluginError(
                f"no plugin gives {hook} for '{info.device}'",
                hint=f"its plugin ('{info.plugin}') must implement it",
            )
        if not isinstance(given, expected):
            raise PluginError(
                f"{hook} gave {given!r} for '{info.device}', which is no {expected.__name__}",
                hint=f"derive its class from {expected.__module__}.{expected.__name__}",
            )
        return given

    def _ask_provider(self, hook: str, info: DeviceInfo) -> Any:
        try:
            return getattr(self.hooks.call, hook)(info=info, config=self.config)
        except KagentError:
            raise
        except Exception as error:
            raise DeviceError(f"device '{info.device}' cannot be opened: {hook} failed with {_told(error)}") from error

    def _choose(self) -> DeviceInfo:
        fallback_type = Device.parse(self.config.fallback_device).type
        for device_type in self.device_types():
            if device_type == fallback_type:
                continue
            try:
                infos = self._devices_of(device_type)
            except KagentError as error:
                log.info("device = auto: %s is left out: %s", device_type, error.message)
                continue
            for info in infos:
                if info.available and info.automatic and not info.emulated:
                    log.info("device = auto: chose %s (%s)", info.device, info.name)
                    return info
                log.info("device = auto: %s is left out: %s", info.device, info.reason or _why_not_auto(info))
        info = self.resolve(self.config.fallback_device)
        log.info("device = auto: chose the fallback device %s", info.device)
        return info


def _is_collection(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str)


def _close(word: str, known: Iterable[str]) -> str | None:
    """The name that `word` misspells: device types are short, so that it must be closer than other words."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)), None)


def _told(error: BaseException) -> str:
    return error.message if isinstance(error, KagentError) else f"{type(error).__name__}: {error}"


def _hint(error: BaseException) -> str | None:
    return error.hint if isinstance(error, KagentError) else None


def _why_not_auto(info: DeviceInfo) -> str:
    return "it is emulated" if info.emulated else "its plugin says that it is to be asked for by its name"
