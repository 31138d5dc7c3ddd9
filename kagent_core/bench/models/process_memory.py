"""What a process has in memory, as Linux tells."""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_nbytes() -> int | None:
    """Return what the process has in memory now; None where the system does not tell."""
    return _field("VmRSS")


def peak_nbytes() -> int | None:
    """Return the most that it had in memory since `forget_peak`; None where the system does not tell."""
    return _field("VmHWM")


def forget_peak() -> None:
    """Let the peak begin anew with what is in memory now."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return  # the peak is then that of the whole process


def _field(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
