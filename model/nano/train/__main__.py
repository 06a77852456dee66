"""Command line of the nano model's training: `make` does all of it; `tokenizer`, `corpus`, `fit`, `baseline`, `random`
are its parts. Measuring is `headrace model eval`."""

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from headrace.model.nano import checkpoint_path
from headrace.model.nano.evaluate.evaluate import FULL, HALF
from headrace.model.nano.evaluate.held_out import even_windows, held_out_tokens, read_held_out
from headrace.model.nano.evaluate.measures import baseline_bits_a_byte
from headrace.model.nano.evaluate.ngram import ByteNgram
from headrace.model.nano.train.corpus import data_sheet, gather
from headrace.model.nano.train.export import random_weights, read_checkpoint, write_checkpoint
from headrace.model.nano.train.loop import Plan, Trainer
from headrace.model.nano.train.naming import load_weights, named_views
from headrace.model.nano.train.schedule import SCHEDULES
from headrace.model.nano.train.shape import NanoShape
from headrace.model.nano.train.tokenizer import train_tokenizer, write_tokenizer
from headrace.model.nano.train.tokens import Corpus


def _corpus(args: argparse.Namespace) -> None:
    began = time.monotonic()
    training, held_out, refused = gather(args.site)
    args.sheet.write_text(data_sheet(training, held_out, refused))
    print(f"gathered {sum(p.text_bytes for p in training):,} bytes in {time.monotonic() - began:.0f} s", flush=True)
    corpus = Corpus.build(training, held_out, args.checkpoint)
    corpus.save(args.corpus)
    counts = ", ".join(f"{name} {s.ids.numel():,}" for name, s in vars(corpus).items())
    print(f"tokens: {counts}; {time.monotonic() - began:.0f} s", flush=True)


def _baseline(args: argparse.Namespace) -> None:
    """Bits a byte of the byte 5-gram trained on the whole training text, over the windows of the full evaluation."""
    began = time.monotonic()
    training, _, _ = gather(args.site)
    texts = [text.encode() + b"\0" for package in training for _, text in package.documents]
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    windows = even_windows(held_out_tokens(read_held_out(), tokenizer), FULL.windows, 2 * HALF + 1)
    found: dict[str, float] = {"trained_on_bytes": sum(map(len, texts))}
    found |= {f"bits_a_byte_order_{n}": baseline_bits_a_byte(ByteNgram(texts, n), tokenizer, windows) for n in (5, 6)}
    found["seconds"] = round(time.monotonic() - began)
    print(json.dumps(found), flush=True)


def _tokenizer(args: argparse.Namespace) -> None:
    training, _, _ = gather(args.site)
    write_tokenizer(train_tokenizer(training, NanoShape()), NanoShape(), args.checkpoint)


def _fit(args: argparse.Namespace) -> None:
    plan = Plan(
        args.budget_s,
        args.stop_after_s or args.budget_s,
        SCHEDULES[args.schedule],
        args.shrink,
        not args.eager,
        args.log_every,
    )
    trainer = Trainer(NanoShape(), Corpus.load(args.corpus), args.device, plan)
    if args.resume:
        trainer.load(args.state)
    elif args.start is not None:
        load_weights(trainer.model, read_checkpoint(args.start))
    trainer.run()
    if args.state is not None:
        trainer.save(args.state)
    write_checkpoint(named_views(trainer.model), NanoShape(), args.out)
    print(f"done: {vars(trainer.progress)}", flush=True)


def _make(args: argparse.Namespace) -> None:
    """The whole of it: corpus, first schedule from nothing, second schedule from its weights."""
    _corpus(args)
    for schedule, budget in (("first", args.first_s), ("second", args.second_s)):
        args.schedule, args.budget_s = schedule, budget
        _fit(args)
        args.start = args.out


def _random(args: argparse.Namespace) -> None:
    write_checkpoint(random_weights(NanoShape()), NanoShape(), args.out)


def _fit_arguments(verb: argparse.ArgumentParser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    verb.add_argument("--device", default=device)
    verb.add_argument("--start", type=Path, help="go on from the weights of this checkpoint folder")
    verb.add_argument("--stop-after-s", type=float, default=0.0, help="end this run early, to be resumed")
    verb.add_argument("--state", type=Path, help="file for weights and optimiser, to resume from")
    verb.add_argument("--resume", action="store_true")
    verb.add_argument("--shrink", type=int, default=1, help="divide lengths and batches, for dry runs")
    verb.add_argument("--eager", action="store_true", help="compile nothing")
    verb.add_argument("--log-every", type=int, default=50)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headrace.model.nano.train", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    for name, run, text in (
        ("make", _make, "everything: gather and encode the text, train from nothing, train for long contexts"),
        ("corpus", _corpus, "gather and encode the training text"),
        ("tokenizer", _tokenizer, "train the tokenizer on the same text"),
        ("fit", _fit, "train by one schedule, then export"),
        ("baseline", _baseline, "train and measure the byte n-gram model on the same text"),
        ("random", _random, "write an untrained checkpoint"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.set_defaults(run=run)
        verb.add_argument("--checkpoint", type=Path, default=checkpoint_path(), help="folder with the tokenizer")
        verb.add_argument("--corpus", type=Path, default=Path("nano-corpus.pt"), help="encoded text")
        verb.add_argument("--out", type=Path, default=Path("nano-out"), help="what the verb writes")
        verb.add_argument("--site", type=Path, action="append", default=[], help="a further folder of packages")
        verb.add_argument("--sheet", type=Path, default=Path("DATA.md"), help="list of what was read")
        if name in ("fit", "make"):
            _fit_arguments(verb)
        if name == "fit":
            verb.add_argument("--schedule", choices=sorted(SCHEDULES), default="first")
            verb.add_argument("--budget-s", type=float, default=835.0, help="time; phases are shares of it")
        if name == "make":
            verb.add_argument("--first-s", type=float, default=835.0)
            verb.add_argument("--second-s", type=float, default=450.0, help="some 100 s of it compile")
    return parser


if __name__ == "__main__":
    arguments = _parser().parse_args()
    torch.set_float32_matmul_precision("high")
    arguments.run(arguments)
