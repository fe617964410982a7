"""`minserve bench drafts`: drafters against none, in one run: how often they are right, what they cost, what is gained.

    tokens/step   what a request gets from a step: its drafts that were kept, and one token more
    i.i.d.        the same, foretold as if all drafts were kept at one rate, whatever became of those before
    needed        tokens a step must bring to pay: how long it takes, in steps without drafts
    at rate       that one rate at which the drafts that were made would bring them; none where not even all would do

A group of requests runs until one of them has all its tokens, so that the whole batch is in each step. Prompts are read
before that, and the time for it does not count.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from tqdm import tqdm

from minserve.bench.draft_runs import ALWAYS, DraftRun, Load, LoadedModels
from minserve.bench.drafts_on_text import acceptance_on_text
from minserve.draft_counts import DraftCounts, draft_counts
from minserve.errors import InvalidValue
from minserve.freed_memory import keep_freed_memory
from minserve.llm import shipped_checkpoint
from minserve.model.corpus import load_corpus
from minserve.model.tokenizer import Tokenizer

PROMPT_TOKENS = 128
FEWEST_PROMPTS, NUM_TEXTS = 4, 4
CHARS_PER_TOKEN = 4  # enough text for so many tokens; what is too much is cut
DEFAULT_DRAFTERS = ("ngram", "mtp", "model", "shuffled", "shuffled" + ALWAYS)
QUICK = MappingProxyType({"batches": (1, 2), "num_tokens": 8, "rounds": 1, "text_tokens": 48})


@dataclass(frozen=True)
class DraftResult:
    """A drafter at one temperature and batch size.

    Fields:
        drafter, temperature, batch: which.
        counts: what became of its drafts, all rounds together.
        step_ms: a whole step, drafting included; median over rounds.
        needed_tokens_per_step, needed_rate: see the module; from the median over rounds of the ratio of step times.
        tokens_per_s: median over rounds.
        ratio: over the tokens per second without drafts in the same round; median.
        num_same: outputs of the last round that are those without drafts, as far as both go; None where tokens are
            drawn. In float32 several positions at once round differently, and nearly equal logits may change places.
        num_outputs: of one round.
    """

    drafter: str
    temperature: float
    batch: int
    counts: DraftCounts
    step_ms: float
    needed_tokens_per_step: float
    needed_rate: float | None
    tokens_per_s: float
    ratio: float
    num_same: int | None
    num_outputs: int


@dataclass(frozen=True)
class DraftBench:
    """What was run, what came out, and what each drafter made of texts."""

    draft_tokens: int
    num_tokens: int
    rounds: int
    dtype: str
    num_threads: int
    results: tuple[DraftResult, ...]
    on_text: dict[str, DraftCounts]


def bench_drafts(
    path: str | Path | None = None,
    drafters: Sequence[str] = DEFAULT_DRAFTERS,
    batches: Sequence[int] = (1, 32),
    temperatures: Sequence[float] = (0.0, 0.8),
    draft_tokens: int = 3,
    num_tokens: int = 128,
    rounds: int = 3,
    text_tokens: int = 512,
    draft_path: str | Path | None = None,
    dtype: str = "float32",
    texts: Sequence[str] | None = None,
) -> DraftBench:
    """Let drafters serve the prompts that are served without, in turn; and let them guess at texts.

    Arguments:
        path: a checkpoint folder; None takes the shipped model's.
        drafters: "ngram"; "mtp", the model's head; "model", a small model; "shuffled", the head with its weights in
            disorder. With "-always" behind it, one drafts all it may in each step, whether that pays or not. "none"
            runs in any case.
        batches: requests in a step.
        temperatures: 0 takes the likeliest tokens.
        draft_tokens: of a request in a step, at most.
        num_tokens: output tokens of whoever has them all first, at least 2; each first one comes with the prompt.
        rounds: each drafter runs once per round, in turn, after one uncounted round, in which engines learn what pays.
        text_tokens: of each of `NUM_TEXTS` texts that are guessed at.
        draft_path: the small model's checkpoint folder; None takes the one that ships.
        dtype: of all models.
        texts: where prompts and texts are cut out; None takes what the shipped model was not trained on.
    Errors: InvalidValue for counts too small, an unknown drafter, or a model that has no MTP head to draft with.
    Changes: how this process's allocator treats freed memory.
    """
    at_least = {"batches": (batches, 1), "draft_tokens": ([draft_tokens], 1), "num_tokens": ([num_tokens], 2),
                "rounds": ([rounds], 1), "temperatures": (temperatures, 0)}  # fmt: skip
    for name, (values, least) in at_least.items():
        if not values or min(values) < least:
            raise InvalidValue(name, values, f"at least {least}")
    keep_freed_memory()
    names = list(dict.fromkeys(["none", *drafters]))
    models = LoadedModels(names, Path(path) if path else shipped_checkpoint(), draft_path, dtype)
    texts = list(load_corpus().held_out.values()) if texts is None else texts
    prompts = _pieces(texts, models.tokenizer, max(FEWEST_PROMPTS, *batches), PROMPT_TOKENS)
    cases = [Load(batch, temperature, PROMPT_TOKENS, num_tokens, draft_tokens)
             for temperature, batch in product(temperatures, batches)]  # fmt: skip
    results, on_text = [], {}
    for name in dict.fromkeys(name.removesuffix(ALWAYS) for name in names[1:]):
        pieces = tqdm(_pieces(texts, models.tokenizer, NUM_TEXTS, text_tokens), desc=f"{name}, text", leave=False)
        on_text[name] = acceptance_on_text(models.on_text(name), pieces, draft_tokens)
    with tqdm(total=len(cases) * (1 + rounds) * len(names), desc="bench", leave=False) as progress:
        for load in cases:
            runs = {name: models.new_run(name, load) for name in names}
            _serve_in_turn(runs, prompts[: max(1, FEWEST_PROMPTS // load.batch) * load.batch], rounds, progress)
            results += [_result(name, load, run, runs["none"]) for name, run in runs.items()]
    threads = torch.get_num_threads()
    return DraftBench(draft_tokens, num_tokens, rounds, dtype, threads, tuple(results), on_text)


def _pieces(texts: Sequence[str], tokenizer: Tokenizer, num: int, num_tokens: int) -> list[list[int]]:
    """Token ids of pieces from random places of random texts, the same ones every time."""
    rng, num_chars, pieces = np.random.default_rng(num_tokens), CHARS_PER_TOKEN * num_tokens, []
    for _ in range(num):
        text = texts[int(rng.integers(len(texts)))]
        start = int(rng.integers(max(1, len(text) - num_chars)))
        pieces.append(tokenizer.encode(text[start : start + num_chars])[:num_tokens])
    return pieces


def _serve_in_turn(runs: Mapping[str, DraftRun], prompts: Sequence[list[int]], rounds: int, progress: tqdm) -> None:
    """Let each run serve the prompts once per round, after a round that does not count. Changes: the runs."""
    for number in range(1 + rounds):
        for name, run in runs.items():
            progress.set_postfix_str(name)
            if number == 1:
                run.forget()
            run.serve(prompts)
            progress.update()


def _result(name: str, load: Load, run: DraftRun, without: DraftRun) -> DraftResult:
    """A run's figures, beside those of the run without drafts."""
    counts = draft_counts(run.engine.log)
    needed = statistics.median(ours / theirs for ours, theirs in zip(run.step_s, without.step_s, strict=True))
    ratios = (ours / theirs for ours, theirs in zip(run.tokens_per_s, without.tokens_per_s, strict=True))
    outputs = zip(run.outputs, without.outputs, strict=True)
    num_same = sum(ours == theirs[: len(ours)] for ours, theirs in outputs) if load.params.is_greedy else None
    return DraftResult(
        name, load.temperature, load.batch, counts, 1e3 * statistics.median(run.step_s), needed,
        counts.rate_for(needed), statistics.median(run.tokens_per_s), statistics.median(ratios), num_same,
        len(run.outputs),
    )  # fmt: skip


