"""Small prefix trees for the checks of chapter 5: built otherwise than by inserting, written out, and put to use."""

from itertools import count

import numpy as np

from minserve.paging.page_table import PageAllocator


def grown(Run, sequences):
    """The children of a node below which these (tokens, slots) lie; of tokens that come twice the first slots count."""
    children = {}
    for first in dict.fromkeys(tokens[0] for tokens, _ in sequences if tokens):
        mine = [(tokens, slots) for tokens, slots in sequences if tokens[:1] == [first]]
        num = next(n for n in count(1) if len({(*tokens[: n + 1], len(tokens) > n) for tokens, _ in mine}) > 1
                   or n == len(mine[0][0]))  # fmt: skip
        below = [(tokens[num:], slots[num:]) for tokens, slots in mine]
        children[first] = Run(mine[0][0][:num], mine[0][1][:num], grown(Run, below))
    return children


def tree(Run, *sequences):
    """A root above all these (tokens, first slot); tokens take slots one after another."""
    return Run([], [], grown(Run, [(list(tokens), slots_of(tokens, slot)) for tokens, slot in sequences]))


def slots_of(tokens, slot):
    """Slots one after another."""
    return list(range(slot, slot + len(tokens)))


def flat(node, above=""):
    """Every token below a node, as {the tokens down to it: its slot}; what is wrong with a node is written behind."""
    found = {}
    for first, child in node.children.items():
        path, fits = above, len(child.tokens) == len(child.slots) and child.tokens[:1] == [first]
        for token, slot in zip(child.tokens, child.slots, strict=False):
            path = f"{path} {token}".strip()
            found[path] = slot if fits and path not in found else f"{slot}, in a node that cannot be"
        found |= flat(child, path)
    return found


def shared_sequences(num, seed):
    """Sequences that share beginnings, each with slots of its own."""
    rng, made = np.random.default_rng(seed), []
    for i in range(num):
        start = made[int(rng.integers(i))][0] if i else []
        start = start[: int(rng.integers(len(start) + 1))]
        made.append((start + rng.integers(1, 4, int(rng.integers(1, 6))).tolist(), 100 * (i + 1)))
    return made


def spelled(node):
    """The tokens of a node's path, as letters."""
    return (spelled(node.parent) if node.parent else "") + "".join(map(chr, node.tokens))


def answer(said, num_free, num_evictable, leaves):
    """What one call of a tree came to, in a line."""
    return f"{said or 'nothing'}; {num_free} pages free, {num_evictable} evictable, leaves: {leaves or 'none'}"


def answers(RadixTree, page_size, calls):
    """For each call what came back, then how many pages are free and evictable, and what the leaves spell.

    An insertion is that of a request which computes what it does not find, and ends. Locks are numbered from 0.
    """
    allocator, locks, found = PageAllocator(40), [], []
    tree = RadixTree(allocator, page_size)
    for name, what, *rest in calls:
        text = what if isinstance(what, str) else ""
        if name == "insert":
            match = tree.match([*map(ord, text)])
            kept = tree.pages(match.path[-1], match.num_tokens)[: match.num_tokens // page_size] if match.path else []
            own = allocator.take(-(-len(text) // page_size) - len(kept))
            tree.insert([*map(ord, text)], kept + own)
            allocator.release(own)
            said = f"{text} inserted"
        elif name == "lock":
            locks.append(tree.lock(tree.match([*map(ord, text)]), *rest))
            said = spelled(locks[-1])
        elif name == "unlock":
            said = spelled(locks[what])
            tree.unlock(locks[what])
        else:
            said = " ".join("".join(map(chr, node.tokens)) for node in tree.evict(what))
        leaves = sorted(spelled(node) for node in tree.nodes() if not node.children)
        tree.check()
        found.append(answer(said, allocator.num_free, tree.num_evictable, " ".join(leaves)))
    return found


def some_calls(num_calls, seed):
    """Random calls on sequences that share beginnings; every lock is taken back once."""
    rng, calls, held, texts = np.random.default_rng(seed), [], [], [""]
    num_locks = 0
    for _ in range(num_calls):
        start = str(rng.choice(texts))
        text = start[: int(rng.integers(len(start) + 1))] + "".join(rng.choice([*"abc"], int(rng.integers(1, 6))))
        kind = str(rng.choice(["insert", "lock", "unlock", "evict"], p=[0.4, 0.25, 0.2, 0.15]))
        if kind == "insert":
            texts, calls = [*texts, text], [*calls, (kind, text)]
        elif kind == "lock":
            some = (int(rng.integers(len(text) + 1)),) if rng.random() < 0.5 else ()
            held, num_locks, calls = [*held, num_locks], num_locks + 1, [*calls, (kind, text, *some)]
        elif kind == "unlock" and held:
            calls.append((kind, held.pop(int(rng.integers(len(held))))))
        elif kind == "evict":
            calls.append((kind, int(rng.integers(1, 5))))
    return calls
