"""What a prefix tree is made of: nodes, the namespaces of their roots, and how a sequence is compared with an edge."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from minserve.errors import MinserveError

FIRST_BLOCK_TOKENS = 256  # of an edge are compared at once, then twice as many, and so on


class TreeError(MinserveError):
    """A use of the tree that cannot be: a node that is gone, an unlock without a lock, counts that do not add up."""


class Namespace(NamedTuple):
    """Who may share: sequences of one version of the weights and one salt, with its type: 1 is not True."""

    version: int
    kind: str
    salt: Hashable


class Node:
    """The tokens [start, stop) of a path, and the pages that hold them.

    Attributes:
        start, stop: positions in the path; a root has 0, 0.
        tokens: the edge that leads here, stop - start of them.
        pages: page start // page_size of the path, and on; the tree holds one reference to each for each node.
        parent: None for a root, and for a node that is no longer in the tree.
        children: by the first token of their edges.
        namespace: of a root; None below it.
        num_locks: how many hold this node or one below it.
        num_own_locks: how many of them hold this node and nothing below it.
        last_used: the tree's count of uses at the last one; 0: by older weights.
        queued: whether the tree's queue of leaves has an entry for it.
    """

    __slots__ = (
        "start", "stop", "tokens", "pages", "parent", "children", "namespace",
        "num_locks", "num_own_locks", "last_used", "queued",
    )  # fmt: skip

    def __init__(self, start: int, tokens: tuple[int, ...], pages: list[int], parent: Node | None):
        self.start, self.stop, self.tokens, self.pages = start, start + len(tokens), tokens, pages
        self.parent, self.children = parent, {}
        self.namespace: Namespace | None = None
        self.num_locks = self.num_own_locks = 0
        self.last_used, self.queued = 1, False

    def __repr__(self) -> str:
        return f"Node([{self.start}, {self.stop}) pages {self.pages})"


class Match(NamedTuple):
    """How much of a sequence the tree holds.

    Fields:
        num_tokens: so many of its first tokens.
        path: the nodes that cover them, below the root; the last one may cover more.
        namespace: where it was looked for.
    """

    num_tokens: int
    path: tuple[Node, ...]
    namespace: Namespace | None = None


def num_common(edge: Sequence[int], tokens: Sequence[int], at: int = 0) -> int:
    """How many tokens of an edge are those of a sequence from position `at` on.

    Slices are compared whole, first short ones and then longer ones; in the one that differs the place is found by
    halving. So it takes time that grows with the answer, and no loop in Python over tokens.

    >>> num_common((5, 6, 7, 8), [1, 5, 6, 9], 1)
    2
    """
    limit, same, block = min(len(edge), len(tokens) - at), 0, FIRST_BLOCK_TOKENS

    def equal(start: int, stop: int) -> bool:
        return tuple(edge[start:stop]) == tuple(tokens[at + start : at + stop])

    while same < limit:
        stop = min(limit, same + block)
        if not equal(same, stop):
            while stop - same > 1:  # [.., same) is equal, and [same, stop) is not
                middle = (same + stop) // 2
                same, stop = (middle, stop) if equal(same, middle) else (same, middle)
            return same
        same, block = stop, 2 * block
    return same


def kind_of(salt: Hashable) -> str:
    """The type of a salt, and of what a tuple is made of: values that are equal need not be the same salt."""
    name = type(salt).__qualname__
    return f"{name}({', '.join(map(kind_of, salt))})" if isinstance(salt, tuple) else name
