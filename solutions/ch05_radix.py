"""Chapter 5, radix: what two requests have in common is stored once, computed once, and read once.

The tree of exercises 5.1 and 5.2 keeps a slot of KV memory for each token (pages of one token). A node stands for a run
of tokens; what may follow them are its children, each under its first token.
"""

import math
from dataclasses import dataclass, field

import torch


@dataclass
class Node:
    """A run of tokens, the slot that holds each one's keys and values, and what follows."""

    tokens: list[int]
    slots: list[int]
    children: dict[int, "Node"] = field(default_factory=dict)


def match(roots: dict[str, Node], tokens: list[int], salt: str = "") -> list[int]:
    """Find the tokens of a prompt that need not be computed, because a request before had the same beginning.

    Nobody may find what was kept under another salt. The prompt's last token is always computed: its logits are wanted.

    Args:
        roots: a tree for each salt; a root has no tokens itself.
        tokens: the prompt.
        salt: whose tree to look in; there may be none yet.

    Returns:
        The slots of the first tokens, as many as are found. The tree stays as it is.

    >>> roots = {"": Node([], [], {7: Node([7, 8, 9], [30, 31, 32])})}
    >>> match(roots, [7, 8, 5, 5])
    [30, 31]
    """
    # solution: 5.1 [20 min, easy] go down while a child begins with the next token; how far do its tokens agree?
    node, found = roots.get(salt), []
    while node and len(found) < len(tokens):
        node = node.children.get(tokens[len(found)])
        for token, slot in zip(node.tokens, node.slots) if node else ():
            if len(found) == len(tokens) or tokens[len(found)] != token:
                return found[: len(tokens) - 1]
            found.append(slot)
    return found[: len(tokens) - 1]
    # end


def insert(root: Node, tokens: list[int], slots: list[int], num_computed: int) -> list[int]:
    """Keep what a request has computed, so that others find it. The tree is changed in place.

    What the tree has already stays: others read it. Where the new tokens leave a node in the middle, the node is split:
    its upper part keeps the common tokens, and has two children, its old rest and the new one.

    Args:
        root: a tree; its own node has no tokens.
        tokens: the request's, from the first on.
        slots: the slot of each; where the request found its beginning in the tree, these are the tree's own slots.
        num_computed: so many of the tokens have run. The others' slots hold nothing yet.

    Returns:
        The slots that are of no use now, in order: the request's own copies of tokens that the tree has elsewhere.

    >>> root = Node([], [], {7: Node([7, 8, 9], [30, 31, 32])})
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
            node.children[tokens[at]] = Node(tokens[at:num_computed], slots[at:num_computed])
            break
        common = 0
        while common < len(child.tokens) and at + common < num_computed and child.tokens[common] == tokens[at + common]:
            if child.slots[common] != slots[at + common]:
                copies.append(slots[at + common])
            common += 1
        if common < len(child.tokens):
            rest = Node(child.tokens[common:], child.slots[common:], child.children)
            child.tokens, child.slots = child.tokens[:common], child.slots[:common]
            child.children = {rest.tokens[0]: rest}
        node, at = child, at + common
    return copies
    # end


def shared_prefix_attention(
    q: torch.Tensor, k_prefix: torch.Tensor, v_prefix: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let requests that share a prefix decode together: its keys are read once for all, each one's own keys apart.

    A softmax can be taken in parts, which are then weighed by how much each stands for (exercise 3.2).

    Args:
        q: [requests, heads, dim], each request's newest query.
        k_prefix, v_prefix: [shared, kv_heads, dim], what all of them attend to; maybe nothing.
        k, v: [own, kv_heads, dim]; request r's own keys are starts[r] to starts[r + 1] - 1, maybe none. Heads 0..n-1
            share KV head 0, the next n KV head 1, and so on.
        starts: [requests + 1].

    Returns:
        The output [requests, heads, dim], scores scaled by dim ** -0.5, and their log-sum-exp [requests, heads].
        Every query has a key somewhere.

    >>> one = torch.ones(1, 1, 1)
    >>> out, lse = shared_prefix_attention(one, one.expand(3, 1, 1), 4 * one.expand(3, 1, 1), one, 8 * one, [0, 1])
    >>> out.item(), round(lse.item(), 3)
    (5.0, 2.386)
    """
    # solution: 5.4 [30 min, medium] attend to the prefix with all queries at once, then row by row; weigh by e^lse
    share, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5

    def attend(queries, keys, values):
        keys, values = keys.repeat_interleave(share, dim=1), values.repeat_interleave(share, dim=1)
        scores = torch.einsum("rhd,shd->rhs", queries, keys) * scale
        lse = scores.logsumexp(-1)
        if not len(keys):
            return torch.zeros_like(queries), lse
        return torch.einsum("rhs,shd->rhd", scores.softmax(-1), values), lse

    shared_out, shared_lse = attend(q, k_prefix, v_prefix)
    rows = [attend(q[r : r + 1], k[a:b], v[a:b]) for r, (a, b) in enumerate(zip(starts, starts[1:]))]
    own_out, own_lse = torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])
    lse = torch.logaddexp(shared_lse, own_lse)
    out = torch.exp(shared_lse - lse)[..., None] * shared_out + torch.exp(own_lse - lse)[..., None] * own_out
    return out, lse
    # end


