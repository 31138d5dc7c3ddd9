"""The core's own placement. It is a plugin like any other, and runs last."""

from __future__ import annotations

from kagent_core.device import CONTRACT_VERSION
from kagent_core.hooks import hookimpl
from kagent_core.schedule.request import PlacementRequest
from kagent_core.specs import Device, OpCall, Placement


class DefaultPlacement:
    """Places each call: where config says, else on the target device if it has a kernel, else on the fallback."""

    @hookimpl
    def kagent_contract_version(self) -> int:
        """The core's stages are always of the core's version."""
        return CONTRACT_VERSION

    @hookimpl(trylast=True)
    def kagent_place(self, request: PlacementRequest) -> list[Placement]:
        """Return a placement per call."""
        return [_place(call, request) for call in request.program.calls]


def _place(call: OpCall, request: PlacementRequest) -> Placement:
    asked = request.config.placement.get(call.signature)
    if asked is not None:
        return Placement(request.named(asked), f"config places {call.signature} on {asked}")
    target: Device = request.target
    if request.has_kernel(target, call):
        return Placement(target, "the target device has a kernel for it")
    if request.config.missing_kernel == "error" or request.fallback == target:
        return Placement(target, "the target device has no kernel, and config allows no fallback")
    refused = request.refusals(target, call)
    reason = f"{call.signature}: {'; '.join(refused)}" if refused else f"no kernel for {call.signature} on '{target}'"
    return Placement(request.fallback, reason)