def table(bench: DraftBench) -> str:
    """The figures as lines of text."""
    width = max(len("given those"), 4 * bench.draft_tokens - 1)
    lines = [
        f"up to {bench.draft_tokens} drafts a step; prompts of {PROMPT_TOKENS} tokens, outputs of {bench.num_tokens}; "
        f"{bench.dtype}, {bench.num_threads} threads; medians of {bench.rounds} rounds",
        "",
        f"{'':{width + 36}}{'given those':{width}}",
        f"{'':15} {'drafts':>8} {'kept':>8}  {'by depth':{width}}  {'before':{width}}  {'tokens/step':>11} "
        f"{'i.i.d.':>6}  {'ms/step':>8} {'needed':>6} {'at rate':>7}  {'tokens/s':>8} {'/ none':>8} {'same':>7}",
    ]
    for case, results in groupby(bench.results, key=lambda r: (r.temperature, r.batch)):
        lines.append("temperature {}, batch {}".format(*case))
        for r in results:
            rate = "-" if r.needed_rate is None else _share(r.needed_rate)
            same = "-" if r.num_same is None else f"{r.num_same}/{r.num_outputs}"
            lines.append(
                f"{r.drafter:15} {_counted(r.counts, width)}  {r.step_ms:8.2f} {r.needed_tokens_per_step:6.2f} "
                f"{rate:>7}  {r.tokens_per_s:8.0f} {r.ratio:6.2f} x {same:>7}"
            )
    if bench.on_text:
        lines.append("on held-out text, at every place, the likeliest drafts")
        lines += [f"{name:15} {_counted(counts, width)}" for name, counts in bench.on_text.items()]
    return "\n".join(lines)


def _counted(counts: DraftCounts, width: int) -> str:
    """The columns that are counted."""
    by_depth, given = (
        " ".join(map(_share, rates)) or "-" for rates in (counts.acceptance, counts.conditional_acceptance)
    )
    return (
        f"{counts.num_drafted:8,} {counts.num_accepted:8,}  {by_depth:{width}}  {given:{width}}  "
        f"{counts.tokens_per_step:11.2f} {counts.iid_tokens_per_step:6.2f}"
    )


def _share(share: float | None) -> str:
    """A share in three characters: .71, 1.0, or " - " for none."""
    text = f"{share:.2f}" if share is not None else " - "
    return text[1:] if text[0] == "0" else text[:3]


def to_json(bench: DraftBench) -> str:
    """The same as JSON, with what follows from the counts."""
    told = asdict(bench)
    for result, row in zip(bench.results, told["results"], strict=True):
        row["counts"] |= _follows(result.counts)
    for name, counts in bench.on_text.items():
        told["on_text"][name] |= _follows(counts)
    return json.dumps(told)


def _follows(counts: DraftCounts) -> dict[str, object]:
    """What `DraftCounts` says beside what it counts."""
    names = ("acceptance", "conditional_acceptance", "rate", "tokens_per_step", "iid_tokens_per_step")
    return {name: getattr(counts, name) for name in names}
