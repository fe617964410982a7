"""The load on which chapter 5's scored exercise is tried: chats, and documents that are read once, in one cache."""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Piece:
    """A piece of a path in the cache: what the exercise sees of a leaf, and whom it hangs below."""

    num_tokens: int
    num_above: int
    num_uses: int
    age_s: float
    below: tuple  # the path that it hangs below


def drawn_requests(num_users, seed):
    """(time, path) of each request, in order; a path is a tuple of (name, tokens), the longest shared part first."""
    rng, requests = np.random.default_rng(seed), []
    for user, begins_s in enumerate(np.sort(rng.uniform(0, 4000, num_users)).tolist()):
        system = (f"system {int(rng.integers(3))}", 200)
        if rng.random() < 0.5:
            document = (f"document {user}", int(rng.lognormal(7.3, 0.4)))
            requests.append((begins_s, (system, document)))
            continue
        path, time_s = (system,), begins_s
        for turn in range(int(rng.geometric(1 / 6))):
            path += ((f"turn {turn} of {user}", int(rng.lognormal(4.6, 0.7)) + 1),)
            requests.append((time_s, path))
            time_s += float(rng.gamma(4, 30))
    return sorted(requests)


def share_found(victim, num_users, capacity, seed):
    """Serve the requests one after another in a cache of `capacity` tokens; the share of prompt tokens found there.

    `victim` is asked for one leaf to evict, by its place, until there is room.
    """
    cache, num_found, num_asked = {}, 0, 0
    for now_s, path in drawn_requests(num_users, seed):
        places = [path[: depth + 1] for depth in range(len(path))]
        num_asked += sum(num for _, num in path)
        for place in places:
            if place in cache:
                num_found += place[-1][1]
                used_s, piece = cache[place]
                cache[place] = now_s, replace(piece, num_uses=piece.num_uses + 1)
        for place in places:
            if place not in cache:
                make_room(victim, cache, capacity - place[-1][1], now_s, places)
                above = sum(num for _, num in place[:-1])
                cache[place] = now_s, Piece(place[-1][1], above, 1, 0.0, place[:-1])
    return num_found / num_asked


def make_room(victim, cache, capacity, now_s, in_use):
    """Evict leaves, none of them in use, until no more than `capacity` tokens are cached."""
    while sum(piece.num_tokens for _, piece in cache.values()) > capacity:
        with_children = {piece.below for _, piece in cache.values()}
        places = [place for place in cache if place not in with_children and place not in in_use]
        leaves = [(p.num_tokens, p.num_above, p.num_uses, now_s - t) for t, p in (cache[place] for place in places)]
        chosen = victim(list(leaves))
        if chosen not in range(len(leaves)):
            raise ValueError(f"{chosen} is no place among {len(leaves)} leaves")
        del cache[places[chosen]]
