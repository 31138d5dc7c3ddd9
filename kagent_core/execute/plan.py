"""ExecutionPlan: the sealed, replayable form of one captured graph for one set of shapes."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kagent_core.device import Environment, Observer, SealedSegment, Segment
from kagent_core.execute.accepted import Accepted
from kagent_core.execute.agent import ExecutorAgent
from kagent_core.execute.copies import Copy
from kagent_core.execute.host import view_of
from kagent_core.execute.in_place import InPlace, tensor_key
from kagent_core.execute.model_parameters import Uploads
from kagent_core.execute.pool import DeviceMemory
from kagent_core.execute.seeds import Seeds
from kagent_core.schedule.placed import PlacedProgram, Transfer
from kagent_core.specs import BufferKind, BufferSpec, Device, InputRef, KernelTask, OutputRef, TensorSpec

_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_BelowAutocast = torch._C._DisableAutocast
_is_autocast_enabled = torch._C._is_any_autocast_enabled


class Bound:
    """A plan whose last arguments are given already; made by `ExecutionPlan.bind`.

    Attributes
    ----------
    plan
        The plan.
    environment
        What an environment has without the other arguments.
    inputs
        Position and buffer of these.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        environment: Environment,
        inputs: Sequence[tuple[int, int]],
        accepted: Accepted,
    ) -> None:
        self.plan = plan
        self.environment = environment
        self.inputs = inputs
        self.accepts = accepted.are


@dataclass(frozen=True)
class PlannedSegment:
    """A segment, and what makes instances of it that run."""

    segment: Segment
    make: Callable[[], SealedSegment]


Step = PlannedSegment | Transfer


