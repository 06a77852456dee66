"""One registry of kernel backends: op -> backend name -> lazy creator.

`choose` asks the backends in order of preference whether they take the device and shape, keeps the reasons of those
that do not, and creates the first that does. A backend that config forces is the only candidate, and its refusal is an
error. A device difference is another backend file, never a branch inside one.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

from headrace.errors import KernelUnsupported
from headrace.kernels.aiter_library import REFUSALS
from headrace.kernels.base import KernelContext
from headrace.kernels.launch import (
    CACHE_OPS,
    architecture,
    refuses_cache_op,
    refuses_cuda,
    refuses_gluon,
    refuses_triton,
)

OPS = (
    "norm",
    "rope",
    "latent_rows",
    "index_keys",
    "index_topk",
    "sparse_mla",
    "linear",
    "router",
    "experts",
    "quantise",
    "sampling",
)
TRITON_OPS = (
    "norm",
    "rope",
    "latent_rows",
    "index_keys",
    "index_topk",
    "sparse_mla",
    "linear",
    "router",
    "experts",
    "quantise",
    "sampling",
)
GLUON_OPS = ("linear", "experts")
CUDA_OPS = {"index_topk": ("index_heads", 17, 32), "sparse_mla": ("heads", 33, 1024)}
"""Ops with a CUDA C++ backend, and the size of the model that its tile is made for"""
PREFERENCE = ("aiter", "cuda", "gluon", "triton", "reference")
TRITON_BEFORE_AITER = ("norm", "latent_rows", "index_keys")
"""aiter takes bf16 there and writes through another buffer; Triton's read fp32 and write in one launch"""


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """`entry` is "module:factory", imported only when chosen; `refuses` gives a reason or None, before any import."""

    name: str
    entry: str
    refuses: Callable[[KernelContext], str | None] = lambda context: None
    arithmetic: str = "fp32"
    """What it computes in where the reference has fp32: says which tolerance it is held to."""

    def create(self, context: KernelContext) -> Any:
        module, _, factory = self.entry.partition(":")
        return getattr(importlib.import_module(module), factory)(context)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What was picked for an op and why the others were not."""

    op: str
    backend: str
    kernel: Any
    rejected: tuple[tuple[str, str], ...]


class Registry:
    def __init__(self) -> None:
        self._backends: dict[str, dict[str, Backend]] = {}

    def register(self, op: str, backend: Backend) -> None:
        known = self._backends.setdefault(op, {})
        if backend.name in known:
            raise KernelUnsupported(f"{op}: backend {backend.name} is registered twice")
        known[backend.name] = backend

    def backends(self, op: str) -> tuple[str, ...]:
        if op not in self._backends:
            raise KernelUnsupported(f"no op {op!r}; known: {', '.join(sorted(self._backends))}")
        order = list(PREFERENCE)
        if op in TRITON_BEFORE_AITER:
            order.sort(key=lambda name: (name == "reference", name == "aiter"))
        return tuple(sorted(self._backends[op], key=lambda name: order.index(name) if name in order else -1))

    def backend(self, op: str, name: str) -> Backend:
        """Raises KernelUnsupported where there is none of that name."""
        if name not in self.backends(op):
            raise KernelUnsupported(f"{op}: no backend {name!r}; registered: {', '.join(self.backends(op))}")
        return self._backends[op][name]

    def choose(self, op: str, context: KernelContext, forced: str = "auto") -> Choice:
        """Create the kernel of an op. Raises KernelUnsupported naming what exists and why each refused."""
        names = self.backends(op)
        if forced != "auto":
            names = (self.backend(op, forced).name,)
        rejected: list[tuple[str, str]] = []
        for name in names:
            backend = self._backends[op][name]
            reason = backend.refuses(context)
            if reason is None:
                try:
                    return Choice(op, name, backend.create(context), tuple(rejected))
                except KernelUnsupported as refusal:
                    reason = str(refusal)
            rejected.append((name, reason))
        why = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        where = architecture(context.device)
        raise KernelUnsupported(f"{op} on {where}, rows {context.row_format or 'any'}, {context.shape}: {why}")


def _refuses_cuda(size: tuple[str, int, int], context: KernelContext) -> str | None:
    return refuses_cuda(context, *size)


def default_registry() -> Registry:
    """The backends that ship with Headrace."""
    registry = Registry()
    for op in OPS:
        if op in REFUSALS:
            entry = f"headrace.kernels.{op}.aiter:create"
            registry.register(op, Backend("aiter", entry, REFUSALS[op], arithmetic="bf16"))
        if op in GLUON_OPS:
            registry.register(op, Backend("gluon", f"headrace.kernels.{op}.gluon:create", refuses_gluon))
        if op in CUDA_OPS:
            too = functools.partial(_refuses_cuda, CUDA_OPS[op])
            registry.register(op, Backend("cuda", f"headrace.kernels.{op}.cuda:create", too))
        if op in TRITON_OPS:
            refuses = refuses_cache_op if op in CACHE_OPS else refuses_triton
            registry.register(op, Backend("triton", f"headrace.kernels.{op}.triton:create", refuses))
        registry.register(op, Backend("reference", f"headrace.kernels.{op}.reference:create"))
    return registry


def forced_choices(forced: str, registry: Registry) -> dict[str, str]:
    """`model.kernels` -> op -> backend. `auto`: none. A name: every op that has such a backend. `op=name,...`: those
    ops. Raises KernelUnsupported for a name that no op has, or an op that there is not."""
    if "=" in forced:
        pairs = dict(pair.split("=", 1) for pair in forced.split(","))
        return {op: registry.backend(op, name).name if name != "auto" else name for op, name in pairs.items()}
    if forced == "auto":
        return {}
    having = {op: forced for op in OPS if forced in registry.backends(op)}
    if not having:
        known = sorted({name for op in OPS for name in registry.backends(op)})
        raise KernelUnsupported(f"no op has a backend {forced!r}; there are: {', '.join(known)}")
    return having


@dataclasses.dataclass(slots=True)
class KernelSet:
    """All ops of one model on one device, chosen once at load."""

    norm: Any
    rope: Any
    latent_rows: Any
    index_keys: Any
    index_topk: Any
    sparse_mla: Any
    linear: Any
    router: Any
    experts: Any
    quantise: Any
    sampling: Any
    choices: tuple[Choice, ...]


def kernel_set(context: KernelContext, forced: str = "auto", registry: Registry | None = None) -> KernelSet:
    """Choose every op; `forced` as `model.kernels` has it. Raises KernelUnsupported."""
    source = registry or default_registry()
    wanted = forced_choices(forced, source)
    choices = tuple(source.choose(op, context, wanted.get(op, "auto")) for op in OPS)
    return KernelSet(**{choice.op: choice.kernel for choice in choices}, choices=choices)
