"""nvcc, once for each source and set of definitions; cubins are kept between processes."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from headrace.errors import KernelUnsupported

HEADER = Path(__file__).parent / "sm90.cuh"
FLAGS = ("-cubin", "-std=c++17", "-O3", "-lineinfo", "-gencode=arch=compute_90a,code=sm_90a")
USUAL_PLACE = Path("/usr/local/cuda/bin/nvcc")
CACHE = Path.home() / ".cache" / "headrace" / "cubin"


def find_nvcc() -> Path | None:
    """The compiler on the PATH or in its usual place."""
    found = shutil.which("nvcc")
    if found:
        return Path(found)
    return USUAL_PLACE if USUAL_PLACE.exists() else None


def build(source: Path, cache: Path = CACHE) -> bytes:
    """The cubin of one .cu file. Raises KernelUnsupported with the compiler's words."""
    text = source.read_bytes() + HEADER.read_bytes() + " ".join(FLAGS).encode()
    kept = cache / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:24]}.cubin"
    if kept.exists():
        return kept.read_bytes()
    cubin, _ = compile_source(source)
    cache.mkdir(parents=True, exist_ok=True)
    # Ranks of one host build at once: each writes a file of its own, the last rename wins with equal bytes.
    handle, name = tempfile.mkstemp(dir=cache)
    with os.fdopen(handle, "wb") as out:
        out.write(cubin)
    os.replace(name, kept)
    return cubin


def compile_source(source: Path) -> tuple[bytes, str]:
    """(cubin, what ptxas says of registers, stack and spills)."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelUnsupported(
            f"{source.name} needs nvcc on the PATH or at {USUAL_PLACE} (13.0 is what it was tested with)"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.cubin"
        command = [str(nvcc), *FLAGS, "-Xptxas", "-v", "-I", str(HEADER.parent), "-o", str(out), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise KernelUnsupported(f"nvcc cannot build {source.name}: {done.stderr[-2000:]}")
        return out.read_bytes(), done.stderr
