"""The SQLite file that keeps timings and tuned launch configs, for every process of one user.

Every operation opens a connection of its own and closes it, so that none is shared between threads or
inherited by a forked process. Operations are rare: the ProfilerAgent reads once per device and writes many
records at a time.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from kagent_core.inspect.logs import get_logger
from kagent_core.specs import DeviceInfo, LaunchConfig

SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 5.0

log = get_logger("profile")

T = TypeVar("T")


class DeviceKey(NamedTuple):
    """Identity of a device: timings of another one, or of another driver, say nothing about it."""

    device: str
    name: str
    driver: str

    @classmethod
    def of(cls, info: DeviceInfo) -> DeviceKey:
        """Return the identity of a device; its driver is what `DeviceInfo.details` calls ``driver``."""
        return cls(str(info.device), info.name, dict(info.details).get("driver", ""))


class TimingKey(NamedTuple):
    """What a timing was measured for."""

    where: DeviceKey
    kernel: str
    signature: str
    problem: str


class ConfigKey(NamedTuple):
    """What a launch config was tuned for."""

    where: DeviceKey
    kernel: str
    problem: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Times measured so far, in milliseconds."""

    count: int
    total_ms: float
    min_ms: float

    @property
    def mean_ms(self) -> float:
        """Arithmetic mean."""
        return self.total_ms / self.count

    def merged(self, other: Timing) -> Timing:
        """Return both together."""
        return Timing(self.count + other.count, self.total_ms + other.total_ms, min(self.min_ms, other.min_ms))


@dataclass(frozen=True, slots=True)
class TunedConfig:
    """A launch config and the time that it took, in milliseconds."""

    config: LaunchConfig
    elapsed_ms: float


@dataclass
class Profile:
    """Timings and launch configs, in memory."""

    timings: dict[TimingKey, Timing] = field(default_factory=dict)
    configs: dict[ConfigKey, TunedConfig] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.timings or self.configs)

    def add_timing(self, key: TimingKey, timing: Timing) -> None:
        """Merge a timing with what is there."""
        known = self.timings.get(key)
        self.timings[key] = timing if known is None else known.merged(timing)

    def add_config(self, key: ConfigKey, tuned: TunedConfig) -> None:
        """Keep the faster of a launch config and the one that is there."""
        known = self.configs.get(key)
        if known is None or tuned.elapsed_ms < known.elapsed_ms:
            self.configs[key] = tuned

    def merge(self, other: Profile) -> None:
        """Add everything of another profile."""
        for timing_key, timing in other.timings.items():
            self.add_timing(timing_key, timing)
        for config_key, tuned in other.configs.items():
            self.add_config(config_key, tuned)

    def of_device(self, where: DeviceKey) -> Profile:
        """Return the part that belongs to one device."""
        return Profile(
            {key: timing for key, timing in self.timings.items() if key.where == where},
            {key: tuned for key, tuned in self.configs.items() if key.where == where},
        )


class ProfileVersionError(Exception):
    """The file has another schema version, so another version of kagent, or another program, wrote it."""


