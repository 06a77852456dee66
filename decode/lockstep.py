"""How the ranks of a group stay in step: one control exchange before a step, one inside it, a bell when all are idle.

Before a step every rank tells how many sequences and rows it verifies, how many drafts it would make and whether it is
leaving; so all know the row counts of the verify phase, and that all run it or none. How many rows the extend and each
draft step have depends on what was accepted, so a second exchange follows the sampling. (The alternative, running the
extend on all verify rows with rejected ones masked, saves that exchange of about 0.1 ms but computes up to 1 + n rows
for each one that counts, and lets rejected rows reach the expert exchange. Exact counts keep every row that is not a
token of somebody's answer, or a draft of it, out of the model.)
"""

import select
import socket
import struct
import threading
import time
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
import torch.distributed as dist

from headrace.decode.base import Control
from headrace.errors import RankLost

MAX_DRAFTS = 8
_RING = struct.Struct("<q")


class Plan(NamedTuple):
    """What all ranks agree on before a step."""

    verify: list[int]  # rows of each rank
    draft_tokens: int  # drafts to make for the next step
    sequences: int  # of all ranks
    stop: bool  # the group ends now

    @property
    def idle(self) -> bool:
        return not sum(self.verify)


class Tail(NamedTuple):
    """Row counts of the phases after sampling."""

    extend: list[int]  # rows of each rank
    drafts: list[list[int]]  # [draft step][rank]; empty steps are left out, on all ranks alike


class LocalControl:
    """One rank alone."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.exchanges = 0

    def gather(self, row: Seq[int]) -> list[list[int]]:
        self.exchanges += 1
        return [list(row)]


class GroupControl:
    """All-gather of int64 on a CPU process group (gloo), also when the model's exchange is NCCL."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.exchanges = 0

    def gather(self, row: Seq[int]) -> list[list[int]]:
        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(rows, mine, group=self._group)
        except RuntimeError as error:
            raise RankLost(f"control exchange {self.exchanges} of rank {self.rank} of {self.size}: {error}") from error
        self.exchanges += 1
        return [gathered.tolist() for gathered in rows]


class Lockstep:
    """The two exchanges of a step, as the step loop uses them."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def agree(self, *, verify: int, sequences: int, draft_tokens: int, leaving: bool, stop_now: bool) -> Plan:
        """First exchange. The rank with the most rows says how many drafts are made (it has measured most); the group
        ends when every rank is leaving, or as soon as one must stop now."""
        rows = self.control.gather([verify, draft_tokens, sequences, int(leaving), int(stop_now)])
        stop = all(row[3] for row in rows) or any(row[4] for row in rows)
        drafts = max(rows, key=lambda row: row[0])[1]
        return Plan([row[0] for row in rows], drafts, sum(row[2] for row in rows), stop)

    def agree_tail(self, extend: int, drafts: Seq[int]) -> Tail:
        """Second exchange: this rank's extend rows, and its rows in draft steps 1, 2, ... (at most 7)."""
        padded = [*drafts, *[0] * (MAX_DRAFTS - 1 - len(drafts))]
        rows = self.control.gather([extend, *padded])
        steps = [[row[1 + step] for row in rows] for step in range(MAX_DRAFTS - 1)]
        return Tail([row[0] for row in rows], [step for step in steps if sum(step)])


class LocalBell:
    """Wakes the one rank of a group of one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rung = -1

    def ring(self, exchange: int) -> None:
        with self._changed:
            self._rung = max(self._rung, exchange)
            self._changed.notify_all()

    def sleep(self, exchange: int, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._rung >= exchange, timeout_s)

    def close(self) -> None:
        pass


class DatagramBell:
    """Loopback UDP between the ranks of one host; the ports are exchanged through the control group. A stranger's
    datagram can only cause an early, harmless control exchange."""

    def __init__(self, control: Control) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.setblocking(False)
        ports = control.gather([self._socket.getsockname()[1]])
        self._peers = [("127.0.0.1", row[0]) for row in ports]

    def ring(self, exchange: int) -> None:
        message = _RING.pack(exchange)
        for peer in self._peers:
            try:
                self._socket.sendto(message, peer)
            except OSError:
                continue  # its buffer is full of rings, or it is gone: its own timeout wakes it, or the exchange fails

    def sleep(self, exchange: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._socket], [], [], left)[0]:
                return
            try:
                data = self._socket.recv(64)
            except BlockingIOError:
                continue
            if len(data) == _RING.size and _RING.unpack(data)[0] >= exchange:
                return

    def close(self) -> None:
        self._socket.close()
