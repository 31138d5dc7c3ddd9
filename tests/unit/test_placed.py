"""Segments and transfers: the TransferPlanner keeps every buffer's copies coherent."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.schedule.placed import PlacedCalls, Transfer, TransferPlanner, base_specs
from kagent_core.specs import BufferKind, Device, InputRef, Placement, Program, flatten_tensors

from .builders import buffer, call, relu, tensor

HOST, HOST_TOO = Device("cpu"), Device("native")
ONE, TWO = Device("toy", 0), Device("toy", 1)
DEVICES = {"h": HOST, "n": HOST_TOO, "1": ONE, "2": TWO}


def copy_into(number, target, source):
    return call(number, "aten::copy_", {"self": target, "src": source}, [target], written=[target])


def program_of(calls, inputs, outputs, constants=()):
    """A program on contiguous tensors; inputs come first, then constants, then what calls make."""
    given = len(inputs) + len(constants)
    count = max([given, *(1 + spec.buffer for c in calls for spec in (*c.inputs, *c.outputs))])
    returned = {spec.buffer for spec in flatten_tensors(tuple(outputs))}
    buffers = []
    for number in range(count):
        kind = BufferKind.OUTPUT if number in returned else BufferKind.INTERMEDIATE
        source = None
        if number < given:
            kind = BufferKind.INPUT if number < len(inputs) else BufferKind.CONSTANT
            source = number if number < len(inputs) else number - len(inputs)
        buffers.append(buffer(number, 16, kind, None, source))
    return Program(tuple(calls), tuple(buffers), tuple(inputs), tuple(outputs), tuple(constants))


def plan(program, places):
    placements = [Placement(DEVICES[place], "") for place in places]
    return TransferPlanner(program, placements, lambda device: device.type != "toy").plan()


def told(placed):
    """The steps as text: calls' ids on a device, transfers as from>to with the direction's device."""
    lines = []
    for step in placed.steps:
        if isinstance(step, Transfer):
            arrow = ">" if step.to_device else "<"
            lines.append(f"{step.source}{arrow}{step.target} {step.device}")
        else:
            lines.append(f"{','.join(str(one.id) for one in step.calls)} {step.device}")
    return lines


X = tensor(0, 4)


def chain(length):
    """Call n reads what call n - 1 made."""
    calls = [relu(n, tensor(n, 4), tensor(n + 1, 4)) for n in range(length)]
    return program_of(calls, [X], [tensor(length, 4)])


def test_host_memory_needs_no_transfers():
    placed = plan(chain(3), "hhh")
    assert told(placed) == ["0,1,2 cpu"]
    assert placed.program == chain(3)


def test_two_devices_in_host_memory_share_it():
    assert told(plan(chain(3), "hnh")) == ["0 cpu", "1 native", "2 cpu"]


def test_to_the_device_and_back():
    placed = plan(chain(3), "111")
    assert told(placed) == ["0>4 toy:0", "0,1,2 toy:0", "3<5 toy:0"]
    kinds = [(b.kind, b.device, b.source) for b in placed.program.buffers]
    assert kinds == [
        (BufferKind.INPUT, None, 0),
        (BufferKind.INTERMEDIATE, ONE, None),
        (BufferKind.INTERMEDIATE, ONE, None),
        (BufferKind.OUTPUT, ONE, None),
        (BufferKind.MIRROR, ONE, 0),
        (BufferKind.MIRROR, None, 3),
    ]
    assert placed.program.calls[0].arguments["self"].buffer == 4
    assert placed.program.calls[0].inputs == (tensor(4, 4),)
    assert placed.program.outputs == (tensor(5, 4),)
    assert all(step.nbytes == 16 for step in placed.steps if isinstance(step, Transfer))


def test_one_transfer_for_many_uses():
    calls = [relu(n, X, tensor(n + 1, 4)) for n in range(3)]
    placed = plan(program_of(calls, [X], [tensor(n, 4) for n in (1, 2, 3)]), "111")
    assert told(placed) == ["0>4 toy:0", "0,1,2 toy:0", "1<5 toy:0", "2<6 toy:0", "3<7 toy:0"]


def test_a_tensor_used_twice_by_one_call_and_returned_twice_moves_once():
    both = call(0, "aten::add.Tensor", {"self": X, "other": X}, [tensor(1, 4)])
    placed = plan(program_of([both], [X], [tensor(1, 4), tensor(1, 2)]), "1")
    assert told(placed) == ["0>2 toy:0", "0 toy:0", "1<3 toy:0"]
    assert placed.program.outputs == (tensor(3, 4), tensor(3, 2))


def test_an_intermediate_is_mirrored_there_and_back():
    calls = [
        *chain(2).calls,
        call(2, "aten::add.Tensor", {"self": tensor(1, 4), "other": tensor(2, 4)}, [tensor(3, 4)]),
    ]
    placed = plan(program_of(calls, [X], [tensor(3, 4)]), "1h1")
    assert told(placed) == ["0>4 toy:0", "0 toy:0", "1<5 toy:0", "1 cpu", "2>6 toy:0", "2 toy:0", "3<7 toy:0"]
    assert placed.program.calls[1].inputs == (tensor(5, 4),)
    assert placed.program.calls[2].inputs == (tensor(1, 4), tensor(6, 4))  # b1 is still valid on the device


def test_from_device_to_device_through_the_host():
    placed = plan(chain(2), "12")
    assert told(placed) == ["0>3 toy:0", "0 toy:0", "1<4 toy:0", "4>5 toy:1", "1 toy:1", "2<6 toy:1"]
    assert placed.program.buffers[5].device == TWO


def test_a_written_input_comes_back():
    calls = [relu(0, X, tensor(1, 4)), copy_into(1, X, tensor(1, 4))]
    placed = plan(program_of(calls, [X], [InputRef(0)]), "11")
    assert told(placed) == ["0>2 toy:0", "0,1 toy:0", "2<0 toy:0"]
    assert placed.program.outputs == (InputRef(0),)
    assert placed.program.calls[1].outputs == (tensor(2, 4),)


def test_an_input_written_in_host_memory_stays_there():
    calls = [relu(0, X, tensor(1, 4)), copy_into(1, X, tensor(1, 4))]
    assert told(plan(program_of(calls, [X], []), "1h")) == ["0>2 toy:0", "0 toy:0", "1<3 toy:0", "1 cpu"]


def test_a_write_makes_other_copies_stale():
    """The device has a copy of the input when the host writes it: the next use there needs the new bytes."""
    calls = [relu(0, X, tensor(1, 4)), copy_into(1, X, tensor(1, 4)), relu(2, X, tensor(2, 4))]
    placed = plan(program_of(calls, [X], [tensor(2, 4)]), "1h1")
    assert told(placed) == [
        "0>3 toy:0",
        "0 toy:0",
        "1<4 toy:0",
        "1 cpu",
        "0>3 toy:0",
        "2 toy:0",
        "2<5 toy:0",
    ]


def test_outputs_that_are_views_are_views_of_the_copy():
    row = tensor(1, 2, offset=2)
    placed = plan(program_of(chain(1).calls, [X], [row, tensor(1, 4)]), "1")
    assert told(placed) == ["0>2 toy:0", "0 toy:0", "1<3 toy:0"]
    assert placed.program.outputs == (tensor(3, 2, offset=2), tensor(3, 4))
    assert placed.bases[3] == tensor(3, 4)


def test_constants_move_like_inputs():
    constant = tensor(1, 4)
    add = call(0, "aten::add.Tensor", {"self": X, "other": constant}, [tensor(2, 4)])
    placed = plan(program_of([add], [X], [tensor(2, 4)], [constant]), "1")
    assert told(placed) == ["0>3 toy:0", "1>4 toy:0", "0 toy:0", "2<5 toy:0"]


def test_lists_of_tensors_are_moved_too():
    cat = call(0, "aten::cat", {"tensors": (X, X), "dim": 0}, [tensor(1, 4)])
    placed = plan(program_of([cat], [X], [tensor(1, 4)]), "1")
    assert placed.program.calls[0].arguments == {"tensors": (tensor(2, 4), tensor(2, 4)), "dim": 0}


def test_a_program_without_calls_is_left_alone():
    program = program_of([], [X, 7], [InputRef(0), 7, tensor(0, 2)])
    placed = plan(program, "")
    assert placed.steps == ()
    assert placed.program.outputs == program.outputs


def test_exports_are_what_later_steps_or_the_caller_read():
    calls = [
        relu(0, X, tensor(1, 4)),  # read by call 2, elsewhere
        relu(1, X, tensor(2, 4)),  # read within its segment only
        call(2, "aten::add.Tensor", {"self": tensor(1, 4), "other": tensor(1, 4)}, [tensor(3, 4)]),
    ]
    calls.insert(2, relu(3, tensor(2, 4), tensor(4, 4)))  # returned, made in the first segment
    placed = plan(program_of(calls, [X], [tensor(3, 4), tensor(4, 4)]), "hhhn")
    assert told(placed) == ["0,1,3 cpu", "2 native"]
    assert placed.exports() == [frozenset({1, 4}), frozenset({3})]


def test_exports_of_transfers_and_their_sources():
    placed = plan(chain(2), "1h")
    assert told(placed) == ["0>3 toy:0", "0 toy:0", "1<4 toy:0", "1 cpu"]
    assert placed.exports() == [frozenset({3}), frozenset({1}), frozenset({4}), frozenset({2})]


def test_inputs_are_nobodys_export():
    calls = [relu(0, X, tensor(1, 4)), copy_into(1, X, tensor(1, 4)), relu(2, X, tensor(2, 4))]
    placed = plan(program_of(calls, [X], [tensor(2, 4)]), "hnh")
    assert placed.exports() == [frozenset({1}), frozenset(), frozenset({2})]


def test_bases_are_the_first_tensor_in_a_buffer():
    wide = tensor(0, 2, 2)
    calls = [relu(0, tensor(0, 4), tensor(1, 4)), relu(1, tensor(1, 2), tensor(2, 2))]
    found = base_specs(program_of(calls, [wide], [tensor(2, 1)]))
    assert found == {0: wide, 1: tensor(1, 4), 2: tensor(2, 2)}


# -- the property: simulated memories hold what program order gives


@st.composite
def placed_programs(draw):
    """A random program of relus (make a buffer) and copies (write an input), and a place for each call."""
    inputs = draw(st.integers(1, 3))
    made, calls, places = inputs, [], []
    for number in range(draw(st.integers(1, 12))):
        source = tensor(draw(st.integers(0, made - 1)), 4)
        places.append(draw(st.sampled_from("hn12")))
        if draw(st.booleans()):
            calls.append(relu(number, source, tensor(made, 4)))
            made += 1
        else:
            written = st.integers(0, inputs - 1).filter(lambda n, source=source: n != source.buffer or inputs == 1)
            calls.append(copy_into(number, tensor(draw(written), 4), source))
    outputs = draw(st.lists(st.integers(inputs, made - 1), max_size=3)) if made > inputs else []
    program = program_of(calls, [tensor(n, 4) for n in range(inputs)], [tensor(n, 4) for n in outputs])
    return program, places


def simulate(calls, memory):
    """Every call writes a value that tells which call it was and what it read; what it writes over counts, too."""
    for one in calls:
        memory[one.outputs[0].buffer] = hash((one.id, *(memory[spec.buffer] for spec in one.inputs)))


@settings(max_examples=300, deadline=None)
@given(placed_programs())
def test_the_caller_sees_what_program_order_gives(case):
    program, places = case
    inputs = range(len(program.inputs))
    expected = {n: f"input {n}" for n in inputs}
    simulate(program.calls, expected)

    placed = plan(program, places)
    memory = {n: f"input {n}" for n in inputs}
    buffers = placed.program.buffers
    for step in placed.steps:
        if isinstance(step, Transfer):
            source, target = buffers[step.source].device, buffers[step.target].device
            assert (source, target) == ((None, step.device) if step.to_device else (step.device, None))
            memory[step.target] = memory[step.source]
            continue
        home = step.device if step.device.type == "toy" else None
        for one in step.calls:
            for spec in (*one.inputs, *one.outputs):
                assert buffers[spec.buffer].device == home
        simulate(step.calls, memory)

    assert [call.id for step in placed.steps if isinstance(step, PlacedCalls) for call in step.calls] == [
        call.id for call in program.calls
    ]
    assert {n: memory[n] for n in inputs} == {n: expected[n] for n in inputs}
    for spec, original in zip(placed.program.outputs, program.outputs, strict=True):
        assert buffers[spec.buffer].device is None
        assert memory[spec.buffer] == expected[original.buffer]


class CountedSteps(tuple):
    """Steps that count how often they are walked."""

    __slots__ = ()
    walks = 0

    def __iter__(self):
        type(self).walks += 1
        return super().__iter__()


def test_exports_walk_the_steps_once_however_many_there_are():
    placed = plan(chain(300), "1h" * 150)
    counted = replace(placed, steps=CountedSteps(placed.steps))
    CountedSteps.walks = 0
    exported = counted.exports()
    assert len(exported) == len(placed.steps) > 400
    assert CountedSteps.walks <= 2
