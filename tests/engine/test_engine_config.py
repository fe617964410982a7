"""The knobs: what is refused, and how the memory is divided between pages, states of who runs, and kept states."""

import re
from itertools import product

import pytest
from small_engine import ATTENTION_ONLY, CONFIG

from minserve.engine_config import MOST_STATES, EngineConfig, size_caches
from minserve.errors import InvalidValue

WRONG = {
    "policy": ("lifo", "FCFS", "", None),
    "prefix_cache": (None, 0, 1, "on"),
    "snapshot_every": (0, -1, 1.5, True, None, "256"),
    "share_reads_from": (0, -1, 1.5, True, None),
    "num_states": (0, -1, 1.5, True, "8"),
    "check": (None, 1),
    "max_running": (0, None),
    "seed": (-1, 2**64, 0.5),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_value_that_cannot_be_is_named(field):
    for value in WRONG[field]:
        with pytest.raises(InvalidValue, match=f"{field} is {value!r}; it must be"):
            EngineConfig(**{field: value})


def test_the_policies_are_three():
    for policy in ("fcfs", "priority", "longest_prefix"):
        assert EngineConfig(policy=policy).policy == policy
    with pytest.raises(InvalidValue, match="one of fcfs, priority, longest_prefix"):
        EngineConfig(policy="shortest")


def sized(model=CONFIG, **config):
    """The sizes of caches in float64, four tokens a page."""
    return size_caches(EngineConfig(**{"dtype": "float64", "page_size": 4, **config}), model)


@pytest.mark.parametrize("max_running", [1, 2, 6, 64])
def test_kept_states_have_slots_beside_those_of_who_runs(max_running):
    kept = sized(max_running=max_running)
    assert kept.num_states == MOST_STATES * max_running and kept.num_rows == max_running
    alone = sized(max_running=max_running, prefix_cache=False)
    assert alone.num_states == alone.num_rows == max_running
    assert sized(max_running=max_running, num_states=5).num_states == 5


def test_a_model_without_states_has_none_to_keep():
    for prefix_cache in (True, False):
        sizes = sized(ATTENTION_ONLY, max_running=6, prefix_cache=prefix_cache)
        assert (sizes.num_states, sizes.num_rows, sizes.state_bytes) == (6, 6, 0)


@pytest.mark.parametrize("max_running", [1, 3, 64])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_memory_holds_both_caches_and_states_take_half_at_most(max_running, prefix_cache):
    state_bytes, num_before = sized().state_bytes, 0
    for cache_bytes in [*range(2112, 200_000, 977), 200_000]:
        sizes = sized(max_running=max_running, prefix_cache=prefix_cache, cache_bytes=cache_bytes)
        assert sizes.total_bytes <= cache_bytes
        assert (sizes.num_states + sizes.num_rows) * state_bytes <= cache_bytes // 2
        assert sizes.num_rows <= sizes.num_states <= max_running * (MOST_STATES if prefix_cache else 1)
        assert sizes.num_rows == min(max_running, sizes.num_states)
        assert sizes.num_states >= num_before
        num_before = sizes.num_states
    fitting = 100_000 // state_bytes - max_running
    assert num_before == (min(fitting, MOST_STATES * max_running) if prefix_cache else max_running)


@pytest.mark.parametrize("page_size", [1, 4, 64, 512])
@pytest.mark.parametrize("num_states", [None, 1, 5])
def test_too_little_memory_is_refused_and_what_is_said_to_be_enough_is_enough(page_size, num_states):
    for prefix_cache, max_running, batch_tokens in product((True, False), (1, 6, 64), (1, 512)):
        knobs = {"prefix_cache": prefix_cache, "max_running": max_running, "batch_tokens": batch_tokens,
                 "page_size": page_size, "num_states": num_states}  # fmt: skip
        with pytest.raises(InvalidValue, match="cache_bytes is 1; .*EngineConfig.cache_bytes or num_states") as refused:
            sized(cache_bytes=1, **knobs)
        least = int(re.search(r"at least (\d+)", str(refused.value)).group(1))
        sizes = sized(cache_bytes=least, **knobs)
        assert sizes.num_pages >= 1 and sizes.num_states >= 1 and sizes.total_bytes <= least
        if num_states is not None:  # where states share what there is, less may do with fewer of them
            with pytest.raises(InvalidValue, match=f"at least {least},"):
                sized(cache_bytes=least - 1, **knobs)


def test_both_numbers_given_are_taken_whatever_the_memory():
    sizes = sized(num_pages=7, num_states=3, cache_bytes=1)
    assert (sizes.num_pages, sizes.num_states, sizes.num_rows) == (7, 3, 3)
    assert sized(num_pages=7, cache_bytes=10**6).num_pages == 7
