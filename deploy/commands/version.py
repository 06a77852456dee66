"""`headrace version`: what is installed, without importing it."""

import argparse
import importlib.metadata
import json
import platform

from headrace import __version__

HELP = "Print the versions of Headrace, Python and the libraries it runs on."
EXAMPLE = "headrace version --json"
LIBRARIES = ("torch", "triton", "ray", "redis", "grpcio", "transformers", "fastapi", "uvicorn", "msgpack", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(args: argparse.Namespace) -> int:
    found = versions()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{name:14}{version}" for name, version in found.items()))
    return 0


def versions() -> dict[str, str]:
    """Version by name; a library that is absent is `not installed`."""
    found = {"headrace": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
