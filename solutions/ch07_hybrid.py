"""Chapter 7, hybrid: pages that can be cut anywhere, states that hold for one count of tokens, and one cache of both.

A snapshot is a state that is kept, with the count of tokens that it has seen. A prompt's hit in the pages says how many
of its tokens are known to the attention layers; only a snapshot says where the DeltaNet layers can go on.
"""

from contextlib import ExitStack
from typing import NamedTuple


def match_hybrid(page_hit: int, snapshots: list[int], num_tokens: int) -> int:
    """Say how many tokens of a request need not be computed. The rest is run, so at least its last token must be.

    Args:
        page_hit: its first tokens whose keys and values are in the cache.
        snapshots: the counts at which states were kept on the way that these tokens went, ascending. The way may have
            gone on beyond page_hit, with other tokens than the request's.
        num_tokens: the request's tokens.

    Returns:
        Tokens to skip, 0 if there is nothing to go on from.

    >>> match_hybrid(page_hit=20, snapshots=[8, 16, 24], num_tokens=30)
    16
    """
    # solution: 7.1 [10 min, easy] pages can be cut, a state cannot: from which one can the request go on?
    deepest = min(page_hit, num_tokens - 1)
    return max((count for count in snapshots if count <= deepest), default=0)
    # end


def place_snapshots(start: int, num_tokens: int, every: int, page_size: int) -> list[int]:
    """Choose the counts of tokens at which a prefill's state is kept, for others with this beginning to go on from.

    These are the multiples of `every`, and the last page boundary below the prompt's end, for the same prompt again: a
    state that has seen all of it is no use to that, which must run a token to get its first one.

    Args:
        start: tokens that the prefill skips; it goes on from a snapshot there.
        num_tokens: the prompt's tokens.
        every: tokens from one snapshot to the next.
        page_size: tokens in a page.

    Returns:
        Counts of tokens after start, num_tokens at most, each once, ascending.

    >>> place_snapshots(start=0, num_tokens=30, every=8, page_size=4)
    [8, 16, 24, 28]
    """
    # solution: 7.2 [15 min, medium] which counts are multiples? Is the last boundary one of them, or behind the start?
    counts = {count for count in range(start + 1, num_tokens + 1) if count % every == 0}
    boundary = (num_tokens - 1) // page_size * page_size
    if boundary > start:
        counts.add(boundary)
    return sorted(counts)
    # end


class SnapshotStore:
    """Keep snapshots in a few slots; when all are taken, the least recently used one goes, whichever it is.

    A snapshot is named by the tokens that its state has seen, a tuple. It is used when it is put in (again, too), and
    when a request goes on from it.

        put(tokens)   keep the state after exactly these tokens
        hit(tokens)   how many of a request's tokens can be skipped: at most all but the last
        kept          the snapshots, least recently used first

    >>> store = SnapshotStore(2)
    >>> store.put("ab"), store.put("abcd"), store.hit("abcdef"), store.put("x")
    (None, None, 4, None)
    >>> store.kept
    ['abcd', 'x']
    """

    def __init__(self, num_slots: int):
        # solution: 7.3 [25 min, medium] a dict remembers in which order its keys were put in
        self.num_slots = num_slots
        self._used = {}
        # end

    @property
    def kept(self) -> list:
        """The snapshots, least recently used first."""
        # solution: 7.3 [25 min, medium] the order of use is all there is to remember
        return list(self._used)
        # end

    def put(self, tokens) -> None:
        """Keep a snapshot, in the place of the least recently used one if there is no slot."""
        # solution: 7.3 [25 min, medium] is it there already? If not, is there a slot?
        self._used.pop(tokens, None)
        if len(self._used) == self.num_slots:
            del self._used[next(iter(self._used))]
        self._used[tokens] = None
        # end

    def hit(self, tokens) -> int:
        """Find the snapshot that a request goes on from."""
        # solution: 7.3 [25 min, medium] the longest that is all of it a beginning of the request; who was used?
        for count in range(len(tokens) - 1, 0, -1):
            if tokens[:count] in self._used:
                self.put(tokens[:count])
                return count
        return 0
        # end


