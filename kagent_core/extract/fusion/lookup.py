"""The kernel of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kagent_core.device import OpenDevice
from kagent_core.errors import KernelNotFoundError
from kagent_core.extract.fused_call import fused_call
from kagent_core.extract.fusion.registered import misfit
from kagent_core.specs import FusionDecision, FusionGroup, FusionPlan, KernelDescriptor, OpCall


def look_up_kernels(
    plan: FusionPlan, calls: Sequence[OpCall], opened: OpenDevice, prefer_generated: bool = True
) -> tuple[FusionPlan, list[KernelDescriptor]]:
    """Find a kernel for each group: a registered one, else one that the device's code generator makes.

    A group that there is no kernel for, as a plugin's own analysis may have made it, falls apart. For single operators
    see `OpenDevice.kernel_for`.

    Returns
    -------
    tuple
        The plan, without the groups that fell apart, and one kernel per group of it.

    Raises
    ------
    KernelNotFoundError
        When no kernel takes a single operator, or when a group cannot fall apart because others rely on it.
    """
    by_id = {call.id: call for call in calls}
    groups: list[FusionGroup] = []
    kernels: list[KernelDescriptor] = []
    decisions = plan.decisions
    for group in plan.groups:
        members = [by_id[number] for number in group.members]
        kernel = (
            opened.kernel_for(members[0], prefer_generated)
            if len(members) == 1
            else _fused_kernel(group, members, opened)
        )
        if kernel is not None:
            groups.append(group)
            kernels.append(kernel)
            continue
        _check_can_fall_apart(group, members, opened)
        groups.extend(FusionGroup((number,)) for number in group.calls)
        kernels.extend(opened.kernel_for(call, prefer_generated) for call in members)
        decisions = tuple(_apart(decision, group, members) for decision in decisions)
    return FusionPlan(tuple(groups), decisions), kernels


def _fused_kernel(group: FusionGroup, calls: Sequence[OpCall], opened: OpenDevice) -> KernelDescriptor | None:
    registered = opened.registry.find_fused(calls)
    if registered is not None and misfit(registered, calls, group.inner) is None:
        return registered
    if opened.printer is None or opened.printer.can_generate(calls, group.inner) is not None:
        return None
    return opened.printer.generate(calls, fused_call(calls, group.inner))


def _check_can_fall_apart(group: FusionGroup, calls: Sequence[OpCall], opened: OpenDevice) -> None:
    if group.recomputed:
        raise KernelNotFoundError(
            f"no kernel on {opened.device} computes {'+'.join(call.signature for call in calls)} in one, and what the "
            "group computes again for itself may be in memory nowhere",
            hint="a plugin that changes the fusion plan must leave groups with recomputed operators as they are",
        )


def _apart(decision: FusionDecision, group: FusionGroup, calls: Sequence[OpCall]) -> FusionDecision:
    if not decision.fused or not {decision.producer, decision.consumer} <= set(group.calls):
        return decision
    reason = f"no kernel computes {'+'.join(call.signature for call in calls)} in one"
    return replace(decision, fused=False, reason=reason)
