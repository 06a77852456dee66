"""`headrace store`: look into the KV store of a running service, through its node daemons' sockets on this host."""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.deploy.commands.store_text import changes, table, top_screen
from headrace.deploy.rundir import ENDPOINTS_FILE, living_runs
from headrace.errors import ConfigError, InputError
from headrace.ids import BlockName
from headrace.kvstore.tool import StoreTool
from headrace.router.http.tenants import tenant_salt

HELP = "Look into a running service's KV store: stats, blocks, digests; flush it, pin blocks, limit tenants."
EXAMPLE = "headrace store ls --limit 20"
LEAST_PREFIX = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    texts = "; ".join(f"{name}: {text}" for name, (_, text) in ACTIONS.items())
    parser.add_argument("what", choices=list(ACTIONS), help=texts)
    parser.add_argument("blocks", nargs="*", metavar="BLOCK", help="pin, unpin: names or their first 8 digits or more")
    parser.add_argument("--run-dir", help="directory of the run (default: deploy.run_dir, or the one run of this user)")
    parser.add_argument("--socket", help="socket of one node daemon, instead of a run")
    parser.add_argument("--place", default="host", help="ls: host, disk, or a rank (default: host)")
    parser.add_argument("--limit", type=int, default=50, help="ls: most blocks shown of a node; 0: all (default: 50)")
    parser.add_argument("--every", type=float, default=2.0, help="top: seconds between two looks (default: 2)")
    parser.add_argument("--count", type=int, default=0, help="top: looks until it ends; 0: until Ctrl-C")
    parser.add_argument("--seconds", type=float, default=600.0, help="pin: for how long (default: 600)")
    parser.add_argument("--tenant", help="quota: the tenant's name, as in router.api_keys (`key=tenant`)")
    parser.add_argument("--tenant-id", help="quota: the tenant's id as `ls` shows it, instead of its name")
    parser.add_argument("--quota", dest="amount", help="quota: blocks of the host tier, or `default`")


def run(args: argparse.Namespace) -> int:
    """0; 1 when `verify` found a corrupt block."""
    with _nodes(args) as nodes:
        action: Callable[[argparse.Namespace, dict[str, StoreTool]], int] = ACTIONS[args.what][0]
        return action(args, nodes)


@contextmanager
def _nodes(args: argparse.Namespace) -> Iterator[dict[str, StoreTool]]:
    sockets = {"node": f"unix:{args.socket}"} if args.socket else node_sockets(args.run_dir, args.config)
    tools: dict[str, StoreTool] = {}
    try:
        for name, endpoint in sockets.items():
            tool = StoreTool(endpoint)
            tools[tool.welcome.node if args.socket else name] = tool
        yield tools
    finally:
        for tool in tools.values():
            tool.close()


