"""Run cases on this machine's GPU and write what was found."""

import argparse
import dataclasses
import datetime
import gc
import json
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from headrace.errors import KernelUnsupported
from headrace.kernels.base import KernelContext
from headrace.kernels.bench.case import Case, Record, record
from headrace.kernels.bench.cases import all_cases
from headrace.kernels.bench.measure import Ceilings, measure_ceilings, time_calls
from headrace.kernels.registry import default_registry

SEED = 1234


@dataclasses.dataclass(slots=True)
class Report:
    """All of one run. `failed` and `skipped`: (case, backend) and why."""

    device: str
    torch: str
    triton: str
    date: str
    command: str
    ceilings: list[Ceilings]
    records: list[Record]
    skipped: list[tuple[str, str, str]]
    failed: list[tuple[str, str, str]]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def table(self) -> str:
        lines = [f"{'case':58} {'backend':10} {'state':5} {'us':>9} {'spread':>7} {'ratio':>6} bound  goal"]
        for r in self.records:
            spread = (r.p90_us - r.p10_us) / r.median_us
            met = {None: "", True: "met", False: "MISSED"}[r.met]
            lines.append(
                f"{r.op + ' ' + r.name:58} {r.backend:10} {r.state:5} {r.median_us:9.1f} {spread:7.1%} {r.ratio:6.2f}"
                f" {r.bound:5}  {r.goal} {met}"
            )
        lines += [f"skipped {case} {backend}: {why}" for case, backend, why in self.skipped]
        lines += [f"FAILED {case} {backend}: {why}" for case, backend, why in self.failed]
        for c in self.ceilings:
            products = f"bf16 {c.bf16 / 1e12:,.0f} TF, fp8 {c.fp8 / 1e12:,.0f} TF"
            lines.append(f"ceilings: copy {c.copy / 1e9:,.0f} GB/s, {products}")
        return "\n".join(lines)


def matching(cases: Iterable[Case], only: Sequence[str]) -> list[Case]:
    """Cases whose "op name" contains one of `only`; all without any."""
    return [case for case in cases if not only or any(part in f"{case.op} {case.name}" for part in only)]


def run(
    cases: Sequence[Case],
    device: torch.device,
    backends: Sequence[str] = ("auto",),
    states: Sequence[str] = ("burst",),
    command: str = "",
    deterministic: bool = False,
) -> Report:
    """Measure every case with every backend and state. A case that breaks is in `failed`, the others go on."""
    report = Report(
        torch.cuda.get_device_name(device), torch.__version__, _triton_version(),
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), command,
        [measure_ceilings(device)], [], [], [],
    )  # fmt: skip
    hot = measure_ceilings(device, hot=True) if "hot" in states else None
    if hot is not None:
        report.ceilings.append(hot)
    for case in cases:
        for backend in backends:
            try:
                _measure(report, case, backend, device, states, hot, deterministic)
            except KernelUnsupported as refusal:
                report.skipped.append((f"{case.op} {case.name}", backend, str(refusal)))
            except Exception as error:  # one broken kernel must not cost the figures of the others
                traceback.print_exc()
                report.failed.append((f"{case.op} {case.name}", backend, f"{type(error).__name__}: {error}"[:300]))
        gc.collect()
        torch.cuda.empty_cache()
    report.ceilings.append(measure_ceilings(device))
    return report


def _measure(
    report: Report,
    case: Case,
    backend: str,
    device: torch.device,
    states: Sequence[str],
    hot: Ceilings | None,
    deterministic: bool,
) -> None:
    context = KernelContext(device, deterministic, case.shape, row_format="tile656")
    choice = default_registry().choose(case.op, context, backend)
    calls = [case.build(choice.kernel, device, SEED + i) for i in range(case.sets)]
    for state in states:
        timing = time_calls(calls, state == "hot", case.graph)
        ceilings = hot if state == "hot" and hot is not None else report.ceilings[0]
        found = record(case, choice.backend, state, timing, ceilings)
        report.records.append(found)
        print(
            f"{case.op} {case.name} {choice.backend} {state}: {found.median_us:.1f} us, {found.ratio:.2f}", flush=True
        )


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of `python -m headrace.kernels.bench`. 2 without a GPU, 1 when a case broke."""
    parser = argparse.ArgumentParser(prog="headrace.kernels.bench", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument("--backend", nargs="*", default=["auto"], help="backends to force, or auto")
    parser.add_argument("--hot", action="store_true", help="measure after 1.2 s of each kernel too")
    parser.add_argument("--deterministic", action="store_true", help="kernels in deterministic mode")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    given = parser.parse_args(arguments)
    cases = matching(all_cases(), given.only)
    if given.list:
        print("\n".join(f"{case.op} {case.name}" for case in cases))
        return 0
    if not torch.cuda.is_available():
        print("no GPU: nothing is measured on a CPU", file=sys.stderr)
        return 2
    command = "python -m headrace.kernels.bench " + " ".join(sys.argv[1:] if arguments is None else arguments)
    states = ("burst", "hot") if given.hot else ("burst",)
    report = run(cases, torch.device("cuda"), given.backend, states, command, given.deterministic)
    if given.json is not None:
        given.json.write_text(report.to_json())
    print(report.table())
    return 1 if report.failed else 0
