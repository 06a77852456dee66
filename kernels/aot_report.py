"""Results of the ahead-of-time compile as a table for people (`docs/results/kernels-aot.md`)."""

from collections.abc import Iterable

from headrace.kernels.aot import TARGETS, Compiled, faults, ignored, short_name
from headrace.kernels.cases import matrix_types

HEAD = """\
# Kernels compiled ahead of time

    headrace kernels compile --markdown docs/results/kernels-aot.md

Written by that command with Triton {triton}, on a machine without a GPU. Each kernel is compiled with the types,
constants and divisibilities of the launches that the published problems of its op make (`kernels/<op>/cases.py`).
This shows that kernels compile, fit and use the matrix units they should. It does not show that they are right or fast:
**nothing here has been run on gfx950 or gfx942.** Other versions of Triton give other numbers.

*registers*: of a thread; on AMD vector and accumulation registers together, 512 at most. *spills*: registers (AMD) or
bytes (NVIDIA) of a thread that live in memory: a fault on AMD; on the H200 tiles are chosen by measured time. *shared*:
bytes of LDS or shared memory of a program. *matrix*: types of the matrix instructions found."""
NAMES = {"gfx950": "MI355X", "gfx942": "MI325X, MI300X", "sm_90": "H200"}


def faulty(results: Iterable[Compiled]) -> list[tuple[Compiled, str]]:
    """Every fault of every kernel."""
    wanted = matrix_types()
    return [(r, text) for r in results for text in faults(r, wanted.get(short_name(r.kernel), frozenset()))]


def markdown(results: list[Compiled]) -> str:
    """One table a target, a row for each form a kernel was compiled in."""
    lines = [HEAD.format(triton=results[0].triton)]
    wanted = matrix_types()
    for target in TARGETS:
        rows = [r for r in results if r.target == target]
        if not rows:
            continue
        lines += ["", f"## {target} ({NAMES[target]})", ""]
        lines += ["| kernel | problem | constants | warps | stages | registers | spills | shared | matrix | |"]
        lines += ["|---|---|---|---|---|---|---|---|---|---|"]
        for r in rows:
            wrong = "; ".join(faults(r, wanted.get(short_name(r.kernel), frozenset())) or ignored(r))
            numbers = (r.warps, r.stages, r.registers, r.spills, f"{r.shared:,}", ", ".join(r.matrix), wrong)
            lines.append(f"| {r.kernel} | {r.op}: {r.case} | {r.constants} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines) + "\n"


def text(results: list[Compiled]) -> str:
    """A line a kernel and target: the most of each number over its forms."""
    lines = [f"{'kernel':38} {'target':7} {'forms':>5} {'registers':>9} {'spills':>6} {'shared':>8}  matrix"]
    for name in sorted({r.kernel for r in results}):
        for target in TARGETS:
            forms = [r for r in results if (r.kernel, r.target) == (name, target)]
            if forms:
                most = (max(r.registers for r in forms), max(r.spills for r in forms), max(r.shared for r in forms))
                matrix = ", ".join(sorted({kind for r in forms for kind in r.matrix}))
                lines.append(
                    f"{name:38} {target:7} {len(forms):5} {most[0]:9} {most[1]:6} {most[2]:8,}  {matrix}".rstrip()
                )
    return "\n".join(lines)
