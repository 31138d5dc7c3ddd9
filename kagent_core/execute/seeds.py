"""The seeds of random numbers that devices make, drawn each time a program is called."""

from __future__ import annotations

import torch

from kagent_core.device import Environment, Observer, SealedSegment
from kagent_core.specs import SeedInput

_LEAST = -(2**63)


class Seeds(SealedSegment):
    """Draws a seed and enters it into the call's buffers.

    The tensor of seeds stays where it is, so that what runs later may keep its address; only its contents change.

    Parameters
    ----------
    seed
        The tensor, and the generator that its seed is drawn from.
    """

    def __init__(self, seed: SeedInput) -> None:
        streams = torch.arange(seed.tensor.shape[0])
        self._buffer = seed.tensor.buffer
        self._generator = seed.generator
        self._tensor = torch.stack((torch.zeros_like(streams), streams), dim=1)
        self._column = self._tensor.select(1, 0)
        self._drawn = torch.zeros((), dtype=torch.int64)

    def run(self, environment: Environment) -> None:
        """Draw 64 bits from the generator, whose state goes on by that."""
        self._drawn.random_(_LEAST, None, generator=self._generator)
        self._column.copy_(self._drawn)
        environment[self._buffer] = self._tensor

    def run_observed(self, environment: Environment, observer: Observer) -> None:
        """As `run`: a seed is no task."""
        self.run(environment)