class ExecutionPlan:
    """Replays one program. Any number of threads may call it at once: each call has memory of its own.

    Parameters
    ----------
    placed
        The program with its final buffers.
    steps
        Segments and transfers, in order.
    executors
        By device, for the transfers.
    constants
        The captured graph's constants.
    args
        What the plan was made for: the parameters among them are copied to a device once, not at every call.
    parameters
        Positions of arguments that count as parameters, whatever they are.
    """

    accepts: Callable[[Sequence[Any]], bool]
    """Whether the plan was made for arguments like these: dtypes, shapes, strides, torch devices and integers."""

    def __init__(
        self,
        placed: PlacedProgram,
        steps: Sequence[Step],
        executors: Callable[[Any], ExecutorAgent],
        constants: Sequence[torch.Tensor],
        args: Sequence[Any] = (),
        parameters: Collection[int] = (),
    ) -> None:
        self.program = placed.program
        self.placements = placed.placements
        self.steps = tuple(steps)
        self._bases = placed.bases
        self._in_place = placed.in_place
        self._accepted = Accepted(self.program, bool(self._in_place), range(len(self.program.inputs)))
        self.accepts = self._accepted.are
        self._steady = any(isinstance(step, PlannedSegment) and step.segment.steady for step in steps)
        tensors = [(i, spec) for i, spec in enumerate(self.program.inputs) if isinstance(spec, TensorSpec)]
        self._inputs = [(i, spec.buffer) for i, spec in tensors]
        self._constants = {
            spec.buffer: constants[self.program.buffers[spec.buffer].source or 0] for spec in self.program.constants
        }
        self._given: set[int] = set()
        self._outputs = [self._output(value) for value in self.program.outputs]
        whole = [buffer for buffer in map(self._returned_as_made, self.program.outputs) if buffer is not None]
        self._whole = whole if len(whole) == len(self.program.outputs) else None
        self._repeats = [(i, v.index) for i, v in enumerate(self.program.outputs) if isinstance(v, OutputRef)]
        self._idle: list[_Instance] = []
        self._closed = False
        self._memories: tuple[DeviceMemory, ...] = ()
        self._makers = self._instance_makers(executors, args, parameters)

    @property
    def tasks(self) -> tuple[KernelTask, ...]:
        """Every task, in the order in which they run."""
        return tuple(t for step in self.steps if isinstance(step, PlannedSegment) for t in step.segment.tasks)

    @property
    def in_host_memory(self) -> bool:
        """Whether no device has to be told when the plan is given up."""
        return not self._in_place and not any(isinstance(step, Transfer) for step in self.steps)

    def bind(self, args: Sequence[Any], first: int) -> Bound:
        """Give the arguments from the first of some position on, for many calls: all of them are accepted ones."""
        environment = self._constants.copy()
        environment.update((buffer, args[index]) for index, buffer in self._inputs if index >= first)
        others = [(index, buffer) for index, buffer in self._inputs if index < first]
        return Bound(self, environment, others, Accepted(self.program, bool(self._in_place), range(first)))

    def run(self, args: Sequence[Any], observer: Observer | None = None, bound: Bound | None = None) -> list[Any]:
        """Run the program and return its outputs.

        Parameters
        ----------
        args
            All arguments, even of those that are bound.
        observer
            Is told about each task.
        bound
            What `bind` has returned for the last ones; else None.

        Raises
        ------
        KernelExecutionError
            When a kernel fails. The plan stays usable.
        """
        try:
            instance = self._idle.pop()
        except IndexError:  # asking first would race with other threads
            instance = self._instantiate()
        environment: Environment = (self._constants if bound is None else bound.environment).copy()
        for index, buffer in self._inputs if bound is None else bound.inputs:
            environment[buffer] = args[index]
        try:
            if self._steady:
                instance.bind(environment, bound)
            whole = self._whole
            if whole is not None and not instance.calls_torch and observer is None:
                instance.run(environment, None)
            else:
                with _BelowAutograd():  # capture has written down what it would do, and what autocast would
                    if _is_autocast_enabled():
                        with _BelowAutocast():
                            instance.run(environment, observer)
                    else:
                        instance.run(environment, observer)
                    if whole is None:
                        results = [output(args, environment) for output in self._outputs]
            if whole is not None:
                results = [environment[whole[0]]] if len(whole) == 1 else list(map(environment.__getitem__, whole))
            for position, earlier in self._repeats:
                results[position] = results[earlier]
            return results
        finally:
            self._idle.append(instance)
            if self._closed:
                self.close()

    def close(self, keep_memory: bool = False) -> None:
        """Give up instances that are not running, and the others when they are done.

        Parameters
        ----------
        keep_memory
            Whether their memory is kept for the next plan of the same device.
        """
        self._closed = True
        while self.evict():
            pass
        if not keep_memory:
            self._trim()

    def idle_since(self) -> float | None:
        """Return when the instance that idles longest was used last; None when none idles."""
        try:
            return self._idle[0].last_run
        except IndexError:
            return None

    def evict(self) -> bool:
        """Give up the instance that idles longest; return whether there was one. The next call makes another."""
        try:
            instance = self._idle.pop(0)
        except IndexError:
            return False
        instance.close()
        return True

    def _trim(self) -> None:
        for memory in self._memories:
            memory.trim()

    def _instantiate(self) -> _Instance:
        with torch.inference_mode(False):  # memory made under inference_mode could not be written outside of it
            try:
                return _DeviceInstance(self._makers) if self._memories else _Instance(self._makers)
            except BaseException:
                self._trim()
                raise

    def _instance_makers(
        self, executors: Callable[[Any], ExecutorAgent], args: Sequence[Any], parameters: Collection[int]
    ) -> tuple[Callable[[], SealedSegment], ...]:
        """Return what makes an instance's steps; the uploads of a device's parameters stand where the first would."""
        uploads = self._uploads(executors, args, parameters)
        makers: list[Callable[[], SealedSegment]] = [functools.partial(Seeds, seed) for seed in self.program.seeds]
        for device in dict.fromkeys(self._in_place.values()):
            self._register(executors(device))
            makers.append(self._tensors_of(executors(device)))
        for step in self.steps:
            if isinstance(step, PlannedSegment):
                makers.append(step.make)
                continue
            executor, shared = executors(step.device), uploads.get(step.device, [])
            self._register(executor)
            if step not in shared:
                is_input = self.program.buffers[step.target].kind is BufferKind.INPUT
                makers.append(functools.partial(Copy, step, executor, self._bases, is_input, self._in_place))
            elif step is shared[0]:
                makers.append(functools.partial(Uploads, executor.parameters, shared, self._bases))
        return tuple(makers)

    def _register(self, executor: ExecutorAgent) -> None:
        """Let a device's memory make room by what this plan does not need at the moment."""
        if executor.memory not in self._memories:
            self._memories += (executor.memory,)
            executor.memory.register(self)

    def _tensors_of(self, executor: ExecutorAgent) -> Callable[[], SealedSegment]:
        """Return what makes the step that finds and makes tensors in a device's memory."""
        mine = [self.program.buffers[b] for b, device in self._in_place.items() if device == executor.opened.device]
        theirs = [buffer.kind in (BufferKind.INPUT, BufferKind.CONSTANT) for buffer in mine]
        given = {b.id: self._bases[b.id] for b, is_given in zip(mine, theirs, strict=True) if is_given}
        made = {b.id: self._bases[b.id] for b, is_given in zip(mine, theirs, strict=True) if not is_given}
        return functools.partial(InPlace, executor.memory, given, made, {b.id: b.nbytes for b in mine})

    def _uploads(
        self, executors: Callable[[Any], ExecutorAgent], args: Sequence[Any], parameters: Collection[int]
    ) -> dict[Device, list[Transfer]]:
        """By device, the transfers of parameters that the program only reads."""
        buffers = self.program.buffers
        written = {_root(buffers[spec.buffer]) for call in self.program.calls for spec in call.outputs}
        uploads: dict[Device, list[Transfer]] = {}
        for step in self.steps:
            if not isinstance(step, Transfer) or not step.to_device or step.source in written:
                continue
            source, executor = buffers[step.source], executors(step.device)
            if executor.opened.runtime.imports_host or executor.parameters.watch == "copied":
                continue
            is_argument = source.kind is BufferKind.INPUT and source.source is not None and bool(args)
            given = args[source.source or 0] if is_argument else None
            if executor.parameters.recognize(given, is_argument and source.source in parameters) or (
                source.kind is BufferKind.CONSTANT
            ):
                uploads.setdefault(step.device, []).append(step)
        return uploads

    def _returned_as_made(self, value: Any) -> int | None:
        """Return the buffer that is returned as its kernel made it; None where more is to be done."""
        if not isinstance(value, TensorSpec) or value != self._bases[value.buffer] or value.buffer in self._in_place:
            return None
        first = sum(isinstance(v, TensorSpec) and v.buffer == value.buffer for v in self.program.outputs) == 1
        return value.buffer if first and self.program.buffers[value.buffer].kind is not BufferKind.INPUT else None

    def _output(self, value: Any) -> Callable[[Sequence[Any], Environment], Any]:
        if isinstance(value, InputRef):
            index = value.index
            return lambda args, environment: args[index]
        if not isinstance(value, TensorSpec):
            return lambda args, environment: value
        base, buffer = self._bases[value.buffer], value.buffer
        tensor = tensor_key(buffer) if buffer in self._in_place else buffer
        is_input = self.program.buffers[buffer].kind is BufferKind.INPUT
        if value == base and not is_input and buffer not in self._given:
            self._given.add(buffer)  # once: what else is returned of it is another tensor on the same memory
            return lambda args, environment: environment[tensor]
        return lambda args, environment: view_of(environment[tensor], base, value)


