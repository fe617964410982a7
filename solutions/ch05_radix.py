"""Chapter 5, radix: what two requests have in common is stored once, computed once, and read once."""

import math
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import torch

from minserve.radix.node import Match, Node
from minserve.radix.prefix_tree import PrefixTree


@dataclass
class Run:
    """A node of 5.1 and 5.2: some tokens, the slot of each, and under its first token what may follow."""

    tokens: list[int]
    slots: list[int]
    children: dict[int, "Run"] = field(default_factory=dict)


def match(roots: dict[str, Run], tokens: list[int], salt: str = "") -> list[int]:
    """Find the tokens of a prompt that need not be computed, because a request before had the same beginning.

    Nobody finds what was kept under another salt. The prompt's last token is always computed: its logits are wanted.

    Args:
        roots: a tree for each salt; a root has no tokens itself.
        tokens, salt: the prompt, and whose tree to look in; there may be none yet.

    Returns: the slots of the first tokens, as many as are found. The tree stays as it is.

    >>> roots = {"": Run([], [], {7: Run([7, 8, 9], [30, 31, 32])})}
    >>> match(roots, [7, 8, 5, 5])
    [30, 31]
    """
    # solution: 5.1 [20 min, easy] go down while a child begins with the next token; how far do its tokens agree?
    wanted, node, found = tokens[:-1], roots.get(salt), []
    while node and len(found) < len(wanted):
        node = node.children.get(wanted[len(found)])
        for token, slot in zip(node.tokens, node.slots, strict=True) if node else ():
            if wanted[len(found) : len(found) + 1] != [token]:
                return found
            found.append(slot)
    return found
    # end


def insert(root: Run, tokens: list[int], slots: list[int], num_computed: int) -> list[int]:
    """Keep what a request has computed, so that others find it. The tree is changed in place.

    What the tree has already stays: others read it. Where the new tokens leave a node in the middle, the node is split:
    its upper part keeps the common tokens, and has two children, its old rest and the new one.

    Args:
        root: a tree; it has no tokens itself.
        tokens, slots: the request's, and the slot of each, the tree's own where the tree had them already.
        num_computed: so many of the tokens have run. The others' slots hold nothing yet.

    Returns: the slots that are of no use now, in order: the request's own copies of tokens that the tree has elsewhere.

    >>> root = Run([], [], {7: Run([7, 8, 9], [30, 31, 32])})
    >>> insert(root, [7, 8, 5, 6], [40, 41, 42, 43], num_computed=3)
    [40, 41]
    >>> root.children[7].tokens, sorted(root.children[7].children), root.children[7].children[5].slots
    ([7, 8], [5, 9], [42])
    """
    # solution: 5.2 [30 min, medium] walk down as in 5.1; when is a node split, and what becomes of its children?
    node, at, copies = root, 0, []
    while at < num_computed:
        child = node.children.get(tokens[at])
        if child is None:
            node.children[tokens[at]] = Run(tokens[at:num_computed], slots[at:num_computed])
            break
        common = 0
        while common < len(child.tokens) and at + common < num_computed and child.tokens[common] == tokens[at + common]:
            if child.slots[common] != slots[at + common]:
                copies.append(slots[at + common])
            common += 1
        if common < len(child.tokens):
            rest = Run(child.tokens[common:], child.slots[common:], child.children)
            child.tokens, child.slots = child.tokens[:common], child.slots[:common]
            child.children = {rest.tokens[0]: rest}
        node, at = child, at + common
    return copies
    # end


