"""What a load tells people: a bar where they watch a terminal, lines in the log where they do not."""

import logging
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from headrace.model.stream import LoadReport

log = logging.getLogger(__name__)


def load_progress(stream: TextIO | None = None) -> Callable[[LoadReport], None]:
    """For `load_model`. `stream`: standard error if not given."""
    stream = stream or sys.stderr
    return LoadBar(stream) if stream.isatty() else LoadLog()


class LoadLog:
    """Logs every tenth of the bytes if the load takes long, and the sums at its end."""

    def __init__(self, quiet_s: float = 5.0) -> None:
        self._tenths = 0
        self._quiet_s = quiet_s

    def __call__(self, report: LoadReport) -> None:
        if report.done:
            log.info("%s", summary(report))
            return
        tenths = 10 * report.read_bytes // max(report.rank_bytes, 1)
        if tenths > self._tenths and report.seconds > self._quiet_s:
            log.info("loading: %d0%%, %.1f of %.1f GB", tenths, report.read_bytes / 1e9, report.rank_bytes / 1e9)
        self._tenths = max(tenths, self._tenths)


class LoadBar:
    """One line that is drawn over itself, and the sums in its place at the end."""

    def __init__(self, stream: TextIO, interval_s: float = 0.1) -> None:
        self._stream, self._interval_s = stream, interval_s
        self._next = 0.0

    def __call__(self, report: LoadReport) -> None:
        now = time.monotonic()
        if not report.done and now < self._next:
            return
        self._next = now + self._interval_s
        columns = shutil.get_terminal_size().columns - 1
        line = summary(report) + "\n" if report.done else bar(report, columns)
        # "\x1b[K" clears what a longer line left.
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()


def summary(report: LoadReport) -> str:
    rate = report.read_bytes / max(report.seconds, 1e-9) / 1e9
    return (
        f"loaded {report.read_tensors} tensors, {report.read_bytes} bytes in {report.seconds:.1f} s ({rate:.2f} GB/s; "
        f"{report.other_ranks_bytes} bytes are other ranks' experts, {report.copies_bytes} are copies)"
    )


def bar(report: LoadReport, columns: int) -> str:
    """At most `columns` characters; the bar itself takes what the numbers leave, up to 40."""
    share = report.read_bytes / max(report.rank_bytes, 1)
    rate = report.read_bytes / max(report.seconds, 1e-9)
    left = (report.rank_bytes - report.read_bytes) / max(rate, 1e-9)
    head = f"loading {share:4.0%} "
    tail = (
        f" {report.read_bytes / 1e9:.1f} of {report.rank_bytes / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left:.0f} s left"
    )
    room = min(columns - len(head) - len(tail) - 2, 40)
    if room < 1:
        return (head + tail)[:columns]
    full = int(share * room)
    return f"{head}[{'#' * full}{'-' * (room - full)}]{tail}"
