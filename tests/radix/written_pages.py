"""Pages whose contents are played: each remembers which token was written at which place of it."""

from minserve.paging.page_table import PageAllocator
from minserve.radix.radix_tree import RadixTree

PAGE_SIZES = (1, 3, 4, 16)


class WrittenPages:
    """An allocator, a tree, and what is written in the pages; None where nothing was since the page was taken."""

    def __init__(self, num_pages, page_size, make_tree=RadixTree):
        self.allocator, self.size = PageAllocator(num_pages), page_size
        self.tree = make_tree(self.allocator, page_size)
        self.contents = {}

    def take(self, num):
        """Fresh pages, or None."""
        pages = self.allocator.take(num)
        self.contents.update((page, [None] * self.size) for page in pages or ())
        return pages

    def write(self, pages, start, tokens):
        """Write tokens from position start on; nothing that was written is ever changed."""
        for position, token in enumerate(tokens, start):
            content = self.contents[pages[position // self.size]]
            assert content[position % self.size] is None, "a token is written over another"
            content[position % self.size] = token

    def read(self, pages, num_tokens):
        """The first tokens of a page table."""
        return [self.contents[pages[p // self.size]][p % self.size] for p in range(num_tokens)]

    def begin(self, match, num_tokens):
        """A page table whose first tokens are cached: full pages are shared, the page that they end in is copied.

        None, and no change, where no page is free for the copy.
        """
        cached = self.tree.pages(match.path[-1], num_tokens) if match.path else []
        num_full, rest = divmod(num_tokens, self.size)
        own = self.take(1 if rest else 0)
        if own is None:
            return None
        for page in own:
            self.contents[page][:rest] = self.contents[cached[num_full]][:rest]
        self.allocator.share(cached[:num_full])
        return cached[:num_full] + own

    def insert(self, tokens, namespace=None, after=None):
        """Play a request from its beginning to its end: what is cached is used, the rest written and inserted."""
        tree = self.tree
        match = tree.match(tokens, namespace)
        held, pages = tree.lock(match), self.begin(match, match.num_tokens)
        pages += self.take(-(-len(tokens) // self.size) - len(pages))
        self.write(pages, match.num_tokens, tokens[match.num_tokens :])
        node = tree.insert(tokens, pages, namespace, after)
        assert self.read(pages, len(tokens)) == list(tokens)
        self.allocator.release(pages)
        tree.unlock(held)
        return node

    def insert_blindly(self, tokens, namespace=None):
        """A request that was computed without the cache: all of its pages are its own. Its node, and those pages."""
        pages = self.take(-(-len(tokens) // self.size))
        self.write(pages, 0, tokens)
        node = self.tree.insert(tokens, pages, namespace)
        self.allocator.release(pages)
        return node, pages

    def cached(self, tokens, namespace=None):
        """How many of the tokens are found, after a look at what their pages really hold."""
        match = self.tree.match(tokens, namespace)
        if match.path:
            pages = self.tree.pages(match.path[-1], match.num_tokens)
            assert len(pages) == -(-match.num_tokens // self.size)
            assert self.read(pages, match.num_tokens) == list(tokens[: match.num_tokens])
        return match.num_tokens

    def check(self):
        """The tree's own check and the allocator's, and every node's pages hold its path."""
        self.tree.check()
        self.allocator.check()
        for node, path in paths(self.tree):
            for num_tokens in range(len(path[1]) + 1):
                assert self.read(self.tree.pages(node, num_tokens), num_tokens) == list(path[1][:num_tokens])
            for above in ancestors(node):
                assert self.tree.pages(node, above.stop) == self.tree.pages(above)  # what a lock of that much protects


def ancestors(node):
    """The nodes above a node, and the root."""
    while node.parent is not None:
        node = node.parent
        yield node


def path_of(node):
    """The namespace of a node, and the tokens from the root to its end."""
    tokens = ()
    while node.parent is not None:
        tokens, node = node.tokens + tokens, node.parent
    return node.namespace, tokens


def paths(tree):
    """Every node with its path."""
    return [(node, path_of(node)) for node in tree.nodes()]


def counts(tree):
    """Pages in all, evictable and protected."""
    return tree.num_pages, tree.num_evictable, tree.num_protected
