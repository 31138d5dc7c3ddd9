"""The fusion rules that look at a pair of neighbours: which may become one loop, and which must not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kagent_core.codegen.generic.leading import CONVOLUTION, PAD, is_read_by
from kagent_core.codegen.generic.place_sums import adds_up_places
from kagent_core.codegen.generic.strips import joined
from kagent_core.codegen.rules.windows import window_size
from kagent_core.extract.fusion.flow import DataFlow
from kagent_core.extract.fusion.operator_class import Loops, OperatorClass, class_of, loops_of
from kagent_core.specs import OpCall, TensorSpec


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rules say of a pair.

    Attributes
    ----------
    allowed
        Whether the two may be in one kernel.
    reason
        Which rule allows or refuses it, and why.
    through_view
        Whether the consumer reads the producer's result otherwise than as it is written.
    """

    allowed: bool
    reason: str
    through_view: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """Two neighbours: `consumer` reads `read`, which `producer` made as `made`.

    Attributes
    ----------
    shared
        Whether others read it, too.
    strip
        Two convolutions that may be computed in strips if they get into one kernel by this pair: one that `producer`
        is, or works on, and one that `consumer` is, or puts zeros around the input of. None where there are not two.
    """

    producer: OpCall
    consumer: OpCall
    made: TensorSpec
    read: tuple[TensorSpec, ...]
    shared: bool
    strip: tuple[OpCall, OpCall] | None = None


def judge(flow: DataFlow, producer: int, consumer: int, rules: Collection[str]) -> Verdict:
    """Return what the rules say of two neighbours, given by their positions.

    Parameters
    ----------
    flow
        The data flow that they are part of.
    producer, consumer
        Their positions.
    rules
        Names of the rules that are switched on. What keeps results right cannot be switched off.
    """
    made_by, read_by = flow.calls[producer], flow.calls[consumer]
    reason = _unfit(made_by) or _unfit(read_by)
    other = flow.other_writer(producer, consumer)
    if reason is None and other is not None:
        reason = f"{read_by.name} reads what {flow.calls[other].name} wrote, too"
    if reason is not None:
        return Verdict(False, reason)
    read = tuple(flow.producers[consumer][producer])
    made = next(spec for spec in made_by.fresh_results if spec.buffer == read[0].buffer)
    if any(spec.buffer != made.buffer for spec in read):
        return Verdict(False, f"{read_by.name} reads several results of {made_by.name}")
    shared = flow.is_kept(producer) or len(flow.readers[producer]) > 1
    pair = Pair(made_by, read_by, made, read, shared, _strip(flow, producer, consumer))
    reason = _reinterpreted(pair)
    return Verdict(False, reason) if reason is not None else _judge_loops(pair, rules)


def _unfit(call: OpCall) -> str | None:
    """Return why a call is never part of a fused kernel, or None."""
    if call.random:
        return f"{call.name} draws random numbers, whose order must stay"
    if not call.outputs:
        return f"{call.name} has an effect on the world outside and no result"
    if len(call.fresh_results) != len(call.outputs):
        return f"{call.name} writes an argument in place"
    return None


def _reinterpreted(pair: Pair) -> str | None:
    for spec in pair.read:
        if spec.dtype != pair.made.dtype:
            return f"{pair.consumer.name} reads the bytes of {pair.made} as {spec.dtype}"
        if (spec.conj, spec.neg) != (pair.made.conj, pair.made.neg):
            return f"{pair.consumer.name} reads {pair.made} lazily conjugated or negated"
    return None


def _judge_loops(pair: Pair, rules: Collection[str]) -> Verdict:
    classes = (class_of(pair.producer), class_of(pair.consumer))
    for call, kind in zip((pair.producer, pair.consumer), classes, strict=True):
        if kind is OperatorClass.OTHER:
            return Verdict(False, f"no fusion rule takes {call.signature}: it is neither pointwise nor a reduction")
    read_by = classes[1] is OperatorClass.PARAMETRISED and is_read_by(pair.producer, pair.consumer)
    rule = _READ_BY if read_by else _STRIPS if pair.strip else _LOOP_RULES.get(classes)
    if rule is None:
        first, then = (_WORDS[kind] for kind in classes)
        return Verdict(False, f"no fusion rule takes {first} into {then}")
    if rule.name not in rules:
        return Verdict(False, f"rule '{rule.name}' is switched off by config (fusion_rules)")
    through_view = any(spec != pair.made for spec in pair.read)
    if through_view and "views" not in rules:
        return Verdict(False, f"{_view(pair)}, and rule 'views' is switched off by config (fusion_rules)", True)
    agreed, told = rule.judge(pair)
    via = f"; {_view(pair)}, which is index arithmetic" if agreed and through_view else ""
    return Verdict(agreed, f"{rule.name}: {told}{via}", through_view)


