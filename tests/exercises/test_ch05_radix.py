"""Checks of chapter 5's exercises. See AUTHORS.md in exercises/."""

from fractions import Fraction

import numpy as np
import torch
from checks import AtLeast, Case
from one_at_a_time import attended, random
from scored_prefixes import share_found
from small_trees import answer, answers, flat, shared_sequences, slots_of, some_calls, tree

from minserve.radix.radix_tree import RadixTree as LibraryTree


def test_5_1_match(ex):
    def case(sequences, tokens, want, note, salt="", where=""):
        roots = {name: tree(ex.Run, *[(t, s) for t, s in sequences]) for name in where.split(",")}
        return Case({"roots": roots, "tokens": list(tokens), "salt": salt}, want, note)

    one, two = [((7, 8, 9), 30)], [((7, 8, 9, 4), 30), ((7, 8, 5), 40)]
    chain = [((1, 2), 10), ((1, 2, 3, 4), 10), ((1, 2, 3, 4, 5, 6), 10), ((1, 2, 9), 50)]
    cases = [
        case(one, (5, 6), [], "nothing in common"),
        case(one, (7, 8, 9, 5), [30, 31, 32], "all of a node"),
        case(one, (7, 8, 5), [30, 31], "a node's first tokens"),
        case(one, (7, 5, 9, 1), [30], "not the tokens behind"),
        case(one, (7, 8, 9), [30, 31], "the prompt itself is there"),  # fault C10
        case(one, (7, 8), [30], "a node begins with the prompt"),
        case(one, (7,), [], "one token, and it is there"),
        case(two, (7, 8, 9, 4, 1), [30, 31, 32, 33], "on, into a child"),
        case(two, (7, 8, 5, 1), [30, 31, 42], "into the other child"),
        case(two, (7, 8, 1, 1), [30, 31], "a node's end, and none of its children"),
        case(two, (7, 8, 9, 1), [30, 31, 32], "a child's first token"),
        case(chain, (1, 2, 3, 4, 5, 9), [10, 11, 12, 13, 14], "three nodes deep"),
        case(chain, (1, 2, 3, 4), [10, 11, 12], "the prompt ends where a node does"),
        case(one, (7, 8, 9, 5), [], "another salt", "b", "a"),  # fault C7
        case(one, (7, 8, 9, 5), [30, 31, 32], "the same salt", "a", "a"),
        case(one, (7, 8, 9, 5), [], "no salt, and a tree with one", "", "a"),
    ]
    roots = {"a": tree(ex.Run, ((7, 8), 10)), "b": tree(ex.Run, ((7, 8, 9), 20))}
    for salt, want in (("a", [10, 11]), ("b", [20, 21, 22])):
        cases.append(Case({"roots": roots, "tokens": [7, 8, 9, 9], "salt": salt}, want, "two salts"))
    for seed in range(6):
        made = shared_sequences(8, seed)
        slot_of = {}
        for tokens, slot in made:
            for n in range(1, len(tokens) + 1):
                slot_of.setdefault(tuple(tokens[:n]), slot + n - 1)
        for tokens in (made[seed][0] + [2, 1], made[-1][0], made[3][0][:2] + made[5][0]):
            found = [slot_of.get(tuple(tokens[:n])) for n in range(1, len(tokens))]
            cases.append(case(made, tokens, [slot for slot in found if slot is not None], "many sequences"))
    ex.check("match", cases)


def inserted(insert, root, **args):
    """What an insertion gave back, and what the tree holds then."""
    return {"given back": insert(root, **args), "tree": flat(root)}


def insertion(Run):
    """A function that makes a case of 5.2."""

    def case(sequences, tokens, slots, want, note, num_computed=None):
        num = len(tokens) if num_computed is None else num_computed
        slots = slots_of(tokens, slots) if isinstance(slots, int) else slots
        grown_root = flat(tree(Run, *sequences))
        for n in range(1, num + 1):
            grown_root.setdefault(" ".join(map(str, tokens[:n])), slots[n - 1])
        args = {"root": tree(Run, *sequences), "tokens": list(tokens), "slots": slots, "num_computed": num}
        return Case(args, {"given back": want, "tree": grown_root}, note, run=inserted, may_change=("root",))

    return case


