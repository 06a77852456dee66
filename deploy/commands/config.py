"""`headrace config`: the configuration tree, documented."""

import argparse
import dataclasses
import json
import textwrap
from typing import Any

import yaml

from headrace.config import Config, to_dict
from headrace.kvstore.policies import policy_names

HELP = "Print the configuration as YAML with each field's meaning, unit and allowed values."
EXAMPLE = "headrace config --set decode.dp=4 > my.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--choices", action="store_true", help="only the fields that take one of a list of values")


def run(args: argparse.Namespace) -> int:
    if args.choices:
        choices = {path: list(meta["choices"]) for path, _, meta in fields(args.config) if meta["choices"]}
        choices |= dict.fromkeys(("store.host_policy", "store.device_policy"), policy_names())
        print(json.dumps(choices, indent=2) if args.json else _choices_text(choices))
    elif args.json:
        print(json.dumps(to_dict(args.config), indent=2))
    else:
        print(as_yaml(args.config), end="")
    return 0


def fields(config: Config) -> list[tuple[str, Any, Any]]:
    """(dotted path, value, metadata) of every setting."""
    found = []
    for section in dataclasses.fields(config):
        node = getattr(config, section.name)
        found += [(f"{section.name}.{f.name}", getattr(node, f.name), f.metadata) for f in dataclasses.fields(node)]
    return found


def as_yaml(config: Config) -> str:
    """YAML that `--config` reads back to the same tree, every setting under its documentation."""
    lines = []
    for section in dataclasses.fields(config):
        lines += [f"# {section.metadata['doc']}", f"{section.name}:"]
        node = getattr(config, section.name)
        for field in dataclasses.fields(node):
            lines += [f"  # {line}" for line in textwrap.wrap(describe(field.metadata), 110)]
            value = getattr(node, field.name)
            plain = list(value) if isinstance(value, tuple) else value
            lines.append(textwrap.indent(yaml.safe_dump({field.name: plain}).rstrip(), "  "))
        lines.append("")
    return "\n".join(lines)


def describe(meta: Any) -> str:
    """Documentation, unit and allowed values of one setting in one text."""
    text = str(meta["doc"]).rstrip(".")
    if meta["unit"]:
        text += f" [{meta['unit']}]"
    if meta["choices"]:
        text += f". One of: {', '.join(map(str, meta['choices']))}"
    if meta["names"]:
        text += f". Or a mapping of: {', '.join(meta['names'])}"
    low, high = meta["minimum"], meta["maximum"]
    if low is not None or high is not None:
        text += f". Allowed: {'' if low is None else f'{low:g}'} .. {'' if high is None else f'{high:g}'}"
    return text


def _choices_text(choices: dict[str, list[Any]]) -> str:
    return "\n".join(f"{path}: {', '.join(map(str, values))}" for path, values in choices.items())
