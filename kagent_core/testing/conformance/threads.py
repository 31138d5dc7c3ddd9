"""Several threads at once, whose errors the one that waits for them hears of."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Call a function in several threads at once, and raise what one of them raises."""
    wrong: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001  raised again below
            wrong.append(error)

    running = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if wrong:
        raise wrong[0]
