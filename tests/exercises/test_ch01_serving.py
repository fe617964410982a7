"""Checks of chapter 1's exercises. See AUTHORS.md in exercises/."""

import numpy as np
from checks import AtLeast, Case


def served(arrived_s, admitted_s, *token_times_s):
    return {"arrived_s": arrived_s, "admitted_s": admitted_s, "token_times_s": list(token_times_s)}


def test_1_1_latency_report(ex):
    two = [served(0.0, 1.0, 2.0, 3.0), served(1.0, 1.0, 4.0)]
    # 99 gaps of 1 s in one request, a single gap of 101 s in the other: of all 100 gaps the 99th percentile is 2 s,
    # the mean of the two requests' own is 51 s.
    uneven = [served(0.0, 0.0, *range(1, 101)), served(0.0, 0.0, 1.0, 102.0)]
    ex.check("latency_report", [
        Case({"requests": [served(0.0, 0.5, 2.0, 3.0, 7.0)]}, note="one request, three tokens",
             want={"ttft_p50_s": 2.0, "ttft_p99_s": 2.0, "tpot_p50_s": 2.5, "itl_p99_s": 3.97}),
        Case({"requests": two}, note="the second request has a single token",
             want={"ttft_p50_s": 2.5, "ttft_p99_s": 2.99, "tpot_p50_s": 1.0, "itl_p99_s": 1.0}),
        Case({"requests": uneven}, note="100 tokens in one request, two in the other",
             want={"ttft_p50_s": 1.0, "ttft_p99_s": 1.0, "tpot_p50_s": 51.0, "itl_p99_s": 2.0}),
    ])  # fmt: skip


def test_1_2_arrivals(ex):
    def shape_of_load(function, **args):
        times_s = np.asarray(function(**args))
        gaps_s = np.diff(times_s, prepend=0.0)
        cv = gaps_s.std() / gaps_s.mean()
        return {"requests": len(times_s), "mean gap in s": gaps_s.mean(), "cv of the gaps": cv}

    def drawn(rate_per_s, cv):
        return Case(
            {"rate_per_s": rate_per_s, "cv": cv, "num_requests": 40_000, "rng": np.random.default_rng(1)},
            want={"requests": 40_000, "mean gap in s": 1 / rate_per_s, "cv of the gaps": cv},
            run=shape_of_load, rtol=0.1, may_change=("rng",),
        )  # fmt: skip

    ex.check("arrivals", [
        Case({"rate_per_s": 4.0, "cv": 0.0, "num_requests": 3, "rng": np.random.default_rng(0)},
             want=np.array([0.25, 0.5, 0.75]), note="even spacing"),
        drawn(5.0, 1.0), drawn(0.5, 1.0), drawn(1.0, 3.0), drawn(2.0, 0.5),
    ])  # fmt: skip


def test_1_3_step_cost(ex):
    dense = dict(dense_params=100, head_params=1000, expert_params=0, num_expert_layers=0, num_experts=0,
                 experts_per_token=0, attention_width=0, kv_numbers=0, state_numbers=0,
                 weight_bytes=2.0, kv_bytes=2.0, state_bytes=4.0)  # fmt: skip
    sparse = dense | dict(expert_params=10, num_expert_layers=3, num_experts=8, experts_per_token=2)
    attention = dense | dict(attention_width=16, kv_numbers=12, kv_bytes=1.0)
    hybrid = sparse | dict(attention_width=16, kv_numbers=12, state_numbers=7, weight_bytes=0.5)

    def case(sizes, rows, note, dense_bytes, expert_bytes, kv_bytes, state_bytes, flops):
        want = dict(dense_bytes=dense_bytes, expert_bytes=expert_bytes, kv_bytes=kv_bytes, state_bytes=state_bytes,
                    flops=flops)  # fmt: skip
        return Case({"sizes": ex.Sizes(**sizes), "rows": rows}, want, note)

    ex.check("step_cost", [
        case(dense, [(5, 6)], "a dense model decodes one token", 2200, 0, 0, 0, 2200),
        case(sparse, [(5, 6)], "one token touches the 2 experts of its own, in 3 layers", 2200, 120, 0, 0, 2320),
        case(attention, [(5, 6)], "position 5 attends to 6 positions", 2200, 0, 72, 0, 2200 + 4 * 16 * 6),
        case(dense | dict(state_numbers=7), [(5, 6)], "a state is read and written", 2200, 0, 0, 56, 2200 + 49),
        case(dense | dict(state_numbers=7), [(0, 1)], "a new request has no state to read", 2200, 0, 0, 28, 2200 + 49),
        case(dense, [(0, 4)], "prefill of 4 tokens", 2200, 0, 0, 0, 4 * 200 + 2000),
        case(attention, [(0, 4)], "prefill of 4 tokens", 2200, 0, 48, 0, 2800 + 4 * 16 * 10),
        case(sparse, [(3, 4), (8, 9)], "two tokens share some of their experts", 2200, 210, 0, 0, 2 * 2320),
        # 1 - (1 - 2/8)^6 = 3367/4096 of 8 experts; attended: 3 + 4 + 5 + 6 and 10 and 1.
        case(hybrid, [(2, 6), (9, 10), (0, 1)], "a chunk, a decode and a start together",
             550, 8 * 3367 / 4096 * 3 * 10 * 0.5, 17 * 12 * 2, 5 * 7 * 4, 6 * 320 + 3 * 2000 + 4 * 16 * 29 + 7 * 7 * 6),
    ])  # fmt: skip