def node_sockets(run_dir: str | None, config: Config) -> dict[str, str]:
    """Node -> "unix:/path" of the run that is meant. Raises ConfigError if there is none, or more than one."""
    chosen = run_dir or config.deploy.run_dir
    if chosen:
        runs = [Path(chosen)]
    else:
        runs = living_runs()
        if len(runs) != 1:
            found = ", ".join(map(str, runs)) or "none"
            raise ConfigError(f"running services of this user: {found}; say which with --run-dir")
    try:
        endpoints: dict[str, str] = json.loads((runs[0] / ENDPOINTS_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{runs[0]} is not the directory of a running service: {error}") from error
    nodes = {name: address for name, address in endpoints.items() if address.startswith("unix:")}
    if not nodes:
        raise ConfigError(f"the service in {runs[0]} has no node daemon at the moment")
    return nodes


def _stats(args: argparse.Namespace, nodes: dict[str, StoreTool]) -> int:
    values = {node: tool.values() for node, tool in nodes.items()}
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        for node, found in values.items():
            print(f"{node}  {nodes[node].welcome.arena}")
            print(table([(name, f"{value:,.10g}") for name, value in sorted(found.items())], indent=2))
    return 0


def _ls(args: argparse.Namespace, nodes: dict[str, StoreTool]) -> int:
    listed: dict[str, list[dict[str, Any]]] = {}
    for node, tool in nodes.items():
        if args.place == "host":
            rows = [
                {"name": b.name.hex(), "depth": b.depth, "leases": b.leases, "slot": b.slot, "tenant": b.tenant.hex()}
                for b in tool.blocks()
            ]
            rows.sort(key=lambda row: (row["tenant"], row["depth"], row["name"]))
        else:
            places = tool.places()
            if args.place not in places:
                raise InputError(f"{node} has no place {args.place!r}; it has {', '.join(sorted(places))}", "place")
            rows = [{"name": name.hex()} for name in places[args.place]]
        listed[node] = rows
    if args.json:
        print(json.dumps(listed))
        return 0
    for node, rows in listed.items():
        shown = rows[: args.limit] if args.limit else rows
        print(f"{node}  {args.place}: {len(rows)} blocks" + (f", {len(shown)} shown" if len(shown) < len(rows) else ""))
        if shown:
            head = tuple(shown[0])
            print(table([head, *(tuple(_short(key, row[key]) for key in head) for row in shown)], indent=2))
    return 0


def _short(key: str, value: Any) -> str:
    return str(value)[:16] if key == "name" else str(value) or "-"


def _verify(args: argparse.Namespace, nodes: dict[str, StoreTool]) -> int:
    verdicts = {node: tool.verify() for node, tool in nodes.items()}
    if args.json:
        print(json.dumps({
            node: {"checked": v.checked, "bytes": v.bytes, "gone": v.gone, "corrupt": [n.hex() for n in v.corrupt]}
            for node, v in verdicts.items()
        }))  # fmt: skip
    else:
        for node, v in verdicts.items():
            print(f"{node}  {v.checked} blocks, {v.bytes / 1e9:.3f} GB checked, {v.gone} gone meanwhile")
            print(f"  {len(v.corrupt)} corrupt" + (" and dropped:" if v.corrupt else ""))
            for name in v.corrupt:
                print(f"  {name.hex()}")
    return 1 if any(v.corrupt for v in verdicts.values()) else 0


def _flush(args: argparse.Namespace, nodes: dict[str, StoreTool]) -> int:
    return _show(args, {node: tool.flush() for node, tool in nodes.items()}, "blocks dropped")


def _top(args: argparse.Namespace, nodes: dict[str, StoreTool]) -> int:
    before = {node: tool.values() for node, tool in nodes.items()}
    looks = 0
    while not args.count or looks < args.count:
        began = time.monotonic()
        time.sleep(args.every)
        now = {node: tool.values() for node, tool in nodes.items()}
        seconds = time.monotonic() - began
        if args.json:
            print(json.dumps({node: changes(before[node], now[node], seconds) for node in now}), flush=True)
        else:
            print(top_screen(before, now, seconds), flush=True)
        before, looks = now, looks + 1
    return 0


def _pin(args: argparse.Namespace, nodes: dict[str, StoreTool]) -> int:
    chosen = _chosen(args, nodes)
    # One by one: the blocks given need not be a chain.
    done = {node: sum(nodes[node].pin([name], args.seconds) for name in names) for node, names in chosen.items()}
    return _show(args, done, f"blocks pinned for {args.seconds:g} s")


def _unpin(args: argparse.Namespace, nodes: dict[str, StoreTool]) -> int:
    return _show(args, {n: nodes[n].unpin(names) for n, names in _chosen(args, nodes).items()}, "pins ended")


def _quota(args: argparse.Namespace, nodes: dict[str, StoreTool]) -> int:
    if (args.tenant is None) == (args.tenant_id is None):
        raise InputError("give either --tenant or --tenant-id", "tenant")
    if args.amount is None or not (args.amount == "default" or args.amount.isdecimal()):
        raise InputError(f"--quota is a number of blocks or `default`, not {args.amount!r}", "quota")
    blocks = None if args.amount == "default" else int(args.amount)
    held = {}
    for node, tool in nodes.items():
        try:
            tenant = bytes.fromhex(args.tenant_id) if args.tenant_id else tool.tenant(tenant_salt(args.tenant))
        except ValueError as error:
            raise InputError(f"--tenant-id {args.tenant_id!r} is not hexadecimal", "tenant_id") from error
        held[node] = tool.set_quota(tenant, blocks)
    return _show(args, held, f"blocks held, quota {args.amount}")


def _show(args: argparse.Namespace, found: dict[str, int], what: str) -> int:
    print(json.dumps(found) if args.json else "\n".join(f"{node}  {count} {what}" for node, count in found.items()))
    return 0


def _chosen(args: argparse.Namespace, nodes: dict[str, StoreTool]) -> dict[str, list[BlockName]]:
    """The blocks that the arguments name, per node. Raises InputError for one that is nowhere or not unique."""
    if not args.blocks:
        raise InputError("name the blocks (see `headrace store ls`)", "blocks")
    names = {node: [block.name for block in tool.blocks()] for node, tool in nodes.items()}
    everything = {name.hex() for found in names.values() for name in found}
    wanted = set()
    for prefix in args.blocks:
        hits = [name for name in everything if name.startswith(prefix.lower())]
        if len(prefix) < LEAST_PREFIX or len(hits) != 1:
            raise InputError(f"{prefix!r} fits {len(hits)} blocks; give {LEAST_PREFIX} digits or more of one", "blocks")
        wanted.add(hits[0])
    return {node: [name for name in found if name.hex() in wanted] for node, found in names.items()}


ACTIONS: dict[str, tuple[Callable[[argparse.Namespace, dict[str, StoreTool]], int], str]] = {
    "stats": (_stats, "gauges and counters"),
    "ls": (_ls, "blocks of a place"),
    "verify": (_verify, "check every digest of the host tier; exit 1 if one does not fit"),
    "flush": (_flush, "drop what nothing holds"),
    "top": (_top, "what happens, live"),
    "pin": (_pin, "keep blocks for --seconds"),
    "unpin": (_unpin, "let them go"),
    "quota": (_quota, "limit a tenant"),
}