def _view(pair: Pair) -> str:
    view = next(spec for spec in pair.read if spec != pair.made)
    return f"{pair.consumer.name} reads {pair.made} as a view, {view} with strides {view.strides}"


# -- do the loops agree?


def _pointwise(pair: Pair) -> tuple[bool, str]:
    inner, outer = loops_of(pair.producer), loops_of(pair.consumer)
    part = _part_read(pair)
    if part is not None:
        return True, part
    if math.prod(inner.full) == math.prod(outer.full):
        return True, f"both loop over {outer}"
    return True, f"{inner} is broadcast into the loop over {outer}"


def _prologue(pair: Pair) -> tuple[bool, str]:
    loops = loops_of(pair.consumer)
    return True, f"each element is made where the loop over {loops} needs it"


def _into_gather(pair: Pair) -> tuple[bool, str]:
    """What a gather reads is computed at the places that it reads: no more often than it has elements.

    A pooling operator reads all of a window, so that neighbours read the same.
    """
    after = loops_of(pair.consumer)
    count = math.prod(after.full) * window_size(pair.consumer)
    if count > MOST_REPEATED * pair.made.numel:
        return False, f"{pair.consumer.name} would compute the {pair.made.numel} elements of {pair.made} {count} times"
    return True, f"each element is made where the loop over {after} needs it"


def _epilogue(pair: Pair) -> tuple[bool, str]:
    reduction, after = loops_of(pair.producer), loops_of(pair.consumer)
    part = _part_read(pair)
    if part is not None:
        return False, part
    if math.prod(after.full) == math.prod(reduction.kept):
        return True, f"it works on what the loop over {reduction} leaves"
    if all(_is_spread(spec, reduction, after) for spec in pair.read):
        return True, f"it goes over the rows of the loop over {reduction} again"
    return False, f"the loop over {reduction} and the one over {after} do not agree"


def _after_rows(pair: Pair) -> tuple[bool, str]:
    """What goes over its rows again makes full rows, and sometimes a number per row."""
    rows, after = loops_of(pair.producer), loops_of(pair.consumer)
    if pair.made.numel != math.prod(rows.full):
        return _epilogue(pair)
    part = _part_read(pair)
    if part is not None:
        return False, part
    agreed = math.prod(after.full) == math.prod(rows.full)
    return agreed, f"both loop over {rows}" if agreed else f"the loop over {rows} and the one over {after} do not agree"


def _after_parametrised(pair: Pair) -> tuple[bool, str]:
    after = loops_of(pair.consumer)
    if any(spec != pair.made for spec in pair.read) or after.full != pair.made.shape:
        return False, f"{pair.consumer.name} does not compute one element from each of {pair.producer.name}"
    return True, f"it is computed where {pair.producer.name} stores its result"


def _added_up(pair: Pair) -> tuple[bool, str]:
    if any(spec != pair.made for spec in pair.read) or not adds_up_places(pair.consumer):
        return False, f"{pair.consumer.name} does not add up the places of what {pair.producer.name} makes"
    return True, f"it adds up what {pair.producer.name} makes, line by line"


def _before_parametrised(pair: Pair) -> tuple[bool, str]:
    return True, f"{pair.consumer.name} reads what {pair.producer.name} is given, in its stead"


def _in_strips(pair: Pair) -> tuple[bool, str]:
    found = None if pair.strip is None else joined(*pair.strip)
    if found is None or pair.read != (pair.made,):
        return False, f"{pair.consumer.name} reads what {pair.producer.name} makes otherwise than line by line"
    return (False, f"others read what {pair.producer.name} makes, too") if found[0] and pair.shared else found


