"""Every error Headrace raises on purpose, as one tree. HTTP and gRPC status are attached here and nowhere else.

    HeadraceError
    ├── ConfigError              a wrong configuration key or value
    ├── CheckpointError          a model directory that cannot be loaded
    ├── KernelUnsupported        no backend takes this op, dtype and shape
    ├── InputError               the client sent something wrong (400)
    │   ├── UnknownModel         (404)
    │   ├── NotAuthenticated     (401)
    │   └── PromptTooLong        (400)
    ├── CapacityError            try again later (429)
    │   └── NeverFits            no amount of waiting helps (400)
    ├── StoreError
    │   ├── DaemonUnavailable    the node daemon does not answer (503)
    │   ├── LeaseExpired         the lease ended; its slots must not be read
    │   ├── DigestMismatch       stored bytes are not what was written
    │   └── IncompatiblePeer     the two builds name or lay out blocks differently
    └── EngineError
        ├── BlockMiss            a decode rank lacks a block it was promised; the router retries through prefill
        ├── Cancelled            the client left, or somebody aborted (499)
        ├── DeadlineExceeded     the request's own time is over (504)
        ├── RankLost             a rank of the group died (503)
        └── Draining             the service is shutting down (503)

Messages name what was wrong and what would be right, with the numbers in them.
"""

from typing import ClassVar


class HeadraceError(Exception):
    """Root of the tree. `kind` is the stable name on the wire, `http_status` what a client sees."""

    http_status: ClassVar[int] = 500

    @property
    def kind(self) -> str:
        return type(self).__name__


class ConfigError(HeadraceError):
    pass


class CheckpointError(HeadraceError):
    pass


class KernelUnsupported(HeadraceError):
    pass


class InputError(HeadraceError):
    """The client's mistake. `param` is the request field at fault, if it is one."""

    http_status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(InputError):
    http_status = 404


class NotAuthenticated(InputError):
    http_status = 401


class PromptTooLong(InputError):
    pass


class CapacityError(HeadraceError):
    """`retry_after_s`: when asking again helps, if that is known."""

    http_status = 429

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NeverFits(CapacityError):
    http_status = 400


class StoreError(HeadraceError):
    http_status = 503


class DaemonUnavailable(StoreError):
    pass


class LeaseExpired(StoreError):
    pass


class DigestMismatch(StoreError):
    pass


class IncompatiblePeer(StoreError):
    pass


class EngineError(HeadraceError):
    pass


class BlockMiss(EngineError):
    http_status = 503


class Cancelled(EngineError):
    http_status = 499


class DeadlineExceeded(EngineError):
    http_status = 504


class RankLost(EngineError):
    http_status = 503


class Draining(EngineError):
    http_status = 503


def _subclasses(root: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_subclasses(child))
    return found


def from_wire(kind: str, message: str) -> HeadraceError:
    """Rebuild an error that another process reported. An unknown kind becomes the root class, never a crash."""
    known = _subclasses(HeadraceError)
    if kind in known:
        return known[kind](message)
    return HeadraceError(f"{kind}: {message}")
