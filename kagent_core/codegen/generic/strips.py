"""Convolutions that follow each other and are computed some lines at a time: a strip.

Such are the blocks of mobile networks: a convolution of one place makes many channels of a few, a depthwise one goes
over their lines, and another one of one place makes few channels again. In front of the first block, it is a
convolution of colours that makes the channels. The images between are larger than a core's own caches, and nobody else
reads them. A kernel that computes a strip of lines of all of these convolutions before the next strip keeps no more of
the images than the caches hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kagent_core.codegen.generic.direct_planes import FEW_PLANES
from kagent_core.codegen.generic.leading import CONVOLUTION, PAD, SCALE, is_of_one_place, with_what_is_read
from kagent_core.specs import OpCall, TensorSpec

LARGE = 128 * 1024
"""Bytes of an image from which on it is not made as a whole: more than a core's nearest cache by far.

In one thread of an AMD processor with caches of 48 KiB and 1 MiB, blocks of three convolutions took 0.6 to 0.8 of the
time that they take one after the other where the image has 0.9 to 4.8 MB, and 0.9 where it has 0.3 to 0.6 MB. Of mobile
networks, images of 128 to 768 KiB made up to 7 % of the time; with smaller ones they took up to 4 % longer.
"""


@dataclass(frozen=True)
class Stage:
    """A convolution of a strip.

    Attributes
    ----------
    call
        The convolution, which reads what the stage before has made.
    rest
        Pointwise operators on what it makes.
    read
        What is a part of it, since it reads otherwise: zeros around its input.
    """

    call: OpCall
    rest: tuple[OpCall, ...]
    read: tuple[OpCall, ...] = ()

    @property
    def made(self) -> TensorSpec:
        """What the next stage reads."""
        last = self.rest[-1] if self.rest else self.call
        return last.outputs[0]


def is_depthwise(call: OpCall) -> bool:
    """Whether a call is a convolution of single channels, with a weight that was laid out for vectors of them."""
    if call.signature != CONVOLUTION or call.arguments["transposed"]:
        return False
    source, weight = call.arguments["input"], call.arguments["weight"]
    groups = call.arguments["groups"]
    single = groups == source.shape[1] == weight.shape[0] > 1 == weight.shape[1]
    return bool(single and len(weight.shape) == 4 and weight.strides[0] == 1)


def mixes_channels(call: OpCall) -> bool:
    """Whether a call is a convolution of one place, with a weight that was laid out for vectors of channels."""
    if call.signature != CONVOLUTION or call.arguments["transposed"]:
        return False
    return len(call.arguments["weight"].shape) == 4 and is_of_one_place(call)


def reads_planes(call: OpCall) -> bool:
    """Whether a call is a convolution of few planes, such as colours, with a weight that was laid out for vectors."""
    if call.signature != CONVOLUTION or call.arguments["transposed"] or call.arguments["groups"] != 1:
        return False
    weight = call.arguments["weight"]
    return len(weight.shape) == 4 and 1 < weight.shape[1] <= FEW_PLANES and weight.strides[0] == 1


def joined(first: OpCall, then: OpCall) -> tuple[bool, str] | None:
    """Return whether two convolutions are better computed in strips, and why; None where they cannot be at all.

    Parameters
    ----------
    first
        A convolution.
    then
        What reads its result, or pointwise operators on that.
    """
    if (mixes_channels(first) or reads_planes(first)) and is_depthwise(then):
        images: tuple[TensorSpec, ...] = first.outputs
    elif is_depthwise(first) and mixes_channels(then):  # what it reads may be part of the strip, too
        images = (first.arguments["input"], *first.outputs)
    else:
        return None
    nbytes = max(spec.numel // spec.shape[0] * spec.dtype.itemsize if spec.numel else 0 for spec in images)
    if nbytes < LARGE:
        return False, f"an image of {nbytes:,} bytes between {first.name} and {then.name} stays in a cache"
    return True, f"{then.name} reads what {first.name} makes some lines at a time, of an image of {nbytes:,} bytes"


def stages_of(calls: Sequence[OpCall]) -> tuple[Stage, ...] | str:
    """Return the stages of some calls, in order, or why they are no strip.

    Parameters
    ----------
    calls
        A convolution and what follows it, more convolutions among it.
    """
    found: list[tuple[OpCall, list[OpCall], list[OpCall]]] = []
    for call in calls:
        if call.signature != CONVOLUTION:
            found[-1][1].append(call)
            continue
        before = found[-1][1] if found else []
        read = [before.pop()] if before and before[-1].signature == PAD else []
        found.append((with_what_is_read([*read, call])[0], [], read))
    stages = tuple(Stage(call, tuple(rest), tuple(read)) for call, rest, read in found)
    return _refusal(stages) or stages


_Kind = Callable[[OpCall], bool]

_KINDS: tuple[tuple[_Kind, ...], ...] = (
    (is_depthwise, mixes_channels),
    *((first, is_depthwise) for first in (mixes_channels, reads_planes)),
    *((first, is_depthwise, mixes_channels) for first in (mixes_channels, reads_planes)),
)
"""What the convolutions of a strip may be."""


def _are(stages: Sequence[Stage], *kinds: _Kind) -> bool:
    return len(stages) == len(kinds) and all(kind(stage.call) for kind, stage in zip(kinds, stages, strict=True))


def _refusal(stages: Sequence[Stage]) -> str | None:
    if not any(_are(stages, *kinds) for kinds in _KINDS):
        return f"{stages[-1].call.name} is no part of a strip of {stages[0].call.name}"
    earlier: set[TensorSpec] = set()
    for before, stage in zip((None, *stages), stages, strict=False):
        source = stage.call.arguments["input"]
        if SCALE in stage.call.arguments or (before is not None and source != before.made):
            return f"{stage.call.name} does not read what is made before it as it is"
        if any(spec.conj or spec.neg for spec in stage.call.inputs):
            return f"{stage.call.name} has a tensor that is lazily conjugated or negated"
        earlier |= {spec for call in stage.read for spec in call.outputs}
        others = {spec for call in stage.rest for spec in call.inputs} | set(stage.call.inputs) - {source}
        if earlier & others:
            return f"something behind {stage.call.name} reads what an earlier convolution makes"
        earlier |= {spec for call in (stage.call, *stage.rest) for spec in call.outputs}
        pay = None if before is None else joined(before.call, stage.call)
        if pay is not None and not pay[0]:
            return pay[1]
    return None
