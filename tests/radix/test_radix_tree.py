"""The prefix tree: what it finds, what it takes in, and what it refuses."""

import pytest
from written_pages import PAGE_SIZES, WrittenPages, counts, path_of

from minserve.errors import InvalidValue
from minserve.paging.page_table import PageError
from minserve.radix.node import FIRST_BLOCK_TOKENS, num_common
from minserve.radix.radix_tree import RadixTree, TreeError

SIZES = pytest.mark.parametrize("page_size", PAGE_SIZES)
SALTS = (None, "", "1", 1, True, 1.0, b"1", 0, False, "None", (1,), (True,), ((1,), "a"), ((True,), "a"))


class Token(int):
    """A token whose hash has 2 bits."""

    def __hash__(self):
        return int(self) & 3


class Counted(list):
    """A sequence that knows how many of its tokens were looked at, and in how many pieces."""

    looked_at = num_pieces = 0

    def __getitem__(self, key):
        answer = super().__getitem__(key)
        self.num_pieces += 1
        self.looked_at += len(answer) if isinstance(key, slice) else 1
        return answer


# -- matching


@pytest.mark.parametrize("num_edge", [1, 2, 255, 256, 257, 767, 768, 769, 2000])
def test_the_place_where_an_edge_differs_is_found(num_edge):
    edge = tuple(range(num_edge))
    for differs in {*range(0, num_edge, 37), *range(max(0, num_edge - 3), num_edge), 255, 256, 257, 767, 768}:
        tokens = [*range(num_edge), 5, 5]
        tokens[differs:] = [-1] * (len(tokens) - differs)
        for at in (0, 3):
            assert num_common(edge, [0] * at + tokens, at) == min(differs, num_edge)
            assert num_common(edge, tuple([0] * at + tokens[:differs]), at) == min(differs, num_edge)


def test_matching_looks_at_little_more_than_what_it_finds():
    num_edge = 100_000
    edge = tuple(range(num_edge))
    for same in (0, 1, 100, 1_000, 10_000, 60_000, num_edge):
        tokens = Counted(range(num_edge))
        if same < num_edge:
            tokens[same] = -1
        assert num_common(edge, tokens, 0) == same
        assert tokens.looked_at <= 4 * same + 2 * FIRST_BLOCK_TOKENS and tokens.num_pieces <= 30


@SIZES
def test_the_longest_common_prefix_is_found_whatever_the_hashes(page_size):  # fault C5
    played, said, num_hits = WrittenPages(4_000, page_size), [], 0
    for number in range(500):
        digits = [Token(number * factor >> shift & 15) for factor, shift in ((7, 0), (1, 4), (3, 2), (5, 3), (11, 1))]
        tokens = digits[: 1 + number % 5] + [Token(number % 3)] * (number % 7)
        longest = max((sum(1 for _ in zip_equal(tokens, other)) for other in said), default=0)
        assert played.cached(tokens) == longest
        num_hits += longest > 0
        played.insert(tokens)
        said.append(tokens)
        assert played.cached(tokens) == len(tokens)
    played.check()
    assert num_hits > 300


def zip_equal(first, second):
    """The tokens that two sequences begin with alike."""
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one


@pytest.mark.parametrize("first", SALTS, ids=repr)
def test_a_salt_finds_only_its_own(first):  # fault C7
    tokens = list(range(9))
    for number, second in enumerate(SALTS):
        if SALTS[number] is not first:
            played = WrittenPages(9, 4)
            names = [played.tree.namespace(salt) for salt in (first, second)]
            found = []
            for name in (names[0], names[1], names[0], names[1]):
                found.append(played.cached(tokens, name))
                played.insert(tokens, name)
            assert found == [0, 0, 9, 9]
            played.check()


def test_a_salt_has_a_hash():
    with pytest.raises(InvalidValue, match="cache_salt"):
        WrittenPages(4, 4).tree.namespace(["a"])


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_holds_a_token(page_size):
    with pytest.raises(InvalidValue, match="page_size"):
        RadixTree(None, page_size)


