"""LSTMs for which a generated kernel is faster than oneDNN."""

from __future__ import annotations

from kagent_core.codegen.generic.recurrent import lstm_tile, packed_shape
from kagent_cpu.language import CLanguage

_MOST_NBYTES = 16 * 1024 * 1024
"""Largest weight of the state.

In one thread of an AMD processor with AVX-512, a layer took 0.52 to 0.97 of oneDNN's time, which packs the weights at
every call, with states of 128 to 1,024 numbers and 1 to 32 sequences (``python -m kagent_core.bench.layers``); with
2,048, whose weight is read from memory at every step, as long as oneDNN.
"""


def packed_shape_of_steps(threads: int, batch: int, width: int) -> tuple[int, int, int] | str:
    """Return how the weight of an LSTM's state is laid out for the generated kernel; or why oneDNN is taken.

    Parameters
    ----------
    threads
        Each has some of the sequences, since the steps follow each other: with fewer tiles of them, oneDNN is taken,
        which shares out the columns of each product.
    batch, width
        How many sequences there are, and numbers of a state.
    """
    tile = lstm_tile(CLanguage.register_tiles, batch, width)
    if 16 * width * width > _MOST_NBYTES:
        return f"a state of {width} numbers has a weight of more than {_MOST_NBYTES} bytes"
    if -(-batch // tile.rows) < threads:
        return f"{batch} sequences are {-(-batch // tile.rows)} tiles, too few for {threads} threads"
    return packed_shape(tile, width)
