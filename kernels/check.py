"""Every backend of every op against the reference on one device, and what the registry would pick there and why."""

import dataclasses
import importlib
import time
from collections.abc import Iterator, Sequence

import torch

from headrace.errors import KernelUnsupported
from headrace.kernels.base import KernelContext
from headrace.kernels.cases import Case, cases_of, disagreements
from headrace.kernels.registry import OPS, Registry, default_registry, forced_choices

GLM_SHAPE = {"heads": 64, "hidden": 6144, "inner": 2048, "index_topk": 2048, "experts": 256, "top_k": 8}
"""What a rank that holds whole heads of GLM-5.2 asks for"""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """`status`: "agrees", "DIFFERS", "FAILED" (it raised) or "refused"."""

    op: str
    case: str
    backend: str
    deterministic: bool
    status: str
    text: str
    seconds: float

    @property
    def bad(self) -> bool:
        return self.status in ("DIFFERS", "FAILED")


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Backends of one op on a device: (name, why not) in order of preference, "" for one that would do."""

    op: str
    chosen: str
    backends: tuple[tuple[str, str], ...]
    error: str = ""


def standings(context: KernelContext, forced: str = "auto", registry: Registry | None = None) -> list[Standing]:
    """What `kernel_set` would choose, op by op, without creating anything. Raises KernelUnsupported for a forced name
    that does not exist; a refusal of a forced backend is in the `error` of its op."""
    registry = registry or default_registry()
    wanted = forced_choices(forced, registry)
    found = []
    for op in OPS:
        backends = tuple((name, registry.backend(op, name).refuses(context) or "") for name in registry.backends(op))
        want = wanted.get(op, "auto")
        able = [name for name, reason in backends if not reason and want in ("auto", name)]
        error = "" if able else f"forced to {want}: {dict(backends)[want]}"
        found.append(Standing(op, able[0] if able else "", backends, error))
    return found


def check(
    device: torch.device,
    ops: Sequence[str] = (),
    backends: Sequence[str] = (),
    tiny: bool = False,
    interpreted: bool = False,
    registry: Registry | None = None,
) -> Iterator[Verdict]:
    """Run the published problems (or the tiny ones) through every backend but the reference, in both modes.
    `interpreted`: Triton's interpreter is installed, so its backends are tried on a CPU whatever they say of it."""
    registry = registry or default_registry()
    for op in ops or OPS:
        names = [name for name in registry.backends(op) if name != "reference" and (not backends or name in backends)]
        for case in cases_of(op, tiny):
            for name in names:
                for deterministic in (False, True):
                    yield _one(registry, case, name, device, deterministic, interpreted)


def _one(
    registry: Registry, case: Case, name: str, device: torch.device, deterministic: bool, interpreted: bool
) -> Verdict:
    context = case.context(device, deterministic)
    backend = registry.backend(case.op, name)
    begin = time.monotonic()

    def verdict(status: str, text: str = "") -> Verdict:
        return Verdict(case.op, case.name, name, deterministic, status, text, time.monotonic() - begin)

    reason = backend.refuses(context)
    if reason is not None and not (interpreted and name == "triton"):
        return verdict("refused", reason)
    try:
        got = case.results(backend.create(context), device)
        reference = importlib.import_module(f"headrace.kernels.{case.op}.reference").create(context)
        wrong = list(disagreements(got, case.results(reference, device), case.tolerance_of(backend.arithmetic)))
    except KernelUnsupported as refusal:
        return verdict("refused", str(refusal))
    except Exception as error:  # one broken kernel must not hide what the others do
        return verdict("FAILED", f"{type(error).__name__}: {error}"[:500])
    return verdict("DIFFERS", "; ".join(wrong)) if wrong else verdict("agrees")
