"""Chapter 1, serving: what to measure, what arrives, what a step costs, and what waiting for a full batch does.

A served request is a dict of three entries, times in seconds on one clock:

    {"arrived_s": 0.0, "admitted_s": 0.5, "token_times_s": [1.0, 1.2, 1.4]}

`token_times_s` says when each output token became known; there is at least one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def latency_report(requests: list[dict]) -> dict[str, float]:
    """Sum up what the users of a server felt, in the four numbers that everybody quotes.

    TTFT, the time to first token, counts from arrival. TPOT, the time per output token, is a request's mean gap between
    one token and the next; a request with a single token has none and is left out. ITL, inter-token latency, is a gap.

    Args:
        requests: served requests, as described at the top of this file; at least one has two tokens.

    Returns:
        The median and 99th percentile of TTFT, the median of TPOT, and the 99th percentile of ITL, in seconds.
        Percentiles are np.percentile's.

    >>> latency_report([{"arrived_s": 0.0, "admitted_s": 0.5, "token_times_s": [1.0, 1.5, 2.5]}])
    {'ttft_p50_s': 1.0, 'ttft_p99_s': 1.0, 'tpot_p50_s': 0.75, 'itl_p99_s': 0.995}
    """
    # solution: 1.1 [15 min, easy] collect three lists: one entry a request, one a request, one a gap
    ttft_s, tpot_s, itl_s = [], [], []
    for request in requests:
        times_s = request["token_times_s"]
        ttft_s.append(times_s[0] - request["arrived_s"])
        gaps_s = [later - sooner for sooner, later in zip(times_s, times_s[1:], strict=False)]
        if gaps_s:
            tpot_s.append(sum(gaps_s) / len(gaps_s))
        itl_s.extend(gaps_s)
    return {
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "tpot_p50_s": float(np.percentile(tpot_s, 50)),
        "itl_p99_s": float(np.percentile(itl_s, 99)),
    }
    # end


def arrivals(rate_per_s: float, cv: float, num_requests: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the times at which requests arrive, as bursty as the load that they stand for.

    The gaps between arrivals follow a gamma distribution. Its mean is shape x scale, its coefficient of variation
    (standard deviation / mean) is 1 / sqrt(shape): 1 gives Poisson arrivals, more gives bursts, 0 gives even spacing.

    Args:
        rate_per_s: requests per second, in the long run.
        cv: coefficient of variation of the gaps, >= 0.
        num_requests: how many to draw.
        rng: where to draw from: rng.gamma(shape, scale, size).

    Returns:
        num_requests ascending times in seconds; the first is one gap after 0.

    >>> arrivals(rate_per_s=2.0, cv=0.0, num_requests=3, rng=np.random.default_rng(0)).tolist()
    [0.5, 1.0, 1.5]
    """
    # solution: 1.2 [10 min, easy] shape from the cv, then scale from the rate; cv 0 has no shape
    if cv == 0:
        gaps_s = np.full(num_requests, 1 / rate_per_s)
    else:
        shape = 1 / cv**2
        gaps_s = rng.gamma(shape, 1 / (rate_per_s * shape), num_requests)
    return np.cumsum(gaps_s)
    # end


@dataclass(frozen=True)
class Sizes:
    """What a step's cost depends on in a model; counts of parameters and of numbers, all layers together.

    `num_experts` 0 means a dense model. `attention_width` is query heads x head size, over the attention layers.
    """

    dense_params: int  # every step reads them and every token uses them: all but routed experts, embedding, head
    head_params: int  # the matrix that makes logits
    expert_params: int  # one routed expert of one layer
    num_expert_layers: int
    num_experts: int  # routed experts per layer
    experts_per_token: int
    attention_width: int
    kv_numbers: int  # keys and values that one token leaves in the cache
    state_numbers: int  # recurrent state of one request, whatever its length
    weight_bytes: float  # bytes per parameter
    kv_bytes: float  # bytes per number in the KV cache
    state_bytes: float  # bytes per number in the state