def order_queue(
    waiting: list[tuple[float, list[int]]], cached: list[list[int]], now_s: float, max_wait_s: float
) -> list[int]:
    """Choose the order in which waiting requests run, so that they find much of their prompts in the cache.

    They run one after another, and each leaves its prompt in the cache for those behind it. The next is always the one
    with most tokens to find; of equals, the one that waits longest. But nobody is passed over for ever: those who have
    waited for more than max_wait_s go before all others, oldest first.

    Args:
        waiting: (when it arrived, its prompt) of each.
        cached: the token sequences that the cache holds now; a prompt finds the longest beginning that it shares with
            one of them.
        now_s: the time now; everybody's waiting time is reckoned from here.
        max_wait_s: see above.

    Returns:
        Positions in `waiting`, in the order in which they run.

    >>> order_queue([(0.0, [1, 2]), (1.0, [5, 6]), (2.0, [1, 3])], [[5, 9]], now_s=3.0, max_wait_s=60.0)
    [1, 0, 2]
    """
    # solution: 5.5 [20 min, medium] choose one at a time: what does the cache hold once those before it have run?

    def num_found(tokens):
        best = 0
        for other in kept:
            num = 0
            while num < min(len(tokens), len(other)) and tokens[num] == other[num]:
                num += 1
            best = max(best, num)
        return best

    order, kept = [], list(cached)
    left = sorted(range(len(waiting)), key=lambda i: waiting[i][0])
    while left:
        chosen = left[0]
        if now_s - waiting[chosen][0] <= max_wait_s:
            chosen = max(left, key=lambda i: num_found(waiting[i][1]))
        left.remove(chosen)
        order.append(chosen)
        kept.append(waiting[chosen][1])
    return order
    # end


@dataclass(frozen=True)
class Price:
    """What an API charges, in dollars per million tokens.

    `write` is what an input token costs that is put into the cache, `hit` one that is found there.
    """

    input: float
    write: float
    hit: float
    output: float


def price_break_even(price: Price, prefix_tokens: int, tokens: int, output_tokens: int, saved: float) -> int | None:
    """Say from how many requests on it pays to have a provider keep the prefix that they share.

    The first request writes the prefix into the cache, all later ones find it there; what comes behind the prefix is
    new in each. Output costs the same either way, and is no part of the input's bill.

    Args:
        price: the provider's.
        prefix_tokens: what all requests begin with, at least 1.
        tokens: further input of each request.
        output_tokens: output of each.
        saved: the share of the input's bill that shall be saved at least, all requests together, 0 to 1.

    Returns:
        The least number of requests, or None if no number is enough.

    >>> price_break_even(Price(2.0, 2.5, 0.2, 6.0), prefix_tokens=2000, tokens=100, output_tokens=300, saved=0.5)
    4
    """
    # solution: 5.6 [15 min, medium] with n requests, what is the bill with the cache, and without?
    plain = price.input * (prefix_tokens + tokens)
    first = price.write * prefix_tokens + price.input * tokens
    later = price.hit * prefix_tokens + price.input * tokens
    allowed = (1 - saved) * plain
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
    are found in it, mean of several loads; the least recently used leaf reaches about 0.41, the smallest 0.29.

    Args:
        leaves: (tokens, tokens on the path above it, requests that came by, seconds since the last one) of each leaf.

    Returns:
        The place of the one to evict; you are asked again until there is room.

    >>> victim([(900, 200, 1, 50.0), (40, 600, 1, 60.0)])
    0
    """
    # solution: 5.7 [30 min, open] room is what a leaf takes and how long it has taken it for nothing
    return max(range(len(leaves)), key=lambda i: leaves[i][0] * leaves[i][3])
    # end