class RadixTree(PrefixTree):
    """The library's tree of pages, which can match, insert and split; yours locks and evicts, and serves in the engine.

    A node's `num_locks` says how many hold it or something below it. Where two nodes meet inside a page, both refer to
    that page (`node.pages`), and it is free only when both are gone.

        lock(found, num_tokens)  hold the first num_tokens tokens (None: all) of a match or of a node's path, no token
                                 more: from the root down, everything counts as used now; returns the last node held
        unlock(node)             take such a lock back
        evict(num_pages)         let go of leaves without a lock, least recently used first, until so many more pages
                                 are free or no such leaf is left; returns them in order
        num_evictable            pages of the tree, each once, that are in no locked node

    >>> from minserve.paging.page_table import PageAllocator
    >>> tree, pages = RadixTree(allocator := PageAllocator(9), page_size=2), allocator.take(2)
    >>> leaf = tree.insert([5, 6, 7], pages)
    >>> allocator.release(pages)  # the tree has references of its own
    >>> node = tree.lock(tree.match([5, 6, 8]))
    >>> (node.start, node.stop), tree.num_evictable, len(tree.evict(9)), allocator.num_free
    ((0, 2), 1, 1, 8)
    """

    num_uses = 0

    def _attach(self, leaf: Node):  # insert calls this with a new leaf
        super()._attach(leaf)
        self.num_uses += 1
        leaf.last_used = self.num_uses

    def path_to(self, found: Match | Node, num_tokens: int | None) -> tuple[list[Node], int]:
        """The nodes of these tokens, from the root down, and how many tokens; the last node may reach further."""
        if isinstance(found, Match):
            node, stop = [self._root(found.namespace), *found.path][-1], found.num_tokens
        else:
            node, stop = found, found.stop
        path, stop = [], stop if num_tokens is None else min(stop, num_tokens)
        while node:
            path, node = [node, *path] if node.start < stop or not node.parent else path, node.parent
        return path, stop

    @property
    def num_pages(self) -> int:
        """Pages of the tree, each once."""
        return len({page for node in self.nodes() for page in node.pages})

    def lock(self, found: Match | Node, num_tokens: int | None = None) -> Node:
        """Hold a path."""
        # solution: 5.3 [40 min, hard] begin with path_to; self._ending_at(node, stop) splits one that reaches further
        path, stop = self.path_to(found, num_tokens)
        path[-1] = self._ending_at(path[-1], stop)
        self.num_uses += 1
        for node in path:
            node.num_locks += 1
            node.last_used = self.num_uses
        return path[-1]
        # end

    def unlock(self, node: Node) -> None:
        """Take one lock of a path back."""
        # solution: 5.3 [40 min, hard] every node up to the root (node.parent is None) was held
        while node:
            node.num_locks -= 1
            node = node.parent
        # end

    def evict(self, num_pages: int) -> list[Node]:
        """Make room."""
        # solution: 5.3 [40 min, hard] self.nodes() are all nodes; a parent may become a leaf; count what gets free
        evicted, enough = [], self._allocator.num_free + num_pages
        while self._allocator.num_free < enough:
            leaves = [node for node in self.nodes() if not node.children and node.num_locks == 0]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.last_used)
            self._allocator.release(leaf.pages)
            del leaf.parent.children[leaf.tokens[0]]
            leaf.parent = None
            evicted.append(leaf)
        return evicted
        # end

    @property
    def num_evictable(self) -> int:
        """Pages in no locked node."""
        # solution: 5.3 [40 min, hard] a page may be in several nodes
        locked = {page for node in self.nodes() if node.num_locks for page in node.pages}
        return self.num_pages - len(locked)
        # end


