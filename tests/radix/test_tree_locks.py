"""What a lock holds, and who may take it back."""

import pytest
from written_pages import PAGE_SIZES, WrittenPages, counts, path_of

from minserve.radix.radix_tree import TreeError

SIZES = pytest.mark.parametrize("page_size", PAGE_SIZES)


@SIZES
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lock_holds_the_node_itself_and_all_above_it(page_size, depth):  # fault C1
    for locked in range(depth):
        played = WrittenPages(40, page_size)
        tree = played.tree
        chain = [played.insert(list(range(3 * (level + 1)))) for level in range(depth)]
        played.insert([0, 1, 50])
        everything = counts(tree)
        assert everything[2] == 0
        held = tree.lock(chain[locked])
        assert held is chain[locked]
        played.check()
        tree.evict(40)
        assert played.cached(list(range(40))) == 3 * (locked + 1)
        assert counts(tree)[1] == 0 and tree.num_pages >= -(-3 * (locked + 1) // page_size)
        tree.unlock(held)
        assert counts(tree)[2] == 0
        played.check()
        tree.evict(40)
        assert played.allocator.num_free == 40 and list(tree.nodes()) == []


@SIZES
def test_a_lock_covers_exactly_what_was_matched_and_a_later_cut_keeps_it(page_size):  # fault C3
    num = 12
    for matched in range(num + 1):
        for branch in range(num + 1):
            played = WrittenPages(60, page_size)
            tree = played.tree
            played.insert(list(range(num)))
            held = tree.lock(tree.match([*range(matched), 70]), 99 if branch % 2 else None)
            assert path_of(held)[1] == tuple(range(matched))
            played.insert([*range(branch), 80, 81])
            played.check()
            assert tree.num_protected == -(-matched // page_size)
            tree.evict(60)
            assert played.cached(list(range(num))) == matched
            assert tree.num_pages == -(-matched // page_size)
            played.insert([*range(branch), 90])  # cuts what is locked
            played.check()
            tree.unlock(held)
            played.check()
            assert counts(tree)[2] == 0 and not any(node.num_locks for node in tree.nodes())
            tree.evict(60)
            assert played.allocator.num_free == 60


@SIZES
def test_locks_count_and_only_their_own_node_gives_them_back(page_size):
    played = WrittenPages(40, page_size)
    tree = played.tree
    upper, lower, side = (played.insert(tokens) for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 9]))
    for times in (1, 2, 3):
        for _ in range(times):
            tree.lock(lower)
        before = counts(tree)
        for node in (upper, side):  # upper is held, but for the sake of lower
            with pytest.raises(TreeError, match="lock"):
                tree.unlock(node)
            assert counts(tree) == before
            tree.check()
        tree.evict(40)
        for left in range(times - 1, -1, -1):
            tree.unlock(lower)
            assert (tree.num_protected > 0) == (left > 0)
            tree.check()
        with pytest.raises(TreeError, match="lock"):
            tree.unlock(lower)
        side = played.insert([1, 2, 9])
    tree.evict(40)
    assert played.allocator.num_free == 40


@SIZES
@pytest.mark.parametrize("salt", [None, "a"])
def test_nothing_can_be_locked_and_leaves_no_trace(page_size, salt):
    played = WrittenPages(20, page_size)
    tree, name = played.tree, played.tree.namespace(salt)
    root = tree.lock(tree.match([1, 2, 3], name))
    again = tree.lock(root)
    assert again is root and (root.stop, root.namespace) == (0, name) and tree.pages(root) == []
    pages = played.take(3)
    node = tree.insert([1, 2, 3], pages, after=root)
    assert path_of(node) == (name, (1, 2, 3)) and tree.num_protected == 0
    assert tree.lock(node, 0) is root
    played.allocator.release(pages)
    assert tree.evict(20) == [node]
    for _ in range(3):
        tree.check()
        tree.unlock(root)
    tree.check()
    with pytest.raises(TreeError):
        tree.unlock(root)
    assert tree.insert([], [], name).stop == 0  # no node, and no root without a child
    tree.check()
    played.insert([1, 2], name)  # the root that is gone stands for the one that is there now
    assert path_of(played.tree.insert([1, 2], [0, 0], after=root)) == (name, (1, 2))
    tree.unlock(tree.lock(root))
    tree.check()


def test_a_match_outlives_cuts():
    for cut in range(1, 12):
        for matched in range(12):
            played = WrittenPages(30, 4)
            played.insert(list(range(12)))
            match = played.tree.match([*range(matched), 99])
            played.insert([*range(cut), 50])
            held = played.tree.lock(match)
            assert path_of(held)[1] == tuple(range(matched))
            if matched > cut:  # one that claims too much ends with its path
                assert played.tree.lock(match._replace(num_tokens=99)).stop == 12
            played.check()
