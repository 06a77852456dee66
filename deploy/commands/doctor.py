"""`headrace doctor`: report the machine, then everything that would stop `headrace serve` with this configuration."""

import argparse
import json

from headrace.deploy.commands.version import versions
from headrace.deploy.diagnosis import Finding, diagnose

HELP = "Report devices, versions and limits, and what would stop a start. Exit 1 if something would."
EXAMPLE = "headrace doctor --config my.yaml"
_MARKS = {"ok": "ok  ", "warn": "WARN", "stop": "STOP"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(args: argparse.Namespace) -> int:
    findings = diagnose(args.config)
    stops = [finding for finding in findings if finding.level == "stop"]
    if args.json:
        checks = [{"check": f.check, "level": f.level, "text": f.text} for f in findings]
        print(json.dumps({"versions": versions(), "checks": checks, "can_start": not stops}, indent=2))
    else:
        print(_render(findings, len(stops)))
    return 1 if stops else 0


def _render(findings: list[Finding], stops: int) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [f"versions: {installed}"]
    lines += [f"{_MARKS[f.level]} {f.check}: {f.text}" for f in findings]
    lines.append("nothing would stop a start" if not stops else f"{stops} finding(s) would stop a start")
    return "\n".join(lines)
