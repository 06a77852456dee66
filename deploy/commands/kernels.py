"""`headrace kernels`: which kernels run here and why; checking, measuring, tuning and compiling them."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HELP = "Which kernels run here and why; check, measure, tune and compile them"
EXAMPLE = "headrace kernels --set model.kernels=linear=triton list"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    nested = parser.add_subparsers(dest="kernels_command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        sub = nested.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="machine-readable output")
        sub.set_defaults(kernels_run=run)
        return sub

    command("list", "each op's backends on this device: what is chosen, and why the others are not", run_list)
    sub = command("check", "every backend against the reference on this device; exit 1 if one differs", run_check)
    sub.add_argument("--op", nargs="*", default=[], metavar="OP", help="these ops; default: all")
    sub.add_argument("--backend", nargs="*", default=[], metavar="NAME", help="these backends; default: all")
    sub.add_argument("--tiny", action="store_true", help="small problems instead of the published sizes")
    sub.add_argument("--interpret", action="store_true", help="on a CPU: run Triton's kernels in its interpreter")
    sub = command("compile", "compile every Triton kernel ahead of time; exit 1 if one spills or misses", run_compile)
    sub.add_argument("--target", nargs="*", default=[], metavar="ARCH", help="gfx950, gfx942, sm_90; default: all")
    sub.add_argument("--op", nargs="*", default=[], metavar="OP", help="these ops; default: all")
    sub.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    sub = command("tune", "find the launch shapes of Triton kernels that are fastest on this GPU", run_tune)
    sub.add_argument("--op", nargs="*", default=[], metavar="OP", help="linear, experts, sparse_mla, index_topk")
    sub.add_argument("--folder", type=Path, metavar="DIR", help="write the tables there; default: where they are read")
    sub = command("bench", "measure kernels beside the ceilings of this GPU", run_bench)
    sub.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases whose name contains one of these")
    sub.add_argument("--backend", nargs="*", default=["auto"], metavar="NAME", help="backends to force, or auto")
    sub.add_argument("--hot", action="store_true", help="measure after 1.2 s of each kernel too")
    sub.add_argument("--out", type=Path, metavar="FILE", help="write everything there as JSON")

    sub = command("accept", "on AMD hardware: check, measure, tune and pack a report to send back", run_accept)
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="where everything goes")
    sub.add_argument("--tiny", action="store_true", help="small problems, to try the procedure itself")
    sub.add_argument("--interpret", action="store_true", help="on a CPU: run Triton's kernels in its interpreter")
    steps = ("list", "check", "bench", "tune", "aiter-tables")
    sub.add_argument("--skip", nargs="*", default=[], choices=steps, metavar="STEP", help=", ".join(steps))
    sub.add_argument("--tuner-limit", type=float, default=3.0, metavar="HOURS", help="for each of aiter's tuners")


def run(args: argparse.Namespace) -> int:
    code: int = args.kernels_run(args)
    return code


def _device(args: argparse.Namespace) -> "torch.device":
    from headrace.model.choose import device_of

    return device_of(args.config, 0)


def run_list(args: argparse.Namespace) -> int:
    from headrace.kernels.base import KernelContext
    from headrace.kernels.check import GLM_SHAPE, standings
    from headrace.kernels.launch import architecture
    from headrace.model.choose import deterministic_of, row_format_of

    device = _device(args)
    context = KernelContext(
        device, deterministic_of(args.config, device), GLM_SHAPE, row_format_of(args.config, device)
    )
    found = standings(context, args.config.model.kernels)
    if args.json:
        head = {"device": device.type, "architecture": architecture(device), "deterministic": context.deterministic}
        print(json.dumps(head | {"row_format": context.row_format, "ops": [dataclasses.asdict(s) for s in found]}))
    else:
        mode = "deterministic" if context.deterministic else "free order"
        print(f"{architecture(device)}, {mode}, rows {context.row_format}, GLM-5.2's shapes (* chosen)")
        for standing in found:
            print(f"\n{standing.op}" + (f"  CANNOT: {standing.error}" if standing.error else ""))
            for name, reason in standing.backends:
                print(f"  {'*' if name == standing.chosen else ' '} {name:10} {reason or 'can'}")
    return 1 if any(standing.error for standing in found) else 0


def run_check(args: argparse.Namespace) -> int:
    device = _device(args)
    if args.interpret:
        _install_interpreter(device)
    from headrace.kernels.check import check

    found = []
    for verdict in check(device, args.op, args.backend, args.tiny, args.interpret):
        found.append(verdict)
        if not args.json:
            mode = "det " if verdict.deterministic else "free"
            head = f"{verdict.status:8} {verdict.op:12} {verdict.backend:10} {mode} {verdict.case}"
            print(f"{head}{': ' + verdict.text if verdict.text else ''}", flush=True)
    bad = sum(verdict.bad for verdict in found)
    if args.json:
        print(json.dumps({"bad": bad, "verdicts": [dataclasses.asdict(verdict) for verdict in found]}))
    else:
        refused = sum(verdict.status == "refused" for verdict in found)
        print(f"{len(found) - bad - refused} agree, {bad} do not, {refused} refused")
    return 1 if bad else 0


def _install_interpreter(device: "torch.device") -> None:
    import importlib.util

    from headrace.errors import KernelUnsupported

    if importlib.util.find_spec("triton") is None:
        raise KernelUnsupported("--interpret needs Triton: pip install 'triton>=3.6'")
    if device.type != "cpu":
        raise KernelUnsupported(
            f"--interpret is for a CPU, the device is {device.type} (headrace kernels --set model.device=cpu check)"
        )
    from headrace.kernels.testing import interpreter

    interpreter.install()


def run_compile(args: argparse.Namespace) -> int:
    from headrace.kernels.aot import TARGETS, compile_target
    from headrace.kernels.aot_report import faulty, markdown, text

    results = []
    for target in args.target or TARGETS:
        results += compile_target(target, args.op)
    wrong = faulty(results)
    if args.markdown is not None:
        args.markdown.write_text(markdown(results))
    if args.json:
        faults = [{"kernel": r.kernel, "target": r.target, "case": r.case, "fault": why} for r, why in wrong]
        print(json.dumps({"faults": faults, "kernels": [dataclasses.asdict(r) for r in results]}))
    else:
        print(text(results))
        for result, why in wrong:
            print(f"FAULT {result.kernel} {result.target} ({result.case}): {why}", file=sys.stderr)
    return 1 if wrong else 0


def run_accept(args: argparse.Namespace) -> int:
    device = _device(args)
    if args.interpret:
        _install_interpreter(device)
    elif device.type != "cuda":
        _gpu(args, "accept")
    from headrace.kernels.accept import Options, accept

    options = Options(args.tiny, args.interpret, tuple(args.skip), 3600 * args.tuner_limit)
    say = (lambda text: print(text, file=sys.stderr)) if args.json else print
    found = accept(device, args.out, options, _where(device), say)
    if args.json:
        print((args.out / "report.json").read_text())
    else:
        print(f"{'passed' if found.passed else 'NOT passed'}: {args.out / 'report.md'}, {args.out}.tar.gz")
    return 0 if found.passed else 1


def run_tune(args: argparse.Namespace) -> int:
    from headrace.kernels import tune, tuned

    device = _gpu(args, "tune")
    found = tune.tune(device, args.op, source=_where(device))
    paths = tune.save(found, args.folder or tuned.FOLDER)
    if args.json:
        print(
            json.dumps({"tables": [str(path) for path in paths], "trials": list(map(dataclasses.asdict, found.trials))})
        )
        return 0
    for op, case in dict.fromkeys((trial.op, trial.case) for trial in found.trials):
        best = found.best(op, case)
        print(f"{op} {case}: " + (f"{best.tile} {best.us:.1f} us" if best and best.us else "no candidate ran"))
    print("\n".join(f"wrote {path}" for path in paths))
    return 0


def _where(device: "torch.device") -> str:
    """Device, software and date, as tables and reports state them."""
    import datetime

    import torch

    from headrace.deploy.commands.version import versions

    found = versions()
    software = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, {software}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def _gpu(args: argparse.Namespace, what: str) -> "torch.device":
    from headrace.errors import KernelUnsupported

    device = _device(args)
    if device.type != "cuda":
        raise KernelUnsupported(f"nothing is measured on a {device.type}: kernels {what} needs a GPU")
    return device


def run_bench(args: argparse.Namespace) -> int:
    from headrace.kernels.bench.cases import all_cases
    from headrace.kernels.bench.run import matching
    from headrace.kernels.bench.run import run as measure

    device = _gpu(args, "bench")
    states = ("burst", "hot") if args.hot else ("burst",)
    report = measure(matching(all_cases(), args.only), device, args.backend, states, "headrace kernels bench")
    if args.out is not None:
        args.out.write_text(report.to_json())
    print(report.to_json() if args.json else report.table())
    return 1 if report.failed else 0
