"""SchedulerAgent: gives every operator a device and a reason, and plans transfers where neighbours sit apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kagent_core.config import Config
from kagent_core.device import OpenDevice
from kagent_core.errors import PluginError
from kagent_core.hooks import Hooks
from kagent_core.inspect.logs import get_logger
from kagent_core.schedule.compaction import Compactor, find_fix, missing_copies
from kagent_core.schedule.placed import PlacedProgram, TransferPlanner, check_torch_devices
from kagent_core.schedule.request import PlacementRequest, Timing
from kagent_core.schedule.seeding import Seeding
from kagent_core.specs import Device, DeviceInfo, OpCall, Program

log = get_logger("schedule")


class SchedulerAgent:
    """Places programs. It never changes what is computed.

    Parameters
    ----------
    hooks
        With the placement stage.
    config
        Target device, fallback policy and placements by signature.
    resolve, open_device
        From a device's name to what its plugin tells of it, and to the opened device.
    timing
        Measured time of a call on a device.
    """

    def __init__(
        self,
        hooks: Hooks,
        config: Config,
        resolve: Callable[[str], DeviceInfo],
        open_device: Callable[[DeviceInfo], OpenDevice],
        timing: Timing,
    ) -> None:
        self._hooks = hooks
        self._config = config
        self._resolve = resolve
        self._open = open_device
        self._timing = timing

    def place(self, program: Program, target: DeviceInfo) -> PlacedProgram:
        """Return the program's segments and transfers.

        Raises
        ------
        KernelNotFoundError
            When the target has no kernel for a call and config says ``missing_kernel = "error"``.
        DeviceError
            When a device that config names cannot be used.
        CaptureError
            When a tensor lies in memory that is neither the host's nor the target's.
        """
        opened: dict[Device, OpenDevice] = {target.device: self._open(target)}
        theirs = opened[target.device].runtime.torch_device
        torch_devices = {} if theirs is None else {theirs: target.device}
        check_torch_devices(program, torch_devices, target.device)
        seeding = Seeding(program, self._config)

        def named(name: str) -> Device:
            info = self._resolve(name)
            opened.setdefault(info.device, self._open(info))
            return info.device

        def has_kernel(device: Device, call: OpCall) -> bool:
            registry = opened[device].registry
            if registry.has(call) or (self._config.compaction and find_fix(registry, call) is not None):
                return True
            return opened[device].has_kernel(call) or seeding.draws(opened[device], call)

        def refusals(device: Device, call: OpCall) -> list[str]:
            registry = opened[device].registry
            told = registry.refusals(call)
            missing = missing_copies(registry, call) if told and self._config.compaction else []
            if missing:
                told.append(f"a kernel for {' and '.join(missing)} of any strides would let kagent compact its tensors")
            not_generated = seeding.not_generated(opened[device], call)
            return [*(told or ["no kernel is registered"]), not_generated] if not_generated else told

        fallback = target.device if self._config.missing_kernel == "error" else named(self._config.fallback_device)
        request = PlacementRequest(
            program, target.device, fallback, self._config, has_kernel, refusals, self._timing, named
        )
        placements = self._hooks.call.kagent_place(request=request)
        if placements is None or len(placements) != len(program.calls):
            count = "none" if placements is None else str(len(placements))
            raise PluginError(f"the placement stage returned {count} placements for {len(program.calls)} calls")
        for call, placement in zip(program.calls, placements, strict=True):
            log.debug("%s (%s) on %s: %s", call.name, call.signature, placement.device, placement.reason)
            if placement.device not in opened:
                named(str(placement.device))
        program, placements = seeding.applied(placements, lambda device: opened[device])
        if self._config.compaction:
            program, placements = Compactor(program, placements, lambda d: opened[d].registry).compact()
            _tell_compactions(program)
        for call, placement in zip(program.calls, placements, strict=True):
            if not opened[placement.device].has_kernel(call):
                opened[placement.device].kernel_for(call)  # says what is missing
        in_host = {device for device, each in opened.items() if each.runtime.host_memory}
        placed = TransferPlanner(program, placements, in_host.__contains__, torch_devices).plan()
        _tell_fallbacks(placed, target.device)
        return placed


def _tell_compactions(program: Program) -> None:
    """Copies cost time: one line says how many there are and why."""
    inserted = [call for call in program.calls if call.inserted is not None]
    if inserted:
        nbytes = sum(call.outputs[0].range.nbytes for call in inserted)
        told = "; ".join(str(call.inserted) for call in inserted)
        log.info("%s: %d copies of %d bytes for kernels' layouts: %s", program.name, len(inserted), nbytes, told)


def _tell_fallbacks(placed: PlacedProgram, target: Device) -> None:
    """Never a silent fallback: one line says what went elsewhere and why."""
    moved = Counter(
        (str(placement.device), placement.reason) for placement in placed.placements if placement.device != target
    )
    if moved:
        told = "; ".join(f"{count} on {device} ({reason})" for (device, reason), count in moved.most_common())
        total = sum(moved.values())
        log.warning(
            "%s: %d of %d calls do not run on %s: %s", placed.program.name, total, len(placed.placements), target, told
        )
