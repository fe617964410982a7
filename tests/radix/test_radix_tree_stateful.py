"""The tree under any sequence of operations, against a model that knows every prefix by itself.

The model is one dictionary: (namespace, prefix) -> when it was used last. Pages are played with their contents, so that
what the tree answers must really hold the tokens asked for, wherever branches and cuts fall inside pages.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from written_pages import PAGE_SIZES, WrittenPages, path_of, paths

from minserve.paging.page_table import PageAllocator
from minserve.radix.radix_tree import RadixTree, TreeError

TOKENS = st.lists(st.sampled_from([-1, -2, 7]), max_size=9)  # -1 and -2 have one hash
SALTS = st.sampled_from([None, None, None, 1, True, "1"])
INDEX, LENGTH = st.integers(0, 30), st.integers(0, 40)


class FreedAllocator(PageAllocator):
    """Writes down how many pages were free after each release."""

    def release(self, pages):
        super().release(pages)
        self.after.append(self.num_free)


class Running:
    """A request: its tokens, its own references to pages, and the node that it holds."""

    def __init__(self, tokens, namespace, pages, held):
        self.tokens, self.namespace, self.pages, self.held = tokens, namespace, pages, held


class TreeModel(RuleBasedStateMachine):
    """Requests begin, compute, publish and end, or are computed blindly; paths are locked; leaves go; weights too."""

    @initialize(page_size=st.sampled_from(PAGE_SIZES), num_pages=st.integers(6, 40))
    def start(self, page_size, num_pages):
        self.played = WrittenPages(num_pages, page_size)
        self.allocator = self.played.allocator = FreedAllocator(num_pages)
        self.allocator.after = []
        self.tree = self.played.tree = RadixTree(self.allocator, page_size)
        self.size, self.num_pages = page_size, num_pages
        self.used, self.ends, self.now = {}, set(), 0  # the model: last uses by prefix, and where nodes end
        self.running, self.locked, self.said = [], [], [[]]  # locked: (node, its path)

    # -- the model

    def tick(self, namespace):
        """The time of a use: older weights have none."""
        self.now += 1
        return self.now if namespace.version == self.tree.version else 0

    def num_known(self, namespace, tokens):
        """The longest known prefix."""
        known = (n for n in range(len(tokens), 0, -1) if (namespace, tuple(tokens[:n])) in self.used)
        return next(known, 0)

    def learn(self, namespace, tokens):
        """The model of an insertion."""
        num_known, time = self.num_known(namespace, tokens), self.tick(namespace)
        self.ends |= {(namespace, tuple(tokens[:n])) for n in (num_known, len(tokens)) if n}
        for n in range(num_known + 1, len(tokens) + 1):
            self.used[namespace, tuple(tokens[:n])] = time

    def hold(self, node, namespace, tokens):
        """The model of a lock: it ends exactly where it should, and its path is used now."""
        assert path_of(node) == (namespace, tuple(tokens))
        self.locked.append((node, (namespace, tuple(tokens))))
        time = self.tick(namespace)
        self.ends |= {(namespace, tuple(tokens))} if tokens else set()
        self.used.update(((namespace, tuple(tokens[:n])), time) for n in range(1, len(tokens) + 1))

    def let_go(self, node):
        self.tree.unlock(node)
        del self.locked[[held for held, _ in self.locked].index(node)]

    def is_locked(self, path):
        """Whether a lock holds it, or something that it begins."""
        namespace, tokens = path
        return any(ns == namespace and held[: len(tokens)] == tokens for _, (ns, held) in self.locked)

    def leaves(self):
        """What can be evicted next."""
        inner = {(namespace, tokens[:n]) for namespace, tokens in self.used for n in range(len(tokens))}
        return [path for path in self.used if path not in inner and not self.is_locked(path)]

    def forget(self, evicted, names):
        """The model of evictions: each was a leaf, and no other was used longer ago."""
        for node in evicted:
            namespace, tokens = names[node]
            leaves = self.leaves()
            assert (namespace, tokens) in leaves
            assert self.used[namespace, tokens] == min(self.used[path] for path in leaves)
            starts = [n for n in range(len(tokens)) if (namespace, tokens[:n]) in self.ends or not n]
            assert (node.start, node.stop, node.parent, node.pages) == (starts[-1], len(tokens), None, [])
            for n in range(starts[-1] + 1, len(tokens) + 1):
                del self.used[namespace, tokens[:n]]
            self.ends.discard((namespace, tokens))

    def evict(self, num):
        """Evict, and see that it was enough and not too much."""
        names, before = dict(paths(self.tree)), self.allocator.num_free
        self.allocator.after.clear()
        evicted = self.tree.evict(num)
        freed = [free - before for free in self.allocator.after]
        assert len(freed) == len(evicted) and all(some < num for some in freed[:-1])
        assert bool(evicted) <= (num > 0)
        self.forget(evicted, names)
        assert self.allocator.num_free - before >= num or not self.leaves()

    # -- what happens

    @rule(which=INDEX, keep=LENGTH, tail=TOKENS, salt=SALTS)
    def begin(self, which, keep, tail, salt):
        """A request comes whose prompt begins like another's."""
        tokens = self.said[which % len(self.said)][:keep] + tail
        self.said.append(tokens)
        namespace = self.tree.namespace(salt)
        match = self.tree.match(tokens, namespace)
        assert match.num_tokens == self.num_known(namespace, tokens) == self.played.cached(tokens, namespace)
        num = min(match.num_tokens, max(0, len(tokens) - 1))
        held = self.tree.lock(match, num)
        self.hold(held, namespace, tokens[:num])
        pages = self.played.begin(match, num)
        if pages is None:
            self.let_go(held)
        else:
            self.running.append(Running(tokens[:num], namespace, pages, held))

    @precondition(lambda self: self.running)
    @rule(which=INDEX, tail=TOKENS, like=INDEX)
    def compute(self, which, tail, like):
        """A request gets more tokens, and sometimes the very tokens that another has in that place."""
        request = self.running[which % len(self.running)]
        start, model = len(request.tokens), self.said[like % len(self.said)]
        tail = model[start : start + 5] + tail if model[:start] == request.tokens else tail
        missing = -(-(start + len(tail)) // self.size) - len(request.pages)
        if missing > self.allocator.num_free:
            self.evict(missing - self.allocator.num_free)
        taken = self.played.take(max(0, missing))
        if taken is not None:
            request.pages += taken
            request.tokens = request.tokens + tail
            self.said.append(request.tokens)
            self.played.write(request.pages, start, tail)

    @precondition(lambda self: self.running)
    @rule(which=INDEX, back=st.integers(0, 3), with_after=st.booleans())
    def publish(self, which, back, with_after):
        """A request's tokens go into the tree, and it takes over the tree's full pages and the lock."""
        request = self.running[which % len(self.running)]
        tokens = request.tokens[: max(len(request.tokens) - back, request.held.stop)]
        after = request.held if with_after else None
        node = self.tree.insert(tokens, request.pages, request.namespace, after)
        self.learn(request.namespace, tokens)
        assert self.tree.lock(node) is node or not tokens
        self.hold(node, request.namespace, tokens)
        self.let_go(request.held)
        num_full = len(tokens) // self.size
        adopted = self.tree.pages(node)[:num_full]
        self.allocator.share(adopted)
        self.allocator.release(request.pages[:num_full])
        request.pages[:num_full], request.held = adopted, node

    @precondition(lambda self: self.running)
    @rule(which=INDEX)
    def end(self, which):
        request = self.running.pop(which % len(self.running))
        self.allocator.release(request.pages)
        self.let_go(request.held)

    @rule(which=INDEX, keep=LENGTH, tail=TOKENS, salt=SALTS)
    def insert_blindly(self, which, keep, tail, salt):
        """Somebody inserts a sequence with pages of its own, whatever of it is known."""
        tokens, namespace = self.said[which % len(self.said)][:keep] + tail, self.tree.namespace(salt)
        if -(-len(tokens) // self.size) <= self.allocator.num_free:
            self.said.append(tokens)
            node, _ = self.played.insert_blindly(tokens, namespace)
            self.learn(namespace, tokens)
            assert path_of(node) == (namespace, tuple(tokens))

    @rule(which=INDEX, cut=LENGTH, salt=SALTS, by_node=st.booleans())
    def lock(self, which, cut, salt, by_node):
        tokens, namespace = self.said[which % len(self.said)], self.tree.namespace(salt)
        match = self.tree.match(tokens, namespace)
        num = min(cut, match.num_tokens)
        target = match.path[-1] if by_node and match.path and num <= match.path[-1].stop else match
        self.hold(self.tree.lock(target, num), namespace, tokens[:num])

    @precondition(lambda self: len(self.locked) > len(self.running))
    @rule(which=INDEX)
    def unlock(self, which):
        of_requests = [request.held for request in self.running]
        loose = [node for node, _ in self.locked]
        for node in of_requests:
            loose.remove(node)
        self.let_go(loose[which % len(loose)])

    @rule(which=INDEX)
    def unlock_what_has_no_lock(self, which):
        held = [node for node, _ in self.locked]
        others = [node for node in self.tree.nodes() if node not in held]
        if others:
            with pytest.raises(TreeError, match="no lock"):
                self.tree.unlock(others[which % len(others)])

    @rule(num=st.integers(-1, 6))
    def evict_some(self, num):
        self.evict(num)

    @precondition(lambda self: len(self.said) > 6)
    @rule()
    def new_version(self):
        names = dict(paths(self.tree))
        old = self.tree.namespace()
        self.forget(self.tree.new_version(), names)
        assert not self.leaves() and old != self.tree.namespace()
        self.used = dict.fromkeys(self.used, 0)
        assert self.tree.match(self.said[-1], old).num_tokens == 0

    # -- what holds

    @invariant()
    def adds_up(self):
        self.played.check()
        nodes = paths(self.tree)
        assert {path for _, path in nodes} == self.ends
        assert sum(node.stop - node.start for node, _ in nodes) == len(self.used)
        pages = {page for node, _ in nodes for page in node.pages}
        protected = {page for node, path in nodes if self.is_locked(path) for page in node.pages}
        assert self.tree.num_pages == len(pages) and self.tree.num_protected == len(protected)
        assert self.tree.num_evictable == len(pages - protected)
        references = [page for node, _ in nodes for page in node.pages]
        references += [page for request in self.running for page in request.pages]
        for page in range(self.num_pages):
            assert self.allocator.ref_count(page) == references.count(page)
        for request in self.running:
            assert self.played.read(request.pages, len(request.tokens)) == request.tokens

    def teardown(self):
        if not hasattr(self, "tree"):
            return
        for request in self.running:
            self.allocator.release(request.pages)
        for node, _ in list(self.locked):
            self.let_go(node)
        self.evict(self.num_pages + 1)
        assert self.allocator.num_free == self.num_pages and not self.used
        self.tree.check()


TestTree = TreeModel.TestCase
TestTree.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
