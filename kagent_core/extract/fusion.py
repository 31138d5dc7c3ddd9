"""FusionChecker: which neighbouring operators run as one kernel, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kagent_core.config import Config
from kagent_core.device import OpenDevice
from kagent_core.specs import FusionDecision, FusionGroup, FusionPlan, OpCall


class FusionChecker:
    """Marks fusion groups.

    A device fuses only what it can make one kernel of: without a code printer, every operator is a group of its
    own, and each neighbouring pair says so.

    Parameters
    ----------
    config
        ``fusion`` switches fusion off.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    def analyze(self, calls: Sequence[OpCall], opened: OpenDevice) -> FusionPlan:
        """Return the groups, in an order in which they can run, and a decision for every neighbouring pair."""
        if not self._config.fusion:
            reason = "fusion is switched off by config (fusion = false)"
        elif opened.printer is None:
            reason = f"{opened.device} has no code printer to make one kernel of the two"
        else:
            reason = "no fusion rule takes this pair"
        return FusionPlan(
            groups=tuple(FusionGroup((call.id,)) for call in calls),
            decisions=tuple(
                FusionDecision(producer, consumer, fused=False, reason=reason)
                for producer, consumer in neighbours(calls)
            ),
        )


def neighbours(calls: Sequence[OpCall]) -> Iterator[tuple[int, int]]:
    """Yield each pair (producer's id, consumer's id): the consumer reads bytes that the producer wrote last."""
    writer: dict[int, int] = {}
    for call in calls:
        yield from ((number, call.id) for number in sorted({writer[s.buffer] for s in call.inputs if s.buffer in writer}))
        for spec in call.outputs:
            writer[spec.buffer] = call.id