_CREATE = (
    """
    CREATE TABLE timings (
        device TEXT NOT NULL, name TEXT NOT NULL, driver TEXT NOT NULL,
        kernel TEXT NOT NULL, signature TEXT NOT NULL, problem TEXT NOT NULL,
        count INTEGER NOT NULL, total_ms REAL NOT NULL, min_ms REAL NOT NULL,
        PRIMARY KEY (device, name, driver, kernel, signature, problem)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE configs (
        device TEXT NOT NULL, name TEXT NOT NULL, driver TEXT NOT NULL,
        kernel TEXT NOT NULL, problem TEXT NOT NULL,
        grid_x INTEGER NOT NULL, grid_y INTEGER NOT NULL, grid_z INTEGER NOT NULL,
        block_x INTEGER NOT NULL, block_y INTEGER NOT NULL, block_z INTEGER NOT NULL,
        shared_nbytes INTEGER NOT NULL, tiles TEXT NOT NULL, elapsed_ms REAL NOT NULL,
        PRIMARY KEY (device, name, driver, kernel, problem)
    ) WITHOUT ROWID
    """,
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

_ADD_TIMING = """
    INSERT INTO timings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (device, name, driver, kernel, signature, problem) DO UPDATE SET
        count = count + excluded.count,
        total_ms = total_ms + excluded.total_ms,
        min_ms = min(min_ms, excluded.min_ms)
"""

_ADD_CONFIG = """
    INSERT INTO configs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (device, name, driver, kernel, problem) DO UPDATE SET
        grid_x = excluded.grid_x, grid_y = excluded.grid_y, grid_z = excluded.grid_z,
        block_x = excluded.block_x, block_y = excluded.block_y, block_z = excluded.block_z,
        shared_nbytes = excluded.shared_nbytes, tiles = excluded.tiles, elapsed_ms = excluded.elapsed_ms
    WHERE excluded.elapsed_ms < elapsed_ms
"""


_OF_DEVICE = " WHERE device = ? AND name = ? AND driver = ?"


class ProfileFile:
    """The file on disk. Safe with many threads and processes at once.

    A file that SQLite cannot read is renamed aside, with a WARNING, and begun anew. All methods raise OSError
    or sqlite3.Error when the file cannot be used, and `ProfileVersionError` for one of another version, which
    is left as it is.

    Parameters
    ----------
    path
        The file. Its directory is made, for this user only, when there is something to write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, where: DeviceKey | None = None) -> Profile:
        """Return what is known of one device, or of all."""
        if not self.path.exists():
            return Profile()
        return self._run(lambda db: _read(db, where))

    def read_configs(self, where: DeviceKey) -> Profile:
        """Return the launch configs of one device, without timings, of which there may be many."""
        if not self.path.exists():
            return Profile()
        return self._run(lambda db: _read_configs(db, where, Profile()))

    def forget_configs(self, where: DeviceKey, problems: Collection[str] | None = None) -> None:
        """Forget the launch configs of one device, for some problems or for all."""
        if self.path.exists():
            self._run(lambda db: _forget_configs(db, where, problems))

    def write(self, profile: Profile) -> None:
        """Merge a profile into the file, in one transaction."""
        self._run(lambda db: _write(db, profile))

    def clear(self) -> None:
        """Forget everything."""
        if self.path.exists():
            self._run(_clear)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        inode = self._prepare()
        try:
            return self._connected(work)
        except sqlite3.DatabaseError as error:
            if not _has_code(error, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            self._set_aside(inode, error)
        self._prepare()
        return self._connected(work)

    def _connected(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with closing(sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as db:
            if _version(db) != SCHEMA_VERSION:
                self._create(db)
            return work(db)

    def _prepare(self) -> int:
        """Make directory and file, readable by this user only, and return the file's inode."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        return self.path.stat().st_ino

    def _create(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")  # of several processes that find the file empty, one makes the tables
        version = _version(db)
        if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            for statement in _CREATE:
                db.execute(statement)
        elif version != SCHEMA_VERSION:
            raise ProfileVersionError(f"'{self.path}' has schema version {version}, this kagent has {SCHEMA_VERSION}")
        db.execute("COMMIT")

    def _set_aside(self, inode: int, error: sqlite3.DatabaseError) -> None:
        if self.path.stat().st_ino != inode:
            return  # another process did it just now
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.corrupt-{number}")).exists():
            number += 1
        self.path.rename(aside)
        for suffix in ("-journal", "-wal", "-shm"):  # SQLite would apply them to the new file
            companion = self.path.with_name(self.path.name + suffix)
            if companion.exists():
                companion.rename(aside.with_name(aside.name + suffix))
        log.warning(
            "the file of timings '%s' is corrupt (%s); it is now '%s', and a new one is begun",
            self.path,
            error,
            aside,
        )


def is_busy(error: Exception) -> bool:
    """Whether another process kept the file for longer than the timeout."""
    return isinstance(error, sqlite3.Error) and _has_code(error, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _has_code(error: sqlite3.Error, *codes: int) -> bool:
    # errors that the Python module itself raises have no code; the low byte is the primary one
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in codes


def _version(db: sqlite3.Connection) -> int:
    [version] = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def _read(db: sqlite3.Connection, where: DeviceKey | None) -> Profile:
    chosen = "" if where is None else _OF_DEVICE
    values = () if where is None else tuple(where)
    profile = Profile()
    for device, name, driver, kernel, signature, problem, *times in db.execute(
        f"SELECT * FROM timings{chosen}", values
    ):
        key = TimingKey(DeviceKey(device, name, driver), kernel, signature, problem)
        profile.timings[key] = Timing(*times)
    return _read_configs(db, where, profile)


def _read_configs(db: sqlite3.Connection, where: DeviceKey | None, profile: Profile) -> Profile:
    """Add the launch configs of one device, or of all, to a profile."""
    chosen = "" if where is None else _OF_DEVICE
    values = () if where is None else tuple(where)
    for device, name, driver, kernel, problem, *numbers, tiles, elapsed_ms in db.execute(
        f"SELECT * FROM configs{chosen}", values
    ):
        gx, gy, gz, bx, by, bz, shared_nbytes = numbers
        config = LaunchConfig((gx, gy, gz), (bx, by, bz), shared_nbytes, json.loads(tiles))
        profile.configs[ConfigKey(DeviceKey(device, name, driver), kernel, problem)] = TunedConfig(config, elapsed_ms)
    return profile


def _write(db: sqlite3.Connection, profile: Profile) -> None:
    timings = [
        (*key.where, key.kernel, key.signature, key.problem, timing.count, timing.total_ms, timing.min_ms)
        for key, timing in profile.timings.items()
    ]
    configs = [
        (
            *(*key.where, key.kernel, key.problem),
            *map(int, (*tuned.config.grid, *tuned.config.block, tuned.config.shared_nbytes)),
            json.dumps(dict(tuned.config.tiles)),
            tuned.elapsed_ms,
        )
        for key, tuned in profile.configs.items()
    ]
    db.execute("BEGIN IMMEDIATE")  # closing the connection without COMMIT rolls back
    db.executemany(_ADD_TIMING, timings)
    db.executemany(_ADD_CONFIG, configs)
    db.execute("COMMIT")


def _forget_configs(db: sqlite3.Connection, where: DeviceKey, problems: Collection[str] | None) -> None:
    db.execute("BEGIN IMMEDIATE")
    if problems is None:
        db.execute(f"DELETE FROM configs{_OF_DEVICE}", tuple(where))
    else:
        one = f"DELETE FROM configs{_OF_DEVICE} AND problem = ?"
        db.executemany(one, [(*where, problem) for problem in problems])
    db.execute("COMMIT")


def _clear(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    db.execute("DELETE FROM timings")
    db.execute("DELETE FROM configs")
    db.execute("COMMIT")
