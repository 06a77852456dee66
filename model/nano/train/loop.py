"""The training loop: runs stages until the time is up, balances experts, saves state that another run can resume."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.model.nano.train.layers import MoE
from headrace.model.nano.train.model import Losses, NanoModel
from headrace.model.nano.train.optim import Optimiser
from headrace.model.nano.train.schedule import FIRST, Schedule, Stage
from headrace.model.nano.train.shape import NanoShape
from headrace.model.nano.train.tokens import Corpus

BALANCE_RATE = 5e-3  # at the peak learning rate; it falls with it
# Weights beside the main loss: MTP step 0, each chained step, indexers, attention outside the selection.
DRAFT_WEIGHT, CHAIN_WEIGHT, INDEXER_WEIGHT, SPREAD_WEIGHT = 0.3, 0.2, 1.0, 0.1


@dataclass
class Progress:
    """What has been done so far, over all runs."""

    elapsed_s: float = 0.0
    steps: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """`budget_s` is the time of all runs together, `stop_after_s` of this one; `shrink` divides sizes in dry runs."""

    budget_s: float
    stop_after_s: float
    schedule: Schedule = FIRST
    shrink: int = 1
    compiled: bool = True
    log_every: int = 50


class Trainer:
    """Model, optimiser and random state on one device."""

    def __init__(self, shape: NanoShape, corpus: Corpus, device: str, plan: Plan, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.plan, self.device = plan, device
        self.model = NanoModel(shape).to(device)
        self.optimiser = Optimiser(self.model)
        self.corpus = corpus.to(device)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.progress = Progress()
        if plan.compiled:
            self.model.compile_parts()

    def save(self, path: Path) -> None:
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "progress": vars(self.progress),
            },
            path,
        )

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.progress = Progress(**state["progress"])
        self.generator.manual_seed(self.progress.steps)

    def run(self) -> None:
        """Trains until this run's time or the whole budget is spent. Compiling counts as training."""
        began, before = time.monotonic(), self.progress.elapsed_s
        current: Stage | None = None
        mark = (began, self.progress.tokens)
        while True:
            spent = time.monotonic() - began
            self.progress.elapsed_s = before + spent
            share = self.progress.elapsed_s / self.plan.budget_s
            if spent >= self.plan.stop_after_s or share >= 1.0:
                return
            stage = self.plan.schedule.stage_at(share, self.progress.steps)
            if stage is not current:
                self._enter(stage)
                current = stage
            losses = self._step(stage, self.plan.schedule.rate_at(share))
            if self.progress.steps % self.plan.log_every == 0:
                self._log(stage, losses, mark)
                mark = (time.monotonic(), self.progress.tokens)

    def _enter(self, stage: Stage) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(".indexer." in name or not stage.indexers_only)
        torch.compiler.set_stance("default" if stage.compiled else "force_eager")

    def _step(self, stage: Stage, rate: float) -> Losses:
        length = stage.length // self.plan.shrink
        count = max(1, stage.sequences // self.plan.shrink)
        window = length + 1 + stage.mode.draft_steps
        tokens = self.corpus.batch(count, window, self.generator)
        rows = self._rows(stage.mode.distil_rows, length)
        losses = self.model(tokens, rows, stage.mode, stage.chain_share)
        total = torch.zeros((), device=self.device)
        if not stage.indexers_only:
            total = losses.main + DRAFT_WEIGHT * losses.drafts[0] + CHAIN_WEIGHT * sum(losses.drafts[1:])
        if losses.indexers:
            total = total + INDEXER_WEIGHT * torch.stack(losses.indexers).sum()
        if losses.spreads:
            total = total + SPREAD_WEIGHT * torch.stack(losses.spreads).sum()
        total.backward()
        self.optimiser.step(rate)
        for parameter in self.model.parameters():
            parameter.grad = None
        if not stage.indexers_only:
            self._balance(losses, BALANCE_RATE * rate / self.plan.schedule.peak)
        self.progress.steps += 1
        self.progress.tokens += count * length
        return losses

    def _rows(self, count: int, length: int) -> Tensor | None:
        """Query rows to distil on, sorted, one drawn from each of `count` equal spans."""
        if count == 0:
            return None
        span = length / count
        draws = torch.rand(count, generator=self.generator, device=self.device)
        return ((torch.arange(count, device=self.device) + draws) * span).long().clamp_max(length - 1)

    @torch.no_grad()
    def _balance(self, losses: Losses, notch: float) -> None:
        """Moves each expert's selection bias one notch against its load, as auxiliary-loss-free balancing does."""
        for layer, load in losses.loads.items():
            moe = self.model.layers[layer].mlp
            if isinstance(moe, MoE):
                moe.bias += notch * torch.sign(load.mean() - load)

    def _log(self, stage: Stage, losses: Losses, mark: tuple[float, int]) -> None:
        def show(values: list[Tensor]) -> str:
            return " ".join(f"{v.item():.3f}" for v in values)

        main = losses.main.item()  # waits for the device, so the rate below is honest
        rate = (self.progress.tokens - mark[1]) / (time.monotonic() - mark[0])
        worst = max((load.max().item() for load in losses.loads.values()), default=0.0)
        print(
            f"{self.progress.elapsed_s:6.0f}s step {self.progress.steps:5d} {self.progress.tokens / 1e6:7.1f}M "
            f"{stage.name:10s} {rate / 1e3:6.0f}k tok/s  main {main:.3f}  drafts {show(losses.drafts)}  "
            f"indexers {show(losses.indexers)}  spreads {show(losses.spreads)}  top load {worst:.2f}",
            flush=True,
        )
