"""`headrace status`: ask a running service's router."""

import argparse
import json
import urllib.error
import urllib.request

from headrace.config import Config
from headrace.errors import RankLost

HELP = "Show the health and the counters of a running service."
EXAMPLE = "headrace status --url http://127.0.0.1:8000"
TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="where the router answers (default: router.host and router.port)")
    parser.add_argument("--key", default="", help="API or admin key, if the service asks for one")
    parser.add_argument("--metrics", action="store_true", help="also the counters of /metrics")


def run(args: argparse.Namespace) -> int:
    """0: healthy, 1: it answers but is not healthy."""
    url = (args.url or default_url(args.config)).rstrip("/")
    code, body = fetch(f"{url}/health", args.key)
    try:
        health = json.loads(body)
    except ValueError:
        health = {"text": body.strip()}
    result = {"url": url, "healthy": code == 200, "health": health}
    if args.metrics:
        result["metrics"] = parse_metrics(fetch(f"{url}/metrics", args.key)[1])
    print(json.dumps(result, indent=2) if args.json else render(result))
    return 0 if code == 200 else 1


def default_url(config: Config) -> str:
    host = config.router.host
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{config.router.port}"


def fetch(url: str, key: str) -> tuple[int, str]:
    """(HTTP status, body). Raises RankLost when nothing answers."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, ValueError) as error:
        raise RankLost(f"no service answers at {url}: {getattr(error, 'reason', error)}") from error


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as name{labels} -> value."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            found[name] = float(value)
    return found


def render(result: dict[str, object]) -> str:
    lines = [f"{result['url']}: {'healthy' if result['healthy'] else 'NOT healthy'}"]
    for part in ("health", "metrics"):
        values = result.get(part)
        if isinstance(values, dict):
            lines += [f"  {name}: {value}" for name, value in values.items()]
    return "\n".join(lines)
