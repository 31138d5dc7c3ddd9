"""Which device is checked, and where its tensors are made. What asks the driver runs in a process of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from kagent_core.config import load_config
from kagent_core.session import session_for
from kagent_cuda.check.sections import Outcome, Row, Section, Tell, run_section
from kagent_cuda.check.setting import Setting
from kagent_cuda.devices import list_devices

EMULATED = "emulated"
FIRST_S = 60.0


def find_device(setting: Setting, wanted: str) -> tuple[Setting, dict[str, str], Outcome]:
    """Return the setting for a device, what is known of it, and the section that found it out.

    Parameters
    ----------
    setting
        As the command line has it.
    wanted
        Name of the device; ``emulated`` for the emulated one.
    """
    emulated = wanted == EMULATED
    outcome = run_section(Section("device", FIRST_S, lambda given, tell: _tell_device(wanted, tell)), setting, FIRST_S)
    if outcome.wrong or not outcome.rows:
        return setting, {}, outcome
    facts = dict(outcome.rows[0].figures)
    setting = replace(setting, device=facts.pop("device"), emulated=emulated)
    if facts.pop("torch") == "with CUDA" and not emulated:
        setting = _with_torch(setting, outcome)
    return setting, facts, outcome


def _with_torch(setting: Setting, outcome: Outcome) -> Setting:
    """Return a setting for a PyTorch with CUDA, and tell whether kagent takes its tensors."""
    tried = replace(setting, torch_cuda=True, cuda_tensors=True)
    found = run_section(Section("device", FIRST_S, _tell_in_place), tried, FIRST_S)
    outcome.elapsed_s += found.elapsed_s
    outcome.rows += found.rows[:1]
    taken = found.state == "done" and not found.wrong
    where = "on the GPU" if taken else "in host memory: kagent's times have their copies in them"
    outcome.rows.append(Row("tensors", {"where": where}, aim="on the GPU", met=taken))
    if not taken:
        said = found.note or "; ".join(row.failed for row in found.rows if row.failed) or found.state
        outcome.note = f"kagent, given a CUDA tensor: {said}"
    return replace(setting, torch_cuda=bool(found.rows), cuda_tensors=taken)


def _tell_device(wanted: str, tell: Tell) -> None:
    infos = list_devices(emulate=wanted == EMULATED)
    if wanted == EMULATED:
        infos = [info for info in infos if info.emulated]
    elif ":" in wanted:
        infos = [info for info in infos if str(info.device) == wanted]
    if not infos:
        raise LookupError(f"there is no device '{wanted}'")
    info = next((info for info in infos if info.available), infos[0])
    has_cuda = torch.version.cuda is not None
    figures = {"device": str(info.device), "name": info.name, "torch": "with CUDA" if has_cuda else "without CUDA"}
    failed = None if info.available else f"it cannot be used: {info.reason}"
    tell(Row(wanted, {**figures, **dict(info.details)}, failed))


def _tell_in_place(setting: Setting, tell: Tell) -> None:
    """Try whether kagent takes CUDA tensors: it runs where a crash is a finding."""
    x = torch.arange(1000, dtype=torch.float32, device=setting.place)
    tell(Row("PyTorch", {"version": torch.__version__, "CUDA": torch.version.cuda, "sum": float(x.sum())}))
    session_for(load_config(options=setting.options))
    result = setting.compile(lambda given: given * 2 + 1)(x)
    right = result.device == x.device and torch.equal(result, x * 2 + 1)
    tell(Row("tensors", {}, None if right else f"{result[:3]} on {result.device} is not 2x + 1"))