def test_5_2_insert(ex):
    case = insertion(ex.Run)
    one, two = [((7, 8, 9), 30)], [((7, 8, 9, 4), 30), ((7, 8, 5), 40)]
    cases = [
        case([], (7,), 30, [], "one token, and an empty tree"),
        case([], (7, 8, 9), 30, [], "an empty tree"),
        case([], (7, 8, 9), 30, [], "one of three tokens has run", 1),  # fault C9
        case([], (7, 8, 9), 30, [], "nothing has run", 0),
        case(one, (5, 6), 60, [], "nothing in common"),
        case(one, (7, 8, 9, 4), [30, 31, 32, 63], [], "what was found there, and one token more"),
        case(one, (7, 8, 9), [30, 31, 32], [], "what was found there, and nothing more"),
        case(one, (7, 8, 9), 60, [60, 61, 62], "the same tokens, computed at the same time"),
        case(one, (7, 8, 9, 4), 60, [60, 61, 62], "the same tokens, and one more"),
        case(one, (7, 8, 5), [30, 31, 62], [], "it leaves a node in the middle"),  # fault C3
        case(one, (7, 8, 5), 60, [60, 61], "it leaves a node in the middle, with copies"),
        case(one, (7, 8, 5), [30, 61, 62], [61], "one token found, one computed twice"),
        case(one, (7, 8), 60, [60, 61], "it ends in the middle of a node"),
        case(one, (7, 8, 9, 4), 60, [60, 61], "two tokens have run", 2),
        case(two, (7, 8, 9, 6), [30, 31, 32, 63], [], "it leaves a child in the middle"),
        case(two, (7, 5, 6), [30, 61, 62], [], "it leaves a node that has children"),
        case(two, (7, 8, 5, 1), [30, 31, 62, 63], [62], "below the second child"),
        case(two, (7, 8, 9, 4, 2, 2), 60, [60, 61, 62, 63], "below the first child"),
    ]
    for seed in range(6):
        *made, (tokens, slot) = shared_sequences(9, seed)
        held = flat(tree(ex.Run, *made))
        num = len(tokens) - seed % 2
        there = [held.get(" ".join(map(str, tokens[:n]))) for n in range(1, num + 1)]
        slots = [mine if there is None or seed % 3 == 0 else there
                 for mine, there in zip(slots_of(tokens, slot), [*there, None], strict=False)]  # fmt: skip
        back = [mine for mine, its in zip(slots, there, strict=False) if its not in (None, mine)]
        cases.append(case(made, tokens, slots, back, "many sequences", num))
    ex.check("insert", cases)


def told(page_size, note, *rows):
    """A case of 5.3; rows of (call, its arguments, what came back, pages free of 40, evictable pages, leaves)."""
    calls, want = [row[:-4] for row in rows], [answer(*row[-4:]) for row in rows]
    return Case({"page_size": page_size, "calls": calls}, want, note, run=answers)


AB, ABC = ("insert", "ab", "ab inserted", 38, 2, "ab"), ("insert", "abc", "abc inserted", 37, 3, "abc")
ABD, THREE = ("insert", "abd", "abd inserted", 36, 4, "abc abd"), ("insert", "c", "c inserted", 36, 4, "ab c d")
HERE = [AB, ("insert", "d", "d inserted", 37, 3, "ab d"), THREE]