def admit_or_undo(tree, node, allocator, states, num_new: int) -> tuple[list[int], int] | None:
    """Take all that a request needs to run, or nothing at all.

    In this order: lock the node that it matched, so that nobody evicts it; share its pages; take a slot for its own
    state; take new pages. If one of them cannot be had, or raises, everything so far is given back, the last first.

    Args:
        tree: lock(node), unlock(node), and pages(node), the page table of all tokens up to the node's end.
        node: what the request matched.
        allocator: take(num), which is None when fewer are free; share(pages); release(pages), a reference less to each.
        states: take(), a slot or None; release(slot).
        num_new: pages to take.

    Returns:
        The request's page table and its slot; None when there is too little, and then nothing has changed. What a call
        raises is raised, and nothing has changed either.

    >>> from types import SimpleNamespace as Fake
    >>> tree = Fake(lock=lambda n: print("lock", n), unlock=lambda n: print("unlock", n), pages=lambda _: [5])
    >>> pages = Fake(share=lambda p: print("share", p), release=lambda p: print("release", p), take=lambda num: None)
    >>> states = Fake(take=lambda: print("slot 0") or 0, release=lambda slot: print("release slot", slot))
    >>> admit_or_undo(tree, "A", pages, states, num_new=1)
    lock A
    share [5]
    slot 0
    release slot 0
    release [5]
    unlock A
    """
    # solution: 7.4 [35 min, hard] right after each thing, note how to undo it: an ExitStack is a list of that
    with ExitStack() as undo:
        tree.lock(node)
        undo.callback(tree.unlock, node)
        pages = tree.pages(node)
        allocator.share(pages)
        undo.callback(allocator.release, pages)
        slot = states.take()
        if slot is None:
            return None
        undo.callback(states.release, slot)
        new = allocator.take(num_new)
        if new is None:
            return None
        undo.pop_all()  # all is there: nothing is to be undone any more
        return pages + new, slot
    # end


class Hybrid(NamedTuple):
    """What a token, and a state, cost one layer of a hybrid model; layers of the other kind keep nothing of it."""

    attention_layers: int
    deltanet_layers: int
    kv_bytes: int  # keys and values of a token, in an attention layer
    state_bytes: int  # the state with its convolution's tail, in a DeltaNet layer


def snapshot_worth(model: Hybrid, every: int, memory_gb: float) -> dict:
    """Weigh snapshots against the pages that they make useful.

    Args:
        model: what is kept of a token, and in a state.
        every: tokens from one snapshot to the next.
        memory_gb: memory for both, 1 GB = 10^9 bytes.

    Returns:
        snapshot_gb: GB of one snapshot, of all layers.
        times_kv: its bytes over those of the keys and values of the tokens since the last one.
        tokens: of context that fit into the memory, each with its share of a snapshot; a whole number, rounded down.

    >>> snapshot_worth(Hybrid(2, 6, kv_bytes=250, state_bytes=5000), every=10, memory_gb=0.00035)
    {'snapshot_gb': 3e-05, 'times_kv': 6.0, 'tokens': 100}
    """
    # solution: 7.5 [10 min, easy] which layers keep what? How many tokens share a snapshot?
    snapshot_bytes = model.deltanet_layers * model.state_bytes
    token_bytes = model.attention_layers * model.kv_bytes
    return {
        "snapshot_gb": snapshot_bytes / 1e9,
        "times_kv": snapshot_bytes / (every * token_bytes),
        "tokens": int(memory_gb * 1e9 // (token_bytes + snapshot_bytes / every)),
    }
    # end


class Kept(NamedTuple):
    """A snapshot of chats: what it has seen, as (system prompt, turn, turn, ...), and when it was last used."""

    path: tuple
    num_tokens: int
    used_s: float
    num_hits: int


def drop_snapshot(kept: list[Kept], now_s: float) -> int:
    """Choose which snapshot to give up: this one is scored, and there is no best answer.

    150 chats with six system prompts; two in five end after a question, the others go on for some turns, at a user's
    pace. After each turn the states after its system prompt and after the turn are put in; when there are more than
    slots, you drop one. The score is the tokens that hits save over what nobody can surpass, who knows who comes back,
    mean of several loads. To drop the least recently used reaches about 0.71.

    Args:
        kept: the snapshots, the newest last.
        now_s: the time.

    Returns:
        The position of the one to drop.

    >>> drop_snapshot([Kept((1,), 80, 9.0, 0), Kept((1, 2), 90, 7.0, 0), Kept((1, 2, 3), 95, 9.0, 0)], now_s=9.0)
    1
    """
    # solution: 7.6 [40 min, open] what would the next request be left with? Will it come at all?
    tokens = {one.path: one.num_tokens for one in kept}

    def worth(one: Kept) -> float:
        if len(one.path) == 1:
            return float("inf")  # everybody begins with one of these
        if any(other[: len(one.path)] == one.path and other != one.path for other in tokens):
            return 0.0  # the chat went on from here already
        before = [tokens.get(one.path[:n], 0) for n in range(len(one.path))]  # without it, the longest of these is left
        return (one.num_tokens - max(before)) / (100 + now_s - one.used_s) ** 2

    return min(range(len(kept)), key=lambda i: worth(kept[i]))
    # end
