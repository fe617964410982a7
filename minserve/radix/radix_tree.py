"""The prefix cache: a radix tree that knows what is in use, and lets go of what was not used for longest.

A lock holds a node and everything above it. What is locked is therefore the top of the tree, and all the rest can be
evicted, leaf by leaf. The memory is pages, not nodes, and nodes share a page where an edge was cut inside it; so pages
are counted, each once:

    evictable (in no locked node)  +  protected (in a locked node)  ==  all pages of the tree

The leaves wait in a heap by their last use. A use does not look for the leaf's entry there: the entry keeps its key,
and gets the new one when it comes to the top. A leaf has one entry at most, so an eviction costs O(log leaves).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from minserve.radix.node import Match, Namespace, Node, TreeError
from minserve.radix.prefix_tree import Pages, PrefixTree

OLD = 0  # the last use of what older weights wrote: before everything of now


class RadixTree(PrefixTree):
    """A prefix tree whose paths can be locked, and whose unlocked leaves make room, least recently used first.

    Arguments:
        allocator: counts the references to pages; the tree holds one for each node that refers to a page.
        page_size: tokens per page.

    >>> from minserve.paging.page_table import PageAllocator
    >>> allocator = PageAllocator(8)
    >>> tree, pages = RadixTree(allocator, page_size=4), allocator.take(3)
    >>> _ = tree.insert([1, 2, 3, 4, 5, 6, 7, 8, 9], pages)
    >>> allocator.release(pages)  # the tree has references of its own
    >>> match = tree.match([1, 2, 3, 4, 5, 0])
    >>> node = tree.lock(match)
    >>> match.num_tokens, tree.pages(node), tree.num_protected, tree.num_evictable
    (5, [0, 1], 2, 1)
    >>> tree.evict(8), tree.unlock(node), tree.evict(8), allocator.num_free
    ([Node([5, 9) pages [])], None, [Node([0, 5) pages [])], 8)
    """

    def __init__(self, allocator: Pages, page_size: int):
        super().__init__(allocator, page_size)
        self._num_uses = 1  # the clock of recency
        self._heap: list[tuple[int, int, Node]] = []  # last use as far as known, order of arrival, leaf
        self._num_queued = 0
        self._num_nodes: dict[int, int] = {}  # of each page: how many nodes refer to it
        self._num_locked: dict[int, int] = {}  # of each page: how many locked nodes refer to it

    @property
    def num_pages(self) -> int:
        """Pages that the tree refers to."""
        return len(self._num_nodes)

    @property
    def num_protected(self) -> int:
        """Pages that a locked node refers to."""
        return len(self._num_locked)

    @property
    def num_evictable(self) -> int:
        """Pages that only unlocked nodes refer to; one is free after eviction if nobody outside the tree has it."""
        return len(self._num_nodes) - len(self._num_locked)

    def lock(self, match_or_node: Match | Node, num_tokens: int | None = None) -> Node:
        """Hold a path until `unlock`, exactly as far as it was matched; its nodes count as used now.

        Arguments:
            match_or_node: what was found, or a node to hold.
            num_tokens: hold no more than so many of its tokens; None holds all.
        Returns the node that ends there, for `unlock`; an edge is cut where it would reach further. Where nothing is
        held, a root.
        Changes: the tree. Errors: TreeError where the node is gone, or the match is of older weights.
        """
        node, stop = self._end(match_or_node)
        stop = stop if num_tokens is None else max(0, min(stop, num_tokens))
        while node.parent is not None and node.start >= stop:
            node = node.parent
        node = self._ending_at(node, stop)
        if node.namespace is not None:
            self._roots[node.namespace] = node
        self._num_uses += 1
        node.num_own_locks += 1
        above = node
        while above is not None:
            if not above.num_locks:
                _count(self._num_locked, above.pages, 1)
            above.num_locks += 1
            if above.last_used != OLD:
                above.last_used = self._num_uses
            above = above.parent
        return node

    def unlock(self, node: Node) -> None:
        """Take back one lock of exactly this node. Changes: the tree. Errors: TreeError where there is none."""
        if not node.num_own_locks:
            raise TreeError(f"{node} is unlocked, and has no lock of its own")
        node.num_own_locks -= 1
        above = node
        while above is not None:
            above.num_locks -= 1
            if not above.num_locks:
                _count(self._num_locked, above.pages, -1)
            above = above.parent
        self._left_alone(node)

    def evict(self, num_pages: int) -> list[Node]:
        """Let go of leaves that nobody locks, least recently used first, until enough pages have become free.

        Arguments:
            num_pages: how many the allocator is to have free beyond those of now. A page of which somebody else, or
                another node, has a reference does not become free.
        Returns the evicted nodes, so that what is attached to them can go, too; too few where no leaf is left.
        Changes: the tree and the allocator.
        """
        evicted, enough = [], self._allocator.num_free + num_pages
        while self._allocator.num_free < enough:
            leaf = self._oldest_leaf()
            if leaf is None:
                break
            self._remove(leaf)
            evicted.append(leaf)
        return evicted

    def new_version(self) -> list[Node]:
        """The weights have changed: nothing of before is found any more.

        Returns the evicted nodes: all that nobody locks. The others can be unlocked as ever, and go first then.
        Changes: the tree and the allocator.
        """
        evicted = super().new_version()
        for node in self.nodes():
            node.last_used = OLD
        return evicted

    def check(self) -> None:
        """Raise TreeError unless the tree fits together, evictable + protected == all pages, and every leaf can go."""
        super().check()
        for namespace, root in self._roots.items():
            if self._is_free(root):
                raise TreeError(f"the root of {namespace} has no child and no lock")
        entries = [id(node) for _, _, node in self._heap]
        if len(set(entries)) != len(entries):
            raise TreeError(f"a leaf waits twice for its eviction, among {len(entries)}")
        queued, num_nodes, num_locked = set(entries), {}, {}
        for node in [*self._roots.values(), *self.nodes()]:
            below = sum(child.num_locks for child in node.children.values())
            if node.num_own_locks < 0 or node.num_locks != node.num_own_locks + below:
                raise TreeError(f"{node} has {node.num_locks} locks: {node.num_own_locks} of its own, {below} below it")
            if node.queued != (id(node) in queued) or self._is_free(node) > node.queued:
                raise TreeError(f"{node} can be evicted, and does not wait for it")
            _count(num_nodes, node.pages, 1)
            _count(num_locked, node.pages if node.num_locks else (), 1)
        for counted, kept, nodes in ((num_nodes, self._num_nodes, "nodes"), (num_locked, self._num_locked, "locked")):
            for page in counted.keys() | kept.keys():
                if counted.get(page) != kept.get(page):
                    raise TreeError(f"page {page} is in {counted.get(page, 0)} {nodes}, counted {kept.get(page, 0)}")

    def _end(self, match_or_node: Match | Node) -> tuple[Node, int]:
        """Where a match or a node ends: the node, and how many tokens its path has until there."""
        if isinstance(match_or_node, Node):
            return self._present(match_or_node), match_or_node.stop
        num_tokens, path, namespace = match_or_node
        namespace = namespace or self.namespace()
        if namespace.version != self.version:
            raise TreeError(f"the match is of version {namespace.version}, and the weights are {self.version}")
        return (self._present(path[-1]), min(num_tokens, path[-1].stop)) if path else (self._root(namespace), 0)

    def _root(self, namespace: Namespace) -> Node:
        """The root of a namespace; one of older weights is as old as they are."""
        root = super()._root(namespace)
        if namespace.version != self.version:
            root.last_used = OLD
        return root

    def _attach(self, leaf: Node) -> None:
        """Put a leaf below its parent; it was used now, unless older weights wrote it. Changes: the tree."""
        super()._attach(leaf)
        self._num_uses += 1
        leaf.last_used = OLD if leaf.parent.last_used == OLD else self._num_uses
        _count(self._num_nodes, leaf.pages, 1)
        self._left_alone(leaf)

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge; a page that both halves refer to is in one node more. Changes: the tree."""
        upper = super()._split(node, at)
        shared = upper.pages[-1:] if at % self.page_size else ()
        _count(self._num_nodes, shared, 1)
        _count(self._num_locked, shared if node.num_locks else (), 1)
        return upper

    def _is_free(self, node: Node) -> bool:
        """Whether nothing is below the node, and nobody locks it."""
        return not node.children and not node.num_locks

    def _left_alone(self, node: Node) -> None:
        """Let a node wait for its eviction, if it is a free leaf; a root goes at once. Changes: the tree."""
        if not self._is_free(node):
            return
        if node.namespace is not None:
            del self._roots[node.namespace]
        elif not node.queued:
            self._push(node)

    def _push(self, leaf: Node) -> None:
        """Give a leaf its entry in the heap. Changes: the heap."""
        self._num_queued += 1
        leaf.queued = True
        heapq.heappush(self._heap, (leaf.last_used, self._num_queued, leaf))

    def _pop(self) -> tuple[int, Node]:
        """Take the top of the heap: the last use that it knows of, and the leaf. Changes: the heap."""
        last_used, _, leaf = heapq.heappop(self._heap)
        leaf.queued = False
        return last_used, leaf

    def _oldest_leaf(self) -> Node | None:
        """The free leaf whose last use is longest ago, taken off the heap; None where there is none."""
        while self._heap:
            last_used, node = self._pop()
            if not self._is_free(node):
                continue  # it gets another entry when it is free
            if last_used == node.last_used:
                return node
            self._push(node)
        return None

    def _remove(self, leaf: Node) -> None:
        """Take a leaf out of the tree and give its references back. Changes: the tree, the allocator, the leaf."""
        parent = leaf.parent
        del parent.children[leaf.tokens[0]]
        _count(self._num_nodes, leaf.pages, -1)
        self._allocator.release(leaf.pages)
        leaf.parent, leaf.pages = None, []
        self._left_alone(parent)


def _count(counts: dict[int, int], pages: Iterable[int], change: int) -> None:
    """Count pages up or down; one at 0 is not kept. Changes: counts."""
    for page in pages:
        counts[page] = counts.get(page, 0) + change
        if not counts[page]:
            del counts[page]
