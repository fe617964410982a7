"""A radix tree over tokens: the pages of every sequence it was given, found again by what the sequence begins with.

A path from a root spells the tokens of a prefix; an edge spells as many as nobody has branched off from. A node covers
the tokens [start, stop) of its path and refers to pages start // P .. ceil(stop / P) - 1 of it, of P tokens each.
Sequences do not part where pages begin; then each part refers to a page for that place:

    position   0 1 2 3 | 4 5 6 7 | 8 9       P = 4
    first      a a a a | b b b b | c c       pages [0, 1, 2]
    second     a a a a | b x x               pages [0, 3]: it copied the page that it branches off in
    nodes      [0, 5) pages [0, 1]  ->  [5, 10) pages [1, 2]  and  [5, 7) pages [3]

Page i of a path is that of its deepest node that covers a part of page i: that one holds what was copied, and on.
Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs (arXiv 2312.07104), section 3.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

from minserve.errors import InvalidValue
from minserve.radix.node import Match, Namespace, Node, TreeError, kind_of, num_common


class Pages(Protocol):
    """What the tree needs of a page allocator, which is the owner of the counts of references."""

    @property
    def num_free(self) -> int:
        """Pages that nobody refers to."""

    def share(self, pages: Sequence[int]) -> None:
        """Count one more reference to each page."""

    def release(self, pages: Sequence[int]) -> None:
        """Count one reference less to each page."""

    def ref_count(self, page: int) -> int:
        """How many refer to the page."""


class PrefixTree:
    """Finds sequences by their beginnings, and takes in new ones; nothing is ever let go.

    Arguments:
        allocator: counts the references to pages; the tree takes one more for each node that refers to a page.
        page_size: tokens per page.
    Attributes:
        version: of the weights; what an older one wrote is not found.
    """

    def __init__(self, allocator: Pages, page_size: int):
        if page_size < 1:
            raise InvalidValue("page_size", page_size, "at least 1", "EngineConfig.page_size")
        self.page_size, self.version = page_size, 0
        self._allocator = allocator
        self._roots: dict[Namespace, Node] = {}

    def namespace(self, salt: Hashable = None) -> Namespace:
        """Where sequences of this salt are kept, for the weights of now. Errors: InvalidValue without a hash."""
        try:
            hash(salt)
        except TypeError:
            raise InvalidValue("cache_salt", salt, "hashable") from None
        return Namespace(self.version, kind_of(salt), salt)

    def match(self, tokens: Sequence[int], namespace: Namespace | None = None) -> Match:
        """How many of the first tokens are here, token for token; reads only, in time that grows with the match.

        Arguments:
            tokens: a sequence, from its first token on.
            namespace: whose sequences are looked at; None takes those without a salt.
        """
        namespace = namespace or self.namespace()
        root = self._roots.get(namespace)
        if root is None or namespace.version != self.version:
            return Match(0, (), namespace)
        path, num_tokens = self._walk(root, tokens)
        return Match(num_tokens, tuple(path), namespace)

    def pages(self, node: Node, num_tokens: int | None = None) -> list[int]:
        """The page table of a node's path: page i holds positions [i * page_size, (i + 1) * page_size).

        Arguments:
            node: the end of the path.
            num_tokens: how many tokens the table is to cover; None takes all, node.stop.
        Errors: InvalidValue for more tokens than the path has; TreeError where the node is no longer in the tree.
        """
        num_tokens = node.stop if num_tokens is None else num_tokens
        if not 0 <= num_tokens <= node.stop:
            raise InvalidValue("num_tokens", num_tokens, f"from 0 to {node.stop}, where the node ends")
        parts, stop_page, above = [], -(-num_tokens // self.page_size), node
        while stop_page and above.parent is not None:
            if above.start < num_tokens:
                first_page = above.start // self.page_size
                parts.append(above.pages[: stop_page - first_page])
                stop_page = first_page
            above = above.parent
        if stop_page:
            raise TreeError(f"{node} is no longer in the tree")
        return [page for part in reversed(parts) for page in part]

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        namespace: Namespace | None = None,
        after: Node | None = None,
    ) -> Node:
        """Take in a sequence: what the tree has already is kept, the rest becomes a leaf that shares its pages.

        Whoever inserts keeps its own references. Where the tree had other pages for the same tokens, `pages(node)` of
        the answer names them; the full ones can be adopted.

        Arguments:
            tokens: the whole sequence.
            pages: pages[i] holds the positions from i * page_size on, up to the last token.
            namespace: where to; None takes that of no salt. `after` has one already.
            after: a node whose path is known to be the first after.stop tokens; they are not compared again.
        Returns the node that ends exactly at the last token: a root where there is none.
        Changes: the tree and the allocator. Errors, before anything changes: InvalidValue for too few pages or tokens,
        TreeError where `after` is no longer in the tree, and the allocator's own for a page that nobody holds.
        """
        num_tokens, size = len(tokens), self.page_size
        if len(pages) < -(-num_tokens // size):
            raise InvalidValue("pages", len(pages), f"at least {-(-num_tokens // size)} for {num_tokens} tokens")
        node = self._root(namespace or self.namespace()) if after is None else self._present(after)
        if node.stop > num_tokens:
            raise InvalidValue("tokens", num_tokens, f"at least {node.stop}, the end of `after`")
        path, at = self._walk(node, tokens)
        new = list(pages[at // size : -(-num_tokens // size)]) if at < num_tokens else []
        self._allocator.share(new)
        node = self._ending_at(path[-1] if path else node, at)
        if at == num_tokens:
            return node
        leaf = Node(at, tuple(tokens[at:]), new, node)
        self._attach(leaf)
        return leaf

    def new_version(self) -> list[Node]:
        """The weights have changed: nothing of before is found any more, and what nobody locks is evicted.

        Returns the evicted nodes. Changes: the tree and the allocator. Needs what this class leaves open: evict.
        """
        self.version += 1
        return self.evict(self.num_evictable + 1)  # more than there are: all that can go

    def nodes(self) -> Iterator[Node]:
        """Every node below the roots, parents first."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting += node.children.values()

    def check(self) -> None:
        """Raise TreeError unless edges, children and pages fit together and every reference is counted."""
        num_nodes, places = {}, {}
        for namespace, root in self._roots.items():
            if root.namespace != namespace or root.parent or root.stop or root.pages or root.tokens:
                raise TreeError(f"{root} is not a root of {namespace}")
        for node in self.nodes():
            first_page, parent = node.start // self.page_size, node.parent
            if not node.tokens or node.start != parent.stop or node.stop != node.start + len(node.tokens):
                raise TreeError(f"{node} has {len(node.tokens)} tokens, below {parent}")
            if parent.children.get(node.tokens[0]) is not node:
                raise TreeError(f"{parent} does not know its child {node}")
            if len(node.pages) != -(-node.stop // self.page_size) - first_page:
                raise TreeError(f"{node} has not one page for each {self.page_size} tokens")
            for place, page in enumerate(node.pages, start=first_page):
                num_nodes[page] = num_nodes.get(page, 0) + 1
                if places.setdefault(page, place) != place:
                    raise TreeError(f"page {page} is page {place} of {node}, and page {places[page]} of another path")
        for page, count in num_nodes.items():
            if self._allocator.ref_count(page) < count:
                raise TreeError(f"page {page} is in {count} nodes, with {self._allocator.ref_count(page)} references")

    def _root(self, namespace: Namespace) -> Node:
        """The root of a namespace, which is in the tree as soon as it has a child."""
        root = self._roots.get(namespace)
        if root is None:
            root = Node(0, (), [], None)
            root.namespace = namespace
        return root

    def _present(self, node: Node) -> Node:
        """The node, or the root of its namespace as it is now. Errors: TreeError where it is no longer in the tree."""
        if node.namespace is not None:
            return self._root(node.namespace)
        if node.parent is None:
            raise TreeError(f"{node} is no longer in the tree")
        return node

    def _walk(self, node: Node, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """From a node down as far as the tokens go: the nodes entered, and how many tokens that is."""
        path, at = [], node.stop
        while at == node.stop and at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            path.append(child)
            node, at = child, at + self._compare(child.tokens, tokens, at)
        return path, at

    def _compare(self, edge: tuple[int, ...], tokens: Sequence[int], at: int) -> int:
        """How many tokens of an edge are those of the sequence."""
        return num_common(edge, tokens, at)

    def _ending_at(self, node: Node, at: int) -> Node:
        """The node of this path that ends at a position that the node covers; splits it inside. Changes: the tree."""
        return node if at == node.stop else self._split(node, at)

    def _attach(self, leaf: Node) -> None:
        """Put a leaf below its parent, whose root is in the tree from now on. Changes: the tree."""
        parent = leaf.parent
        if parent.namespace is not None:
            self._roots[parent.namespace] = parent
        parent.children[leaf.tokens[0]] = leaf

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge: a new node takes [start, at) and everybody's locks, the node keeps [at, stop).

        Whoever holds the node holds the same tokens as before. Inside a page both refer to it. Changes: the tree.
        """
        size, first_page = self.page_size, node.start // self.page_size
        num_upper, start_lower = -(-at // size) - first_page, at // size - first_page
        self._allocator.share(node.pages[start_lower:num_upper])  # one page, or none
        upper = Node(node.start, node.tokens[: at - node.start], node.pages[:num_upper], node.parent)
        upper.num_locks, upper.last_used = node.num_locks, node.last_used
        node.parent.children[upper.tokens[0]] = upper
        node.start, node.tokens, node.parent = at, node.tokens[at - node.start :], upper
        node.pages = node.pages[start_lower:]
        upper.children[node.tokens[0]] = node
        return upper
