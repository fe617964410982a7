"""What a reader writes in chapter 7 is what the library does."""

from itertools import combinations

import numpy as np
import pytest
from catalogue import ROOT, load

from minserve.deltanet.state_pool import StatePool
from minserve.hybrid.reuse import match_hybrid, next_snapshot
from minserve.hybrid.snapshots import Snapshots
from minserve.model.counting import kv_bytes_per_token, state_bytes
from minserve.model.model_figures import named_config
from minserve.paging.page_table import PageAllocator
from minserve.radix.radix_tree import RadixTree

CH07 = load(ROOT / "solutions" / "ch07_hybrid.py")


def test_match_hybrid_equals_the_library():  # faults A1, A3, A6
    for num_tokens in range(1, 8):
        for page_hit in range(num_tokens + 1):
            for snapshots in (kept for num in range(4) for kept in combinations(range(1, 9), num)):
                mine = CH07.match_hybrid(page_hit, list(snapshots), num_tokens)
                assert mine == match_hybrid(page_hit, snapshots, num_tokens)


@pytest.mark.parametrize("every, page_size", [(8, 4), (6, 5), (1, 3), (4, 8), (256, 16)])
def test_place_snapshots_equals_the_library_stop_by_stop(every, page_size):  # fault A13
    for num_tokens in range(1, 40):
        for start in range(num_tokens):
            counts, count = [], start
            while (count := next_snapshot(count, num_tokens, page_size, every)) is not None:
                counts.append(count)
            assert CH07.place_snapshots(start, num_tokens, every, page_size) == counts


class Place:
    """Where the library keeps a state: something that ends after `stop` tokens."""

    def __init__(self, tokens):
        self.tokens, self.stop = tokens, len(tokens)


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_snapshot_stores_keep_the_same(num_slots):  # fault A15
    mine, states, rng = CH07.SnapshotStore(num_slots), StatePool(num_slots + 1), np.random.default_rng(num_slots)
    theirs, places = Snapshots(states), {}
    for _ in range(300):
        tokens = "".join(rng.choice(["a", "b"], int(rng.integers(1, 6))))
        if rng.random() < 0.5:
            mine.put(tokens)
            place, slot = places.setdefault(tokens, Place(tokens)), states.take()
            states.stamp(slot, len(tokens))
            theirs.put(place, slot)
            states.release(slot)
            theirs.evict(num_slots)
        else:
            counts = [count for count in range(len(tokens) + 1) if places.get(tokens[:count]) in theirs]
            count = match_hybrid(len(tokens), counts, len(tokens))
            assert mine.hit(tokens) == count
            if count:
                theirs.use(places[tokens[:count]])
        assert sorted(mine.kept) == sorted(tokens for tokens, place in places.items() if place in theirs)
        theirs.check(), states.check()


@pytest.mark.parametrize("num_new, num_states, is_in", [(3, 1, True), (5, 1, True), (6, 1, False), (1, 0, False)])
def test_admit_or_undo_with_the_librarys_tree_and_pools(num_new, num_states, is_in):  # fault A7
    allocator, states = PageAllocator(8), StatePool(1)
    tree = RadixTree(allocator, page_size=2)
    pages = allocator.take(3)
    node = tree.insert([1, 2, 3, 4, 5, 6], pages)
    allocator.release(pages)
    for _ in range(1 - num_states):
        states.take()
    before = allocator.num_free, states.num_free, tree.num_evictable
    for _ in range(1 if is_in else 100):
        taken = CH07.admit_or_undo(tree, node, allocator, states, num_new)
    if is_in:
        table, slot = taken
        assert table[:3] == pages and len(set(table)) == 3 + num_new and tree.num_protected == 3
        allocator.release(table), states.release(slot), tree.unlock(node)
    else:
        assert taken is None
    assert (allocator.num_free, states.num_free, tree.num_evictable) == before
    tree.check(), states.check(), allocator.check()


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3.8-2.4t-a95b"])
@pytest.mark.parametrize("every", [256, 2080])
def test_snapshot_worth_equals_the_counting(name, every):
    config = named_config(name)
    per_token, state = kv_bytes_per_token(config), state_bytes(config)
    layers = config.num_full_layers, config.num_linear_layers
    model = CH07.Hybrid(*layers, per_token / layers[0], state / layers[1])
    worth = CH07.snapshot_worth(model, every, 50.0)
    assert worth["snapshot_gb"] == pytest.approx(state / 1e9)
    assert worth["times_kv"] == pytest.approx(state / (every * per_token))
    assert worth["tokens"] == pytest.approx(50e9 / (per_token + state / every), abs=1)