def test_1_4_step_time(ex):
    machine = ex.Machine(bytes_per_s=100.0, flops_per_s={"bf16": 1000.0, "fp8": 2000.0}, overhead_s=0.5)

    def case(num_bytes, flops, dtype, want, note):
        return Case({"machine": machine, "num_bytes": num_bytes, "flops": flops, "dtype": dtype}, want, note)

    ex.check("step_time", [
        case(300.0, 1000.0, "bf16", 3.5, "hauling takes 3 s, computing 1 s"),
        case(300.0, 6000.0, "bf16", 6.5, "hauling takes 3 s, computing 6 s"),
        case(300.0, 8000.0, "fp8", 4.5, "hauling takes 3 s, computing 4 s"),
        case(0.0, 0.0, "fp8", 0.5, "an empty step"),
    ])  # fmt: skip


def test_1_5_ridge(ex):
    h100 = ex.Machine(bytes_per_s=3.35e12, flops_per_s={"bf16": 989e12, "fp8": 1979e12}, overhead_s=1e-4)
    small = ex.Machine(bytes_per_s=100.0, flops_per_s={"bf16": 1000.0, "fp8": 2000.0}, overhead_s=0.5)

    def case(machine, dtype, bytes_per_param, want):
        return Case({"machine": machine, "dtype": dtype, "bytes_per_param": bytes_per_param}, want, rtol=1e-3)

    ex.check("ridge", [
        case(small, "bf16", 2.0, 10.0), case(small, "bf16", 1.0, 5.0), case(small, "fp8", 1.0, 10.0),
        case(h100, "bf16", 2.0, 295.22), case(h100, "fp8", 1.0, 295.37), case(h100, "bf16", 0.5, 73.8),
    ])  # fmt: skip


def clock_of_static_batches(arrived_s, output_tokens, batch_size, max_wait_s, step_time_s):
    """The same server, played event by event: at each moment that matters, does a batch start?"""
    moments = sorted({*arrived_s, *(t + max_wait_s for t in arrived_s)})
    waiting, coming, requests = [], list(range(len(arrived_s))), {}
    while moments:
        now_s = moments.pop(0)
        while coming and arrived_s[coming[0]] <= now_s:
            waiting.append(coming.pop(0))
        is_free = all(request["token_times_s"][-1] <= now_s for request in requests.values())
        is_due = waiting and (len(waiting) >= batch_size or now_s >= arrived_s[waiting[0]] + max_wait_s)
        if not (is_free and is_due):
            continue
        batch, waiting = waiting[:batch_size], waiting[batch_size:]
        for i in batch:
            requests[i] = served(arrived_s[i], now_s, now_s + step_time_s(len(batch)))
            for _ in range(output_tokens[i] - 1):
                requests[i]["token_times_s"].append(requests[i]["token_times_s"][-1] + step_time_s(len(batch)))
        end_s = max(requests[i]["token_times_s"][-1] for i in batch)
        moments = sorted({t for t in moments if t > end_s} | {end_s})
    return [requests[i] for i in sorted(requests)]


def one_second(rows):
    return 1.0


def one_second_and_a_quarter_per_row(rows):
    return 1.0 + 0.25 * rows


