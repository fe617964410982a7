"""A hybrid cache whose pages and slots are played: lists of tokens instead of tensors.

A page is a list of tokens by place, a slot the tokens that its state has seen; each token with the salt and the version
of the weights that it was computed for. What is free is wiped. So whatever is read that nobody has written, or that was
written by or for somebody else, shows.
"""

from __future__ import annotations

from minserve.deltanet.state_pool import EMPTY
from minserve.engine_config import CacheSizes
from minserve.hybrid.hybrid_cache import HybridCache
from minserve.request import Request, SamplingParams


def sizes(num_pages=32, page_size=4, num_states=8, num_rows=4, has_states=True, num_draft_slots=0):
    """The sizes of a cache's pools."""
    return CacheSizes(num_pages, page_size, 1, num_states, num_rows, int(has_states), num_draft_slots)


def ask(name, tokens, max_tokens=8, salt=None, scored=False):
    """A request of these prompt tokens."""
    params = SamplingParams(max_tokens, seed=0, cache_salt=salt, prompt_logprobs=0 if scored else None)
    return Request(name, tuple(tokens), params)


class PlayedCache:
    """A cache, the contents of its pools, and what the engine does with them around a forward.

    Attributes:
        cache: the cache under test.
        pages, slots: what they hold, by number.
        heads: what the pages hold for a draft head, which follows some of the requests.
        kind_of: (version, salt) by the id of a request that was let in.
    """

    def __init__(self, snapshot_every=8, prefix_cache=True, parts=None, **more):
        self.sizes = sizes(**more)
        self.cache = HybridCache(self.sizes, snapshot_every, prefix_cache, parts, self.copy_page)
        self.pages, self.heads, self.slots, self.kind_of = {}, {}, {EMPTY: ()}, {}
        self.wipe()

    def copy_page(self, source, target):
        self.pages[target], self.heads[target] = list(self.pages[source]), list(self.heads[source])

    def wipe(self):
        """Forget what free pages and slots held. Changes: the contents."""
        for page in range(self.sizes.num_pages):
            if not self.cache.allocator.ref_count(page):
                self.pages[page], self.heads[page] = [None] * self.sizes.page_size, [None] * self.sizes.page_size
        for slot in range(self.cache.states.num_slots):
            if slot not in self.cache.states.held:
                self.slots[slot] = None

    def read(self, pages, num_tokens, pool=None):
        """The first tokens that a page table holds."""
        return [token for page in pages for token in (pool or self.pages)[page]][:num_tokens]

    def written(self, request, stop):
        """What pages and state of a request must hold."""
        return [(token, self.kind_of[request.id]) for token in request.tokens[:stop]]

    def compute(self, ticket, request, stop, drafts=()):
        """What a forward does for one slice, and drafts behind it: read what is before it, write it.

        Changes: the contents.
        """
        start, size = request.num_computed, self.sizes.page_size
        wanted = self.written(request, stop) + [(token, self.kind_of[request.id]) for token in drafts]
        assert self.read(self.cache.tables[request.id].pages, start) == wanted[:start]
        seen = self.slots[ticket.state_read(request)]
        assert not self.sizes.state_bytes or seen == tuple(wanted[:start])
        for position, slot in enumerate(self.cache.tables[request.id].slots(start, len(wanted)), start=start):
            self.pages[slot // size][slot % size] = wanted[position]
        slots = [*enumerate(ticket.state_write[request.id], start=stop), *ticket.state_between.get(request.id, ())]
        assert len({slot for _, slot in slots}) == len(slots)
        for num_tokens, slot in slots:
            assert slot not in {*self.cache.slot_of.values()} and self.cache.states.ref_count(slot) == 1
            self.slots[slot] = tuple(wanted[:num_tokens])

    def follow(self, request, stop, new_ids):
        """What a draft head does behind a forward up to `stop`: entries of its tokens, and of those chosen then.

        Changes: the contents, the count of entries.
        """
        table, entries, size = self.cache.tables[request.id], self.cache.entries, self.sizes.page_size
        start = entries.num(table)
        if start < request.num_computed:
            return  # somebody has left a gap
        tokens = [*self.written(request, stop), *((token, self.kind_of[request.id]) for token in new_ids)]
        if new_ids and (len(tokens) - 1) % size == 0:
            tokens.pop()  # the page of the newest token is not there yet
        for position, slot in enumerate(table.slots(start, len(tokens)), start=start):
            self.heads[slot // size][slot % size] = tokens[position]
        if start < len(tokens):
            entries.fill(table, len(tokens))

    def verify(self, request, drafts, num_right, new_id, follows=False):
        """One step of a decoding request with drafts, the first of which are right. Returns how many were kept."""
        with self.cache.open((), lambda request: len(drafts)) as ticket:
            stop = request.num_committed
            assert ticket.grow(request, stop)
            drafts = drafts[: ticket.look_ahead(request, 99)]
            ticket.keep_states(request, stop + len(drafts))
            self.compute(ticket, request, stop, drafts)
            kept = drafts[:num_right]
            if follows:
                self.follow(request, stop, [*kept, new_id])
            request.commit(stop + len(kept), [*kept, new_id])
            self.cache.commit(ticket, request)
        self.check([request])
        return len(kept)

    def run(self, request, stop=None, new_ids=(), publish=True):
        """One step for one request, to `stop` or as far as it may go. Changes: all."""
        with self.cache.open() as ticket:
            stop = min(stop or request.num_committed, request.num_committed)
            assert ticket.grow(request, stop)
            ticket.keep_states(request, stop)
            self.compute(ticket, request, stop)
            request.commit(stop, new_ids if stop == request.num_committed else ())
            self.cache.commit(ticket, request, publish)
        self.check([request])

    def admit(self, request, spare_pages=0):
        """Let a request in, if there is room. Returns how it went."""
        self.kind_of[request.id] = (self.cache.tree.version, request.params.cache_salt)
        with self.cache.open() as ticket:
            return ticket.admit(request, spare_pages)

    def serve(self, request, output=(), keep=True):
        """Serve a request to its end by itself; the tokens that it reused. Changes: all."""
        self.admit(request)
        cached = request.num_computed
        while request.num_computed < len(request.prompt_ids):
            self.run(request, new_ids=output[:1])
        for token in output[1:]:
            self.run(request, new_ids=[token], publish=False)
        self.cache.release(request, keep)
        self.wipe()
        return cached

    def check(self, running=()):
        """Fail unless every request, every path of the tree and every snapshot is what it should be. Changes: wiped."""
        cache = self.cache
        cache.check()
        self.wipe()
        for request in running:
            tokens = self.written(request, request.num_computed)
            table = cache.tables[request.id]
            assert self.read(table.pages, len(tokens)) == tokens and len(table.pages) == cache.pages_needed(len(tokens))
            self.check_entries(request)
            if self.sizes.state_bytes:
                assert self.slots[cache.state_of(request)] == tuple(tokens)
        locked = {page for node in cache.tree.nodes() if node.num_locks for page in node.pages}
        loose = {page for node in cache.tree.nodes() for page in node.pages} - locked
        assert not loose & {page for table in cache.tables.values() for page in table.pages}, "counted as takeable"
        for node in cache.tree.nodes():
            path = path_tokens(node)
            assert self.read(cache.tree.pages(node), node.stop) == path
            if cache.snapshots is not None and node in cache.snapshots:
                slot = cache.snapshots._slot_of[node]
                assert self.slots[slot] == tuple(path) and cache.states.ref_count(slot)

    def check_entries(self, request):
        """Fail where an entry of a draft head is counted as there, and is not, or is another token's."""
        table, tokens = self.cache.tables[request.id], self.written(request, request.num_committed)
        num = self.cache.entries.num(table)
        assert self.read(table.pages, num, self.heads) == tokens[:num]

    def check_idle(self):
        """Fail unless all that is not free is the tree's, to be evicted, and then all is free. CONS."""
        cache = self.cache
        self.check()
        assert not cache.holders and not cache.tree.num_protected and cache.num_takeable == self.sizes.num_pages
        assert len(cache.states.held) == (0 if cache.snapshots is None else len(cache.snapshots))
        cache.prefixes.evict(self.sizes.num_pages)
        assert cache.allocator.num_free == self.sizes.num_pages and not cache.states.held


def path_tokens(node):
    """The tokens from a root to a node, each with the version and the salt of that root."""
    path = []
    while node.parent is not None:
        node, path = node.parent, [*node.tokens, *path]
    return [(token, (node.namespace.version, node.namespace.salt)) for token in path]
