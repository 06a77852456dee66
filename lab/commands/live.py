"""Arguments and steps that `replay` and `bench` share."""

import argparse
import asyncio

from headrace.errors import HeadraceError, InputError
from headrace.lab.live.http import Client
from headrace.lab.live.replay import Measured, Replay, ReplaySettings
from headrace.lab.traces.form import Trace


def add_live_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the service answers")
    parser.add_argument("--api-key", default="", help="key of a client")
    parser.add_argument("--model", default="", help="empty: the first model of /v1/models")
    parser.add_argument("--keep-cache", action="store_true", help="do not flush the prefix cache first (admin)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--csv", default="", metavar="FILE", help="write CSV")


def run_live(client: Client, trace: Trace, settings: ReplaySettings, *, flush: bool) -> list[Measured]:
    """Replay `trace`. Raises InputError when no request got through."""

    async def go() -> list[Measured]:
        if flush:
            try:
                await client.call("POST", "/flush_cache")
            except HeadraceError as error:
                raise InputError(f"the cache could not be flushed ({error}); --keep-cache runs without") from error
        results = await Replay(client, trace, settings).run()
        if all(result.error for result in results):
            raise InputError(f"no request succeeded; the first one: {results[0].error}")
        return results

    return asyncio.run(go())