def calls_on_a_branch():
    """Cases of 5.3 with several leaves."""
    return [
        told(1, "a branch", ABC, ABD, ("lock", "abd", "abd", 36, 1, "abc abd"), ("evict", 9, "c", 37, 0, "abd")),
        told(1, "the node above is locked, the leaf is not", ABC, ABD, ("lock", "ab", "ab", 36, 2, "abc abd"),
             ("evict", 9, "c d", 38, 0, "ab"), ("unlock", 0, "ab", 38, 2, "ab")),
        told(1, "split while it is locked", ABC, ("lock", "abc", "abc", 37, 0, "abc"), (*ABD[:3], 36, 1, "abc abd"),
             ("unlock", 0, "abc", 36, 4, "abc abd"), ("evict", 9, "c d ab", 40, 0, "")),
        told(1, "the oldest of three", *HERE, ("evict", 1, "ab", 38, 2, "c d")),
        told(1, "three pages' worth", *HERE, ("evict", 3, "ab d", 39, 1, "c")),  # fault C13
        told(1, "a use makes young", *HERE, ("lock", "ab", "ab", 36, 2, "ab c d"), ("unlock", 0, "ab", 36, 4, "ab c d"),
             ("evict", 1, "d", 37, 3, "ab c")),
        told(1, "two uses", *HERE, ("lock", "ab", "ab", 36, 2, "ab c d"), ("lock", "d", "d", 36, 1, "ab c d"),
             ("unlock", 1, "d", 36, 2, "ab c d"), ("unlock", 0, "ab", 36, 4, "ab c d"),
             ("evict", 2, "c ab", 39, 1, "d")),
        told(1, "a parent becomes a leaf", ABC, ABD, ("evict", 9, "c d ab", 40, 0, "")),
        told(1, "no more than needed", ABC, ABD, ("evict", 2, "c d", 38, 2, "ab")),
        told(2, "two nodes in one page", ("insert", "abc", "abc inserted", 38, 2, "abc"),
             ("lock", "a", "a", 38, 1, "abc"), ("evict", 1, "bc", 39, 0, "a"), ("unlock", 0, "a", 39, 1, "a")),
        told(2, "a page that is not free yet", ("insert", "ab", "ab inserted", 39, 1, "ab"),
             ("lock", "a", "a", 39, 0, "ab"), ("unlock", 0, "a", 39, 1, "ab"), ("evict", 1, "b a", 40, 0, "")),
    ]  # fmt: skip


def test_5_3_radix_tree(ex):
    cases = [
        told(1, "one leaf", AB, ("evict", 1, "ab", 40, 0, "")), told(1, "no tree yet", ("evict", 1, "", 40, 0, "")),
        told(1, "room that is there is not room made", AB, ("evict", 0, "", 38, 2, "ab")),
        told(1, "a lock", AB, ("lock", "ab", "ab", 38, 0, "ab")),  # fault C1: just below the root
        told(1, "a locked leaf", AB, ("lock", "ab", "ab", 38, 0, "ab"), ("evict", 1, "", 38, 0, "ab")),
        told(1, "unlocked", AB, ("lock", "ab", "ab", 38, 0, "ab"), ("unlock", 0, "ab", 38, 2, "ab"),
             ("evict", 1, "ab", 40, 0, "")),
        told(1, "locked twice", AB, ("lock", "ab", "ab", 38, 0, "ab"), ("lock", "ab", "ab", 38, 0, "ab"),
             ("unlock", 0, "ab", 38, 0, "ab"), ("evict", 1, "", 38, 0, "ab"), ("unlock", 1, "ab", 38, 2, "ab")),
        told(1, "a match that ends in a node", ABC, ("lock", "ab", "ab", 37, 1, "abc"),  # fault C3
             ("evict", 9, "c", 38, 0, "ab"), ("unlock", 0, "ab", 38, 2, "ab")),
        told(1, "less than was matched", ABC, ("lock", "abc", 2, "ab", 37, 1, "abc"), ("evict", 1, "c", 38, 0, "ab")),
        told(1, "more than was matched", ABC, ("lock", "abx", 3, "ab", 37, 1, "abc"), ("evict", 1, "c", 38, 0, "ab")),
        told(1, "nothing of the match", ABC, ("lock", "abc", 0, "", 37, 3, "abc"), ("evict", 1, "abc", 40, 0, ""),
             ("unlock", 0, "", 40, 0, "")),
        told(1, "nothing matched", AB, ("lock", "x", "", 38, 2, "ab"), ("evict", 9, "ab", 40, 0, "")),
        *calls_on_a_branch(),
    ]  # fmt: skip
    for page_size, num_calls, seed in [(1, 12, 0), (2, 12, 1), (3, 20, 2), (4, 30, 3), (2, 40, 4), (1, 40, 5)]:
        calls = some_calls(num_calls, seed)
        args = {"page_size": page_size, "calls": calls}
        cases.append(Case(args, answers(LibraryTree, page_size, calls), f"{num_calls} calls", run=answers))
    ex.check("RadixTree", cases)