def step_cost(sizes: Sizes, rows: list[tuple[int, int]]) -> dict[str, float]:
    """Count the bytes that one step must move and the arithmetic that it must do.

    Every weight that is used is read once, however many rows there are. n tokens that each choose k of E experts touch
    E (1 - (1 - k/E)^n) distinct ones, on average. Keys, values and state are read where a row has some, and written.
    A multiply-add is 2 FLOPs; the token at position p attends to p + 1 positions, 2 multiply-adds per position and unit
    of attention_width; the state costs 7 FLOPs per number and token. Only the last token of a row needs logits.

    Args:
        sizes: the model.
        rows: (start, stop) of each request, 0 <= start < stop: positions start..stop-1 are computed, those before are
            in the cache. (4096, 4097) decodes one token, (0, 512) prefills 512.

    Returns:
        Bytes of "dense_bytes" (the head among them), "expert_bytes", "kv_bytes" and "state_bytes", and "flops".

    >>> tiny = Sizes(dense_params=100, head_params=10, expert_params=5, num_expert_layers=2, num_experts=4,
    ...              experts_per_token=1, attention_width=3, kv_numbers=6, state_numbers=8,
    ...              weight_bytes=2, kv_bytes=2, state_bytes=4)
    >>> step_cost(tiny, rows=[(3, 4)])
    {'dense_bytes': 220, 'expert_bytes': 20.0, 'kv_bytes': 48, 'state_bytes': 64, 'flops': 344}
    """
    # solution: 1.3 [30 min, medium] bytes first, kind by kind; then FLOPs of matrices, of attention, of the state
    num_tokens = sum(stop - start for start, stop in rows)
    distinct = 0.0
    if sizes.num_experts:
        untouched = (1 - sizes.experts_per_token / sizes.num_experts) ** num_tokens
        distinct = sizes.num_experts * (1 - untouched)
    attended = sum(position + 1 for start, stop in rows for position in range(start, stop))
    states_moved = sum(1 if start == 0 else 2 for start, _ in rows)
    active_params = sizes.dense_params + sizes.num_expert_layers * sizes.experts_per_token * sizes.expert_params
    return {
        "dense_bytes": (sizes.dense_params + sizes.head_params) * sizes.weight_bytes,
        "expert_bytes": distinct * sizes.num_expert_layers * sizes.expert_params * sizes.weight_bytes,
        "kv_bytes": sum(stop for _, stop in rows) * sizes.kv_numbers * sizes.kv_bytes,
        "state_bytes": states_moved * sizes.state_numbers * sizes.state_bytes,
        "flops": 2 * active_params * num_tokens
        + 2 * sizes.head_params * len(rows)
        + 4 * sizes.attention_width * attended
        + 7 * sizes.state_numbers * num_tokens,
    }
    # end


@dataclass(frozen=True)
class Machine:
    """A machine as the roofline sees it: how fast it hauls, how fast it computes, and what a step costs in any case."""

    bytes_per_s: float
    flops_per_s: dict[str, float]  # by dtype, such as {"bf16": 989e12, "fp8": 1979e12}
    overhead_s: float  # launching and scheduling, per step


def step_time(machine: Machine, num_bytes: float, flops: float, dtype: str) -> float:
    """Predict how long a step takes: hauling and computing overlap, the overhead does not.

    Args:
        machine: where the step runs.
        num_bytes, flops: what it moves and computes, as `step_cost` counts them.
        dtype: the type that it computes in, a key of machine.flops_per_s.

    Returns:
        Seconds.

    >>> step_time(Machine(100.0, {"bf16": 1000.0, "fp8": 2000.0}, 0.5), num_bytes=100.0, flops=4000.0, dtype="bf16")
    4.5
    """
    # solution: 1.4 [5 min, easy] which of the two takes longer?
    hauling_s = num_bytes / machine.bytes_per_s
    computing_s = flops / machine.flops_per_s[dtype]
    return machine.overhead_s + max(hauling_s, computing_s)
    # end


def ridge(machine: Machine, dtype: str, bytes_per_param: float) -> float:
    """Find the number of rows at which a matrix stops being bound by hauling: below it, one more row is free.

    Args:
        machine: where the matrix is used.
        dtype: the type that it computes in, a key of machine.flops_per_s.
        bytes_per_param: bytes that one parameter takes in memory.

    Returns:
        Rows (not rounded) for which reading a parameter takes as long as using it once per row, a multiply-add each.

    >>> ridge(Machine(100.0, {"bf16": 1000.0, "fp8": 2000.0}, 0.5), "bf16", bytes_per_param=2.0)
    10.0
    """
    # solution: 1.5 [5 min, easy] how many FLOPs does the machine do while it hauls one byte? One parameter?
    flops_per_byte = machine.flops_per_s[dtype] / machine.bytes_per_s
    flops_per_param = flops_per_byte * bytes_per_param
    return flops_per_param / 2
    # end


