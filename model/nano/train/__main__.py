"""Command line of the nano model's training: `corpus`, `tokenizer`, `fit`, `report`, `random`."""

import argparse
import time
from pathlib import Path

import torch

from headrace.model.nano import checkpoint_path
from headrace.model.nano.train.corpus import data_sheet, gather
from headrace.model.nano.train.export import random_weights, write_checkpoint
from headrace.model.nano.train.loop import Plan, Trainer
from headrace.model.nano.train.naming import named_views
from headrace.model.nano.train.report import write_report
from headrace.model.nano.train.shape import NanoShape
from headrace.model.nano.train.tokenizer import train_tokenizer, write_tokenizer
from headrace.model.nano.train.tokens import Corpus


def _corpus(args: argparse.Namespace) -> None:
    began = time.monotonic()
    training, held_out, refused = gather()
    args.sheet.write_text(data_sheet(training, held_out, refused))
    print(f"gathered {sum(p.text_bytes for p in training):,} bytes in {time.monotonic() - began:.0f} s", flush=True)
    corpus = Corpus.build(training, held_out, args.checkpoint)
    corpus.save(args.corpus)
    counts = ", ".join(f"{name} {s.ids.numel():,}" for name, s in vars(corpus).items())
    print(f"tokens: {counts}; {time.monotonic() - began:.0f} s", flush=True)


def _tokenizer(args: argparse.Namespace) -> None:
    training, _, _ = gather()
    write_tokenizer(train_tokenizer(training, NanoShape()), NanoShape(), args.checkpoint)


def _fit(args: argparse.Namespace) -> None:
    plan = Plan(
        args.budget_s, args.stop_after_s or args.minutes * 60, args.rate, args.shrink, not args.eager, args.log_every
    )
    trainer = Trainer(NanoShape(), Corpus.load(args.corpus), args.device, plan)
    if args.resume:
        trainer.load(args.state)
    trainer.run()
    trainer.save(args.state)
    write_checkpoint(named_views(trainer.model), NanoShape(), args.out)
    print(f"done: {vars(trainer.progress)}", flush=True)


def _report(args: argparse.Namespace) -> None:
    report = write_report(args.checkpoint, Corpus.load(args.corpus).held_out, args.device, args.long, args.shrink)
    args.out.write_text(report)
    print(report, flush=True)


def _random(args: argparse.Namespace) -> None:
    write_checkpoint(random_weights(NanoShape()), NanoShape(), args.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headrace.model.nano.train", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, run, text in (
        ("corpus", _corpus, "gather and encode the training text"),
        ("tokenizer", _tokenizer, "train the tokenizer on the same text"),
        ("fit", _fit, "train, then export"),
        ("report", _report, "measure an exported checkpoint"),
        ("random", _random, "write an untrained checkpoint"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.set_defaults(run=run)
        verb.add_argument("--checkpoint", type=Path, default=checkpoint_path(), help="folder with the tokenizer")
        verb.add_argument("--corpus", type=Path, default=Path("nano-corpus.pt"), help="encoded text")
        verb.add_argument("--out", type=Path, default=Path("nano-out"), help="what the verb writes")
        verb.add_argument("--device", default=device)
        if name == "corpus":
            verb.add_argument("--sheet", type=Path, default=Path("DATA.md"))
        if name == "report":
            verb.add_argument("--long", action="store_true", help="also measure 32K windows")
        if name in ("fit", "report"):
            verb.add_argument("--shrink", type=int, default=1, help="divide lengths and batches, for dry runs")
        if name == "fit":
            verb.add_argument("--minutes", type=float, default=15.0, help="time of this run")
            verb.add_argument("--stop-after-s", type=float, default=0.0, help="the same in seconds")
            verb.add_argument("--budget-s", type=float, default=900.0, help="time of all runs; stages are shares of it")
            verb.add_argument("--rate", type=float, default=8e-3, help="peak learning rate")
            verb.add_argument("--state", type=Path, default=Path("nano-state.pt"))
            verb.add_argument("--resume", action="store_true")
            verb.add_argument("--eager", action="store_true", help="compile nothing")
            verb.add_argument("--log-every", type=int, default=50)
    return parser


if __name__ == "__main__":
    arguments = _parser().parse_args()
    torch.set_float32_matmul_precision("high")
    arguments.run(arguments)
