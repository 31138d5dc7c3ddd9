"""The table of a device's kernels: add, freeze, find."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kagent_core.errors import RegistryError
from kagent_core.inspect.logs import get_logger
from kagent_core.registry.acceptance import group_refusal, refusal
from kagent_core.registry.missing import kernel_not_found
from kagent_core.registry.operators import RegistryProblem, check_fields, problem_with
from kagent_core.registry.origin import calling_line, function_name, line_of
from kagent_core.specs import DEFAULT_SIGNATURE, KernelDescriptor, OpCall

Resolver = Callable[[OpCall], KernelDescriptor | None]
"""Makes a descriptor on demand, for a device that gets its kernels from a library with its own lookup."""

StubWriter = Callable[[OpCall], str]
"""Writes a kernel for a call with its registration, but for what it computes, in the device's language."""

Function = TypeVar("Function", bound=Callable[..., Any])

log = get_logger("extract")
_plugins_log = get_logger("plugins")


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
    stub
        Writes the stub that the error of a missing kernel shows; by default it is a Python function.

    Examples
    --------
    >>> registry = KernelRegistry("toy")
    >>> registry.add(KernelDescriptor("aten::relu", "my_relu", function=lambda out, x: None))
    >>> registry.freeze()
    >>> registry.signatures()
    ['aten::relu']
    """

    def __init__(self, device_type: str, resolver: Resolver | None = None, stub: StubWriter | None = None) -> None:
        self.device_type = device_type
        self._stub = stub
        self._resolver = None if resolver is None else _Resolved(resolver)
        self._added: dict[str, list[KernelDescriptor]] = {}
        self._layers: tuple[_Layer, ...] | None = None  # those who win come first; None until frozen
        self._problems: tuple[RegistryProblem, ...] = ()
        self._defaults: dict[tuple[str, int], KernelDescriptor] = {}
        self._lock = threading.Lock()

    # -- registration

    def add(self, kernel: KernelDescriptor) -> None:
        """Add a kernel. Where it does not say where it comes from, the calling line is noted.

        Raises
        ------
        RegistryError
            When the registry is frozen, a kernel with this signature and name is there already, or the signature of
            a fused kernel is not that of the operators that it fuses.
        """
        if not kernel.origin:
            kernel = replace(kernel, origin=calling_line())
        self._add(kernel)

    def kernel(self, signature: str, **fields: Any) -> Callable[[Function], Function]:
        """Return a decorator that adds a function as a kernel.

        Parameters
        ----------
        signature
            The exact overload.
        **fields
            Further fields of the `KernelDescriptor`; `name` is the function's own by default.

        Examples
        --------
        >>> registry = KernelRegistry("toy")
        >>> @registry.kernel("aten::relu", dtypes={"float32"})
        ... def relu(x, out):
        ...     pass
        >>> [kernel.name for kernel in registry.kernels("aten::relu")]
        ['relu']
        """

        def add(function: Function) -> Function:
            given = {"name": function_name(function), "origin": line_of(function) or calling_line(), **fields}
            check_fields(signature, given)
            self._add(KernelDescriptor(signature, function=function, **given))
            return function

        return add

    def freeze(self) -> None:
        """End registration: from here on the registry only answers.

        A kernel whose operator the installed torch does not have, or whose parameters and layouts name arguments that
        the operator does not have, is set aside with a WARNING; it is among `problems`, and the others stay usable.
        Imports torch, unless there is no kernel.
        """
        with self._lock:
            if self._layers is not None:
                return
            usable: list[KernelDescriptor] = []
            problems: list[RegistryProblem] = []
            for kernel in (kernel for same in self._added.values() for kernel in same):
                problem = problem_with(kernel)
                if problem is None:
                    usable.append(kernel)
                else:
                    problems.append(problem)
                    _plugins_log.warning("'%s': %s", self.device_type, problem)
            self._problems = tuple(problems)
            self._layers = (_Layer(usable),)

    def overlaid(self, *layers: Sequence[KernelDescriptor]) -> KernelRegistry:
        """Return a registry with kernels that outrank this one's, whatever their priorities.

        Parameters
        ----------
        *layers
            Kernels that were checked already; those of an earlier layer outrank those of a later one.

        Raises
        ------
        RegistryError
            When this registry is not frozen.
        """
        if self._layers is None:
            raise RegistryError(f"the registry of '{self.device_type}' is not frozen: nothing can be laid over it yet")
        above = KernelRegistry(self.device_type, stub=self._stub)
        above._resolver = self._resolver
        above._problems = self._problems
        above._layers = (*map(_Layer, layers), *self._layers)
        return above

    # -- what there is

    @property
    def frozen(self) -> bool:
        """Whether registration has ended."""
        return self._layers is not None

    @property
    def resolves(self) -> bool:
        """Whether kernels that nobody added are made on demand."""
        return self._resolver is not None

    @property
    def problems(self) -> tuple[RegistryProblem, ...]:
        """The kernels that were set aside when the registry was frozen."""
        return self._problems

    def signatures(self) -> list[str]:
        """Every signature that was added, sorted. What a resolver would give is not among them."""
        return sorted({signature for layer in self._current() for signature in layer.kernels})

    def kernels(self, signature: str | None = None) -> tuple[KernelDescriptor, ...]:
        """Every kernel that was added, or those for one signature; those who win come first."""
        wanted = self.signatures() if signature is None else [signature]
        return tuple(kernel for name in wanted for layer in self._current() for kernel in layer.kernels.get(name, ()))

    def resolve(self, call: OpCall) -> KernelDescriptor | None:
        """Return what the resolver gives for a call's signature; None when there is nothing, or no resolver."""
        return None if self._resolver is None else self._resolver.get(call)

    # -- lookup

    def find(self, call: OpCall) -> KernelDescriptor:
        """Return the kernel for a call: exact signature, then dtypes and layouts, then priority.

        A default kernel (signature ``default``) is used, with a WARNING the first time, when there is nothing else.
        Its function is called with torch's overload before the operator's own arguments.

        Raises
        ------
        KernelNotFoundError
            When no kernel takes the call; says why not for each that was close.
        RegistryError
            When two kernels with the same priority take it.
        """
        refused: list[str] = []
        found = self._search(call, refused)
        if found is None:
            raise kernel_not_found(call, self.device_type, self.signatures(), refused, self._stub)
        if found.signature == DEFAULT_SIGNATURE:
            return self._bound_default(found, call)
        return found

    def has(self, call: OpCall) -> bool:
        """Whether `find` would return a kernel, or fail because of a tie."""
        if self.has_registered(call) or self.has_resolved(call):
            return True
        return any(layer.takes(DEFAULT_SIGNATURE, call) for layer in self._current())

    def has_registered(self, call: OpCall) -> bool:
        """Whether a kernel that was added for a call's signature takes the call."""
        return any(layer.takes(call.signature, call) for layer in self._current())

    def has_laid_over(self, call: OpCall) -> bool:
        """Whether a kernel that was laid over the device's own, as a program's are, takes a call."""
        return any(layer.takes(call.signature, call) for layer in self._current()[:-1])

    def has_resolved(self, call: OpCall) -> bool:
        """Whether the resolver gives a kernel that takes a call."""
        resolved = self.resolve(call)
        return resolved is not None and refusal(resolved, call) is None

    def find_fused(self, calls: Sequence[OpCall]) -> KernelDescriptor | None:
        """Return the fused kernel for a group of calls, in order; None when none takes it.

        Raises
        ------
        RegistryError
            When two kernels with the same priority take it.
        """
        signatures = tuple(call.signature for call in calls)
        for layer in self._current():
            accepted = [kernel for kernel in layer.fused.get(signatures, ()) if group_refusal(kernel, calls) is None]
            if accepted:
                return self._best("+".join(signatures), accepted)
        return None

    def refusals(self, call: OpCall) -> list[str]:
        """Return, of each kernel with the call's signature that does not take it, the name and why not."""
        refused: list[str] = []
        self._search(call, refused)
        return refused

    # -- inside

    def _add(self, kernel: KernelDescriptor) -> None:
        if kernel.fuses and kernel.signature != "+".join(kernel.fuses):
            raise RegistryError(
                f"kernel '{kernel.name}' ({kernel.origin}) fuses {', '.join(kernel.fuses)}, but its signature is "
                f"'{kernel.signature}'",
                hint=f"leave the signature empty, or write '{'+'.join(kernel.fuses)}'",
            )
        with self._lock:
            if self._layers is not None:
                raise RegistryError(
                    f"kernel '{kernel.name}' for {kernel.signature} comes too late: the registry of "
                    f"'{self.device_type}' is frozen",
                    hint="add kernels in the plugin's kagent_kernel_registry hook, before the device opens; "
                    "kagent_core.kernel takes a program's own kernels at any time",
                )
            same = self._added.setdefault(kernel.signature, [])
            for other in same:
                if other.name == kernel.name:
                    raise RegistryError(
                        f"two kernels named '{kernel.name}' for {kernel.signature} on '{self.device_type}': "
                        f"one from {other.origin}, one from {kernel.origin}",
                        hint="give one of them another name and priority",
                    )
            same.append(kernel)

    def _current(self) -> tuple[_Layer, ...]:
        if self._layers is not None:
            return self._layers
        with self._lock:
            return (_Layer([kernel for same in self._added.values() for kernel in same]),)

    def _search(self, call: OpCall, refused: list[str]) -> KernelDescriptor | None:
        layers = self._current()
        for layer in layers:
            accepted = layer.accepted(call.signature, call, refused)
            if accepted:
                return self._best(call.signature, accepted)
        resolved = self.resolve(call)
        if resolved is not None:
            reason = refusal(resolved, call)
            if reason is None:
                return resolved
            refused.append(f"'{resolved.name}' {reason}")
        for layer in layers:
            accepted = layer.accepted(DEFAULT_SIGNATURE, call, refused)
            if accepted:
                return self._best(DEFAULT_SIGNATURE, accepted)
        return None

    def _best(self, signature: str, accepted: list[KernelDescriptor]) -> KernelDescriptor:
        if len(accepted) == 1:
            return accepted[0]
        top = max(kernel.priority for kernel in accepted)
        best = [kernel for kernel in accepted if kernel.priority == top]
        if len(best) > 1:
            named = " and ".join(f"'{kernel.name}' ({kernel.origin})" for kernel in best)
            raise RegistryError(
                f"{len(best)} kernels of '{self.device_type}' with priority {top} accept {signature}: {named}",
                hint="give the one that should win a higher priority",
            )
        return best[0]

    def _bound_default(self, default: KernelDescriptor, call: OpCall) -> KernelDescriptor:
        """Tell a default kernel which operator it computes; say once per signature that it is used."""
        key = (call.signature, id(default))
        with self._lock:
            first = key not in self._defaults
            if first:
                function = default.function and functools.partial(default.function, call.overload)
                self._defaults[key] = replace(default, function=function)
        if first:
            log.warning(
                "%s runs with the default kernel '%s' of '%s' (%s): there is no kernel for it that takes what came",
                call.signature,
                default.name,
                self.device_type,
                default.origin,
            )
        return self._defaults[key]


