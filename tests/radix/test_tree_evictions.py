"""What an eviction takes, what becomes of the cache when the weights change, and that broken counts are found."""

import math

import pytest
from written_pages import PAGE_SIZES, WrittenPages, counts

from minserve.radix.radix_tree import TreeError

SIZES = pytest.mark.parametrize("page_size", PAGE_SIZES)


@pytest.mark.parametrize("wanted", range(-1, 12))
def test_an_eviction_takes_the_oldest_and_no_more_than_it_needs(wanted):  # fault C13
    played = WrittenPages(10, 4)
    tree = played.tree
    nodes = [played.insert([number, 0, 0, 0]) for number in range(10)]
    assert played.allocator.num_free == 0
    used = [3, 1, 4, 0]
    for number in used:
        tree.match([number])  # a look is no use
        tree.unlock(tree.lock(nodes[number]))
    for number in (2, 5):
        tree.match([number, 0, 0, 0])
    order = [number for number in range(10) if number not in used] + used
    evicted = tree.evict(wanted)
    assert evicted == [nodes[number] for number in order[: max(0, wanted)]]
    assert played.allocator.num_free == min(max(0, wanted), 10) == 10 - tree.num_pages
    played.check()


@pytest.mark.parametrize("wanted", range(1, 6))
def test_only_pages_that_become_free_are_counted(wanted):  # fault C13
    """Pages that others hold, and those that a cut edge refers to twice, are not yet free when a node goes."""
    played = WrittenPages(30, 4)
    tree = played.tree
    nodes, held = [], []
    for number in range(6):
        nodes.append(played.insert([number] * 6))  # two pages each
        if number < 3:
            held += tree.pages(nodes[-1])[:1]
    played.allocator.share(held)
    cut = tree.lock(nodes[0], 5)
    tree.unlock(cut)
    before = played.allocator.num_free
    evicted = tree.evict(wanted)
    freed = {nodes[0]: 0, nodes[1]: 1, nodes[2]: 1, nodes[3]: 2, nodes[4]: 2, nodes[5]: 2}
    assert evicted == list(freed)[: len(evicted)] and cut not in evicted  # the part that was used last
    gains = [freed[node] for node in evicted]
    assert sum(gains[:-1]) < wanted <= sum(gains) == played.allocator.num_free - before
    played.check()
    tree.evict(30)
    assert played.allocator.num_free == 30 - len(held) and tree.num_pages == 0


def test_a_leaf_goes_before_what_is_above_it_and_a_parent_after_its_last_child():
    played = WrittenPages(30, 4)
    tree = played.tree
    first, second, other = played.insert([1] * 4), played.insert([1] * 8), played.insert([2] * 4)
    third = played.insert([1] * 4 + [3] * 4)
    assert tree.evict(1) == [second]  # the oldest, but for the node above it
    assert tree.evict(1) == [other] and tree.evict(1) == [third]
    assert tree.evict(5) == [first] and tree.evict(5) == []


def test_what_is_above_a_cut_is_as_old_as_what_is_below():
    for cut in range(1, 8):
        played = WrittenPages(30, 4)
        tree = played.tree
        older = tree.lock(played.insert([9] * 4))
        lower, (branch, _) = played.insert([1] * 8), played.insert_blindly([1] * cut + [2] * 8)  # nobody used upper
        upper = lower.parent
        assert [*tree.evict(1), *tree.evict(1)][:2] == [lower, branch]
        tree.unlock(older)
        assert upper.parent is None or tree.evict(1) == [older]


def test_the_queue_has_one_entry_for_a_leaf_however_often_it_is_used():
    played = WrittenPages(30, 4)
    tree = played.tree
    nodes = [played.insert([number] * 4) for number in range(10)]
    for number in range(200):
        tree.unlock(tree.lock(nodes[number * 7 % 10]))
    assert len(tree._heap) == 10
    held = [tree.lock(node) for node in nodes[:5]]
    assert tree.evict(30) and len(tree._heap) == 0 and tree.num_pages == 5
    for node in held:
        tree.unlock(node)
    assert len(tree._heap) == 5 and tree.evict(2) and len(tree._heap) == 3
    played.check()


# -- new weights