def _strip(flow: DataFlow, producer: int, consumer: int) -> tuple[OpCall, OpCall] | None:
    """Return the two convolutions that may be computed in strips where two calls get into one kernel."""
    then, readers = flow.calls[consumer], flow.readers[consumer]
    if then.signature == PAD and len(readers) == 1 and is_read_by(then, flow.calls[readers[0]]):
        then = flow.calls[readers[0]]
    if then.signature != CONVOLUTION:
        return None
    first = _convolution_before(flow, producer)
    return None if first is None or joined(first, then) is None else (first, then)


def _convolution_before(flow: DataFlow, position: int) -> OpCall | None:
    """Return the convolution that a call is, or that it works on, element by element."""
    shape = flow.calls[position].outputs[0].shape
    waiting, seen = [position], {position}
    while waiting:
        position = waiting.pop()
        call = flow.calls[position]
        if call.outputs[0].shape != shape:
            continue
        if call.signature == CONVOLUTION:
            return call
        if class_of(call) is OperatorClass.POINTWISE:
            new = set(flow.producers[position]) - seen
            seen |= new
            waiting += sorted(new)
    return None


def _is_spread(spec: TensorSpec, reduction: Loops, after: Loops) -> bool:
    """Whether a reduced tensor is broadcast back along the very dimensions that it was reduced along."""
    missing = len(after.full) - len(spec.shape)
    shape = (1,) * missing + spec.shape
    strides = (0,) * missing + spec.strides
    seen = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
    return after.full == reduction.full and seen == reduction.kept


def _part_read(pair: Pair) -> str | None:
    """Return what is said of a consumer that does not read every element; None where it reads all.

    Elements that are read twice, as after `expand`, count once.
    """
    for spec in pair.read:
        sizes = (size for size, stride in zip(spec.shape, spec.strides, strict=True) if stride != 0 or size == 0)
        count = math.prod(sizes)
        if count != pair.made.numel:
            return f"{pair.consumer.name} reads {count} of the {pair.made.numel} elements of {pair.made}"
    return None


@dataclass(frozen=True, slots=True)
class _LoopRule:
    name: str
    judge: Callable[[Pair], tuple[bool, str]]


_WORDS = {
    OperatorClass.POINTWISE: "a pointwise operator",
    OperatorClass.GATHER: "a gather",
    OperatorClass.REDUCTION: "a reduction",
    OperatorClass.ROWS: "an operator on rows",
    OperatorClass.PARAMETRISED: "a parametrised kernel",
}

_LOOP_RULES = {
    (OperatorClass.POINTWISE, OperatorClass.POINTWISE): _LoopRule("pointwise", _pointwise),
    (OperatorClass.GATHER, OperatorClass.POINTWISE): _LoopRule("pointwise", _pointwise),
    (OperatorClass.POINTWISE, OperatorClass.GATHER): _LoopRule("pointwise", _into_gather),
    (OperatorClass.GATHER, OperatorClass.GATHER): _LoopRule("pointwise", _into_gather),
    (OperatorClass.POINTWISE, OperatorClass.REDUCTION): _LoopRule("prologue", _prologue),
    (OperatorClass.GATHER, OperatorClass.REDUCTION): _LoopRule("prologue", _prologue),
    (OperatorClass.POINTWISE, OperatorClass.ROWS): _LoopRule("prologue", _prologue),
    (OperatorClass.GATHER, OperatorClass.ROWS): _LoopRule("prologue", _prologue),
    (OperatorClass.REDUCTION, OperatorClass.POINTWISE): _LoopRule("epilogue", _epilogue),
    (OperatorClass.ROWS, OperatorClass.POINTWISE): _LoopRule("epilogue", _after_rows),
    (OperatorClass.PARAMETRISED, OperatorClass.POINTWISE): _LoopRule("epilogue", _after_parametrised),
    (OperatorClass.PARAMETRISED, OperatorClass.REDUCTION): _LoopRule("epilogue", _added_up),
}

_READ_BY = _LoopRule("prologue", _before_parametrised)

_STRIPS = _LoopRule("strips", _in_strips)

MOST_REPEATED = 2
"""How many times as many elements as there are may be computed for a gather."""
