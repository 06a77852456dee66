"""`headrace model`: what a model costs in memory, and how good the one that ships with Headrace is."""

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.model.plan import GroupPlan, ModelPlan

HELP = "Plan a model's memory over the ranks of a deployment; measure the nano checkpoint"
EXAMPLE = "headrace model plan --model GLM-5.2-FP8 --prefill-cp 8 --decode-ep 8 --hbm 288GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    nested = parser.add_subparsers(dest="model_command", required=True, metavar="COMMAND")
    plan = nested.add_parser("plan", help="weights of a rank by part, and the tokens of KV that fit beside them")
    plan.add_argument("--model", metavar="X", help="a directory, `nano` or a preset; default: `model.path`")
    plan.add_argument("--prefill-cp", type=int, metavar="N", help="ranks of a prefill group; default: `prefill.cp`")
    plan.add_argument(
        "--prefill-tp", type=int, default=0, metavar="N", help="a head-split prefill group (the baseline) instead"
    )
    plan.add_argument("--decode-ep", type=int, metavar="N", help="ranks of a decode group; default: `decode.dp`")
    plan.add_argument("--hbm", required=True, metavar="SIZE", help="memory of one device: 288GB, 141GB, 139.8GiB")
    plan.add_argument(
        "--reserve", default="10%", metavar="SIZE", help="kept for activations and buffers: a size or a share of --hbm"
    )
    # Given twice, so that it may stand on either side of the second word.
    plan.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="machine-readable output")
    plan.set_defaults(model_run=run_plan)
    measure = nested.add_parser("eval", help="measure a checkpoint of the nano family on held-out Python text")
    measure.add_argument("model", metavar="X", help="`nano`, or a directory that its training wrote")
    measure.add_argument("--quick", action="store_true", help="a minute or two instead of some twenty; rougher figures")
    measure.add_argument(
        "--no-baseline", action="store_true", help="leave out the byte 5-gram, which reads the packages installed here"
    )
    measure.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="machine-readable output")
    measure.set_defaults(model_run=run_eval)


def run(args: argparse.Namespace) -> int:
    code: int = args.model_run(args)
    return code


def run_plan(args: argparse.Namespace) -> int:
    from headrace.model.plan import plan_model

    config = args.config
    plan = plan_model(
        args.model or config.model.path,
        args.prefill_cp or config.prefill.cp,
        args.decode_ep or config.decode.dp,
        args.hbm,
        args.reserve,
        prefill_tp=args.prefill_tp,
    )
    if args.json:
        groups = [dataclasses.asdict(group) | {"weight_bytes": group.weight_bytes} for group in plan.groups]
        print(json.dumps(dataclasses.asdict(plan) | {"groups": groups, "fits": plan.fits}))
    else:
        print(render_plan(plan))
    return 0 if plan.fits else 1


def run_eval(args: argparse.Namespace) -> int:
    from headrace.model.nano.evaluate.evaluate import FULL, QUICK, Evaluation, installed_training_texts

    evaluation = Evaluation(args.model, QUICK if args.quick else FULL, lambda line: print(line, file=sys.stderr))
    texts, source = (None, "") if args.no_baseline else installed_training_texts()
    result = evaluation.run(texts, source)
    print(json.dumps(result) if args.json else render_eval(result))
    return 0