def shared_prefix_attention(
    q: torch.Tensor, k_prefix: torch.Tensor, v_prefix: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let requests that share a prefix decode together: its keys are read once for all, each one's own keys apart.

    A softmax can be taken in parts, which are then weighed by how much each stands for (exercise 3.2).

    Args:
        q: [requests, heads, dim], each request's newest query.
        k_prefix, v_prefix: [shared, kv_heads, dim], what all attend to; maybe nothing, if all have keys of their own.
        k, v: [own, kv_heads, dim]; request r's own keys are starts[r] to starts[r + 1] - 1, maybe none. Heads 0..n-1
            share KV head 0, the next n KV head 1, and so on.
        starts: [requests + 1].

    Returns: the output [requests, heads, dim], scores scaled by dim ** -0.5, and their log-sum-exp [requests, heads].

    >>> one = torch.ones(1, 1, 1)
    >>> out, lse = shared_prefix_attention(one, one.expand(3, 1, 1), 4 * one.expand(3, 1, 1), one, 8 * one, [0, 1])
    >>> out.item(), round(lse.item(), 3)
    (5.0, 2.386)
    """
    # solution: 5.4 [30 min, medium] attend to the prefix with all queries at once, then row by row; weigh by e^lse
    share = q.shape[1] // k.shape[1]

    def attend(queries, keys, values):
        keys, values = keys.repeat_interleave(share, dim=1), values.repeat_interleave(share, dim=1)
        scores = torch.einsum("rhd,shd->rhs", queries, keys) * q.shape[-1] ** -0.5
        return torch.einsum("rhs,shd->rhd", scores.softmax(-1), values), scores.logsumexp(-1)

    shared_out, shared_lse = attend(q, k_prefix, v_prefix)
    rows = [attend(q[r : r + 1], k[a:b], v[a:b]) for r, (a, b) in enumerate(pairwise(starts))]
    own_out, own_lse = torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])
    lse = torch.logaddexp(shared_lse, own_lse)
    out = torch.exp(shared_lse - lse)[..., None] * shared_out + torch.exp(own_lse - lse)[..., None] * own_out
    return out, lse
    # end


def order_queue(
    waiting: list[tuple[float, list[int]]], cached: list[list[int]], now_s: float, max_wait_s: float
) -> list[int]:
    """Choose the order in which waiting requests run, so that they find much of their prompts in the cache.

    They run one after another, and each leaves its prompt in the cache for those behind it. Next is always the one with
    most tokens to find; of equals, the oldest. But nobody is passed over for ever: those who have waited for more than
    max_wait_s go before all others, oldest first.

    Args:
        waiting: (when it arrived, its prompt) of each; its waiting time is reckoned up to now_s.
        cached: the token sequences that the cache holds now; a prompt finds the longest beginning shared with one.

    Returns: positions in `waiting`, in the order in which they run.

    >>> order_queue([(0.0, [1, 2]), (1.0, [5, 6]), (2.0, [1, 3])], [[5, 9]], now_s=3.0, max_wait_s=60.0)
    [1, 0, 2]
    """
    # solution: 5.5 [20 min, medium] choose one at a time: what does the cache hold once those before it have run?

    def num_found(tokens):
        pairs = [zip(tokens, other, strict=False) for other in kept]
        return max([len(list(takewhile(lambda pair: pair[0] == pair[1], both))) for both in pairs], default=0)

    order, kept = [], list(cached)
    left = sorted(range(len(waiting)), key=lambda i: waiting[i][0])
    for _ in waiting:
        chosen = left[0]
        if now_s - waiting[chosen][0] <= max_wait_s:
            chosen = max(left, key=lambda i: num_found(waiting[i][1]))
        left.remove(chosen)
        order.append(chosen)
        kept.append(waiting[chosen][1])
    return order
    # end


def price_break_even(prices: dict, prefix_tokens: int, tokens: int, output_tokens: int, saved: float) -> int | None:
    """Say from how many requests on it pays to have a provider keep the prefix that they share.

    The first request writes it into the cache, all later ones find it there; what comes behind it is new in each.
    Output costs the same either way, and is no part of the input's bill.

    Args:
        prices: dollars per million tokens of "input" and "output", of input that a cache keeps ("write"), of input
            that it has ("hit").
        prefix_tokens, tokens, output_tokens: of each request: what all begin with, its further input, its output.
        saved: the share of the input's bill that all requests together shall save at least.

    Returns: the least number of requests, or None if no number is enough.

    >>> price_break_even({"input": 2.0, "write": 2.5, "hit": 0.2, "output": 6.0}, 2000, 100, 300, saved=0.5)
    4
    """
    # solution: 5.6 [15 min, medium] with n requests, what is the bill with the cache, and without?
    further = prices["input"] * tokens
    first, later = prices["write"] * prefix_tokens + further, prices["hit"] * prefix_tokens + further
    allowed = (1 - saved) * (prices["input"] * prefix_tokens + further)
    if first <= allowed:
        return 1
    if later >= allowed:
        return None
    return math.ceil((first - later) / (allowed - later) - 1e-9)
    # end


def victim(leaves: list[tuple[int, int, int, float]]) -> int:
    """Choose which leaf of the tree is evicted: this one is scored, and there is no best answer.

    Chats come back, each turn with all turns before it; in between, long documents are read once each. One of a few
    system prompts stands before everything. The cache is too small. The score is the share of all prompt tokens that
    are found in it, mean of several loads; the least recently used leaf reaches about 0.53, the smallest 0.27.

    Args: leaves, (tokens, tokens above it, requests that came by, seconds since the last one) of each.
    Returns: the place of the one to evict; you are asked again until there is room.

    >>> victim([(900, 200, 1, 50.0), (40, 600, 1, 60.0)])
    0
    """
    # solution: 5.7 [30 min, open] room is what a leaf takes and how long it has taken it for nothing
    return max(range(len(leaves)), key=lambda i: leaves[i][0] * leaves[i][3])
    # end
