"""The tree's bench: its counted work says that no operation costs more in a larger tree."""

import json

import pytest

from minserve.bench.tree import bench_tree, table, to_json
from minserve.errors import InvalidValue


def test_the_counted_work_is_that_of_the_match_and_does_not_grow_with_the_tree():
    results = bench_tree(num_nodes=(200, 1_000, 4_000), match_tokens=(64, 32, 128), rounds=2, num_operations=50)
    assert [(r.num_nodes, r.match_tokens) for r in results] == [
        (200, 64), (1_000, 64), (4_000, 64), (200, 32), (200, 128)]  # fmt: skip
    for result in results:
        assert result.edges == 2
        # in with the insertion, out with the eviction; a lock puts off one leaf at most, which goes out and in again
        assert 2 <= result.heap_operations <= 4
        assert min(result.match_us, result.insert_us, result.lock_us, result.evict_us) > 0
    shown = table(results)
    assert all(f"{num_nodes:,}" in shown for num_nodes in (200, 1_000, 4_000))
    assert [row["num_nodes"] for row in json.loads(to_json(results))] == [200, 1_000, 4_000, 200, 200]


@pytest.mark.parametrize(
    "wrong",
    [{"num_nodes": ()}, {"num_nodes": (150,)}, {"num_nodes": (0,)}, {"match_tokens": (16,)}, {"match_tokens": ()},
     {"rounds": 0}, {"num_operations": 0}, {"num_operations": 99}],
    ids=str,
)  # fmt: skip
def test_sizes_that_cannot_be_built_are_refused(wrong):
    (field,) = wrong
    with pytest.raises(InvalidValue, match=field):
        bench_tree(**{"num_nodes": (100,), "match_tokens": (32,), "rounds": 1, "num_operations": 10, **wrong})