def render_eval(result: dict[str, Any]) -> str:
    loss, recall = result["loss"], result["recall"]
    lines = [f"held-out loss      {loss['nats_a_token']:.4f} nats a token, {loss['bits_a_byte']:.4f} bits a byte"]
    if "baseline" in result:
        base = result["baseline"]
        lines.append(
            f"byte 5-gram        {base['bits_a_byte']:.4f} bits a byte, from {base['trained_on_bytes']:,} bytes"
        )
    lines += ["", "tokens a verify step, 4 drafts, bonus included"]
    for name, got in result["accepted"].items():
        rates = " ".join(f"{rate:.2f}" for rate in got["by_draft"])
        lines.append(f"  {name:26s} {got['tokens_a_step']:.2f}   drafts accepted {rates}   {got['steps']} steps")
    lines += ["", "nats a token by position: whole context, 1,024 to 2,048 tokens of it, difference"]
    for name, got in result["long_context"].items():
        lines.append(f"  {name:14s} {got['nats']:.3f}  {got['short_context_nats']:.3f}  {got['cost']:+.3f}")
    lines += ["", f"dense attention caught by the selection (best possible); indexers in {recall['indexer_layers']}"]
    for name, got in recall["by_layer"].items():
        best = recall["best_possible"][name]
        lines.append(f"  {name:14s} " + " ".join(f"{a:.3f} ({b:.3f})" for a, b in zip(got, best, strict=True)))
    lines += ["", "replies to requests for a function"]
    for name, got in result["chat"].items():
        shares = ", ".join(f"{what} {got[what]:.0%}" for what in ("ended", "parses", "defines"))
        lines.append(f"  {name:26s} {shares} of {got['requests']}")
    lines.append(f"{result['seconds']} s")
    return "\n".join(lines)


def render_plan(plan: "ModelPlan") -> str:
    memory = f"{_gb(plan.hbm_bytes)} GB a device, {_gb(plan.reserve_bytes)} GB of them reserved (GB = 10^9 bytes)"
    lines = [
        f"{plan.model}: {plan.tensors:,} tensors, {_gb(plan.stored_bytes)} GB; {memory}",
        "",
        _row("", "checkpoint", *map(_title, plan.groups)),
    ]
    parts = list(dict.fromkeys([*plan.stored_parts, *(part for group in plan.groups for part in group.parts)]))
    for part in parts:
        lines.append(
            _row(part, *map(_gb, (plan.stored_parts.get(part, 0), *(g.parts.get(part, 0) for g in plan.groups))))
        )
    lines.append(_row("all weights", *map(_gb, (plan.stored_bytes, *(group.weight_bytes for group in plan.groups)))))
    lines.append(_row("left for KV", "", *(_gb(group.left_bytes) for group in plan.groups)))
    lines += ["", _row("KV tokens", "bytes/token", *(f"{group.role} group" for group in plan.groups))]
    for i, room in enumerate(plan.groups[0].kv):
        lines.append(_row(room.row_format, f"{room.bytes_per_token:,}", *(_tokens(g, i) for g in plan.groups)))
    longest = min(room.rank_tokens for group in plan.groups for room in group.kv)
    lines += ["", f"longest context of the model: {plan.max_context:,} tokens"]
    if not plan.fits:
        lines.append("DOES NOT FIT: " + "; ".join(_shortage(group) for group in plan.groups if not _fits(group)))
    elif longest < plan.max_context:
        lines.append("a rank holds less than that in some format: contexts beyond its tokens are refused")
    return "\n".join(lines)


def _title(group: "GroupPlan") -> str:
    return f"{group.role} rank ({'TP ' if group.head_split else ''}{group.ranks})"


def _tokens(group: "GroupPlan", i: int) -> str:
    room = group.kv[i]
    if room.group_tokens == room.rank_tokens:
        return f"{room.rank_tokens:,}"
    return f"{group.ranks} x {room.rank_tokens:,}"


def _fits(group: "GroupPlan") -> bool:
    return all(room.rank_tokens for room in group.kv)


def _shortage(group: "GroupPlan") -> str:
    if group.left_bytes < 0:
        return f"a {group.role} rank is {_gb(-group.left_bytes)} GB short for its weights"
    return f"a {group.role} rank has {group.left_bytes:,} bytes left, less than one block of 64 tokens"


def _row(name: str, *cells: str) -> str:
    return "  ".join([name.ljust(20), *(cell.rjust(18) for cell in cells)]).rstrip()


def _gb(count: int) -> str:
    """GB with two digits, four for what would vanish."""
    return f"{count / 1e9:.2f}" if not count or abs(count) >= 1e7 else f"{count / 1e9:.4f}"
