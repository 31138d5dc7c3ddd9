"""Where the file of timings and launch configs is."""

from __future__ import annotations

from pathlib import Path

from kagent_core.config import Config

PROFILE_FILE = "profile.sqlite3"


def profile_path(config: Config) -> Path:
    """Return where the file is; it need not exist."""
    return config.cache_dir / PROFILE_FILE
