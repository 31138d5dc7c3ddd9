"""Which launch config a kernel gets: the one that the user forces, the one that was tuned, or the derived one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kagent_core.device import LaunchConfigDeriver
from kagent_core.errors import LaunchConfigError
from kagent_core.extract.launch_config import beyond_limits
from kagent_core.inspect.logs import get_logger
from kagent_core.profile.problem import problem_key
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig, LocalMemory, OpCall, PackedArg
from kagent_core.specs.tiles import TileChoice, checked_tiles, spelled_tiles

log = get_logger("extract")

MOST_ITEMS = 2**31
"""Work-items that a generated kernel is launched with at most. Where it counts its steps in 32 bits, there are fewer
than this of them, and a step of as many does not come around to an earlier one."""


@dataclass
class ForcedLaunchConfig:
    """A launch config that the user forces on a kernel.

    Attributes
    ----------
    kernel
        The kernel's name, or a signature.
    config
        As the user gave it.
    used
        Whether any kernel got it.
    """

    kernel: str
    config: LaunchConfig
    used: bool = False


@dataclass(frozen=True, slots=True)
class LaunchChoice:
    """A kernel's launch config, where it came from, and what else there was.

    Attributes
    ----------
    config
        What is launched; None where there is nothing to launch.
    source
        ``derived`` by the device, ``suggested`` by the ProfilerAgent or ``forced`` by the user.
    derived, suggested
        What the device and the ProfilerAgent gave; None also where they were not asked.
    refused
        Why the suggestion was not taken, where it exceeds the device's limits.
    """

    config: LaunchConfig | None
    source: Literal["derived", "suggested", "forced"]
    derived: LaunchConfig | None = None
    suggested: LaunchConfig | None = None
    refused: str | None = None


def choose_tiles(
    calls: Sequence[OpCall],
    forced: Mapping[str, ForcedLaunchConfig],
    suggested: LaunchConfig | None = None,
) -> TileChoice:
    """Choose the tile sizes that a kernel is generated with.

    They are part of launch configs, and chosen as those are: the forced one comes first, then the suggestion, then what
    the device's generator takes; of those that have tile sizes.

    Parameters
    ----------
    calls
        What the kernel computes. Tile sizes go by its signature, since its name depends on them.
    forced
        By size of problem, or by signature.
    suggested
        What is known to be fast.
    """
    force = _forced_by_operators(calls, forced)
    if force is not None and force.config.tiles:
        return TileChoice(checked_tiles(force.config.tiles), "forced")
    if suggested is not None and suggested.tiles:
        return TileChoice(checked_tiles(suggested.tiles), "suggested")
    return TileChoice()


def choose_launch_config(
    calls: Sequence[OpCall],
    kernel: KernelDescriptor,
    info: DeviceInfo,
    deriver: LaunchConfigDeriver,
    suggested: LaunchConfig | None = None,
    forced: Mapping[str, ForcedLaunchConfig] | None = None,
) -> LaunchChoice:
    """Choose a kernel's launch config.

    A forced one comes first, unless there is nothing to launch; then a suggestion that the device can launch; then what
    the device derives. Where a config is forced, the derived one is asked for as well, to compare the two. One that has
    only tiles is launched as the device derives.

    Parameters
    ----------
    calls
        What the kernel computes.
    kernel
        To launch.
    info
        The device's limits.
    deriver
        The device's.
    suggested
        What is known to be fast.
    forced
        By the kernel's name, by size of problem (`kagent_core.profile.problem.problem_key`) or by signature.

    Raises
    ------
    LaunchConfigError
        When the derived or the forced launch config exceeds the device's limits.
    """
    force = _forced(kernel, calls, forced or {})
    refused = None
    if suggested is not None and force is None and not suggested.has_only_tiles:
        refused = beyond_limits(suggested, info) or _other_threads(suggested, kernel) or _too_many(suggested, kernel)
        if refused is None:
            return _told(calls, kernel, LaunchChoice(suggested, "suggested", suggested=suggested))
        told = "%s: the launch config that was tuned for kernel '%s', %s, is not used: %s"
        log.warning(told, calls[-1].name, kernel.name, suggested, refused)
    derived = _countable(deriver.derive(calls, kernel, info), kernel)
    if derived is None:
        choice = LaunchChoice(None, "derived", None, suggested, refused)
    elif force is not None:
        force.used = True
        config = _launched(force.config, derived)
        _check(config, kernel, f"kernel '{kernel.name}' is forced to the launch config {config}", info)
        choice = LaunchChoice(config, "forced", derived, suggested)
    else:
        _check(derived, kernel, f"kernel '{kernel.name}' got the launch config {derived}", info)
        choice = LaunchChoice(derived, "derived", derived, suggested, refused)
        if suggested is not None and suggested.has_only_tiles:
            choice = replace(choice, config=_launched(suggested, derived), source="suggested")
    return _told(calls, kernel, choice)


def with_local_memory(
    choice: LaunchChoice, args: Sequence[PackedArg], kernel: KernelDescriptor, info: DeviceInfo
) -> LaunchChoice:
    """Return a choice whose launch config has at least the shared bytes of a prototype's local parameters.

    Raises
    ------
    LaunchConfigError
        When the device has less.
    """
    nbytes = sum(arg.value.nbytes for arg in args if isinstance(arg.value, LocalMemory))
    if choice.config is None or choice.config.shared_nbytes >= nbytes:
        return choice
    config = replace(choice.config, shared_nbytes=nbytes)
    _check(config, kernel, f"kernel '{kernel.name}' asks for local memory by its prototype", info)
    return replace(choice, config=config)


def _launched(config: LaunchConfig, derived: LaunchConfig) -> LaunchConfig:
    """Return a launch config; one that has only tiles is launched as the device derives."""
    return replace(derived, tiles=config.tiles) if config.has_only_tiles else config


def _forced(
    kernel: KernelDescriptor, calls: Sequence[OpCall], forced: Mapping[str, ForcedLaunchConfig]
) -> ForcedLaunchConfig | None:
    """The name says which of several kernels for one signature is meant, so it comes first."""
    named, signed = forced.get(kernel.name), _forced_by_operators(calls, forced)
    if signed is not None and signed.config.tiles:
        if kernel.packed is not None:
            signed.used = True  # its tiles are in the kernel's text, whatever launch config the name has
        else:
            told = "%s: kernel '%s' is not generated, so %s, which are forced on it, change nothing"
            log.warning(told, calls[-1].name, kernel.name, spelled_tiles(signed.config.tiles))
            signed = None if signed.config.has_only_tiles else signed
    return named or signed


def _forced_by_operators(
    calls: Sequence[OpCall], forced: Mapping[str, ForcedLaunchConfig]
) -> ForcedLaunchConfig | None:
    """A size of problem says more than a signature, so it comes first."""
    if not forced:
        return None
    return forced.get(problem_key(calls)) or forced.get("+".join(call.signature for call in calls))


def _check(config: LaunchConfig, kernel: KernelDescriptor, what: str, info: DeviceInfo) -> None:
    beyond = beyond_limits(config, info) or _other_threads(config, kernel) or _too_many(config, kernel)
    if beyond is not None:
        raise LaunchConfigError(f"{what}: {beyond}")


def _too_many(config: LaunchConfig, kernel: KernelDescriptor) -> str | None:
    """Return what is wrong with a launch config of more work-items than a generated kernel counts."""
    items = config.grid[0] * config.block[0]
    if kernel.items is None or items <= MOST_ITEMS:
        return None
    return f"it has {items} work-items, a generated kernel counts {MOST_ITEMS} at most"


def _countable(config: LaunchConfig | None, kernel: KernelDescriptor) -> LaunchConfig | None:
    """Return a launch config with fewer blocks, where a generated kernel would get more work-items than it counts."""
    if config is None or _too_many(config, kernel) is None:
        return config
    return replace(config, grid=(MOST_ITEMS // config.block[0], *config.grid[1:]))


def _other_threads(config: LaunchConfig, kernel: KernelDescriptor) -> str | None:
    """Return what is wrong with a launch config whose blocks have not the number of threads that a kernel needs."""
    if kernel.threads is None or config.block == (kernel.threads, 1, 1):
        return None
    return f"its blocks are {config.block}, but the kernel is written for blocks of ({kernel.threads}, 1, 1)"


def _told(calls: Sequence[OpCall], kernel: KernelDescriptor, choice: LaunchChoice) -> LaunchChoice:
    compared = f"; derived was {choice.derived}" if choice.source == "forced" else ""
    name = "+".join(call.name for call in calls)
    log.debug("%s: kernel '%s' gets %s, %s%s", name, kernel.name, choice.config or "no launch", choice.source, compared)
    return choice
