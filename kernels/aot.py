"""Ahead-of-time compilation: every Triton kernel for every architecture it is meant for, on a machine without a GPU.

A process sets a Triton driver that only knows its target, then runs the published problems (`cases.py`) on the meta
device; what would be launched is compiled with the types, constants and divisibilities of that launch. What comes out
is read for registers, spills, shared memory and matrix instructions. It proves that kernels compile to what they should
and fit; not that they are right or fast on the chip.

    python -m headrace.kernels.aot gfx950        # JSON on standard output
"""

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from headrace.errors import KernelUnsupported

ROOM = Path(__file__).resolve().parent
SHARED_LIMIT = {"gfx950": 160 << 10, "gfx942": 64 << 10, "sm_90": 227 << 10}
TARGETS = tuple(SHARED_LIMIT)
"""MI355X, MI325X and MI300X, H200"""
MATRIX_INSTRUCTIONS = {
    "gfx": {
        "fp8": r"v_(?:s?mfmac?)_(?:scale_)?f32_\w*(?:fp8_fp8|f8f6f4)",
        "bf16": r"v_mfma_f32_\w*bf16\w*",
        "f16": r"v_mfma_f32_\w*_f16",
        "f32": r"v_mfma_f32_\w*(?:f32|xf32)\b",
    },
    "sm_": {
        "fp8": r"(?:wgmma\.)?mma(?:_async)?\.\S*e4m3\.\S*e4m3\S*",
        "bf16": r"(?:wgmma\.)?mma(?:_async)?\.\S*bf16\.bf16\S*",
        "f16": r"(?:wgmma\.)?mma(?:_async)?\.\S*\.f16\.f16\S*",
        "f32": r"(?:wgmma\.)?mma(?:_async)?\.\S*tf32\.tf32\S*",
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as one launch wants it, and what the compiler made of it."""

    kernel: str
    """"module.name" inside the room"""
    op: str
    case: str
    target: str
    constants: str
    warps: int
    stages: int
    registers: int
    """of a thread; on AMD architectural and accumulation registers together"""
    spills: int
    """registers (AMD) or bytes (NVIDIA) of a thread that live in memory"""
    shared: int
    """bytes of LDS or shared memory of a program"""
    matrix: tuple[str, ...]
    """types of the matrix instructions in the code"""
    triton: str
    error: str = ""


def entry_kernels() -> list[str]:
    """ "module.name" of every `@triton.jit` or `@gluon.jit` function that some file of the room launches. Imports
    nothing."""
    jitted, launched = [], set()
    for path in sorted(ROOM.rglob("*.py")):
        module = ".".join(path.relative_to(ROOM).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                if any(ast.unparse(d).startswith(("triton.jit", "gluon.jit")) for d in node.decorator_list):
                    jitted.append(f"{module}.{node.name}")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).split(".")[-1])
    return [kernel for kernel in jitted if short_name(kernel) in launched]


def short_name(kernel: str) -> str:
    """Of "module.name": what `MATRIX` in a `cases.py` goes by."""
    return kernel.rsplit(".", 1)[-1]


def backends_for(op: str, target: str) -> list[str]:
    """Backends of an op that Triton compiles for a target."""
    names = ("triton", "gluon") if target == "sm_90" else ("triton",)
    return [name for name in names if (ROOM / op / f"{name}.py").exists()]


def faults(result: Compiled, wanted: frozenset[str]) -> list[str]:
    """What is wrong with a compiled kernel. `wanted`: types of its matrix instructions, empty if it has none."""
    if result.error:
        return [result.error]
    found = []
    if result.spills and result.target.startswith("gfx"):
        found.append(f"{result.spills} registers spilled")
    if result.shared > SHARED_LIMIT[result.target]:
        found.append(f"{result.shared:,} bytes of shared memory, {result.target} has {SHARED_LIMIT[result.target]:,}")
    if frozenset(result.matrix) != wanted:
        have, want = (", ".join(sorted(types)) or "none" for types in (result.matrix, wanted))
        found.append(f"matrix instructions: {have}; wanted: {want}")
    return found


def ignored(result: Compiled) -> list[str]:
    """What is worth saying and no fault: on an H200 tiles are chosen by measured time, and a few spilled bytes in a
    prologue cost none."""
    if result.spills and result.target.startswith("sm_"):
        return [f"{result.spills} bytes spilled"]
    return []


def compile_target(target: str, ops: Iterable[str] = ()) -> list[Compiled]:
    """Compile in a process of its own (this one's Triton stays as it is). Raises KernelUnsupported."""
    if target not in TARGETS:
        raise KernelUnsupported(f"no target {target!r}; known: {', '.join(TARGETS)}")
    if importlib.util.find_spec("triton") is None:
        raise KernelUnsupported("compiling ahead of time needs Triton: pip install 'triton>=3.6'")
    command = [sys.executable, "-P", "-W", "ignore", "-m", "headrace.kernels.aot", target, *ops]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelUnsupported(f"compiling for {target} failed: {done.stderr.strip()[-2000:]}")
    return [Compiled(**(row | {"matrix": tuple(row["matrix"])})) for row in json.loads(done.stdout)]


class _TargetDriver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0


class _Recorder:
    """Stands where launches go; compiles each once."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.op = self.case = ""
        self.results: dict[tuple[object, ...], Compiled] = {}

    def launch(self, plain: Callable[..., Any], function: Any, *args: Any, **options: Any) -> Any:
        options["warmup"] = True
        constants = self._constants(function, args, options)
        error, compiled = "", None
        try:
            compiled = plain(function, *args, **options)
        except Exception as failure:  # whatever a compiler raises is the result
            error = f"{type(failure).__name__}: {str(failure).strip()[:300]}"
        kernel = f"{function.fn.__module__.removeprefix('headrace.kernels.')}.{function.__name__}"
        key = (kernel, constants, id(compiled) if compiled is not None else error)
        if key not in self.results:
            self.results[key] = self._measure(kernel, constants, compiled, error)
        return compiled

    @staticmethod
    def _constants(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        given = dict(zip(function.arg_names, args)) | options
        named = (p.name for p in function.params if p.is_constexpr)
        return " ".join(f"{name}={given[name]}" for name in named if name in given)

    def _measure(self, name: str, constants: str, compiled: Any, error: str) -> Compiled:
        import triton

        common = (name, self.op, self.case, self._target, constants)
        if compiled is None:
            return Compiled(*common, 0, 0, 0, 0, 0, (), triton.__version__, error)
        meta = compiled.metadata
        amd = self._target.startswith("gfx")
        registers, spills = amd_registers(compiled.asm["amdgcn"]) if amd else nvidia_registers(compiled.asm["cubin"])
        matrix = matrix_types_in(compiled.asm["amdgcn" if amd else "ptx"], self._target)
        numbers = (meta.num_warps, meta.num_stages, registers, spills, meta.shared)
        return Compiled(*common, *numbers, matrix, triton.__version__)


def matrix_types_in(text: str, target: str) -> tuple[str, ...]:
    """Types of the matrix instructions of an assembly text."""
    patterns = MATRIX_INSTRUCTIONS[target[:3]]
    return tuple(sorted(name for name, pattern in patterns.items() if re.search(pattern, text)))


def amd_registers(text: str) -> tuple[int, int]:
    """(registers, spilled vector registers) from the metadata of an amdgcn text. Scalar registers spill into lanes of
    vector registers, not into memory; a scratch frame without a spill (an array in memory) counts as spilled too."""

    def number(name: str) -> int:
        return max((int(found) for found in re.findall(rf"\.{name}:\s+(\d+)", text)), default=0)

    return number("vgpr_count"), max(number("vgpr_spill_count"), number("private_segment_fixed_size") // 4)


def nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) as the resource table of the cubin says."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)", text)
    if found is None:
        raise KernelUnsupported(f"{tool} printed no resource usage: {text[:200]}")
    return int(found[1]), int(found[2])


def compile_here(target: str, ops: Iterable[str]) -> list[Compiled]:
    """What `compile_target` runs in its child: replaces this process's Triton driver and launches for good."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from headrace.kernels.cases import OPS_WITH_CASES, cases_of
    from headrace.kernels.launch import ahead_of_time

    chip = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    triton.runtime.driver.set_active(_TargetDriver(chip))
    recorder = _Recorder(target)
    plain = JITFunction.run
    JITFunction.run = functools.wraps(plain)(lambda function, *a, **k: recorder.launch(plain, function, *a, **k))
    with ahead_of_time(target):
        for op in ops or OPS_WITH_CASES:
            for backend in backends_for(op, target):
                create = importlib.import_module(f"headrace.kernels.{op}.{backend}").create
                for case in cases_of(op):
                    for deterministic in (False, True):
                        recorder.op, recorder.case = op, case.name
                        device = torch.device("meta")
                        case.results(create(case.context(device, deterministic)), device)
    return list(recorder.results.values())


def main() -> None:
    target, *ops = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        results = compile_here(target, ops)
    json.dump([dataclasses.asdict(result) for result in results], sys.stdout)


if __name__ == "__main__":
    main()