def static_batches(
    arrived_s: list[float],
    output_tokens: list[int],
    batch_size: int,
    max_wait_s: float,
    step_time_s: Callable[[int], float],
) -> list[dict]:
    """Play a server that collects a batch, runs it to its end, and only then looks at the queue again.

    A batch starts as soon as the server is free and batch_size requests wait, or the oldest has waited max_wait_s. It
    takes the oldest that have arrived by then, batch_size at most. Each step gives every request one token until it has
    all its own, and takes step_time_s(requests in the batch), also when some have finished: their rows are padding.

    Args:
        arrived_s: ascending arrival times in seconds.
        output_tokens: tokens that each request will want, at least 1.
        batch_size: requests in a batch, at most.
        max_wait_s: seconds that the oldest waits for company, at most, while the server is free.
        step_time_s: step_time_s(rows) is the seconds that a step takes; the first step is one like any other.

    Returns:
        One served request per arrival, in the same order, as described at the top of this file; admitted at its batch's
        start.

    >>> for request in static_batches([0.0, 1.0, 9.0], [1, 2, 1], 2, 4.0, step_time_s=lambda rows: 1.0 + rows):
    ...     print(request)
    {'arrived_s': 0.0, 'admitted_s': 1.0, 'token_times_s': [4.0]}
    {'arrived_s': 1.0, 'admitted_s': 1.0, 'token_times_s': [4.0, 7.0]}
    {'arrived_s': 9.0, 'admitted_s': 13.0, 'token_times_s': [15.0]}
    """
    # solution: 1.6 [40 min, hard] when does a batch start, who is in it, and when is the server free again?
    served, free_s = [], 0.0
    while len(served) < len(arrived_s):
        first = len(served)
        last = first + batch_size - 1
        full_s = arrived_s[last] if last < len(arrived_s) else math.inf
        start_s = max(free_s, min(full_s, arrived_s[first] + max_wait_s))
        batch = [i for i in range(first, len(arrived_s)) if arrived_s[i] <= start_s][:batch_size]
        step_s = step_time_s(len(batch))
        for i in batch:
            times_s = [start_s + step_s * n for n in range(1, output_tokens[i] + 1)]
            served.append({"arrived_s": arrived_s[i], "admitted_s": start_s, "token_times_s": times_s})
        free_s = start_s + step_s * max(output_tokens[i] for i in batch)
    return served
    # end


def next_batch(
    now_s: float,
    waiting: list[tuple[float, int]],
    batch_size: int,
    step_time_s: Callable[[int], float],
    ttft_limit_s: float,
) -> list[int]:
    """Choose whom to serve next: this one is scored, and there is no best answer.

    The server of `static_batches`, which asks you whenever it is free and somebody waits. A batch runs as long as its
    longest request. The score is the share of requests whose first token comes in time, over several loads, calm and
    bursty, all of them more than the server can take: oldest first reaches about 0.14.

    Args:
        now_s: the time; the batch starts now.
        waiting: (arrived_s, output_tokens) of each waiting request, oldest first; say a predictor knows the lengths.
        batch_size: requests in a batch, at most.
        step_time_s: step_time_s(rows) is the seconds that a step takes.
        ttft_limit_s: a first token later than this after arrival is in time for nobody.

    Returns:
        Positions in `waiting`, each once, at least one and at most batch_size.

    >>> sorted(next_batch(5.0, [(4.0, 90), (4.5, 3), (4.8, 5)], 2, step_time_s=lambda rows: 0.1, ttft_limit_s=3.0))
    [1, 2]
    """
    # solution: 1.7 [30 min, open] what does a long request cost the others? And one that is too late anyway?
    first_token_s = now_s + step_time_s(batch_size)

    def urgency(i: int) -> tuple[bool, int]:
        arrived_s, num_tokens = waiting[i]
        return first_token_s > arrived_s + ttft_limit_s, num_tokens

    return sorted(range(len(waiting)), key=urgency)[:batch_size]
    # end
