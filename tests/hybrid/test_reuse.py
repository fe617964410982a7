"""How much is reused and where states are kept, against the sentences that say so, over all small cases."""

from itertools import combinations, product

import pytest

from minserve.hybrid.reuse import match_hybrid, next_snapshot


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_the_deepest_state_at_or_below_the_hit_and_one_token_is_left(num_tokens):  # faults A1, A3, A6
    counts = range(1, 9)
    for page_hit, states in product(range(num_tokens + 1), (c for n in range(4) for c in combinations(counts, n))):
        good = [n for n in range(1, num_tokens) if n <= page_hit and n in states]
        for order in (states, states[::-1]):
            assert match_hybrid(page_hit, order, num_tokens) == (good[-1] if good else 0)


@pytest.mark.parametrize("page_size, every", [*product((1, 3, 4, 7), (1, 2, 5, 8, 64))])
def test_states_are_kept_at_multiples_at_the_last_page_boundary_and_where_others_part(page_size, every):
    for num_tokens, branches in product(range(1, 24), ((), (1,), (6,), (23,), (2, 7, 19))):
        last = max(n for n in range(num_tokens) if n % page_size == 0)
        points = [n for n in range(1, num_tokens + 1) if n % every == 0 or n == last or n in branches]
        for start in range(num_tokens + 1):
            wanted = next((n for n in points if n > start), None)
            assert next_snapshot(start, num_tokens, page_size, every, branches) == wanted


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_a_prompt_as_long_as_a_page_or_less_has_no_boundary_below_its_end(page_size):  # fault A13
    for num_tokens in range(1, page_size + 1):
        assert next_snapshot(0, num_tokens, page_size, every=64) is None
    assert next_snapshot(0, page_size + 1, page_size, every=64) == page_size
