"""Train the models that ship: the same layers that serve, with a memory that forgets when the step ends.

Two processes of one thread each, their gradients averaged; bfloat16 autocast; layers compiled one by one. Training is
bounded by wall time and can be resumed: the same command goes on from the last saved state.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from minserve.errors import CheckpointError, InvalidValue, MinserveError
from minserve.model.config import ModelConfig
from minserve.model.corpus import Corpus, load_corpus
from minserve.model.hybrid_lm import HybridLM
from minserve.model.losses import losses
from minserve.model.optimizer import make_optimizers
from minserve.model.practice import Practice


class TrainingDiverged(MinserveError):
    """A training whose numbers are no longer finite: it stops, and its last saved state is kept."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Fields: `minutes` of wall time; `row_tokens` pairs (share of the time, tokens per row), shares rising to 1;
    `tokens_per_process` of each step; `practice_share` and `tests_share` of the rows, the rest being library text;
    loss weights of the two MTP depths (the second from `mtp_deep_from` of the time on), of balance and of router size.
    """

    minutes: float = 82.0
    num_processes: int = 2
    tokens_per_process: int = 4096
    row_tokens: tuple[tuple[float, int], ...] = ((0.75, 512), (0.94, 2048), (1.0, 4096))
    practice_share: float = 0.2
    tests_share: float = 0.1
    mtp_weights: tuple[float, float] = (0.2, 0.1)
    mtp_deep_from: float = 0.7
    balance_weight: float = 0.003
    router_weight: float = 1e-4
    warmup_steps: int = 40
    constant_share: float = 0.4
    final_lr_share: float = 0.02
    save_every_s: float = 300.0
    compile_layers: bool = True
    seed: int = 0

    def __post_init__(self):
        for name in ("minutes", "num_processes", "tokens_per_process", "save_every_s"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "above 0")


# Let the allocator keep freed memory (giving it back and faulting it in again doubles a step's time), and let oneDNN
# keep every shape's primitive.
PROCESS_SETTINGS = MappingProxyType({
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**35), "MALLOC_TOP_PAD_": str(2**28),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4096", "OMP_NUM_THREADS": "1",
})  # fmt: skip


@torch.no_grad()
def initialize(model: HybridLM, seed: int) -> None:
    """Draw fresh weights: outputs of every block start at zero, forgetting speeds from 1 to a thousand tokens.

    Changes: the model's parameters.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj", "lm_head.weight")):
            p.zero_()
        elif name.endswith("dt_bias"):
            dt = torch.exp(torch.empty_like(p).uniform_(np.log(1e-3), np.log(1e-1), generator=generator))
            p.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        elif name.endswith("A_log"):
            p.copy_(torch.empty_like(p).uniform_(1, 8, generator=generator).log())
        elif name.endswith("embed_tokens.weight"):
            p.normal_(0, 0.3, generator=generator)
        elif p.ndim >= 2:
            p.normal_(0, 0.5 * p.shape[-1] ** -0.5, generator=generator)


def make_batch(
    corpus: Corpus, config: TrainConfig, num_rows: int, row_tokens: int, seed: list[int]
) -> Int[Tensor, "rows t"]:
    """Draw rows of row_tokens + 3 tokens: the inputs, and the targets of three depths."""
    rng = np.random.default_rng(seed)
    practice = Practice(corpus.library, rng)
    rows = []
    for _ in range(num_rows):
        kind = rng.random()
        if kind < config.practice_share:
            rows.append(np.array(practice.row(row_tokens + 3)))
            continue
        source = (
            corpus.tests if kind < config.practice_share + config.tests_share and len(corpus.tests) else corpus.library
        )
        start = int(rng.integers(len(source) - row_tokens - 3))
        rows.append(source[start : start + row_tokens + 3])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