def _root(buffer: BufferSpec) -> int:
    """The buffer itself, or the one of which it is a copy at another place."""
    return buffer.id if buffer.kind is not BufferKind.MIRROR or buffer.source is None else buffer.source


class _Instance:
    """Memory and sealed segments for one call at a time."""

    last_run = 0.0

    def __init__(self, makers: Sequence[Callable[[], SealedSegment]]) -> None:
        self._sealed: list[SealedSegment] = []
        self._bound: Callable[[], Bound | None] = lambda: None
        try:
            for make in makers:
                self._sealed.append(make())
            self.calls_torch = any(step.calls_torch for step in self._sealed)
            self._run_only = self._sealed[0].run if len(self._sealed) == 1 else None
        except BaseException:
            self.close()
            raise

    def bind(self, environment: Environment, bound: Bound | None) -> None:
        """Bind an environment's steady tensors, unless they are those that were bound last: they may live no longer."""
        if bound is None or self._bound() is not bound:
            self._bound = lambda: None
            for step in self._sealed:
                step.bind(environment)
            if bound is not None:
                self._bound = weakref.ref(bound)

    def run(self, environment: Environment, observer: Observer | None) -> None:
        if observer is not None:
            for step in self._sealed:
                step.run_observed(environment, observer)
        elif self._run_only is not None:
            self._run_only(environment)
        else:
            for step in self._sealed:
                step.run(environment)

    def close(self) -> None:
        for step in self._sealed:
            step.close()


class _DeviceInstance(_Instance):
    """An instance with memory on devices: what it uses stays there while it runs, and may go when it idles."""

    def __init__(self, makers: Sequence[Callable[[], SealedSegment]]) -> None:
        super().__init__(makers)
        self._uploads = [step for step in self._sealed if isinstance(step, Uploads)]

    def run(self, environment: Environment, observer: Observer | None) -> None:
        if self._uploads:
            with contextlib.ExitStack() as stack:
                for uploads in self._uploads:
                    stack.enter_context(uploads.in_use())
                super().run(environment, observer)
        else:
            super().run(environment, observer)
        self.last_run = time.monotonic()
