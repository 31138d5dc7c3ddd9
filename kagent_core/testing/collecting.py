"""Garbage collection that does not look at everything that PyTorch has imported."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def only_new_garbage() -> Iterator[None]:
    """Let the garbage collector look only at objects that are made inside the ``with`` block.

    PyTorch and its operator database are half a million objects, of which nothing is garbage: a full collection takes a
    quarter of a second to find that out. Inside of another such block, and where a program has called `gc.freeze`
    itself, nothing happens.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
