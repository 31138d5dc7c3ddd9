"""Blocks of work-items that share rows: each thread takes a part of a row, and a tree puts together what they find.

Where a row lies along memory, neighbouring threads have neighbouring elements of it, or neighbouring vectors where the
language has any; short rows share a block. Where rows lie across memory, and are too few to keep a device busy one by
one, neighbouring threads have neighbouring rows, and each row's elements are dealt out to several of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from kagent_core.codegen.expressions import Expr
from kagent_core.codegen.groups import THREAD
from kagent_core.codegen.indices import Axis
from kagent_core.codegen.kernel import KernelSource, LoopNest, Store
from kagent_core.codegen.loops.form import by_stride
from kagent_core.codegen.loops.group_layout import PART, SLOT, GroupLayout, group_layout
from kagent_core.codegen.loops.group_trees import DISTANCE, PartialState, PartialValue, Trees
from kagent_core.codegen.loops.items_form import OnItems
from kagent_core.codegen.loops.items_lanes import LaneAccumulator, holds_rows_of, lane_accumulators
from kagent_core.codegen.loops.kept import KEPT_STEPS, KEPT_VALUES, at_every_step, is_read_or_costly, values_to_keep
from kagent_core.codegen.loops.reductions import CHUNK, Accumulator
from kagent_core.codegen.loops.rows import Rows
from kagent_core.codegen.loops.states import RunningState, is_compound, within_block
from kagent_core.codegen.vectors import sums_lanes
from kagent_core.codegen.work_items import WorkItemLanguage

_STEP, _TURN = "step", "turn"
"""Variables that count the steps of several loops together, and a thread's own steps."""


def write_group_rows(nest: LoopNest, language: WorkItemLanguage, name: str) -> KernelSource | None:
    """Write a loop nest with reductions as a kernel whose blocks share rows.

    Parameters
    ----------
    nest
        The loops.
    language
        One with `WorkItemLanguage.groups`.
    name
        Of the kernel.

    Returns
    -------
    KernelSource or None
        None where it does not pay, or a block has too little memory for it.
    """
    form = GroupRows(nest, language)
    if form.layout.threads == 1:
        return None
    made = form.source(name)
    return made if form.fits else None


