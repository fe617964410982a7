"""Who runs in a bench: each way of serving as one function from requests to the log of their run.

Every contender's figures are read from its log by the same code, so they mean the same for all. A single number of
tokens per second says more about the machine and the minute than about the code. So each round runs every contender
once, in turn, and what is reported is a ratio within a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from minserve.bench.peers import transformers_batches
from minserve.clock import RealClock
from minserve.engine import Engine, Progress
from minserve.engine_config import EngineConfig
from minserve.errors import InvalidValue
from minserve.events import EventKind, EventLog
from minserve.freed_memory import keep_freed_memory
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import run_alone
from minserve.model.static_batch import serve_static
from minserve.model.tokenizer import load_tokenizer
from minserve.request import Request, Status
from minserve.stopping import Decoder, StopChecker

PEERS = ("transformers",)

Serve = Callable[[Sequence[Request]], EventLog]


def contenders(folder: Path, config: EngineConfig, batch_size: int, against: str | None = None) -> dict[str, Serve]:
    """The ways of serving a checkpoint, by name.

    `naive` is the plain loop, one request after the other. `static` runs static batches, one after the other.
    `continuous` is the engine, with nothing in its prefix cache at first. A peer runs static batches of the same size.
    Each takes fresh requests, which all arrive at once, in order, and returns its log, whose clock starts with them.
    The loop and the static batch make their memory as they need it; the engine has its pools before. naive and
    continuous turn tokens into text as they go, static and the peer do not.

    Arguments:
        folder: the checkpoint.
        config: the engine's; its dtype and device are everybody's.
        batch_size: requests of a static batch.
        against: None or one of `PEERS`.
    Errors: InvalidValue for an unknown peer, MissingRequirement for one that is not installed.
    Changes: on a CPU, how this process's allocator treats freed memory, for all contenders alike.
    """
    if against not in (None, *PEERS):
        raise InvalidValue("against", against, "one of " + ", ".join(PEERS))
    if torch.device(config.device).type == "cpu":
        keep_freed_memory()
    dtype = getattr(torch, config.dtype)
    model = HybridLM.from_checkpoint(folder, dtype, config.device, config.impl)
    new_decoder = load_tokenizer(folder).incremental
    engine = Engine(model, model.config, config, EventLog(RealClock()), new_decoder)

    def naive(requests: Sequence[Request]) -> EventLog:
        log = EventLog(RealClock())
        for _ in serve_in_turn(model, requests, log, new_decoder, config.batch_tokens):
            pass
        return log

    def static(requests: Sequence[Request]) -> EventLog:
        log = EventLog(RealClock())
        serve_static(model, [(0.0, request) for request in requests], log, batch_size)
        return log

    def continuous(requests: Sequence[Request]) -> EventLog:
        engine.weights_changed()  # what an earlier round has computed is not found again
        log = engine.log = EventLog(RealClock())
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
        return log

    serves: dict[str, Serve] = {"naive": naive, "static": static, "continuous": continuous}
    if against is not None:
        serves[against] = transformers_batches(folder, dtype, batch_size, config.device)
    return serves


def serve_in_turn(
    model: HybridLM, requests: Sequence[Request], log: EventLog, new_decoder: Callable[[], Decoder],
    batch_tokens: int = 512,
) -> Iterator[Progress]:  # fmt: skip
    """Serve requests as a loop around generate() does: all arrive now, and each runs alone when its turn comes.

    Arguments:
        model: any checkpoint.
        requests: waiting, nothing computed; each wants at least one token.
        log: every event is recorded here.
        new_decoder: makes an incremental decoder for each output.
        batch_tokens: prompt tokens per step at most.
    Returns an iterator over what each step brought, as `Engine.step` says it; going on is what runs the next one.
    Changes: the requests, the log.
    """
    for request in requests:
        log.record(EventKind.ARRIVED, request.id, prompt_tokens=len(request.prompt_ids))
    for request in requests:
        request.status = Status.RUNNING
        log.record(EventKind.ADMITTED, request.id, cached_tokens=0)
        checker = StopChecker(request.params, new_decoder(), model.config.eos_token_ids)
        for sampled in run_alone(model, request, log, batch_tokens):
            kept = checker.push((sampled.token_id,))
            log.record(EventKind.TOKENS, request.id, count=1)
            if kept.finish_reason is not None:
                request.finish(kept.finish_reason)
                log.record(EventKind.FINISHED, request.id, reason=str(kept.finish_reason))
            yield Progress(request, (sampled.token_id,), kept.text, (sampled.logprobs,), kept.finish_reason)
            if kept.finish_reason is not None:
                break


def run_rounds(
    serves: dict[str, Serve], new_requests: Callable[[], list[Request]], rounds: int
) -> Iterator[tuple[str, list[Request], EventLog]]:
    """Run every contender once per round, in turn, after one uncounted round.

    Arguments:
        serves: the contenders by name.
        new_requests: makes the same requests anew.
        rounds: how many are counted, at least 1.
    Returns an iterator over each counted run: whose, its requests as they ended, its log.
    """
    if rounds < 1:
        raise InvalidValue("rounds", rounds, "at least 1")
    runs = [(counted, name) for counted in [False] + [True] * rounds for name in serves]
    with tqdm(runs, desc="bench", leave=False) as progress:
        for counted, name in progress:
            progress.set_postfix_str(name)
            requests = new_requests()
            log = serves[name](requests)
            if counted:
                yield name, requests, log
