"""What was reused, counted from a log, and what could have been."""

import numpy as np

from minserve.cache_hits import best_cached_tokens, cache_hits
from minserve.clock import VirtualClock
from minserve.events import EventKind, EventLog

K = EventKind


def life(log, name, prompt_tokens, cached, slices, again=None):
    """Write down a request that is let in once, or twice, and its slices as (start, stop, phase)."""
    log.record(K.ARRIVED, name, prompt_tokens=prompt_tokens)
    log.record(K.ADMITTED, name, cached_tokens=cached)
    for start, stop, phase in slices:
        log.record(K.SLICE, name, start=start, stop=stop, phase=phase, step=0)
    if again is not None:
        log.record(K.PREEMPTED, name, num_computed=slices[-1][1])
        log.record(K.ADMITTED, name, cached_tokens=again)


def test_hits_are_counted_at_the_first_admission_and_prefill_whenever_it_is_done():
    log = EventLog(VirtualClock())
    assert cache_hits(log).hit_rate == 0.0
    life(log, "a", 20, 0, [(0, 16, "prefill"), (16, 20, "prefill"), (20, 21, "decode")], again=16)
    log.record(K.SLICE, "a", start=16, stop=21, phase="prefill", step=1)
    life(log, "b", 12, 8, [(8, 12, "prefill"), (12, 13, "decode")])
    log.record(K.ARRIVED, "waits", prompt_tokens=99)
    life(log, "a fork of b", 12, 12, [(12, 13, "decode")])
    hits = cache_hits(log)
    assert (hits.prompt_tokens, hits.cached_tokens, hits.prefill_tokens) == (32, 8, 20 + 5 + 4)
    assert hits.hit_rate == 8 / 32


def test_the_best_cache_gives_all_but_the_last_token_of_what_was_known_before():
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 2, rng.integers(1, 9)).tolist()) for _ in range(40)]
    known = [prompt + tuple(rng.integers(0, 2, 3).tolist()) for prompt in prompts]
    best = best_cached_tokens(prompts, known)
    for number, prompt in enumerate(prompts):
        beginnings = {other[:n] for other in known[:number] for n in range(len(other) + 1)}
        assert best[number] == max((n for n in range(len(prompt)) if prompt[:n] in beginnings), default=0)
