"""`minserve bench tree`: what the prefix cache's tree costs, and that its cost does not grow with what it holds.

Sequences come in groups: the first half of a sequence is its group's, the second half its own. So a match takes two
edges, however many sequences there are. Beside the times stands the work as it was counted.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from minserve.clock import RealClock
from minserve.errors import InvalidValue
from minserve.paging.page_table import PageAllocator
from minserve.radix.node import Node
from minserve.radix.radix_tree import RadixTree

NUM_NODES, MATCH_TOKENS = (1_000, 10_000, 100_000), (256, 1_024, 4_096)
PAGE_SIZE = 16
GROUP_NODES = 100  # the common half of a group, and 99 second halves
FIRST_ID = 1_000  # from here on Python has no int ready: equal tokens are two objects, as they are in a server


@dataclass(frozen=True)
class TreeResult:
    """The cost of the tree's operations: microseconds each, medians, and counted work.

    Fields:
        num_nodes: in the tree, before and after each round.
        match_tokens: how many tokens a match finds; an insertion finds half of them, and brings the other half.
        match_us, insert_us, lock_us, evict_us: a match; an insertion of a leaf; a lock and its unlock; an eviction of a
            leaf.
        edges: compared, per match.
        heap_operations: entries put into the queue of leaves or taken out, per insertion and its eviction together,
            with what the locks of the round left to be set right.
    """

    num_nodes: int
    match_tokens: int
    match_us: float
    insert_us: float
    lock_us: float
    evict_us: float
    edges: float
    heap_operations: float


class CountingTree(RadixTree):
    """A tree that counts what it does.

    Attributes:
        edges: compared with a sequence.
        heap_operations: entries put into the queue of leaves, or taken out.
    """

    def __init__(self, allocator: PageAllocator, page_size: int):
        super().__init__(allocator, page_size)
        self.edges = self.heap_operations = 0

    def _compare(self, edge: tuple[int, ...], tokens: Sequence[int], at: int) -> int:
        """Compare and count. Changes: edges."""
        self.edges += 1
        return super()._compare(edge, tokens, at)

    def _push(self, leaf: Node) -> None:
        """Push and count. Changes: the heap, heap_operations."""
        self.heap_operations += 1
        super()._push(leaf)

    def _pop(self) -> tuple[int, Node]:
        """Pop and count. Changes: the heap, heap_operations."""
        self.heap_operations += 1
        return super()._pop()


class Grove:
    """A tree of so many nodes, and the sequences in it, which come and go.

    Arguments:
        num_nodes: a multiple of GROUP_NODES.
        match_tokens: of each sequence; a multiple of two pages.
        num_operations: how many sequences come and go in a round.
    Attributes:
        tree: what is measured.
        live: of each leaf its group and its number, from which its tokens follow.
    """

    def __init__(self, num_nodes: int, match_tokens: int, num_operations: int):
        self.num_groups, self.half, self.num_operations = num_nodes // GROUP_NODES, match_tokens // 2, num_operations
        self.half_pages = self.half // PAGE_SIZE
        self.allocator = PageAllocator((num_nodes + num_operations) * self.half_pages)
        self.tree, self.live, self._num_come = CountingTree(self.allocator, PAGE_SIZE), {}, 0
        self._filling = tuple(range(FIRST_ID, FIRST_ID + self.half - 1))
        for _ in range(self.num_groups * (GROUP_NODES - 1)):
            self.insert(*self.next_sequence())

    def tokens(self, group: int, number: int) -> list[int]:
        """A sequence, of ints of its own."""
        return [token + 0 for token in (group, *self._filling, number, *self._filling)]

    def next_sequence(self) -> tuple[list[int], list[int], tuple[int, int]]:
        """A sequence that is not in the tree, its pages, and its name; groups take turns. Changes: the allocator."""
        number, group = divmod(self._num_come, self.num_groups)
        self._num_come += 1
        num_known = self.half_pages if number else 0  # the group's half is in the tree, with its pages
        pages = [0] * num_known + self.allocator.take(2 * self.half_pages - num_known)
        return self.tokens(group, number), pages, (group, number)

    def insert(self, tokens: list[int], pages: list[int], name: tuple[int, int]) -> None:
        """Insert a sequence and keep nothing of it. Changes: the tree, the allocator, live."""
        self.live[self.tree.insert(tokens, pages)] = name
        self.allocator.release(pages[self.half_pages if name[1] else 0 :])

    def round(self, rng: random.Random) -> list[float]:
        """Time each operation: microseconds of match, insert, lock and evict, then edges and heap operations.

        Changes: the tree, which has as many nodes afterwards as before.
        """
        tree, num = self.tree, self.num_operations
        asked = [self.tokens(*name) for name in rng.sample(list(self.live.values()), num)]
        come = [self.next_sequence() for _ in range(num)]
        edges, inserted, evicted = tree.edges, [], []
        times = [_median_us(tree.match, asked)]
        edges = tree.edges - edges
        matches, heap_operations = [tree.match(tokens) for tokens in asked], tree.heap_operations
        times.append(_median_us(lambda new: inserted.append(tree.insert(new[0], new[1])), come))
        times.append(_median_us(lambda match: tree.unlock(tree.lock(match)), matches))
        for leaf, (_, pages, name) in zip(inserted, come, strict=True):
            self.live[leaf] = name
            self.allocator.release(pages[self.half_pages :])
        times.append(_median_us(lambda num_pages: evicted.extend(tree.evict(num_pages)), [self.half_pages] * num))
        for leaf in evicted:
            del self.live[leaf]
        return [*times, edges / num, (tree.heap_operations - heap_operations) / num]


def bench_tree(
    num_nodes: Sequence[int] = NUM_NODES,
    match_tokens: Sequence[int] = MATCH_TOKENS,
    rounds: int = 5,
    num_operations: int = 100,
) -> list[TreeResult]:
    """Time the tree at several sizes with one length of match, then at the first size with the other lengths.

    Arguments:
        num_nodes: sizes, multiples of 100.
        match_tokens: lengths, multiples of 32; the first one is that of all sizes.
        rounds: measurements of each, at least 1.
        num_operations: of each kind in a round.
    Errors: InvalidValue for sizes that cannot be built.
    """
    for field, values, unit in (("num_nodes", num_nodes, GROUP_NODES), ("match_tokens", match_tokens, 2 * PAGE_SIZE)):
        if not values or any(value < 1 or value % unit for value in values):
            raise InvalidValue(field, list(values), f"multiples of {unit}, at least one of them")
    if rounds < 1:
        raise InvalidValue("rounds", rounds, "at least 1")
    if not 1 <= num_operations <= min(num_nodes) // 2:
        raise InvalidValue(
            "num_operations", num_operations, f"from 1 to {min(num_nodes) // 2}, half of the smallest tree"
        )
    sizes = [(num, match_tokens[0]) for num in num_nodes] + [(num_nodes[0], length) for length in match_tokens[1:]]
    results, rng = [], random.Random(0)
    for size in tqdm(sizes, desc="bench", leave=False):
        grove = Grove(*size, num_operations)
        grove.round(rng)  # what is slow the first time
        columns = zip(*(grove.round(rng) for _ in range(rounds)), strict=True)
        results.append(TreeResult(*size, *map(statistics.median, columns)))
    return results


def _median_us(operation: Callable, arguments: Sequence) -> float:
    """Microseconds of a call, the median over the arguments; each is timed by itself."""
    clock, times_s = RealClock(), []
    for argument in arguments:
        start_s = clock.now()
        operation(argument)
        times_s.append(clock.now() - start_s)
    return 1e6 * statistics.median(times_s)


def table(results: Sequence[TreeResult]) -> str:
    """The results as lines of text."""
    lines = [
        "the prefix tree, microseconds per operation, median",
        f"{'nodes':>9} {'match':>8}  {'match':>8} {'insert':>8} {'lock':>8} {'evict':>8}  {'edges':>6} {'heap':>6}",
    ]
    for r in results:
        lines.append(
            f"{r.num_nodes:9,} {r.match_tokens:8,}  {r.match_us:8.1f} {r.insert_us:8.1f} {r.lock_us:8.1f} "
            f"{r.evict_us:8.1f}  {r.edges:6.1f} {r.heap_operations:6.1f}"
        )
    lines.append("lock: with its unlock; edges: compared per match; heap: operations per insertion and eviction")
    return "\n".join(lines)


def to_json(results: Sequence[TreeResult]) -> str:
    """The results as JSON."""
    return json.dumps([asdict(r) for r in results])