class Trainer:
    """One process's half of the work: its rows, the shared gradient, the schedule, the saved state."""

    def __init__(self, model_config: ModelConfig, config: TrainConfig, out: Path, rank: int, corpus: Corpus):
        self.config, self.out, self.rank, self.corpus = config, out, rank, corpus
        self.model = HybridLM(model_config, impl="train")
        initialize(self.model, config.seed)
        self.optimizers = make_optimizers(self.model)
        self.base_lrs = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.step, self.elapsed_s, self.num_tokens = 0, 0.0, 0
        if (out / "state.pt").exists():
            self.load()
        layers = [*self.model.model.layers, *(self.model.mtp.layers if self.model.mtp else [])]
        for layer in layers if config.compile_layers else []:
            layer.compile(dynamic=False)
        params = list(self.model.parameters())
        self.flat_grad = torch.zeros(sum(p.numel() for p in params))
        for p, view in zip(params, self.flat_grad.split([p.numel() for p in params]), strict=True):
            p.grad = view.view_as(p)

    def train_step(self) -> dict[str, float]:
        """Run one batch and update the weights. Changes: the model, the optimizers, the counts."""
        share = self.elapsed_s / (60 * self.config.minutes)
        row_tokens = next(tokens for until, tokens in self.config.row_tokens if share < until or until == 1.0)
        num_rows = max(1, self.config.tokens_per_process // row_tokens)
        rows = make_batch(self.corpus, self.config, num_rows, row_tokens, [self.config.seed, self.step, self.rank])
        with torch.autocast("cpu", torch.bfloat16):
            parts = losses(self.model, rows, deep=share >= self.config.mtp_deep_from)
        weights = {"main": 1.0, "mtp1": self.config.mtp_weights[0], "mtp2": self.config.mtp_weights[1],
                   "balance": self.config.balance_weight, "router": self.config.router_weight}  # fmt: skip
        self.flat_grad.zero_()
        sum(weights[name] * loss for name, loss in parts.items()).backward()
        dist.all_reduce(self.flat_grad)
        self.flat_grad /= self.config.num_processes
        norm = self.flat_grad.norm().item()
        if not math.isfinite(norm):
            raise TrainingDiverged(f"step {self.step}: the gradient is {norm}; {self.out / 'state.pt'} is as it was")
        self.flat_grad *= min(1.0, 1.0 / (norm + 1e-6))
        for optimizer, lrs in zip(self.optimizers, self.base_lrs, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * self.lr_share(share)
            optimizer.step()
        self.step += 1
        self.num_tokens += num_rows * row_tokens * self.config.num_processes
        return {name: loss.item() for name, loss in parts.items()}

    def lr_share(self, share: float) -> float:
        """The learning rate at a share of the time: warm-up in steps, constant, then linear to the final share."""
        falling = max(0.0, share - self.config.constant_share) / (1 - self.config.constant_share)
        level = 1 - min(1.0, falling) * (1 - self.config.final_lr_share)
        return level * min(1.0, (self.step + 1) / self.config.warmup_steps)

    def save(self) -> None:
        """Write everything needed to go on. Changes: state.pt, in one move."""
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers],
                 "config": self.model.config.to_dict(),
                 "step": self.step, "elapsed_s": self.elapsed_s, "num_tokens": self.num_tokens}  # fmt: skip
        torch.save(state, self.out / "state.tmp")
        os.replace(self.out / "state.tmp", self.out / "state.pt")

    def load(self) -> None:
        """Go on from state.pt. Changes: the model, the optimizers, the counts."""
        state = torch.load(self.out / "state.pt", weights_only=True)
        if state["config"] != self.model.config.to_dict():
            raise CheckpointError(f"{self.out / 'state.pt'} is the training of a model of another shape")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.elapsed_s, self.num_tokens = state["step"], state["elapsed_s"], state["num_tokens"]


def run_process(rank: int, model_config: ModelConfig, config: TrainConfig, out: Path, store: str) -> None:
    """One training process: pinned to its core, in step with the others until the time is up."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) >= config.num_processes:
        os.sched_setaffinity(0, {cores[rank]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=config.num_processes)
    torch._dynamo.config.recompile_limit = 128
    # By default a compiled backward pass runs under the forward's autocast, and the triangular solve's gradient is NaN.
    torch._functorch.config.backward_pass_autocast = "off"
    _run_until_time_is_up(Trainer(model_config, config, out, rank, load_corpus()))
    dist.destroy_process_group()


def _run_until_time_is_up(trainer: Trainer) -> None:
    """Take steps; the first process keeps the time, saves, and shows progress. Changes: the trainer, its folder."""
    limit_s, is_first = 60 * trainer.config.minutes, trainer.rank == 0
    clock = torch.zeros(1, dtype=torch.float64)
    started, saved_s = time.monotonic() - trainer.elapsed_s, trainer.elapsed_s
    bar = tqdm(total=round(limit_s), unit="s", disable=not is_first, mininterval=5)
    log = _losses_up_to(trainer.out / "losses.jsonl", trainer.step) if is_first else None
    while trainer.elapsed_s < limit_s:
        parts = trainer.train_step()
        clock[0] = time.monotonic() - started
        dist.broadcast(clock, 0)  # one clock decides for all
        trainer.elapsed_s = clock.item()
        if is_first:
            bar.n, bits = min(bar.total, round(trainer.elapsed_s)), parts["main"] / math.log(2)
            bar.set_postfix(step=trainer.step, MB=f"{trainer.num_tokens / 1e6:.1f}", bits=f"{bits:.3f}")
            counts = {"step": trainer.step, "s": round(trainer.elapsed_s, 1), "tokens": trainer.num_tokens}
            log.write(json.dumps({**counts, **parts}) + "\n")
            if trainer.elapsed_s - saved_s > trainer.config.save_every_s or trainer.elapsed_s >= limit_s:
                log.flush()
                trainer.save()
                saved_s = trainer.elapsed_s


def _losses_up_to(path: Path, step: int) -> TextIO:
    """The log of losses, open for more, without what was logged after the last saved state. Changes: the file."""
    lines = path.read_text().splitlines()[:step] if path.exists() else []
    path.write_text("".join(line + "\n" for line in lines))
    return path.open("a")


def train(model_config: ModelConfig, config: TrainConfig, out: str | Path) -> Path:
    """Train a model from the running Python's own library, and return the folder of the training state.

    Arguments:
        model_config: the shape.
        config: how; see TrainConfig.
        out: a folder; a state.pt in it is gone on from.
    Changes: writes state.pt (weights, optimizers, counts) and losses.jsonl there.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    before = {**os.environ}
    os.environ.update(PROCESS_SETTINGS)  # read by the processes when they start
    try:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (model_config, config, out, f"{folder}/store")
            torch.multiprocessing.spawn(run_process, arguments, nprocs=config.num_processes)
    finally:
        for name in PROCESS_SETTINGS.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    return out
