"""KernelRegistry: the kernels of one device, found by exact signature."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kagent_core.errors import KernelNotFoundError, RegistryError, nearest
from kagent_core.specs import KernelDescriptor, OpCall

Resolver = Callable[[OpCall], KernelDescriptor | None]
"""Makes a descriptor on demand, for a device that gets its kernels from a library with its own lookup."""


class KernelRegistry:
    """The kernels of one device: add, freeze, then find.

    Parameters
    ----------
    device_type
        For error messages.
    resolver
        Asked, once per signature, when no added kernel accepts a call. What it returns is remembered and has
        the lowest rank: an added kernel that accepts the call wins. Its dtypes and layouts are checked as an
        added kernel's are. It must not use this registry.

    Examples
    --------
    >>> registry = KernelRegistry("toy")
    >>> registry.add(KernelDescriptor("aten::relu", "my_relu", function=lambda out, x: None))
    >>> registry.freeze()
    >>> registry.signatures()
    ['aten::relu']
    """

    def __init__(self, device_type: str, resolver: Resolver | None = None) -> None:
        self.device_type = device_type
        self._resolver = resolver
        self._kernels: dict[str, list[KernelDescriptor]] = {}
        self._resolved: dict[str, KernelDescriptor | None] = {}
        self._frozen = False
        self._lock = threading.Lock()

    def add(self, kernel: KernelDescriptor) -> None:
        """Add a kernel.

        Raises
        ------
        RegistryError
            When the registry is frozen, or a kernel with this signature and name is there already.
        """
        with self._lock:
            if self._frozen:
                raise RegistryError(
                    f"kernel '{kernel.name}' for {kernel.signature} comes too late: the registry of "
                    f"'{self.device_type}' is frozen",
                    hint="add kernels in the plugin's kagent_kernel_registry hook, before the device opens",
                )
            same = self._kernels.setdefault(kernel.signature, [])
            for other in same:
                if other.name == kernel.name:
                    raise RegistryError(
                        f"two kernels named '{kernel.name}' for {kernel.signature} on '{self.device_type}': "
                        f"one from {other.origin or 'an unknown place'}, "
                        f"one from {kernel.origin or 'an unknown place'}",
                        hint="give one of them another name and priority",
                    )
            same.append(kernel)

    def freeze(self) -> None:
        """End registration: from here on the registry only answers."""
        with self._lock:
            self._frozen = True

    def signatures(self) -> list[str]:
        """Every signature that was added, sorted. What a resolver would give is not among them."""
        return sorted(self._kernels)

    def kernels(self, signature: str) -> tuple[KernelDescriptor, ...]:
        """Every kernel that was added for a signature."""
        return tuple(self._kernels.get(signature, ()))

    def find(self, call: OpCall) -> KernelDescriptor:
        """Return the kernel for a call: exact signature, then dtypes and layouts, then priority.

        Raises
        ------
        KernelNotFoundError
            When no kernel takes the call; says why not for each that was close.
        RegistryError
            When two kernels with the same priority take it.
        """
        accepted: list[KernelDescriptor] = []
        refused: list[str] = []
        for kernel in self._kernels.get(call.signature, ()):
            reason = refusal(kernel, call)
            if reason is None:
                accepted.append(kernel)
            else:
                refused.append(f"'{kernel.name}' {reason}")
        if accepted:
            return self._best(call, accepted)
        resolved = self._resolve(call)
        if resolved is not None:
            reason = refusal(resolved, call)
            if reason is None:
                return resolved
            refused.append(f"'{resolved.name}' {reason}")
        raise self._not_found(call, refused)

    def has(self, call: OpCall) -> bool:
        """Whether `find` would return a kernel."""
        if any(refusal(kernel, call) is None for kernel in self._kernels.get(call.signature, ())):
            return True
        resolved = self._resolve(call)
        return resolved is not None and refusal(resolved, call) is None

    def _best(self, call: OpCall, accepted: list[KernelDescriptor]) -> KernelDescriptor:
        top = max(kernel.priority for kernel in accepted)
        best = [kernel for kernel in accepted if kernel.priority == top]
        if len(best) > 1:
            named = " and ".join(f"'{k.name}' ({k.origin or 'unknown origin'})" for k in best)
            raise RegistryError(
                f"{len(best)} kernels of '{self.device_type}' with priority {top} accept {call.signature}: "
                f"{named}",
                hint="give the one that should win a higher priority",
            )
        return best[0]

    def _resolve(self, call: OpCall) -> KernelDescriptor | None:
        if self._resolver is None:
            return None
        if call.signature in self._resolved:
            return self._resolved[call.signature]
        with self._lock:
            if call.signature not in self._resolved:  # another thread may have been faster
                self._resolved[call.signature] = self._resolver(call)
            return self._resolved[call.signature]

    def _not_found(self, call: OpCall, refused: Iterable[str]) -> KernelNotFoundError:
        came = ", ".join(f"{spec} strides {spec.strides}" for spec in call.inputs) or "no tensors"
        reasons = "; ".join(refused)
        close = self._nearest_signature(call.signature)
        return KernelNotFoundError(
            f"no kernel for {call.signature} on '{self.device_type}' takes what came: {came}"
            + (f"; {reasons}" if reasons else ""),
            hint=(f"the nearest registered signature is '{close}'; " if close and not reasons else "")
            + 'register a kernel for it, or set missing_kernel = "fallback"',
        )

    def _nearest_signature(self, signature: str) -> str | None:
        """Return another overload of the operator if there is one, else the signature spelled most alike."""
        operator = signature.partition(".")[0]
        overloads = sorted(known for known in self._kernels if known.partition(".")[0] == operator)
        return nearest(signature, overloads) or nearest(signature, self._kernels)


def refusal(kernel: KernelDescriptor, call: OpCall) -> str | None:
    """Return why a kernel does not take a call, or None when it does."""
    for spec in (*call.inputs, *call.outputs):
        if kernel.dtypes is not None and spec.dtype.name not in kernel.dtypes:
            return f"takes {', '.join(sorted(kernel.dtypes))}, not {spec.dtype}"
        if kernel.contiguous and not spec.is_contiguous:
            return f"takes contiguous tensors, not {spec} with strides {spec.strides}"
        if (spec.conj or spec.neg) and not kernel.lazy_bits:
            return f"does not read lazily conjugated or negated tensors, such as {spec}"
    return None
