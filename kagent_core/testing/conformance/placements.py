"""Where operators are placed while something is tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import kagent_core
from kagent_core import hookimpl


@dataclass(eq=False)  # pluggy takes no two plugins that are equal, as all that have noted nothing would be
class Placements:
    """A plugin that notes where operators are placed.

    Attributes
    ----------
    native
        How often each was placed on the device that was asked for, by signature.
    elsewhere
        How often it was not.
    """

    native: Counter[str] = field(default_factory=Counter)
    elsewhere: Counter[str] = field(default_factory=Counter)

    @hookimpl(wrapper=True)
    def kagent_place(self, request: Any) -> Any:
        """Note what the scheduler decides."""
        placements = yield
        for call, placement in zip(request.program.calls, placements, strict=True):
            (self.native if placement.device == request.target else self.elsewhere)[call.signature] += 1
        return placements

    def clear(self) -> None:
        """Forget all."""
        self.native.clear()
        self.elsewhere.clear()


@contextmanager
def noted(name: str) -> Iterator[Placements]:
    """Note placements inside the block, under the name of a plugin."""
    placements = Placements()
    with kagent_core.use_plugin(placements, name):
        yield placements