class GroupRows(OnItems, Rows):
    """Every block goes over rows of its own, in as many passes as their reductions need."""

    def __init__(self, nest: LoopNest, language: WorkItemLanguage) -> None:
        super().__init__(nest, language)
        assert language.groups is not None
        self._groups = language.groups
        self._work_items = language
        self.layout = group_layout(self.nest, self.passes, language.groups.threads) or GroupLayout(1)
        self._trees = Trees(self.text, language.groups, self.layout)
        self._span: tuple[str, str] | None = None
        self._in_range = ""
        self._has_vectors = True
        self._has_vectors = self._takes_vectors()
        for name in (THREAD, PART, SLOT, _STEP, _TURN, DISTANCE, "next"):
            self.statements.fresh_name(name)  # which is taken then

    @property
    def fits(self) -> bool:
        """Whether a block has the memory that a kernel takes, once it is written."""
        return self._trees.nbytes <= self._groups.local_nbytes

    @property
    def width(self) -> int:
        """Elements of a vector; 0 where threads take the place of lanes."""
        return super().width if self._has_vectors else 0

    def _takes_vectors(self) -> bool:
        """Whether a thread's steps are vectors of neighbours: of all passes over a row, or of none."""
        orders = {self.inner_order(axes) for axes, _ in self.passes}
        orders |= {self.store_order()} if self.full_stores else set()
        if self.layout.across or not self.width or len(orders) != 1:
            return False
        [axes] = orders
        nodes = [node for _, nodes in self.passes for node in nodes]
        if not axes or any(map(is_compound, nodes)) or not all(map(sums_lanes, nodes)):
            return False
        values = [node.args[0] for node in nodes] + [store.value for store in self.full_stores]
        steps = math.prod(axis.extent for axis in axes)
        if axes[-1].extent % self.width or 2 * steps < self.layout.parts * self.width:  # half of them have a vector
            return False
        return self.takes_lanes(axes[-1], values, self.full_stores) and not holds_rows_of(axes[-1], values)

    @property
    def _stride(self) -> int:
        """Elements from one step of a thread to its next."""
        return self.layout.parts * max(self.width, 1)

    @property
    def _first(self) -> str:
        """A thread's first element."""
        return f"{PART} * {self.width}" if self.width else PART

    def _in_lanes(self, axes: Sequence[Axis]) -> AbstractContextManager[None]:
        """Compute vectors for as long as the block lasts, where a thread's steps are vectors."""
        return self.statements.lanes(axes[-1]) if self.width else nullcontext()

    def source(self, name: str) -> KernelSource:
        """Return the kernel."""
        self.write()
        args, reports = self.parameters.args, self.parameters.reports
        head = self._work_items.fixed_head(self.language.head(name, args, reports), self.layout.threads)
        inside = [*self._trees.declared(), self._work_items.thread(), *self.layout.declared()]
        lines = [*self.parameters.entry(), *(f"    {line}" for line in inside), *self.text.lines]
        text = "\n".join([f"{head} {{", *lines, "}"]) + "\n"
        return KernelSource(name, text, args, reports, self.items or 1, threads=self.layout.threads)

    def write(self) -> None:
        """Write the kernel's body."""
        slots, shared = self.layout.slots, self.layout.slot_axis
        offsets = [load.offset for load in self.loads]
        rest = by_stride([axis for axis in self.nest.outer if axis is not shared], offsets)
        loops = [(axis.name, self.size(axis), axis.extent) for axis in rest]
        self.items = math.prod(axis.extent for axis in rest)
        if shared is not None:
            blocks = -(-shared.extent // slots)
            loops.append((f"{shared.name}_block", self.parameters.size(blocks), blocks))
            self.items *= blocks
        self.parameters.fits(self.items)
        opened = self._work_items.open_groups(self.text, loops)
        if shared is not None:
            self._find_row(shared)
        self._kept, self._filled = self._declare_kept(), set()
        for axes, nodes in self.passes:
            self._write_pass(axes, nodes)
        if self.row_stores:
            self.text.add(*self.statements.place([store.value for store in self.row_stores], [])[0])
            self.text.open(f"if ({PART} == 0{f' && {self._in_range}' if self._in_range else ''}) {{")
            self.store_all(self.row_stores)
            self.text.close()
        if self.full_stores:
            self._write_full_stores(self.full_stores)
        self.text.close(opened)

    def _find_row(self, axis: Axis) -> None:
        """Declare which of the block's rows a thread has: beyond the last one, that one again, without storing it."""
        name, kind, size, slots = axis.name, self.language.index_type, self.size(axis), self.layout.slots
        self.parameters.fits(axis.extent + slots)
        place = f"{name}_block * {slots} + {SLOT}"
        if axis.extent % slots == 0:
            self.text.add(f"const {kind} {name} = {place};")
            return
        self._in_range = f"{name}_here < {size}"
        self.text.add(f"const {kind} {name}_here = {place};")
        self.text.add(f"const {kind} {name} = {self._in_range} ? {name}_here : {size} - 1;")

    # -- a thread's steps

    def _variable(self, axes: Sequence[Axis]) -> str:
        """Return the variable that counts the steps of some loops."""
        return axes[0].name if len(axes) == 1 else _STEP

    def _total(self, axes: Sequence[Axis]) -> str:
        """Return how many steps some loops have."""
        count = math.prod(axis.extent for axis in axes)
        self.parameters.fits(count + self._chunk)  # where the last step leads
        return " * ".join(self.size(axis) for axis in axes) or "1"

    def _open_steps(self, axes: Sequence[Axis], inside: Sequence[str]) -> int:
        """Open a loop over a thread's share of the steps of some loops, within the chunk that is open.

        Returns how many loops and conditions were opened.
        """
        kind, variable, stride = self.language.index_type, self._variable(axes), self._stride
        first, end = self._span or (self._first, self._total(axes))
        opened = 1
        if self._kept:  # written out, so that what is kept has registers
            self.text.add(self._groups.unroll)
            self.text.open(f"for (i32 {_TURN} = 0; {_TURN} < {self._turns(axes)}; {_TURN}++) {{")
            self.text.add(f"const {kind} {variable} = {first} + {_TURN} * {stride};")
            if math.prod(axis.extent for axis in axes) % stride:
                self.text.open(f"if ({variable} < {end}) {{")
                opened += 1
        else:
            self.text.open(f"for ({kind} {variable} = {first}; {variable} < {end}; {variable} += {stride}) {{")
        if len(axes) > 1:
            rest = variable
            for axis in reversed(axes[1:]):
                above = f"above_{axis.name}"
                self.text.add(f"const {kind} {axis.name} = {rest} % {self.size(axis)};")
                self.text.add(f"const {kind} {above} = {rest} / {self.size(axis)};")
                rest = above
            self.text.add(f"const {kind} {axes[0].name} = {rest};")
        self.text.add(*inside)
        return opened

    def _open_chunks(self, axes: Sequence[Axis]) -> None:
        """Open a loop over chunks of the steps, to one of which a thread's steps are limited until `_close_chunks`."""
        kind, name, total, size = self.language.index_type, self._variable(axes), self._total(axes), self._chunk
        self.text.open(f"for ({kind} {name}_0 = 0; {name}_0 < {total}; {name}_0 += {size}) {{")
        last = f"{name}_0 + {size}"
        self.text.add(f"const {kind} {name}_last = {last} < {total} ? {last} : {total};")
        self._span = (f"{name}_0 + {self._first}", f"{name}_last")

    def _close_chunks(self) -> None:
        self._span = None
        self.text.close()

    @property
    def _chunk(self) -> int:
        """Elements of a row in which each thread, or each lane, takes as many as it may sum up in their own type."""
        return CHUNK * self._stride

    def steps(self, axes: Sequence[Axis]) -> str:  # type: ignore[override]  # ordered
        """Return how many steps a thread has in the chunk that is open."""
        assert self._span is not None
        first, end = self._span
        return f"(({end} - ({first}) + {self.layout.parts - 1}) / {self.layout.parts})"

    def _turns(self, axes: Sequence[Axis]) -> int:
        """Return how many steps a thread has at most."""
        return -(-math.prod(axis.extent for axis in axes) // self._stride)

    # -- what is kept from pass to pass

    def _declare_kept(self) -> dict[int, tuple[str, Expr]]:
        """Declare what a thread keeps of its share of a row, if every pass gives it the same one."""
        orders = {self.inner_order(axes) for axes, _ in self.passes}
        orders |= {self.store_order()} if self.full_stores else set()
        axes = orders.pop()
        steps = [at_every_step(nodes) for _, nodes in self.passes]
        elements = self._turns(axes) * max(self.width, 1)
        if orders or None in steps or elements > KEPT_STEPS:
            return {}
        values = [values for values in steps if values is not None]
        values.append([store.value for store in self.full_stores])
        kept: dict[int, tuple[str, Expr]] = {}
        for node in values_to_keep(values, is_read_or_costly)[: KEPT_VALUES // elements]:
            name = self.statements.fresh_name("kept")
            with self._in_lanes(axes):
                self.text.add(f"{self.statements.kind_of(node)} {name}[{self._turns(axes)}];")
            kept[node.number] = (name, node)
        return kept

    def _kept_place(self, node: Expr) -> str:
        return f"{self._kept[node.number][0]}[{_TURN}]"

    # -- plain reductions

    def _write_pass(self, all_axes: tuple[Axis, ...], nodes: Sequence[Expr]) -> None:
        axes = self.inner_order(all_axes)
        plain = [node for node in nodes if not is_compound(node)]
        if plain:
            is_long = math.prod(axis.extent for axis in axes) > self._chunk
            running = self._accumulate(axes, plain, is_long)
            self._trees.join([PartialValue(each) for each in running], self._total(axes))
            self._name(running)
        compounds = [node for node in nodes if is_compound(node)]
        if compounds:
            self._write_compounds(axes, compounds)

    def _accumulate(self, axes: Sequence[Axis], nodes: Sequence[Expr], is_long: bool) -> list[Accumulator]:
        """Write what each thread reduces of its own."""
        values = [node.args[0] for node in nodes]
        known = set(self.statements.names)
        with self._in_lanes(axes):
            to_keep = self._to_keep(values, may_keep=True)
            before, inside = self.statements.place([*values, *to_keep], [set(axes)])
            self.text.add(*before)
            running = self.accumulators(nodes, (0, self._chunk) if is_long else None)
            self._declare(running)
            lanes = lane_accumulators(running, self.language) if self.width else []
            self.text.add(*(line for each in lanes if not each.in_chunks for line in each.declared()))
            if is_long and any(each.in_chunks for each in running):
                self._open_chunks(axes)
                self._declare_chunks(running, lanes)
            opened = self._open_steps(axes, inside)
            self._keep(to_keep)
            for each in lanes or running:
                self.text.add(*each.update(self.value_of(each.node)))
            self.text.close(opened)
        self._join_lanes(running, lanes)
        self.forget_inside(known, axes)
        self._filled.update(node.number for node in to_keep)
        return running

    def _declare_chunks(self, running: Sequence[Accumulator], lanes: Sequence[LaneAccumulator]) -> None:
        """Declare what chunks are summed up in: by lanes where there are any."""
        if lanes:
            self.text.add(*(each.declared_chunk() for each in lanes if each.in_chunks))
        else:
            self.declare_chunks([each for each in running if each.in_chunks])

    def _join_lanes(self, running: Sequence[Accumulator], lanes: Sequence[LaneAccumulator]) -> None:
        """Close the chunks, whose sums are added up; let what each thread has found take in what its lanes have."""
        of_lanes = list(zip(running, lanes, strict=True)) if lanes else []
        if self._span is not None and any(each.in_chunks for each in running):
            self.text.add(*(line for each, lane in of_lanes if each.in_chunks for line in lane.over_lanes(each)))
            if not lanes:
                self.fold_chunks([each for each in running if each.in_chunks])
            self._close_chunks()
        self.text.add(*(line for each, lane in of_lanes if not each.in_chunks for line in lane.over_lanes(each)))

    def value_of(self, node: Expr) -> str:
        """Return what a reduction takes in, as a text that may be repeated."""
        return self.taken(node) if self.width else super().value_of(node)

    def _keep(self, nodes: Sequence[Expr]) -> None:
        """Write what is kept of a step."""
        self.text.add(*(f"{self._kept_place(node)} = {self.statements.kept(node)};" for node in nodes))

    def _use_kept(self) -> None:
        for number in self._filled:
            self.statements.take_kept(self._kept[number][1], self._kept_place(self._kept[number][1]))

    def _name(self, running: Sequence[Accumulator]) -> None:
        """Give the reductions' values names."""
        for each in running:
            name = self.result_name(each.node)
            self.text.add(f"const {each.type} {name} = {each.result()};")
            self.statements.name(each.node, name)

    # -- compound reductions

    def _write_compounds(self, axes: Sequence[Axis], nodes: Sequence[Expr]) -> None:
        states = [RunningState(node, self.statements, self.parameters, self.language) for node in nodes]
        self._declare_states(states)
        known = set(self.statements.names)
        found = [part for state in states for part in state.node.args]
        if any(node.op == "reduce" for node in within_block(*found)):
            self._open_chunks(axes)
            self.text.open("if ({} < {}) {{".format(*(self._span or ("0", "0"))))  # a thread may have no step in it
            is_long = math.prod(axis.extent for axis in axes) > self._chunk
            self._write_block(axes, states, found, may_skip=is_long)
            self.text.close()
            self._close_chunks()
        else:
            self.text.open("{")
            self._write_elements(axes, states, found)
            self.text.close()
        for number in [number for number in self.statements.names if number not in known]:
            del self.statements.names[number]
        self._trees.join([PartialState(state) for state in states], self._total(axes))
        for state in states:
            for node in self._parts.get(state.node.number, ()):
                self.statements.name(node, state.names[node.payload])

    def _write_elements(self, axes: Sequence[Axis], states: Sequence[RunningState], found: Sequence[Expr]) -> None:
        """Merge one element after the other."""
        to_keep = self._to_keep(found, may_keep=True)
        before, inside = self.statements.place([*found, *to_keep], [set(axes)])
        self.text.add(*before)
        opened = self._open_steps(axes, inside)
        self._keep(to_keep)
        self.text.add(*(line for state in states for line in self._merging(state)))
        self.text.close(opened)
        self._filled.update(node.number for node in to_keep)

    def write_block_pass(self, axes: Sequence[Axis], nodes: Sequence[Expr], may_keep: bool) -> None:
        """Write one pass over a thread's share of a chunk."""
        self._name(self._accumulate(axes, nodes, is_long=False))

    # -- stores

    def _write_full_stores(self, stores: Sequence[Store]) -> None:
        axes = self.store_order()
        with self._in_lanes(axes):
            self._use_kept()
            before, inside = self.statements.place([store.value for store in stores], [set(axes)])
            self.text.add(*before)
            if self._in_range:
                self.text.open(f"if ({self._in_range}) {{")
            opened = self._open_steps(axes, inside)
            self.store_all(stores)
            self.text.close(opened + bool(self._in_range))
