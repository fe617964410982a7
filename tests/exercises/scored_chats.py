"""The load on which chapter 7's scored exercise is tried: chats whose states are kept in a few slots, and its bound."""

from collections import deque
from functools import cache

import numpy as np


@cache
def drawn_turns(num_chats, think_s, seed):
    """(time, path, tokens of each prefix of it) of each turn, in order; a path is (system prompt, turn, turn, ...)."""
    rng, turns, begins_s, num_turns = np.random.default_rng(seed), [], 0.0, 6  # paths begin with 0 .. 5
    systems, popular = rng.integers(100, 1500, 6).tolist(), np.array([8, 4, 2, 1, 1, 1]) / 17
    for _ in range(num_chats):
        begins_s += rng.exponential(1.0)
        now_s, path = begins_s, (int(rng.choice(6, p=popular)),)
        counts = [systems[path[0]]]
        for _ in range(1 if rng.random() < 0.4 else 1 + int(rng.geometric(0.25))):
            path, counts = (*path, num_turns), [*counts, counts[-1] + int(rng.lognormal(5.5, 1.0)) + 1]
            turns.append((now_s, path, counts))
            num_turns, now_s = num_turns + 1, now_s + float(rng.lognormal(np.log(think_s), 0.7))
    return sorted(turns)


def share_saved(drop, kept_as, num_slots, think_s, seed):
    """Serve 150 chats with `drop` choosing what goes; the tokens it saves over the most that anybody can save."""
    turns, kept, num_saved = drawn_turns(150, think_s, seed), {}, 0
    for now_s, path, counts in turns:
        hit = max((depth for depth in range(1, len(path)) if path[:depth] in kept), default=0)
        if hit:
            used = kept[path[:hit]]
            kept[path[:hit]] = used._replace(used_s=now_s, num_hits=used.num_hits + 1)
            num_saved += counts[hit - 1]
        for depth in (1, len(path)):
            if path[:depth] not in kept:
                kept[path[:depth]] = kept_as(path[:depth], counts[depth - 1], now_s, 0)
            if len(kept) > num_slots:
                rows = list(kept.values())
                chosen = drop(list(rows), now_s)
                if chosen not in range(len(rows)):
                    raise ValueError(f"{chosen} is no position among {len(rows)} snapshots")
                del kept[rows[chosen].path]
    return num_saved / most_saved(num_slots, think_s, seed)


@cache
def most_saved(num_slots, think_s, seed):
    """Tokens that no choice can surpass: system prompts are kept beside the slots, and the future is known."""
    last_s, intervals, num_shared = {}, [], 0
    for now_s, path, counts in drawn_turns(150, think_s, seed):
        num_shared += counts[0] * (path[:1] in last_s)
        if len(path) > 2:
            intervals.append((last_s[path[:-1]], now_s, counts[-2] - counts[0]))
        last_s[path[:1]] = last_s[path] = now_s
    return num_shared + heaviest(intervals, num_slots)


def heaviest(intervals, num_slots):
    """Largest total weight of (start, stop, weight) with at most num_slots at a time: a flow of least cost."""
    times = sorted({edge for start, stop, _ in intervals for edge in (start, stop)})
    node, arcs, leaving, total = {time: i for i, time in enumerate(times)}, [], [[] for _ in times], 0

    def connect(source, target, room, cost):
        for at, arc in ((source, [target, room, cost]), (target, [source, 0, -cost])):
            leaving[at].append(len(arcs))
            arcs.append(arc)

    for i in range(len(times) - 1):
        connect(i, i + 1, num_slots, 0)
    for start, stop, weight in intervals:
        connect(node[start], node[stop], 1, -weight)
    for _ in range(num_slots):
        costs, came_by, queue = [0.0] + [np.inf] * (len(times) - 1), {}, deque([0])
        while queue:
            at = queue.popleft()
            for number in leaving[at]:
                target, room, cost = arcs[number]
                if room and costs[at] + cost < costs[target]:
                    costs[target], came_by[target] = costs[at] + cost, number
                    queue.append(target)
        total, at = total - costs[-1], len(times) - 1
        while at:
            number = came_by[at]
            arcs[number][1] -= 1
            arcs[number ^ 1][1] += 1
            at = arcs[number ^ 1][0]
    return total
