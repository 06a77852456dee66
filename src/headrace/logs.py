"""Logging of a process: one line format, to standard error. Knows nothing of files; whoever starts a process says where
its standard error goes."""

import logging
import sys


def setup(box: str, level: int = logging.INFO) -> None:
    """Log to standard error as `time level box logger: message`. Replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {box} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
