"""The command line of ``python -m kagent_cuda.check``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kagent_cuda.check import benchmarks, correctness, sanitizer
from kagent_cuda.check.devices import EMULATED, find_device
from kagent_cuda.check.report import as_dict, summary, table
from kagent_cuda.check.sections import Outcome, Section, run_section
from kagent_cuda.check.setting import Setting

TOTAL_S = 345.0
"""Seconds for all, so that six minutes are enough with what Python itself takes."""

LEAST_S = 3.0

SECTIONS = (
    Section("operators", 45, correctness.check_operators),
    Section("models", 40, correctness.check_models),
    Section("training", 20, correctness.check_training),
    Section("sanitizer", 40, sanitizer.check_sanitized),
    Section("fused kernels", 45, benchmarks.measure_fused),
    Section("launch overhead", 12, benchmarks.measure_overhead),
    Section("model times", 95, benchmarks.measure_models),
    Section("fused kernels of peers", 35, benchmarks.measure_fused_peers),
    Section("model times, autotuned", 120, benchmarks.measure_autotuned),
)
"""In the order in which they run: what comes last has the time that is left."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print the table, write the JSON and return the exit code: 0 where nothing is wrong.

    A figure that misses its aim, and a section that had no time, are told and are not wrong.
    """
    args = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kagent-check-") as folder:
        setting = Setting(args.device, args.cache or Path(folder), tiny=args.tiny)
        if args.kernels_only:
            return sanitizer.main(setting)
        return _check(setting, args)


def _check(setting: Setting, args: argparse.Namespace) -> int:
    started = time.monotonic()
    setting, facts, found = find_device(setting, args.device)
    outcomes = [found]
    _print(table([found]))
    if not found.wrong:
        for section in _chosen(args.only):
            left = args.seconds - (time.monotonic() - started)
            outcomes.append(_run(section, setting, left))
            _print(table(outcomes[-1:]))
    elapsed_s = time.monotonic() - started
    _print(summary(outcomes, elapsed_s) + "\n")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(as_dict(setting, facts, outcomes, elapsed_s), indent=1) + "\n", encoding="utf-8")
    _print(f"written: {args.json}\n")
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def _run(section: Section, setting: Setting, left_s: float) -> Outcome:
    if left_s < LEAST_S:
        return Outcome(section.name, state="skipped", note="no time was left")
    return run_section(section, setting, min(section.budget_s, left_s))


def _chosen(only: str | None) -> list[Section]:
    names = None if only is None else [name.strip() for name in only.split(",")]
    known = [section.name for section in SECTIONS]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise SystemExit(f"--only names '{unknown[0]}', expected some of: {', '.join(known)}")
    return [section for section in SECTIONS if names is None or section.name in names]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m kagent_cuda.check", description=__doc__)
    parser.add_argument("--device", default="cuda", help=f"cuda, cuda:INDEX or {EMULATED}; by default the first GPU")
    parser.add_argument("--tiny", action="store_true", help="as little of everything as there can be")
    parser.add_argument("--only", help="names of sections with commas between them")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all; what has no time left is skipped")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="file for the figures")
    parser.add_argument("--cache", type=Path, help="directory of compiled kernels; by default an empty one")
    parser.add_argument("--kernels-only", action="store_true", help=argparse.SUPPRESS)  # what the sanitizer watches
    return parser


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
