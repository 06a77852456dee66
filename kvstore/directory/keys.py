"""Names and forms of what lives in Redis. Nothing of it is needed to serve: it can be lost at any time.

    headrace:<fp>:nodes                     set of node names that ever registered
    headrace:<fp>:node:<n>                  registration (Registration), expires unless renewed
    headrace:<fp>:node:<n>:snapshot         everything the node holds at one event number (wire.Events)
    headrace:<fp>:node:<n>:wanted           somebody needs a newer snapshot
    headrace:<fp>:node:<n>:events:<inc>     stream of wire.PlaceChange; the entry id is <event number>-0

<fp> is the start of the naming fingerprint: deployments that name blocks differently never meet.
"""

import dataclasses

from headrace.ids import Incarnation
from headrace.messages import message

REGISTRATION_S = 3.0
"""Life of a registration without renewal."""
FIELD = b"change"


@message
class Registration:
    incarnation: Incarnation
    last: int
    """Newest event number in the stream; a reader that has fewer has lost some."""


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    fingerprint: bytes

    @property
    def _root(self) -> str:
        return f"headrace:{self.fingerprint.hex()[:16]}"

    @property
    def nodes(self) -> str:
        return f"{self._root}:nodes"

    def node(self, node: str) -> str:
        return f"{self._root}:node:{node}"

    def snapshot(self, node: str) -> str:
        return f"{self.node(node)}:snapshot"

    def wanted(self, node: str) -> str:
        return f"{self.node(node)}:wanted"

    def events(self, node: str, incarnation: Incarnation) -> str:
        return f"{self.node(node)}:events:{incarnation}"
