"""The acceptance kit: everything that must be known of kernels on hardware that nobody here has, in one run.

    headrace kernels accept --out DIR

Checks every backend of every op against the reference, measures, tunes, writes our tables and aiter's CSV files, and a
report to send back. A step that breaks is in the report, the others go on.
"""

import dataclasses
import json
import platform
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.kernels import aiter_library, aiter_tables, tune
from headrace.kernels.base import KernelContext
from headrace.kernels.check import GLM_SHAPE, Verdict, check, standings
from headrace.kernels.launch import architecture
from headrace.kernels.registry import Registry, default_registry

LAYOUTS = {"whole heads, experts over 8": {"heads": 64}, "tensor parallel 4": {"heads": 16, "inner": 512}}
FORMATS = ("tile656", "plain576")
BENCH_BACKENDS = ("triton", "aiter")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """`tiny`: small problems and few candidates; `interpreted`: Triton's interpreter on a CPU. Together they run the
    whole procedure on a machine without a GPU, for a test of the kit itself."""

    tiny: bool = False
    interpreted: bool = False
    skip: tuple[str, ...] = ()
    tuner_limit_s: float = 3 * 3600.0
    """For each of aiter's tuners"""


@dataclasses.dataclass(slots=True)
class Step:
    """`status`: "done", "skipped" or "FAILED"."""

    name: str
    status: str
    text: str
    seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class Acceptance:
    facts: dict[str, str]
    steps: list[Step]
    verdicts: list[Verdict]
    chosen: list[dict[str, Any]]
    tuned: tune.Tuning | None = None
    tuners: list[aiter_tables.Run] = dataclasses.field(default_factory=list)
    bench: Any = None

    @property
    def passed(self) -> bool:
        return not any(verdict.bad for verdict in self.verdicts) and all(step.status != "FAILED" for step in self.steps)


def accept(
    device: torch.device, out: Path, options: Options, where: str, say: Callable[[str], None] = print,
    registry: Registry | None = None,
) -> Acceptance:  # fmt: skip
    """Run all steps and leave their files in `out`, and `out`.tar.gz beside it. `where`: device, software and date."""
    out.mkdir(parents=True, exist_ok=True)
    registry = registry or default_registry()
    found = Acceptance(facts_of(device, where), [], [], [])
    steps: dict[str, Callable[[], str]] = {
        "list": lambda: _list(found, device, registry),
        "check": lambda: _check(found, device, options, registry, say),
        "bench": lambda: _bench(found, device),
        "tune": lambda: _tune(found, device, options, out, where, registry),
        "aiter-tables": lambda: _aiter_tables(found, device, options, out),
    }
    for name, step in steps.items():
        found.steps.append(_guarded(name, step, options.skip))
        say(f"{name}: {found.steps[-1].status} {found.steps[-1].text}")
        _write(found, out)
    _pack(out)
    return found


def facts_of(device: torch.device, where: str) -> dict[str, str]:
    """What the report says of the machine."""
    facts = {"where": where, "architecture": architecture(device), "python": platform.python_version()}
    facts |= {"torch": torch.__version__, "hip": str(torch.version.hip), "cuda": str(torch.version.cuda)}
    facts["aiter"] = aiter_library.installed() or "installed"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = f"{properties.name}, {properties.multi_processor_count} compute units"
        facts["memory"] = f"{properties.total_memory:,} bytes"
    return facts


class Skipped(Exception):
    """A step that does not apply here; the text says why."""


def _guarded(name: str, step: Callable[[], str], skip: Sequence[str]) -> Step:
    begin = time.monotonic()
    if name in skip:
        return Step(name, "skipped", "as asked")
    try:
        text, status = step(), "done"
    except Skipped as reason:
        text, status = str(reason), "skipped"
    except Exception as error:  # the report must reach us whatever breaks
        traceback.print_exc()
        text, status = f"{type(error).__name__}: {error}"[:500], "FAILED"
    return Step(name, status, text, time.monotonic() - begin)


def _list(found: Acceptance, device: torch.device, registry: Registry) -> str:
    for layout, shape in LAYOUTS.items():
        for row_format in FORMATS:
            context = KernelContext(device, False, GLM_SHAPE | shape, row_format)
            ops = [dataclasses.asdict(standing) for standing in standings(context, registry=registry)]
            found.chosen.append({"layout": layout, "row_format": row_format, "ops": ops})
    return f"{len(found.chosen)} combinations of layout and row format"


def _check(
    found: Acceptance, device: torch.device, options: Options, registry: Registry, say: Callable[[str], None]
) -> str:
    for verdict in check(device, tiny=options.tiny, interpreted=options.interpreted, registry=registry):
        found.verdicts.append(verdict)
        if verdict.bad:
            say(f"  {verdict.status} {verdict.op} {verdict.backend} {verdict.case}: {verdict.text}")
    count = {s: sum(v.status == s for v in found.verdicts) for s in ("agrees", "DIFFERS", "FAILED", "refused")}
    return ", ".join(f"{number} {status}" for status, number in count.items())