@SIZES
def test_nothing_is_found_before_it_is_inserted_and_a_match_changes_nothing(page_size):  # fault C9
    played = WrittenPages(20, page_size)
    tree, tokens = played.tree, list(range(8))
    pages = played.take(-(-8 // page_size))
    assert tree.match(tokens).num_tokens == 0 and list(tree.nodes()) == []
    played.write(pages, 0, tokens)
    node = tree.insert(tokens, pages)
    before = node.last_used, node.num_locks, counts(tree)
    assert tree.match(tokens) == (8, (node,), tree.namespace())
    assert tree.match([]).num_tokens == 0
    assert (node.last_used, node.num_locks, counts(tree)) == before
    tree.check()


@SIZES
def test_short_and_empty_sequences_are_found_whole(page_size):  # faults A13, C10
    for num_tokens in range(20):
        played, tokens = WrittenPages(40, page_size), list(range(num_tokens))
        for _ in range(2):
            node = played.insert(tokens)
            assert path_of(node) == (played.tree.namespace(), tuple(tokens))
            assert played.cached([*tokens, 99]) == num_tokens
        played.check()
        for kept in range(num_tokens + 1):  # a request leaves its last token to be computed, or more
            held = played.tree.lock(played.tree.match(tokens), kept)
            assert path_of(held) == (played.tree.namespace(), tuple(tokens[:kept]))
            played.check()
            played.tree.unlock(held)
        played.tree.evict(40)
        assert played.allocator.num_free == 40 and list(played.tree.nodes()) == []
        played.check()


# -- inserting


@SIZES
def test_a_duplicate_keeps_the_pages_of_the_tree_and_gives_back_its_own(page_size):  # fault C9
    for num_first in range(1, 18):
        for num_second in range(1, 18):
            played = WrittenPages(80, page_size)
            tokens = list(range(max(num_first, num_second)))
            _, first = played.insert_blindly(tokens[:num_first])
            node, second = played.insert_blindly(tokens[:num_second])
            num_known = min(num_first, num_second)
            table = played.tree.pages(node)
            num_kept = num_known // page_size  # full pages, which are the first one's; then each has its own
            assert table[:num_kept] == first[:num_kept]
            assert table[num_kept:] == (second if num_second > num_first else first)[num_kept : len(second)]
            played.check()
            held = {page for leaf in played.tree.nodes() for page in leaf.pages}
            assert played.allocator.num_free == 80 - len(held)
            assert all(played.allocator.ref_count(page) == 0 for page in {*first, *second} - held)


@SIZES
def test_no_branch_and_no_cut_loses_what_was_there(page_size):
    for branch in range(17):
        for cut in range(17):
            played = WrittenPages(200, page_size)
            said = [list(range(16)) + tail for tail in ([], [70, 71], [80, 81, 82])]
            said += [list(range(branch)) + [90, 91, 92], list(range(cut)), list(range(cut)) + [95]]
            for number, tokens in enumerate(said):
                played.insert(tokens)
                assert [played.cached(earlier) for earlier in said[: number + 1]] == [*map(len, said[: number + 1])]
            played.check()
            assert played.tree.evict(200) and played.allocator.num_free == 200


@SIZES
@pytest.mark.parametrize("by", ["root", "after"])
def test_a_sequence_grows_piece_by_piece_in_one_page_after_another(page_size, by):
    """As a request publishes: its last page, already in the tree, is written further."""
    for step in range(1, 7):
        played = WrittenPages(40, page_size)
        pages, node = played.take(-(-30 // page_size)), None
        for stop in range(step, 31, step):
            played.write(pages, stop - step, range(stop - step, stop))
            node = played.tree.insert(list(range(stop)), pages, after=node if by == "after" else None)
            assert played.tree.pages(node) == pages[: -(-stop // page_size)]
            assert played.cached(list(range(31))) == stop
            played.check()
        assert played.tree.num_pages == -(-stop // page_size)


def test_what_cannot_be_inserted_changes_nothing():
    played = WrittenPages(12, 4)
    tree, node = played.tree, played.insert(list(range(10)))
    other = played.insert([0, 1, 5])
    before = counts(tree), [(n.start, n.stop, n.pages) for n in tree.nodes()], played.allocator.num_free
    pages = played.take(3)
    free = next(page for page in range(12) if not played.allocator.ref_count(page))
    refused = [
        (PageError, lambda: tree.insert([0, 1, 2, 3, 9, 9], [pages[0], free])),
        (PageError, lambda: tree.insert([7, 8], [free], tree.namespace("new"))),
        (InvalidValue, lambda: tree.insert(list(range(9)) + [5], pages[:2])),
        (InvalidValue, lambda: tree.insert([0, 1], pages, after=other)),
        (InvalidValue, lambda: tree.pages(node, 11)),
        (InvalidValue, lambda: tree.pages(node, -1)),
    ]
    for error, change in refused:
        with pytest.raises(error):
            change()
        assert (counts(tree), [(n.start, n.stop, n.pages) for n in tree.nodes()]) == before[:2]
        played.check()
    played.allocator.release(pages)
    assert played.allocator.num_free == before[2]


@pytest.mark.parametrize("use", ["lock", "unlock", "after", "pages", "match"])
def test_a_node_that_is_gone_is_refused(use):
    played = WrittenPages(8, 4)
    tree, node = played.tree, played.insert(list(range(6)))
    match = tree.match(list(range(6)))
    assert tree.evict(8) == [node]
    pages = played.take(2)
    uses = {
        "lock": lambda: tree.lock(node),
        "unlock": lambda: tree.unlock(node),
        "after": lambda: tree.insert(list(range(8)), pages, after=node),
        "pages": lambda: tree.pages(node),
        "match": lambda: tree.lock(match),
    }
    with pytest.raises(TreeError):
        uses[use]()
    played.check()
    assert list(tree.nodes()) == [] and counts(tree) == (0, 0, 0)
