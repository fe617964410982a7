"""What requests have in common: finding it in the tree, holding on to it, and adding what has just been computed.

The tree has one writer, `publish`, which is called with committed tokens only. A request holds a lock on the node that
it has come to; so what it reads is not evicted, and its next tokens are added there without another walk.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from minserve.deltanet.state_pool import EMPTY
from minserve.hybrid.reuse import match_hybrid, next_snapshot
from minserve.hybrid.snapshots import Snapshots
from minserve.radix.node import num_common
from minserve.radix.radix_tree import Match, Namespace, Node, RadixTree
from minserve.request import Request

MOST_BRANCHES = 8  # places where a request keeps its state for those who part with it there
PATIENCE = 16  # steps that a request waits, at most, for one that computes what it could reuse and does not get on


class Hit(NamedTuple):
    """What a request can start from.

    Fields: `num_tokens` to be reused; `match` in the tree, which may go deeper; `place` of the state, None for zeros.
    """

    num_tokens: int
    match: Match
    place: Node | None


class Prefixes:
    """The tree and the snapshots of a hybrid cache, and where each running request stands in them.

    Arguments:
        tree: of pages.
        snapshots: of states; None for a model that has no states, and then pages alone decide.
        page_size: tokens per page.
        snapshot_every: tokens between two snapshots of a request.
        match: chooses how much is reused; `match_hybrid` unless a reader has replaced it.
        enabled: False finds nothing and keeps nothing.
    """

    def __init__(
        self, tree: RadixTree, snapshots: Snapshots | None, page_size: int, snapshot_every: int,
        match: Callable[[int, Sequence[int], int], int] = match_hybrid, enabled: bool = True,
    ):  # fmt: skip
        self.tree, self.snapshots, self.enabled = tree, snapshots, enabled
        self._page_size, self._every, self._match = page_size, snapshot_every, match
        self._node_of: dict[Hashable, Node] = {}
        self._branches_of: dict[Hashable, set[int]] = {}
        self._computing: dict[Hashable, tuple[Request, Namespace]] = {}
        self._waited: dict[Hashable, tuple[int, int]] = {}  # steps without progress, and progress, of whom it waits for

    @property
    def holders(self) -> set[Hashable]:
        """The requests that hold a place in the tree."""
        return {*self._node_of}

    def find(self, request: Request) -> Hit:
        """What a request can start from now. Changes nothing, not even recency."""
        # Whoever wants his prompt scored needs the logits of all of it.
        wants_all = not self.enabled or request.params.prompt_logprobs is not None
        match = self.tree.match([] if wants_all else request.tokens, self._namespace(request))
        most = min(match.num_tokens, request.num_committed - 1)
        if self.snapshots is None:
            return Hit(most, match, None)
        places = {node.stop: node for node in match.path if node in self.snapshots}
        wanted = self._match(match.num_tokens, sorted(places), request.num_committed)
        deepest = max((count for count in places if count <= wanted), default=0)
        return Hit(min(wanted, most), match, places.get(deepest))

    def miss(self, request: Request) -> Hit:
        """What a request starts from that reuses nothing."""
        return Hit(0, self.tree.match([], self._namespace(request)), None)

    def waits_for_another(self, request: Request, hit: Hit) -> bool:
        """Whether a request had better wait: one that runs is about to compute what it could reuse.

        That one keeps its state where the two part. It is waited for while it gets on, and for PATIENCE steps when it
        does not. Changes: how long the request has waited, where the other one's states are kept.
        """
        if not self.enabled or request.params.prompt_logprobs is not None:
            return False
        for other, namespace in self._computing.values():
            common = self._num_common(request, other, hit.num_tokens) if namespace == self._namespace(request) else 0
            if common <= other.num_computed:
                continue  # too little, or it has been computed, and no state was kept there
            num_steps, num_computed = self._waited.get(request.id, (0, -1))
            num_steps = num_steps + 1 if other.num_computed == num_computed else 0
            if num_steps >= PATIENCE:
                continue
            self._waited[request.id] = num_steps, other.num_computed
            branches = self._branches_of.setdefault(other.id, set())
            if len(branches) < MOST_BRANCHES:
                branches.add(common)
            return True
        return False

    def lock(self, request: Request, hit: Hit) -> tuple[list[int], int]:
        """Hold on to what is reused: its pages, and the slot of its state. Changes: locks, both caches' recency."""
        node = self._node_of[request.id] = self.tree.lock(hit.match, hit.num_tokens)
        return self.tree.pages(node), EMPTY if hit.place is None else self.snapshots.use(hit.place)

    def begin(self, request: Request, hit: Hit, waiting: Iterable[Request] = ()) -> None:
        """Note that a request is let in and computes the rest, and where others will want its state.

        Arguments:
            waiting: requests that may come next; those that begin as this one does part with it somewhere.
        Changes: these notes.
        """
        namespace = self._namespace(request)
        self._waited.pop(request.id, None)
        self._computing[request.id] = request, namespace
        if self.snapshots is None or not self.enabled:
            return
        # Pages without a state: somebody else went on from here.
        page_hit = min(hit.match.num_tokens, request.num_committed - 1)
        branches = {page_hit} if page_hit >= hit.num_tokens + self._page_size else set()
        for other in waiting:
            if len(branches) >= MOST_BRANCHES:
                break
            if other.id not in self._computing and self._namespace(other) == namespace:
                branches.add(min(self._num_common(other, request, hit.num_tokens), request.num_committed - 1))
        self._branches_of[request.id] = branches - {0}

    def fork(self, request: Request, child: Request) -> None:
        """Let a child hold on to where its request stands. Changes: locks."""
        self._node_of[child.id] = self.tree.lock(self._node_of[request.id])

    def let_go(self, request_id: Hashable) -> None:
        """Hold on to nothing of a request's path, and evict all that nobody holds. Changes: locks, both caches."""
        node = root = self._node_of[request_id]
        while root.parent is not None:
            root = root.parent
        self._node_of[request_id] = self.tree.lock(root)
        self.tree.unlock(node)
        self.evict(self.tree.num_evictable)

    def points(self, request: Request, stop: int) -> list[int]:
        """After which counts of a slice up to `stop` the request's state is to be kept, in order."""
        if self.snapshots is None or not self.enabled:
            return []
        branches = self._branches_of.get(request.id, ())
        if stop == request.num_computed + 1 == request.num_committed and stop % self._every and not branches:
            return []  # a decode step like most
        points = []
        point = next_snapshot(request.num_computed, request.num_committed, self._page_size, self._every, branches)
        while point is not None and point <= stop:
            points.append(point)
            point = next_snapshot(point, request.num_committed, self._page_size, self._every, branches)
        behind = range(request.num_committed + 1, stop + 1)  # drafts, if they are kept
        return points + [count for count in behind if count % self._every == 0]

    def publish(self, request: Request, num_tokens: int, pages: Sequence[int], slot: int | None) -> list[int]:
        """Add a request's first tokens, computed and committed, and the state after them unless slot is None.

        Returns the pages of their path, for the request to adopt. Changes: the tree, the snapshots, the lock.
        """
        tokens, before = request.tokens[:num_tokens], self._node_of[request.id]
        node = self.tree.insert(tokens, pages, after=before)
        self._node_of[request.id] = self.tree.lock(node)
        self.tree.unlock(before)
        if slot is not None and self.snapshots is not None:
            self.snapshots.put(node, slot)
        if request.num_computed + 1 >= request.num_committed:
            self._computing.pop(request.id, None)
        return self.tree.pages(node)

    def leave(self, request: Request) -> None:
        """Forget a request. Changes: locks, these notes."""
        node = self._node_of.pop(request.id, None)
        if node is not None:
            self.tree.unlock(node)
        for notes in (self._branches_of, self._computing, self._waited):
            notes.pop(request.id, None)

    def evict(self, num_pages: int) -> None:
        """Make pages free, the least recently used first, and drop the states kept there. Changes: both caches."""
        self._drop(self.tree.evict(num_pages))

    def new_version(self) -> None:
        """Find nothing any more of what was computed with other weights. Changes: both caches."""
        self._drop(self.tree.new_version())

    def check(self) -> None:
        """Raise TreeError or StateError for the first broken invariant."""
        self.tree.check()
        if self.snapshots is not None:
            self.snapshots.check()

    def _drop(self, nodes: Sequence[Node]) -> None:
        """Forget the states of nodes that are gone. Changes: the snapshots."""
        for node in nodes if self.snapshots is not None else ():
            self.snapshots.drop(node)

    def _num_common(self, request: Request, other: Request, beyond: int) -> int:
        """How many first tokens of two requests are the same, the last of the first one left out.

        0 if that is not a page more than `beyond`: mostly a look at the tokens of that page shows it.
        """
        page = slice(beyond, beyond + self._page_size)
        if (
            min(request.num_committed - 1, other.num_committed) < page.stop
            or request.tokens[page] != other.tokens[page]
        ):
            return 0
        common = min(num_common(request.tokens, other.tokens), request.num_committed - 1)
        return common if common >= page.stop else 0

    def _namespace(self, request: Request) -> Namespace:
        """Whose prefixes a request may share."""
        return self.tree.namespace(request.params.cache_salt)
