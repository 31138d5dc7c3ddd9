"""Inference graphs whose constants are computed once, and again when the parameters that they come from change."""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_core.inspect.logs import get_logger
from kagent_core.optimize.affine import NotFoldableError
from kagent_core.optimize.splitting import SplitGraph
from kagent_core.watch.memory import MemoryWatch, memory_of

log = get_logger("capture")

GraphRunner = Callable[[Sequence[Any]], list[Any]]

KEPT = 64
"""Sets of parameters whose constants are kept: a graph that layers share is called with those of each."""

RESTLESS = 3
"""Calls in a row at which parameters have changed, after which a graph runs as it was captured; and calls in a row at
which they have not, after which constants are computed again."""


class FoldedGraph:
    """A graph in two parts: constants of its parameters, and what is computed from those at every call.

    At every call the parameters are compared with those that the constants were computed from: the objects, their
    memory, PyTorch's version counters, and, unless the config trusts those, what lies in the memory, since writing
    through ``.data``, NumPy or a storage moves no counter. Safe to call from many threads.

    Parameters
    ----------
    name
        For logs.
    parts
        The two parts.
    bind
        Makes what runs the second one with some constants.
    run_whole
        Makes what runs the graph as it was captured.
    watch
        Notices that memory is written; None where version counters are trusted.
    """

    def __init__(
        self,
        name: str,
        parts: SplitGraph,
        bind: Callable[[Sequence[Any]], GraphRunner],
        run_whole: Callable[[], GraphRunner],
        watch: MemoryWatch | None,
    ) -> None:
        self.name = name
        self._parts = parts
        self._bind = bind
        self._pick_watched, self._pick_kept = _picker(parts.watched), _picker(parts.kept)
        self._make_whole = run_whole
        self._watch = watch
        self._known: OrderedDict[tuple[int, ...], _Constants] = OrderedDict()
        self._latest: _Constants | None = None
        self._lock = threading.Lock()

    @functools.cached_property
    def run_whole(self) -> GraphRunner:
        """What runs the graph as it was captured."""
        return self._make_whole()

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Run the graph."""
        run = self._runner(self._pick_watched(args))
        return self.run_whole(args) if run is None else run(self._pick_kept(args))

    def _runner(self, parameters: tuple[torch.Tensor, ...]) -> GraphRunner | None:
        """Return what runs the graph with the constants of some parameters; None while those change, or have none."""
        with self._lock:
            known = self._latest
            if known is not None and known.are_as_before(parameters):
                changed = known.written()
            else:
                known = self._latest = self._known_of(parameters)
                changed = known.changed(parameters)
            if changed:
                known.unchanged_calls = 0
                known.changed_calls += 1
                known.run, known.foldable = None, True
                if known.changed_calls == RESTLESS:
                    log.info("%s: its parameters change at every call, so nothing is folded into them", self.name)
            else:
                known.unchanged_calls += 1
                if known.unchanged_calls >= RESTLESS:
                    known.changed_calls = 0
            if known.run is None and known.foldable and known.changed_calls < RESTLESS:
                constants = self._computed(parameters)
                known.foldable = constants is not None
                known.run = None if constants is None else self._bind(constants)
            return known.run

    def _known_of(self, parameters: tuple[torch.Tensor, ...]) -> _Constants:
        """Return what is known of some parameters, and make it the last to be given up."""
        key = tuple(map(id, parameters))
        known = self._known.get(key)
        if known is None or not known.are_of(parameters):
            self._known = OrderedDict((k, each) for k, each in self._known.items() if each.is_alive())
            known = self._known[key] = _Constants(parameters, self._watch)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known

    def _computed(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the constants of some parameters; None where their values have none."""
        # as memory that anybody may use later, without gradients, and in the types that capture has written down
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
            try:
                made = self._parts.constants(*(parameter.detach() for parameter in parameters))
            except NotFoldableError as error:
                log.info("%s: nothing is folded into its parameters as they are: %s", self.name, error)
                return None
        log.debug("%s: computed %d constants from %d parameters", self.name, self._parts.count, len(parameters))
        return made


class _Constants:
    """What was computed from some parameters, and how those were then."""

    def __init__(self, parameters: tuple[torch.Tensor, ...], watch: MemoryWatch | None) -> None:
        self._watch = watch
        self._gone: list[object] = []
        self._references = [weakref.ref(parameter, self._gone.append) for parameter in parameters]
        # a tensor made under inference_mode has no version counter, and never gets one
        self._counted = [position for position, parameter in enumerate(parameters) if not parameter.is_inference()]
        self._found: list[bytes] = []
        self._look(parameters)
        self.run: GraphRunner | None = None
        self.foldable = True
        self.changed_calls = 0
        self.unchanged_calls = 0

    def are_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters, rather than others that came to have the same numbers."""
        return all(map(operator.is_, parameters, map(operator.call, self._references)))

    def is_alive(self) -> bool:
        """Whether all of the parameters still exist."""
        return not self._gone

    def are_as_before(self, parameters: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are the parameters, and nothing about them is new but, perhaps, what lies in their memory."""
        if self._same is not None:
            return not self._gone and self._same.are(parameters)
        return self.are_of(parameters) and self._state(parameters) == self._states

    def changed(self, parameters: tuple[torch.Tensor, ...]) -> bool:
        """Whether anything about the parameters is new since the last time, and note how it is now."""
        if self.are_as_before(parameters):
            return self.written()
        self._look(parameters)
        return True

    def written(self) -> bool:
        """Whether something else lies in the parameters' memory than the last time, and note what lies there now."""
        if self._memory is None:
            return False
        before, self._found = self._found, self._memory.compute()
        return before is not self._found and before != self._found

    def _look(self, parameters: tuple[torch.Tensor, ...]) -> None:
        self._same = None if self._watch is None else self._watch.tensors(parameters)
        self._states = self._state(parameters) if self._same is None else None
        # watched before constants are computed: what is written in between is noticed at the next call
        self._memory = None if self._watch is None else self._watch.table([*map(memory_of, parameters)])
        if self._memory is not None:
            self._found = self._memory.compute()

    def _state(self, parameters: Sequence[torch.Tensor]) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        """Return what PyTorch knows about the parameters: addresses, strides, version counters.

        The counters where they are all that tells. It is asked for at every call: functions in C, mapped, take half
        the time of a function for each parameter.
        """
        counted = [] if self._watch is not None else [parameters[position] for position in self._counted]
        return list(map(_version, counted)), list(map(_address, parameters)), list(map(_strides, parameters))


_version = operator.attrgetter("_version")
_address = torch.Tensor.data_ptr
_strides = torch.Tensor.stride


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what takes the items at some positions out of a sequence."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda items: tuple(items[position] for position in positions)
