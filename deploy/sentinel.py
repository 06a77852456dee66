"""Outlives a supervisor that was killed, by seconds.

The supervisor holds the other end of the pipe. When it closes, the sentinel ends at once if the run directory is gone
(an orderly end), otherwise it gives the boxes a moment to stop by themselves and removes what is left.
"""

import argparse
import os
import signal
import time
from pathlib import Path

from headrace.deploy.rundir import is_run, marked_processes, remove_run

BOXES_MAY_TAKE_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="headrace.deploy.sentinel")
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--shm-dir", type=Path, required=True)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(args.pipe, 1)
    deadline = time.monotonic() + BOXES_MAY_TAKE_S
    while is_run(args.run_dir) and marked_processes(args.run_dir) and time.monotonic() < deadline:
        time.sleep(0.2)
    if is_run(args.run_dir):
        remove_run(args.run_dir, args.shm_dir)


if __name__ == "__main__":
    main()
