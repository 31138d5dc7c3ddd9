"""A segment's launches started as one, where the device can record them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from kagent_core.device import Launch, Recording, Runtime, Segment
from kagent_core.errors import ExecutionError
from kagent_core.execute.streams import physical_dependencies
from kagent_core.inspect.logs import get_logger
from kagent_core.specs import LaunchConfig

log = get_logger("execute")

_FIRST = 1
"""Runs before the recording is made: it costs more than a run, and the first one tells best which launch fails."""


class Prepared(Protocol):
    """A task that is ready to be launched."""

    kernel: Any
    config: LaunchConfig
    args: list[Any]


class Replay:
    """The recording of a segment, once there is one.

    Parameters
    ----------
    runtime
        Of the device.
    segment
        Whose tasks are launched.
    """

    def __init__(self, runtime: Runtime, segment: Segment) -> None:
        self._runtime = runtime
        self._segment = segment
        self._runs = 0
        self._recording: Recording | None = None
        self._numbers: dict[int, int] = {}

    def start(self, launches: Sequence[Prepared | None]) -> bool:
        """Start every launch as one; return False where each is to be started on its own.

        Parameters
        ----------
        launches
            By position of their tasks; None where there is nothing to launch.

        Raises
        ------
        ExecutionError
            When the device refuses to start a recording that it has made.
        """
        self._runs += 1
        if self._runs == _FIRST + 1:
            self._record(launches)
        if self._recording is None:
            return False
        try:
            self._recording.start()
        except Exception as error:
            raise ExecutionError(
                f"{self._segment.device} does not start {len(self._numbers)} recorded launches of "
                f"{self._segment.name}: {type(error).__name__}: {error}",
                hint="profile = true launches one by one and names the one that fails",
            ) from error
        return True

    def update(self, position: int, args: Sequence[Any]) -> None:
        """Give a recorded launch other arguments. One that cannot have them ends the recording."""
        if self._recording is None:
            return
        try:
            self._recording.update(self._numbers[position], args)
        except Exception as error:  # noqa: BLE001  whatever a device refuses: launching each works without it
            log.warning("%s: launched one by one from here on: %s", self._segment.name, error)
            self.close()

    def close(self) -> None:
        """Give the recording up."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with contextlib.suppress(Exception):  # the device has failed, and takes it along
                recording.close()

    def _record(self, launches: Sequence[Prepared | None]) -> None:
        self._numbers = {}
        recorded: list[Launch] = []
        before: list[frozenset[int]] = []
        for position, needed in enumerate(physical_dependencies(self._segment.tasks, self._segment.offsets)):
            after = frozenset().union(*(before[other] for other in needed))
            launch = launches[position]
            if launch is not None:  # else what comes after it comes after all that it would have come after
                self._numbers[position] = len(recorded)
                recorded.append(Launch(launch.kernel, launch.config, tuple(launch.args), tuple(sorted(after))))
                after = frozenset([self._numbers[position]])
            before.append(after)
        if len(recorded) > 1:
            try:
                self._recording = self._runtime.record(recorded)
            except Exception as error:  # noqa: BLE001  as in `update`
                log.warning("%s: launched one by one: %s", self._segment.name, error)