class _Layer:
    """Kernels that compete by priority: single ones by signature, fused ones by the signatures that they fuse."""

    def __init__(self, kernels: Iterable[KernelDescriptor]) -> None:
        by_signature: dict[str, list[KernelDescriptor]] = {}
        for kernel in kernels:
            by_signature.setdefault(kernel.signature, []).append(kernel)
        self.kernels: Mapping[str, tuple[KernelDescriptor, ...]] = {
            signature: tuple(same) for signature, same in by_signature.items()
        }
        self.fused = {same[0].fuses: same for same in self.kernels.values() if same[0].fuses}

    def accepted(self, signature: str, call: OpCall, refused: list[str]) -> list[KernelDescriptor]:
        """Return the kernels that take a call; note of the others why not."""
        found: list[KernelDescriptor] = []
        for kernel in self.kernels.get(signature, ()):
            reason = refusal(kernel, call)
            if reason is None:
                found.append(kernel)
            else:
                refused.append(f"'{kernel.name}' {reason}")
        return found

    def takes(self, signature: str, call: OpCall) -> bool:
        return any(refusal(kernel, call) is None for kernel in self.kernels.get(signature, ()))


class _Resolved:
    """What a resolver gave, by signature and schema. Shared by a registry and those laid over it."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._known: dict[tuple[str, Any], KernelDescriptor | None] = {}
        self._lock = threading.Lock()

    def get(self, call: OpCall) -> KernelDescriptor | None:
        key = (call.signature, call.overload)
        if key in self._known:
            return self._known[key]
        with self._lock:
            if key not in self._known:  # another thread may have been faster
                self._known[key] = self._resolver(call)
            return self._known[key]
