"""Collections that look at what is new alone."""

from __future__ import annotations

import gc
import weakref

from kagent_core.testing.collecting import only_new_garbage


class Knot:
    """An object that only a collection can free."""

    def __init__(self) -> None:
        self.itself = self


def test_new_garbage_goes_and_old_garbage_waits() -> None:
    gc.collect()
    gc.disable()
    try:
        old = weakref.ref(Knot())
        with only_new_garbage():
            new = weakref.ref(Knot())
            with only_new_garbage():  # the inner block does not end the outer one
                gc.collect()
            assert new() is None
            gc.collect()
            assert old() is not None
        gc.collect()
        assert old() is None
    finally:
        gc.enable()


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with only_new_garbage():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