def test_5_4_shared_prefix_attention(ex):
    def case(shared, own, note, heads=1, kv_heads=1, dim=1, scale=1.0):
        starts = [0, *np.cumsum(own).tolist()]
        q = scale * random(len(own), heads, dim, seed=1)
        prefix, rest = random(2, shared, kv_heads, dim, seed=2), random(2, starts[-1], kv_heads, dim, seed=3)
        each = [torch.cat([prefix, rest[:, a:b]], 1) for a, b in zip(starts, starts[1:], strict=False)]
        bounds = [0, *np.cumsum([shared + num for num in own]).tolist()]
        k, v = torch.cat(each, 1)
        want = attended(q, k, v, list(range(len(own) + 1)), bounds)
        args = {"q": q, "k_prefix": prefix[0], "v_prefix": prefix[1], "k": rest[0], "v": rest[1], "starts": starts}
        return Case(args, want, note)

    ex.check("shared_prefix_attention", [
        case(1, [1], "one key of each kind"), case(2, [1], "two shared keys and one"),
        case(1, [2], "one shared key and two"), case(0, [2], "nothing is shared"), case(2, [0], "no key of its own"),
        case(1, [1, 1], "two requests"), case(2, [1, 2], "two requests, of different length"),
        case(2, [1, 0], "the second has no key of its own"), case(2, [2, 1, 3], "three requests"),
        case(1, [1], "heads of two", dim=2), case(1, [1, 2], "four heads share two KV heads", 4, 2),
        case(40, [3, 9, 1], "a long prefix", 6, 2, 4), case(7, [5] * 8, "eight requests", 4, 4, 3),
        case(6, [3, 4], "scores of hundreds", 2, 1, 2, scale=500.0),
    ])  # fmt: skip


def best_order(waiting, cached, now_s, max_wait_s):
    """The order, from a set of all beginnings that the cache holds."""
    held = {tuple(tokens[:n]) for tokens in cached for n in range(len(tokens) + 1)}
    left, order = dict(enumerate(waiting)), []
    while left:
        ranks = {}
        for i, (arrived_s, tokens) in left.items():
            num_found = sum(tuple(tokens[:n]) in held for n in range(1, len(tokens) + 1))
            late = now_s - arrived_s > max_wait_s
            ranks[i] = (0, arrived_s) if late else (1, -num_found, arrived_s)
        order.append(sorted(ranks, key=lambda i: ranks[i])[0])
        _, tokens = left.pop(order[-1])
        held |= {tuple(tokens[:n]) for n in range(len(tokens) + 1)}
    return order


def test_5_5_order_queue(ex):
    def case(waiting, cached, want, note, now_s=9.0, max_wait_s=60.0):
        args = {"waiting": waiting, "cached": cached, "now_s": now_s, "max_wait_s": max_wait_s}
        return Case(args, want, note)

    a, b, c = (0.0, [1, 2, 3]), (1.0, [4, 5, 6]), (2.0, [1, 2, 7])
    cases = [
        case([a], [], [0], "one request"),
        case([], [[1]], [], "nobody waits"),
        case([a, b], [], [0, 1], "an empty cache"),
        case([b, a], [], [1, 0], "an empty cache, the second is older"),
        case([a, b], [[4]], [1, 0], "the second finds a token"),
        case([a, b], [[1], [4, 5]], [1, 0], "the second finds more"),
        case([a, b], [[9, 1, 2], [4]], [1, 0], "the cache holds the first one's tokens, and not as a beginning"),
        case([a, b], [[1, 9, 3], [4, 5]], [1, 0], "only the beginning counts"),
        case([a, b], [[1, 2], [4, 5, 6, 6]], [1, 0], "the cache has more than the prompt"),
        case([a, b, c], [], [0, 2, 1], "the first leaves in the cache what the third begins with"),
        case([b, a, c], [[1, 9]], [1, 2, 0], "one token, then two"),
        case([a, b, c], [[4, 5]], [1, 0, 2], "then the older one of two equals"),
        case([a, b], [[4, 5]], [0, 1], "the first has waited too long", max_wait_s=8.5),
        case([a, b], [[4, 5]], [1, 0], "the first has waited for just as long as it may", max_wait_s=9.0),
        case([b, a, c], [[1]], [1, 0, 2], "two have waited too long: the oldest first", max_wait_s=7.5),
        case([a, (0.5, [8]), b, c], [[4]], [0, 3, 2, 1], "one has waited too long, and shares", max_wait_s=8.9),
    ]
    for seed in range(8):
        rng, made = np.random.default_rng(seed), shared_sequences(9, seed)
        waiting = [(float(time_s), tokens) for time_s, (tokens, _) in zip(rng.permutation(7), made[2:], strict=True)]
        args = {"waiting": waiting, "cached": [tokens for tokens, _ in made[: seed % 3]], "now_s": 10.0,
                "max_wait_s": 8.5}  # fmt: skip
        cases.append(Case(args, best_order(**args), "seven requests"))
    ex.check("order_queue", cases)