def test_1_6_static_batches(ex):
    def case(arrived_s, output_tokens, batch_size, max_wait_s, step_time_s, want=None, note=""):
        args = {"arrived_s": arrived_s, "output_tokens": output_tokens, "batch_size": batch_size,
                "max_wait_s": max_wait_s, "step_time_s": step_time_s}  # fmt: skip
        return Case(args, want or clock_of_static_batches(**args), note)

    cases = [
        case([1.0], [2], 1, 5.0, one_second, [served(1.0, 1.0, 2.0, 3.0)], "a full batch waits for nobody"),
        case([1.0], [1], 2, 5.0, one_second, [served(1.0, 6.0, 7.0)], "nobody else comes: the wait ends after 5 s"),
        case([0.0, 1.0], [1, 3], 2, 9.0, one_second,
             [served(0.0, 1.0, 2.0), served(1.0, 1.0, 2.0, 3.0, 4.0)], "the batch is full when the second comes"),
        case([0.0, 9.0], [1, 1], 2, 4.0, one_second,
             [served(0.0, 4.0, 5.0), served(9.0, 13.0, 14.0)], "the second comes after the first one's wait"),
        case([0.0, 0.0, 0.0], [1, 3, 1], 2, 0.0, one_second,
             [served(0.0, 0.0, 1.0), served(0.0, 0.0, 1.0, 2.0, 3.0), served(0.0, 3.0, 4.0)],
             "the third has to wait for the longest of the first two"),
        case([0.0, 4.0], [2, 1], 2, 4.0, one_second, note="the second comes just as the wait ends"),
    ]  # fmt: skip
    rng = np.random.default_rng(3)
    for num_requests, batch_size, max_wait_s in [(4, 2, 2.0), (7, 3, 0.0), (12, 4, 3.0), (12, 1, 1.0), (25, 8, 6.0)]:
        arrived_s = np.cumsum(rng.integers(0, 8, num_requests) / 4.0).tolist()
        output_tokens = rng.integers(1, 6, num_requests).tolist()
        cases.append(case(arrived_s, output_tokens, batch_size, max_wait_s, one_second_and_a_quarter_per_row))
    ex.check("static_batches", cases)


def refuse_no_batch(chosen, waiting, batch_size):
    """Raise unless these are positions in `waiting`, each once, not too few and not too many."""
    if not ({*chosen} <= {*range(len(waiting))} and 1 <= len({*chosen}) == len(chosen) <= batch_size):
        raise ValueError(f"{chosen} are not 1 to {batch_size} different positions among {len(waiting)} waiting")


def share_in_time(next_batch, rate_per_s, cv, batch_size, ttft_limit_s, step_time_s, seed):
    """Serve 300 requests in batches that `next_batch` chooses, and return the share whose first token came in time."""
    rng, num_requests, num_good = np.random.default_rng(seed), 300, 0
    arrived_s = np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate_per_s, num_requests)).tolist()
    coming = list(zip(arrived_s, rng.lognormal(3.0, 1.0, num_requests).clip(1, 400).astype(int).tolist(), strict=True))
    waiting, now_s = [], 0.0
    while coming or waiting:
        now_s = now_s if waiting else max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            waiting.append(coming.pop(0))
        chosen = next_batch(now_s, list(waiting), batch_size, step_time_s, ttft_limit_s)
        refuse_no_batch(chosen, waiting, batch_size)
        step_s = step_time_s(len(chosen))
        num_good += sum(now_s + step_s <= waiting[i][0] + ttft_limit_s for i in chosen)
        now_s += step_s * max(waiting[i][1] for i in chosen)
        waiting = [request for i, request in enumerate(waiting) if i not in chosen]
    return num_good / num_requests


def twenty_milliseconds_and_one_per_row(rows):
    return 0.020 + 0.001 * rows


def test_1_7_next_batch(ex):
    def score(next_batch, loads, **rest):
        return float(np.mean([share_in_time(next_batch, *load, **rest) for load in loads]))

    loads = [(rate, cv, 8, limit, twenty_milliseconds_and_one_per_row)
             for rate, cv, limit in [(4, 1, 3), (4, 3, 3), (8, 1, 4), (8, 3, 4)]]  # fmt: skip

    def chooses(next_batch, waiting, batch_size, **rest):
        refuse_no_batch(next_batch(waiting=waiting, batch_size=batch_size, **rest), waiting, batch_size)
        return "a batch"

    two = {"now_s": 5.0, "waiting": [(4.0, 90), (4.5, 3)], "batch_size": 2, "step_time_s": one_second,
           "ttft_limit_s": 3.0}  # fmt: skip
    ex.check("next_batch", [
        Case(two, want="a batch", run=chooses),
        Case({"loads": loads, "seed": 1}, want=AtLeast(0.75), run=score, note="rate, cv, batch_size, limit, step time"),
    ])  # fmt: skip
