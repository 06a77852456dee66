"""aiter's own tuning tables for GLM-5.2: the shapes in its CSV form, and its tuners run over them.

aiter looks up products and fused experts by exact shape and falls back to heuristics. What it ships for this model
covers tensor parallelism of 8; these are the shapes of a rank with whole heads (data-parallel attention, experts over
8 ranks) and of tensor parallelism of 4.
"""

import csv
import dataclasses
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GEMM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MOE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
HIDDEN = 6144
GEMMS = {
    "ep8": ((2624, 6144), (16384, 2048), (6144, 16384), (24576, 6144), (6144, 12288), (4096, 6144), (6144, 2048),
            (4096, 2048), (128, 6144)),
    "tp4": ((2624, 6144), (4096, 2048), (6144, 4096), (6144, 6144), (6144, 3072), (1024, 6144), (6144, 512),
            (128, 6144)),
}  # fmt: skip
"""(N, K): q_a with kv_a, q_b, o, dense gate with up, dense down, shared gate with up, shared down, index queries, index
keys. The MTP input has the shape of a dense down."""
EXPERTS = {"ep8": (2048, 32, 8), "tp4": (512, 256, 8)}
"""(channels of an expert, experts of a rank, experts of a token)"""
GEMM_COLUMNS = ("M", "N", "K")
MOE_COLUMNS = (
    "token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type",
    "use_g1u1", "doweight_stage1",
)  # fmt: skip
GEMM_TUNER = "ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_tune.py"
MOE_TUNER = "ck_gemm_moe_2stages_codegen/gemm_moe_tune.py"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One of aiter's tuners on one file. `status`: "tuned", "failed", "out of time" or "not run"."""

    name: str
    command: str
    status: str
    text: str
    seconds: float


def write_untuned(folder: Path, fp8: str, tiny: bool = False) -> dict[str, Path]:
    """CSV files of the shapes, as aiter's tuners read them. `fp8`: its name of the device's type."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = GEMM_ROWS[:2] if tiny else GEMM_ROWS
    tokens = MOE_TOKENS[:2] if tiny else MOE_TOKENS
    gemms = sorted({(m, n, k) for shapes in GEMMS.values() for n, k in shapes for m in rows})
    fixed = ("ActivationType.Silu", "torch.bfloat16", fp8, fp8, "QuantType.per_1x128", 1, 0)
    experts = [(token, HIDDEN, inner, count, top, *fixed) for inner, count, top in EXPERTS.values() for token in tokens]
    return {
        "gemm": _write(folder / "a8w8_blockscale_untuned_gemm.csv", GEMM_COLUMNS, gemms),
        "moe": _write(folder / "untuned_fmoe.csv", MOE_COLUMNS, experts),
    }


def _write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def tuner_folder() -> Path | None:
    """`csrc` of the aiter that is installed (from sources, or the wheel's aiter_meta). Imports nothing."""
    spec = importlib.util.find_spec("aiter")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(folder).parent
        for candidate in (root / "csrc", root / "aiter_meta" / "csrc"):
            if candidate.is_dir():
                return candidate
    return None


def run_tuners(files: dict[str, Path], folder: Path, limit_s: float) -> list[Run]:
    """Run aiter's tuners, each with the limit; their output goes to `<name>.log` beside the tables."""
    sources = tuner_folder()
    found = []
    plan = (
        ("gemm", GEMM_TUNER, "a8w8_blockscale_tuned_gemm.csv", ("--libtype", "both")),
        ("moe", MOE_TUNER, "tuned_fmoe.csv", ()),
    )
    for name, script, target, extra in plan:
        arguments = ["-i", str(files[name]), "-o", str(folder / target), *extra]
        if sources is None or not (sources / script).exists():
            where = f"no {script} beside the installed aiter" if sources else "aiter's sources are not here"
            found.append(Run(name, f"python csrc/{script} {' '.join(arguments)}", "not run", where, 0.0))
            continue
        found.append(_run(name, [sys.executable, str(sources / script), *arguments], folder / f"{name}.log", limit_s))
    return found


def _run(name: str, command: list[str], log: Path, limit_s: float) -> Run:
    begin = time.monotonic()
    with log.open("w") as file:
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            text = f"stopped after {limit_s:,.0f} s; what it had is in {log.name}"
            return Run(name, " ".join(command), "out of time", text, time.monotonic() - begin)
    status = "failed" if code else "tuned"
    return Run(name, " ".join(command), status, f"exit {code}, see {log.name}", time.monotonic() - begin)