def least(prices, prefix_tokens, tokens, output_tokens, saved, most=5000):
    """The least number of requests, by trying one after another in exact numbers."""
    wide, write, hit = (Fraction(str(prices[name])) for name in ("input", "write", "hit"))
    for num in range(1, most):
        cached = write * prefix_tokens + (num - 1) * hit * prefix_tokens + num * wide * tokens
        if cached <= (1 - Fraction(str(saved))) * num * wide * (prefix_tokens + tokens):
            return num
    return None


def test_5_6_price_break_even(ex):
    def case(prices, prefix_tokens, tokens, output_tokens, saved, note, want=0):
        prices = dict(zip(("input", "write", "hit", "output"), prices, strict=True))
        args = {"prices": prices, "prefix_tokens": prefix_tokens, "tokens": tokens, "output_tokens": output_tokens,
                "saved": saved}  # fmt: skip
        return Case(args, want if want != 0 else least(**args), note)

    even, premium = (2.0, 2.0, 0.5, 6.0), (2.0, 2.5, 0.25, 6.0)
    ex.check("price_break_even", [
        case(even, 1000, 0, 0, 0.0, "writing costs no more: the first is no dearer", 1),
        case(even, 1000, 0, 0, 0.5, "half is saved: 2 + 0.5 + 0.5 of 3 x 2 dollars", 3),
        case(premium, 1000, 0, 0, 0.0, "writing costs more: 2.5 + 0.25 of 2 x 2 dollars", 2),
        case(premium, 1000, 0, 0, 0.5, "a premium, and half to be saved"),
        case(premium, 1000, 0, 0, 0.875, "as much as a hit saves is never reached", None),
        case(premium, 1000, 0, 0, 0.95, "more than a hit saves", None),
        case((2.0, 3.0, 2.0, 6.0), 1000, 0, 0, 0.0, "a hit saves nothing", None),
        case(premium, 1000, 500, 0, 0.25, "further input"), case(premium, 1000, 500, 900, 0.25, "input and output"),
        case(premium, 1000, 5000, 0, 0.25, "much further input", None),
        case(premium, 1000, 0, 5000, 0.75, "much output"), case(premium, 5000, 200, 100, 0.8, "nearly all to be saved"),
        case((0.6, 0.6, 0.02, 2.0), 2000, 300, 400, 0.8, "cheap hits"),
        case((2.0, 2.5, 0.2, 6.0), 2000, 100, 300, 0.5, "a premium and cheap hits"),
        case((3.0, 3.75, 0.3, 15.0), 700, 300, 50, 0.6, "a price list"),
        case((1.0, 9.0, 0.1, 1.0), 1024, 0, 0, 0.5, "a high premium"),
        case((0.1, 0.125, 0.01, 0.4), 1000, 0, 100, 0.0, "little money"),
    ])  # fmt: skip


def test_5_7_victim(ex):
    def share(victim, loads):
        return float(np.mean([share_found(victim, *load) for load in loads]))

    loads = [(120, 6000, 0), (120, 12000, 1), (120, 8000, 2)]
    ex.check("victim", [
        Case({"loads": loads}, want=AtLeast(0.58), run=share, note="users, tokens that fit, seed"),
    ])  # fmt: skip
