"""Run a node daemon alone: `python -m headrace.kvstore.daemon --help`. Ends on SIGTERM or Ctrl-C."""

import argparse
import dataclasses
import json
import signal
import socket
import sys
from pathlib import Path

from headrace.config import StoreConfig, load_config
from headrace.errors import HeadraceError
from headrace.kvstore.daemon.node import Node, NodeSettings
from headrace.kvstore.layout import SlabLayout


def main() -> int:
    """Prints one JSON line with socket and incarnation when it serves."""
    args = _arguments()
    try:
        node = Node(_settings(args))
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 1
    # Not a blocked signal and sigwait: libraries started threads before this line, and one that does not block the
    # signal would end the process while the main thread is not waiting yet.
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        node.start()
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"socket": str(args.socket), "incarnation": node.incarnation}), flush=True)
    woken.recv(1)
    node.stop()
    return 0


def _settings(args: argparse.Namespace) -> NodeSettings:
    layout = json.loads(args.layout)
    return NodeSettings(
        name=args.name,
        socket=args.socket,
        layout=SlabLayout(**{**layout, "full_layers": tuple(layout["full_layers"])}),
        fingerprint=bytes.fromhex(args.fingerprint),
        store=dataclasses.replace(
            load_config(overrides=args.set).store,
            host_bytes=args.host_bytes,
            shm_dir=str(args.shm_dir),
            host_policy=args.policy,
            lease_s=args.lease_s,
            event_log=args.event_log,
        ),
        directory_url=args.redis,
        arena_prefix=args.arena_prefix or args.name,
    )


def _arguments() -> argparse.Namespace:
    default = StoreConfig()
    parser = argparse.ArgumentParser(prog="headrace.kvstore.daemon", description=__doc__)
    parser.add_argument("--name", default="node-0")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument(
        "--layout", required=True, help="SlabLayout as JSON: num_layers, full_layers, has_mtp, row_format"
    )
    parser.add_argument("--fingerprint", required=True, help="kvstore.names.fingerprint, 64 hex digits")
    parser.add_argument("--host-bytes", type=int, default=default.host_bytes)
    parser.add_argument("--shm-dir", type=Path, default=Path(default.shm_dir))
    parser.add_argument("--policy", default=default.host_policy)
    parser.add_argument("--lease-s", type=float, default=default.lease_s)
    parser.add_argument("--event-log", default="", help="file for what the store did, one JSON object a line")
    parser.add_argument("--arena-prefix", default="", help="start of the shared-memory file's name; empty: the node's")
    parser.add_argument("--redis", default="", help="URL of the Redis that holds the directory")
    parser.add_argument(
        "--set", action="append", default=[], metavar="store.FIELD=VALUE", help="any other setting of the store"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