@SIZES
@pytest.mark.parametrize("num_locks", [1, 2])
def test_new_weights_find_nothing_of_the_old_ones_which_go_first_when_they_are_unlocked(page_size, num_locks):
    played = WrittenPages(60, page_size)
    tree, tokens, old = played.tree, list(range(9)), played.tree.namespace()
    loose = played.insert([50, 51])
    node = played.insert(tokens)
    match = tree.match(tokens)
    for _ in range(num_locks):
        tree.lock(node)
    assert tree.new_version() == [loose]
    played.check()
    assert tree.version == 1 and tree.namespace() != old
    for namespace in (None, old):
        assert played.cached(tokens, namespace) == 0
    with pytest.raises(TreeError, match="version"):
        tree.lock(match)
    new = played.insert(tokens)  # the same tokens with the new weights
    assert played.cached(tokens) == 9 and not set(tree.pages(new)) & set(tree.pages(node))
    more = played.take(-(-11 // page_size) - len(tree.pages(node)))
    played.write([*tree.pages(node), *more], 9, [1, 2])
    further = tree.insert([*tokens, 1, 2], [*tree.pages(node), *more], old, after=node)  # it still runs
    played.allocator.release(more)
    tree.lock(further), tree.unlock(node)
    assert tree.evict(60) == [new]
    new = played.insert(tokens)
    tree.unlock(tree.lock(further))  # used after the new one, and yet of older weights
    tree.unlock(further)
    played.check()
    if num_locks == 1:
        assert tree.evict(60) == [further, node, new]
    else:
        assert tree.evict(1)[0] is further
        tree.unlock(node)
        assert tree.evict(60)[0] is node
    assert counts(tree) == (0, 0, 0)
    played.check()


def test_old_weights_can_still_write_and_are_never_found():
    played = WrittenPages(30, 4)
    tree, old = played.tree, played.tree.namespace("a")
    tree.new_version()
    new = played.insert([1, 2, 3], tree.namespace("a"))
    node, _ = played.insert_blindly([1, 2, 3, 4], old)
    assert played.cached([1, 2, 3, 4], old) == 0 and played.cached([1, 2, 3, 4], tree.namespace("a")) == 3
    tree.unlock(tree.lock(node))
    assert tree.evict(math.inf) == [node, new]


def move(node, num):
    """Shift a node along its path."""
    node.start, node.stop = node.start + num, node.stop + num


def rename(node):
    """File a child under a token that it does not begin with."""
    node.parent.children[77] = node.parent.children.pop(node.tokens[0])


def first_root(tree):
    """A root."""
    return next(iter(tree._roots.values()))


def keep_root(tree):
    """Put a root into the tree that nobody needs."""
    root = tree._root(tree.namespace("kept"))
    tree._roots[root.namespace] = root


def set_all(node, **values):
    """Set several attributes."""
    for name, value in values.items():
        setattr(node, name, value)


BREAK = {  # what is done to a tree and its deepest, locked node, and what the complaint says
    "a lock too few": (lambda tree, node: setattr(node, "num_locks", 0), "1 locks: 0 of its own, 0 below it"),
    "a lock too many": (lambda tree, node: setattr(node.parent, "num_locks", 2), "1 locks: 0 of its own, 2 below it"),
    "a lock less than none": (lambda tree, node: setattr(node.parent, "num_own_locks", -1), "-1 of its own"),
    "a page lost": (lambda tree, node: node.pages.pop(), "not one page"),
    "another page": (lambda tree, node: node.pages.__setitem__(-1, 29), "page 29 is in 1 nodes, with 0 references"),
    "a page in two places": (lambda tree, node: node.pages.__setitem__(-1, node.pages[0]), "of another path"),
    "a reference lost": (lambda tree, node: tree._allocator.release(node.pages[-1:]), "1 nodes, with 0 references"),
    "an edge too short": (lambda tree, node: setattr(node, "tokens", node.tokens[:-1]), "has 6 tokens"),
    "an edge of nothing": (lambda tree, node: set_all(node, tokens=(), stop=node.start, pages=[]), "has 0 tokens"),
    "a node that has moved": (lambda tree, node: move(node, 1), "has 7 tokens, below"),
    "a child under another token": (lambda tree, node: rename(node), "does not know its child"),
    "another parent": (lambda tree, node: setattr(node, "parent", first_root(tree)), "below"),
    "a leaf that cannot go": (lambda tree, node: tree._heap.clear(), "does not wait"),
    "a leaf that says it waits": (lambda tree, node: setattr(node, "queued", not node.queued), "does not wait"),
    "a leaf twice in the queue": (lambda tree, node: tree._heap.append(tree._heap[0]), "waits twice"),
    "a page uncounted": (lambda tree, node: tree._num_nodes.pop(node.pages[-1]), "1 nodes, counted 0"),
    "a page counted twice": (lambda tree, node: tree._num_nodes.update({node.pages[-1]: 2}), "1 nodes, counted 2"),
    "a page unprotected": (lambda tree, node: tree._num_locked.pop(node.pages[-1]), "1 locked, counted 0"),
    "a page protected": (lambda tree, node: tree._num_locked.update({29: 1}), "0 locked, counted 1"),
    "a root with pages": (lambda tree, node: first_root(tree).pages.append(29), "is not a root"),
    "a root of another name": (lambda tree, node: tree._roots.update({tree.namespace(1): node}), "is not a root"),
    "a root without use": (lambda tree, node: keep_root(tree), "no child and no lock"),
}


@pytest.mark.parametrize("fault", BREAK)
def test_a_broken_tree_is_found(fault):
    played = WrittenPages(30, 4)
    played.insert(list(range(6)))
    node = played.insert(list(range(13)))
    played.insert([0, 1, 50])
    played.tree.lock(node)
    played.check()
    damage, complaint = BREAK[fault]
    damage(played.tree, node)
    with pytest.raises(TreeError, match=complaint):
        played.tree.check()
