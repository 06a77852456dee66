"""`headrace serve`: run the whole service in the foreground."""

import argparse
import json
import os
import sys

from headrace import logs
from headrace.config import Config
from headrace.deploy.plan import ROUTER, Entries
from headrace.deploy.supervisor import Supervisor, install_signals
from headrace.errors import Cancelled

HELP = "Start the service: node daemon, prefill and decode ranks, router. Ctrl-C or SIGTERM stops it."
EXAMPLE = "headrace serve --set router.port=8000 --set decode.dp=2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fake", action="store_true", help="boxes without an engine, to try launchers and supervision")


def run(args: argparse.Namespace) -> int:
    logs.setup("supervisor")
    supervisor = make_supervisor(args.config, fake=args.fake)
    install_signals(supervisor)
    try:
        endpoints = supervisor.start()
        print(announcement(args.config, supervisor, endpoints, as_json=args.json), flush=True)
        return supervisor.watch()
    except Cancelled:
        return 0
    finally:
        supervisor.close()
        if not args.json:
            print("stopped", file=sys.stderr)


def make_supervisor(config: Config, *, fake: bool) -> Supervisor:
    """The supervisor of the real service, or of one whose boxes are `deploy.fake.FakeBox`."""
    if not fake:
        return Supervisor(config)
    from headrace.deploy.facts import ModelFacts

    return Supervisor(
        config, entries=Entries.all("headrace.deploy.fake:FakeBox"), facts=lambda _: ModelFacts(None, b"")
    )


def announcement(config: Config, supervisor: Supervisor, endpoints: dict[str, str], *, as_json: bool) -> str:
    """What is printed once the service answers: one JSON line, or the URL and a request to try."""
    url = endpoints[ROUTER]
    if as_json:
        ready = {"url": url, "endpoints": endpoints, "run_dir": supervisor.run_dir, "pid": os.getpid()}
        return json.dumps(ready)
    body = json.dumps({"prompt": "def fibonacci(n):\n", "max_tokens": 64, "temperature": 0})
    key = "-H 'Authorization: Bearer <key>' " if config.router.api_keys else ""
    return (
        f"ready at {url}   (Ctrl-C stops it; logs in {supervisor.run_dir})\n\n"
        f"  curl {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'\n"
    )