def _bench(found: Acceptance, device: torch.device) -> str:
    if device.type != "cuda":
        raise Skipped(f"nothing is measured on a {device.type}")
    from headrace.kernels.bench.cases import all_cases
    from headrace.kernels.bench.run import run

    found.bench = run(all_cases(), device, BENCH_BACKENDS, ("burst", "hot"), "headrace kernels accept")
    return f"{len(found.bench.records)} figures, {len(found.bench.failed)} cases failed"


def _tune(found: Acceptance, device: torch.device, options: Options, out: Path, where: str, registry: Registry) -> str:
    if device.type != "cuda" and not options.interpreted:
        raise Skipped(f"needs a GPU or the interpreter, the device is {device.type}")
    tiles: tuple[tune.Tile, ...] = (tune.Tile(16, 32, 4, 1), tune.Tile(32, 32, 4, 1)) if options.tiny else ()
    ops = ("sparse_mla",) if options.tiny else ()
    timer = tune.device_timer if device.type == "cuda" else tune.clock_timer
    found.tuned = tune.tune(device, ops, options.tiny, tiles, timer, where, registry)
    paths = tune.save(found.tuned, out / "tables")
    usable = sum(trial.us is not None for trial in found.tuned.trials)
    return f"{usable} of {len(found.tuned.trials)} candidates ran; {', '.join(path.name for path in paths)}"


def _aiter_tables(found: Acceptance, device: torch.device, options: Options, out: Path) -> str:
    fp8 = str(aiter_library.fp8_type(device))
    files = aiter_tables.write_untuned(out / "aiter", fp8, options.tiny)
    found.tuners = aiter_tables.run_tuners(files, out / "aiter", options.tuner_limit_s)
    return ", ".join(f"{run.name}: {run.status}" for run in found.tuners)


def _write(found: Acceptance, out: Path) -> None:
    data = {
        "facts": found.facts,
        "passed": found.passed,
        "steps": [dataclasses.asdict(step) for step in found.steps],
        "verdicts": [dataclasses.asdict(verdict) for verdict in found.verdicts],
        "chosen": found.chosen,
        "trials": [dataclasses.asdict(trial) for trial in found.tuned.trials] if found.tuned else [],
        "tuners": [dataclasses.asdict(run) for run in found.tuners],
        "bench": dataclasses.asdict(found.bench) if found.bench else None,
    }
    (out / "report.json").write_text(json.dumps(data, indent=1))
    (out / "report.md").write_text(report(found))


def _pack(out: Path) -> None:
    with tarfile.open(out.with_name(out.name + ".tar.gz"), "w:gz") as archive:
        archive.add(out, arcname=out.name)


def report(found: Acceptance) -> str:
    """The report as a person reads it."""
    lines = ["# Kernels: acceptance", "", *(f"- {name}: {value}" for name, value in found.facts.items()), ""]
    lines += ["**" + ("Passed." if found.passed else "NOT passed: see below.") + "**", ""]
    lines += ["| step | status | seconds | |", "|---|---|---|---|"]
    lines += [f"| {s.name} | {s.status} | {s.seconds:.0f} | {s.text} |" for s in found.steps]
    bad = [verdict for verdict in found.verdicts if verdict.bad]
    if bad:
        lines += ["", "## What is wrong", ""]
        for v in bad:
            mode = "deterministic" if v.deterministic else "free order"
            lines.append(f"- {v.op}, {v.backend}, {mode}, {v.case}: {v.status} ({v.text})")
    lines += ["", "## Checked", "", "| op | backend | agree | differ or fail | refused |", "|---|---|---|---|---|"]
    for op, backend in dict.fromkeys((v.op, v.backend) for v in found.verdicts):
        mine = [v for v in found.verdicts if (v.op, v.backend) == (op, backend)]
        agree, wrong = sum(v.status == "agrees" for v in mine), sum(v.bad for v in mine)
        lines.append(f"| {op} | {backend} | {agree} | {wrong} | {len(mine) - agree - wrong} |")
    if found.tuned:
        lines += ["", "## Tuned", "", "| op | problem | fastest | us |", "|---|---|---|---|"]
        for op, case in dict.fromkeys((t.op, t.case) for t in found.tuned.trials):
            best = found.tuned.best(op, case)
            lines.append(f"| {op} | {case} | {best.tile if best else 'none ran'} | {best.us if best else ''} |")
    if found.tuners:
        lines += ["", "## aiter's tuners", ""]
        lines += [f"- {run.name}: {run.status} ({run.text})\n\n      {run.command}" for run in found.tuners]
    if found.bench:
        lines += ["", "## Measured", "", "```", found.bench.table(), "```"]
    lines += ["", "## What to send back", "", "The archive beside this folder; tables go to `kernels/tables/`."]
    return "\n".join(lines) + "\n"
