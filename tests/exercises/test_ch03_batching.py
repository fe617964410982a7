"""Checks of chapter 3's exercises. See AUTHORS.md in exercises/."""

import math

import numpy as np
import torch
from checks import AtLeast, Case, Raised
from one_at_a_time import attended, planned, random, weighted
from scored_loads import share_in_time

INF = math.inf


def doubles(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_3_1_pack(ex):
    def case(rows, token_ids, positions, row_starts, chosen_at, note):
        want = {"token_ids": token_ids, "positions": positions, "row_starts": row_starts, "chosen_at": chosen_at}
        return Case({"rows": rows}, want, note)

    ex.check("pack", [
        case([([5, 6], 1, 2)], [6], [1], [0, 1], [0], "a decoding row"),
        case([([5, 6], 0, 2)], [5, 6], [0, 1], [0, 2], [1], "a prompt at once"),
        case([([5, 6], 1, 1)], [], [], [0, 0], [None], "an idle row"),
        case([([5, 6], 2, 2)], [], [], [0, 0], [None], "an idle row of which all has run"),
        case([([5, 6, 7], 0, 2)], [5, 6], [0, 1], [0, 2], [None], "the first part of a prompt"),
        case([([5, 6, 7], 2, 3)], [7], [2], [0, 1], [0], "the rest of a prompt"),
        case([([5, 6], 1, 2), ([8, 9], 1, 2)], [6, 9], [1, 1], [0, 1, 2], [0, 1], "two decoding rows"),
        case([([5, 6], 1, 1), ([8, 9], 1, 2)], [9], [1], [0, 0, 1], [None, 0], "an idle row, then a decoding one"),
        case([([5, 6], 1, 2), ([8, 9], 1, 1)], [6], [1], [0, 1, 1], [0, None], "a decoding row, then an idle one"),
        case([([5, 6, 7], 1, 3), ([8, 9], 1, 2)], [6, 7, 9], [1, 2, 1], [0, 2, 3], [1, 2], "the rest of a prompt"),
        # fault D10: prompts of 5 and 40 in steps of 8
        case([([*range(5)], 0, 5), ([*range(40)], 0, 3)], [0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2],
             [0, 5, 8], [4, None], "a short prompt and the first part of a long one"),
        case([([*range(6)], 5, 6), ([*range(40)], 3, 10), ([3, 3], 1, 1)], [5, 3, 4, 5, 6, 7, 8, 9],
             [5, 3, 4, 5, 6, 7, 8, 9], [0, 1, 8, 8], [0, None, None], "decode, a part, and an idle row"),
    ])  # fmt: skip


def test_3_2_merge_softmax(ex):
    def by_hand(out_a, lse_a, out_b, lse_b, out, lse, note):
        args = {"out_a": doubles([[out_a]]), "lse_a": doubles([lse_a]), "out_b": doubles([[out_b]]),
                "lse_b": doubles([lse_b])}  # fmt: skip
        return Case(args, (doubles([[out]]), doubles([lse])), note)

    def cut(tokens, keys, at, dim, scale, seed):
        scores, values = scale * random(tokens, keys, seed=seed), random(keys, dim, seed=seed + 1)
        out_a, lse_a = weighted(scores[:, :at], values[:at])
        out_b, lse_b = weighted(scores[:, at:], values[at:])
        args = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        return Case(args, weighted(scores, values), f"{keys} keys, cut after {at}")

    log3 = math.log(3)
    some = {"out_a": doubles([[8.0], [0.0], [2.0]]), "lse_a": doubles([0.0, -INF, 5.0]),
            "out_b": doubles([[4.0], [3.0], [0.0]]), "lse_b": doubles([log3, 7.0, -INF])}  # fmt: skip
    ex.check("merge_softmax", [
        by_hand(8.0, 0.0, 4.0, 0.0, 6.0, math.log(2), "equal weight"),
        by_hand(8.0, 0.0, 4.0, log3, 5.0, math.log(4), "weights 1 and 3"),
        by_hand(8.0, log3, 4.0, 0.0, 7.0, math.log(4), "weights 3 and 1"),
        by_hand(8.0, 1.5, 0.0, -INF, 8.0, 1.5, "the second has no keys"),
        by_hand(0.0, -INF, 4.0, -0.5, 4.0, -0.5, "the first has no keys"),
        by_hand(0.0, -INF, 0.0, -INF, 0.0, -INF, "neither has keys"),
        by_hand(8.0, 1000.0, 4.0, 1000.0 + log3, 5.0, 1000.0 + math.log(4), "e^1000 is too large for a float"),
        by_hand(8.0, -1000.0, 4.0, log3 - 1000.0, 5.0, math.log(4) - 1000.0, "e^-1000 is too small for a float"),
        Case(some, (doubles([[5.0], [3.0], [2.0]]), doubles([math.log(4), 7.0, 5.0])), "some have no keys"),
        cut(1, 3, 1, 2, 1.0, 1), cut(4, 9, 5, 3, 3.0, 2), cut(5, 20, 2, 4, 9.0, 4),
    ])  # fmt: skip


def test_3_3_ragged_attention(ex):
    def case(rows, note, heads=1, kv_heads=1, dim=1):
        """Rows of (queries, context)."""
        row_starts, context_starts = ([0, *np.cumsum(column).tolist()] for column in zip(*rows, strict=True))
        q = random(row_starts[-1], heads, dim, seed=1)
        k, v = random(2, context_starts[-1], kv_heads, dim, seed=2)
        args = {"q": q, "k": k, "v": v, "row_starts": torch.tensor(row_starts),
                "context_starts": torch.tensor(context_starts)}  # fmt: skip
        return Case(args, attended(q, k, v, row_starts, context_starts), note)

    ex.check("ragged_attention", [
        case([(1, 1)], "one row of one token"),
        case([(1, 0)], "a row that only fills the batch up"),
        case([(2, 2)], "a prompt of two"),
        case([(1, 2)], "a decoding row: one query, two keys"),
        case([(1, 1), (1, 1)], "two rows of one token"),
        case([(0, 1), (1, 1)], "an idle row, then a decoding one"),
        case([(1, 1)], "two numbers per head", dim=2),
        case([(1, 2)], "four heads share two KV heads", 4, 2),
        case([(2, 3)], "the second part of a prompt"),
        case([(1, 3), (2, 2), (1, 0)], "decode, a prompt, and a row that fills up", 2, 1, 2),
        case([(1, 6), (0, 3), (3, 7), (4, 4), (1, 1), (2, 0)], "all kinds", 4, 2, 3),
        case([(9, 9), (1, 17), (3, 3)], "a long prompt first", 6, 2, 8),
    ])  # fmt: skip


class Planning:
    """Requests and cases of `plan`; `ex` is the exercise."""

    def __init__(self, ex):
        self.request = ex.Request

    def decode(self, number, num_tokens, num_pages):
        return self.request(number, float(number), num_tokens, num_tokens - 1, num_pages, "decode")

    def prompt(self, number, num_tokens, num_computed=0, num_pages=0):
        return self.request(number, float(number), num_tokens, num_computed, num_pages, "prefill")

    def case(self, note, want=None, running=(), waiting=(), batch_tokens=8, max_running=9, free_pages=9, page_size=4):
        args = {"running": [*running], "waiting": [*waiting], "batch_tokens": batch_tokens, "max_running": max_running,
                "free_pages": free_pages, "page_size": page_size}  # fmt: skip
        return Case(args, planned(**args) if want is None else want, note)

    def many(self, num_running, num_waiting, batch_tokens, free_pages, page_size, rng):
        """A case of many requests, drawn."""
        running, waiting = [], []
        for number in range(num_running):
            num_tokens = int(rng.integers(2, 20))
            num_computed = num_tokens - 1 if rng.random() < 0.6 else int(rng.integers(num_tokens - 1))
            phase = "decode" if num_computed == num_tokens - 1 else "prefill"
            num_pages = -(-num_computed // page_size)
            running.append(self.request(number, float(number), num_tokens, num_computed, num_pages, phase))
        for number in range(num_running, num_running + num_waiting):
            waiting.append(self.prompt(number, int(rng.choice([2, 5, 9, 14, 200], p=[0.3, 0.3, 0.2, 0.1, 0.1]))))
        return self.case("many", None, running, waiting, batch_tokens, num_running + 3, free_pages, page_size)


def plans_of_the_running(case, decode, prompt):
    return [
        case("a decoding row", [(1, 5, 6, "decode")], [decode(1, 6, 2)]),
        case("room in its last page", [(1, 5, 6, "decode")], [decode(1, 6, 2)], free_pages=0),
        case("its pages are full, one is free", [(1, 8, 9, "decode")], [decode(1, 9, 2)], free_pages=1),
        case("its pages are full, and none is free", [], [decode(1, 9, 2)], free_pages=0),
        case("the prompt goes on", [(1, 8, 16, "prefill")], [prompt(1, 20, 8, 2)]),
        case("the rest of a prompt is one token", [(1, 8, 9, "prefill")], [prompt(1, 9, 8, 2)]),  # fault D15
        case("its own pages have room for two", [(1, 6, 8, "prefill")], [prompt(1, 20, 6, 2)], free_pages=0),
        case("one page is free", [(1, 6, 12, "prefill")], [prompt(1, 20, 6, 2)], free_pages=1),
        case("decode goes first", [(2, 3, 4, "decode"), (1, 4, 11, "prefill")], [prompt(1, 30, 4, 1), decode(2, 4, 1)]),
        case("the row takes the only page", [(2, 4, 5, "decode")], [prompt(1, 9, 4, 1), decode(2, 5, 1)], free_pages=1),
        case("three rows, a budget of two", [(1, 1, 2, "decode"), (2, 1, 2, "decode")],
             [decode(1, 2, 1), decode(2, 2, 1), decode(3, 2, 1)], batch_tokens=2),
    ]  # fmt: skip


def plans_of_the_queue(case, decode, prompt):
    return [
        case("a prompt from the queue", [(1, 0, 6, "prefill")], waiting=[prompt(1, 6)]),
        case("a prompt longer than the budget", [(1, 0, 8, "prefill")], waiting=[prompt(1, 20)]),
        case("a cache knows 8 of 9", [(1, 8, 9, "prefill")], waiting=[prompt(1, 9, 8, 2)], free_pages=1),  # fault D13
        case("the budget is one token", [(1, 0, 1, "prefill")], waiting=[prompt(1, 6)], batch_tokens=1),
        case("it fills all pages", [(1, 0, 8, "prefill")], waiting=[prompt(1, 32)], free_pages=8),
        case("one token too many for all pages", [(1, 0, 0, "refused")], waiting=[prompt(1, 33)], free_pages=8),
        case("one may run, one waits", [(1, 0, 2, "prefill")], (), [prompt(1, 2), prompt(2, 2)], max_running=1),
        case("one runs, one waits", [(1, 1, 2, "decode")], [decode(1, 2, 1)], [prompt(2, 2)], max_running=1),
        # fault D1
        case("the first will never fit", [(1, 0, 0, "refused"), (2, 0, 4, "prefill")], (),
             [prompt(1, 30), prompt(2, 4)], free_pages=7),
        case("the second fits only when the first has ended", [(1, 3, 4, "decode")], [decode(1, 4, 1)], [prompt(2, 20)],
             free_pages=4),
        case("two begin", [(1, 0, 3, "prefill"), (2, 0, 5, "prefill")], (), [prompt(1, 3), prompt(2, 9)]),
        case("the first must wait, so the second waits too", [(1, 3, 4, "decode")], [decode(1, 4, 1)],
             [prompt(2, 16), prompt(3, 4)], free_pages=3),
        case("the first holds pages for all of its prompt", [(1, 0, 3, "prefill"), (2, 0, 4, "prefill")],
             [prompt(1, 3, 0, 4)], [prompt(2, 4), prompt(3, 4)], free_pages=1),
    ]  # fmt: skip


def test_3_4_plan(ex):
    make, rng = Planning(ex), np.random.default_rng(5)
    sizes = [
        (3, 3, 12, 4, 4),
        (4, 4, 9, 9, 2),
        (5, 5, 40, 6, 3),
        (6, 6, 30, 20, 4),
        (8, 8, 64, 30, 5),
        (2, 9, 99, 25, 3),
    ]
    ex.check("plan", [
        *plans_of_the_running(make.case, make.decode, make.prompt),
        *plans_of_the_queue(make.case, make.decode, make.prompt),
        *(make.many(*size, rng) for size in sizes),
    ])  # fmt: skip


def test_3_5_preempt(ex):
    def request(number, arrived_s, num_tokens, num_computed, num_pages, phase="decode"):
        return ex.Request(number, arrived_s, num_tokens, num_computed, num_pages, phase)

    def case(note, needy, running, slices=(), batch_tokens=8, free_pages=0, want="made", undone=0):
        args = {"needy": needy, "running": running, "planned": [*slices], "batch_tokens": batch_tokens,
                "free_pages": free_pages}  # fmt: skip
        gone = running[-1]
        made = {"victim": request(gone.id, gone.arrived_s, gone.num_tokens, 0, 0, "prefill"), "running": running[:-1],
                "planned": [row for row in slices if row[0] != gone.id], "batch_tokens": batch_tokens + undone,
                "free_pages": free_pages + gone.num_pages}  # fmt: skip
        return Case(args, made if want == "made" else want, note)

    first, second = request(1, 0.5, 9, 8, 2), request(2, 0.7, 6, 5, 3)
    four = [request(4, 0.1, 30, 20, 5, "prefill"), second, first, request(3, 0.6, 4, 3, 1)]
    ex.check("preempt", [
        case("it is alone, and has all pages", 1, [first], want=Raised("ValueError")),  # fault D3
        case("nobody has a slice yet", 1, [first, second]),
        case("who was let in last is in need itself", 2, [first, second], want=None),
        case("who arrived first was let in last", 2, [second, first]),
        case("the first has a slice", 1, [first, second], [(1, 8, 9, "decode")], 7),
        case("the last has a slice already", 1, [first, second], [(2, 5, 6, "decode")], 7, undone=1),  # fault D5
        case("the last has a slice of its prompt", 1, [first, request(2, 0.7, 30, 4, 1, "prefill")],
             [(2, 4, 11, "prefill")], 1, 1, undone=7),
        case("four", 4, four, [(2, 5, 6, "decode"), (1, 8, 9, "decode"), (3, 3, 4, "decode")], 5, undone=1),
    ])  # fmt: skip


def test_3_6_budget_for_itl(ex):
    def p99_s(cost, decode_contexts, prompts, batch_tokens):
        """The gaps with one budget, from sums of arithmetic series."""
        gaps_s, chunk = [], batch_tokens - len(decode_contexts)
        for prompt in prompts:
            starts = np.arange(0, prompt, chunk)
            stops = np.minimum(starts + chunk, prompt)
            positions = sum(decode_contexts) + (stops * (stops + 1) - starts * (starts + 1)) / 2
            tokens = len(decode_contexts) + stops - starts
            gaps_s += (cost.overhead_s + cost.per_token_s * tokens + cost.per_position_s * positions).tolist()
        return np.percentile(gaps_s, 99)

    def case(note, cost, decode_contexts, prompts, target_s, max_batch_tokens=64, want=None):
        args = {"cost": ex.StepCost(*cost), "decode_contexts": decode_contexts, "prompts": prompts,
                "target_s": target_s, "max_batch_tokens": max_batch_tokens}  # fmt: skip
        good = [n for n in range(len(decode_contexts) + 1, max_batch_tokens + 1)
                if p99_s(args["cost"], decode_contexts, prompts, n) <= target_s]  # fmt: skip
        return Case(args, max(good, default=0) if want is None else want, note)

    cases = [
        case("one row: 1 s and 0.5 s per token", (1.0, 0.5, 0.0), [40], [8], 3.5, want=5),
        case("two rows", (1.0, 0.5, 0.0), [40, 60], [8], 3.6, want=5),
        case("not even a token of the prompt", (1.0, 0.5, 0.0), [40], [8], 1.9, want=0),
        case("just one token of the prompt", (1.0, 0.5, 0.0), [40], [8], 2.1, want=2),
        case("a short prompt: any budget will do", (1.0, 0.5, 0.0), [40], [3], 3.1, want=64),
        case("the largest that is considered", (1.0, 0.5, 0.0), [40], [8], 3.6, 4, want=4),
        # Gaps of a chunk of 1: 2.1 2.2 2.3 2.4, of 2: 2.3 2.7, of 3: 2.6 2.4, of 4: 3.0.
        case("0.1 s per position that is attended to", (1.0, 0.0, 0.1), [10], [4], 2.65, want=4),
        case("overhead and positions", (1.0, 0.0, 0.1), [10], [4], 2.42, want=2),
        case("a long prompt", (0.01, 0.0005, 2e-6), [900, 1500, 70], [60], 0.0201),
        case("one slow gap in 111", (1.0, 0.5, 0.01), [5, 5], [2] * 110 + [30], 3.4, 36),
        case("slow gaps of five prompts", (1.0, 0.5, 0.01), [5, 5], [2] * 20 + [30] * 5, 5.2, 24),
        case("prompts of all lengths", (0.01, 0.001, 1e-5), [30, 60, 90], [7, 19, 33, 40, 61], 0.0305),
    ]
    ex.check("budget_for_itl", cases)


def test_3_7_share_step(ex):
    def share(share_step, loads, cost):
        return float(np.mean([share_in_time(share_step, *load, cost, seed) for load in loads for seed in (1, 2)]))

    loads = [(4, 1, 1.0, 0.0502), (4, 3, 1.0, 0.0502), (6, 1, 2.0, 0.0602), (6, 3, 2.0, 0.0602)]
    ex.check("share_step", [
        Case({"loads": loads, "cost": ex.StepCost(0.010, 0.0005, 0.0)}, want=AtLeast(0.8), run=share,
             note="rate, cv, TTFT limit, ITL limit"),
    ])  # fmt: skip
