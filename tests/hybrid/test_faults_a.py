"""Faults of recurrent states and prefixes, told again of whole engines: each kind at nearby lengths and orders.

Wide sweeps are served by the ledger, where every token that a page or a state has seen shows in the answer; each kind
is served by the small model as well. A fault that is a wrong part must show when the part is put in.
"""

from itertools import product

import pytest
from served import (
    Ask,
    TrustingPool,
    cached_tokens,
    check_idle,
    num_wrong,
    one_by_one,
    params,
    serve,
    serve_right,
    slices,
    tokens,
)
from worlds import SIZES, A, engine_of, serve_as_known, shared

from minserve.deltanet.state_pool import StateError
from minserve.parts import Parts

sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def skip_all_pages(page_hit, states, num_tokens):  # fault A1
    return min(page_hit, num_tokens - 1)


def take_the_state_of_all_tokens(page_hit, states, num_tokens):  # fault A3
    return max((count for count in states if count <= min(page_hit, num_tokens)), default=0)


def take_a_state_past_the_hit(page_hit, states, num_tokens):  # fault A6
    return max(states, default=0)


WRONG = [
    *((skip_all_pages, [A, shared(num)], 64) for num in (8, 15, 17, 19)),
    *((skip_all_pages, [A, shared(num)], 8) for num in (9, 15, 18, 23)),
    *((take_the_state_of_all_tokens, [A[:num], A[:num]], 8) for num in (8, 16, 24)),
    *((take_the_state_of_all_tokens, [A[:num], A[:num]], 3) for num in (3, 9, 15)),
    *((take_a_state_past_the_hit, [A, shared(num), A], 8) for num in (9, 17, 19, 21, 23)),
]


@pytest.mark.parametrize("match, prompts, every", WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_hit_is_seen_and_the_pool_refuses_it(match, prompts, every, worlds):  # faults A1, A3, A6
    model, plain = worlds["hybrid"]
    serve_right(engine_of(model, (4, every, 8)), plain, one_by_one(prompts))
    trusting = Parts(match_hybrid=match, state_pool=TrustingPool)
    assert num_wrong(engine_of(model, (4, every, 8), trusting), plain, one_by_one(prompts))
    engine = engine_of(model, (4, every, 8), Parts(match_hybrid=match))
    for _ in range(2):
        with pytest.raises(StateError, match="has seen .* tokens; its reader expects"):
            serve(engine, one_by_one(prompts))
        (name,) = engine.batcher.running
        assert engine.abort(name) and len(engine.step()) == 1
        check_idle(engine)
    serve_right(engine, plain, one_by_one([tokens(9, seed=7)]))


@sizes
def test_pages_alone_are_no_reason_to_skip(size, worlds):  # fault A1
    order = [(1, 24, 7, 11)[SIZES.index(size) % 4] * i % 25 for i in range(25)]
    reused = serve_as_known(worlds["ledger"], size, [A, *(shared(num) for num in order)], 1)
    assert any(reused) and reused[0] == 0
    serve_as_known(worlds["attention ledger"], size, [A, *(shared(num) for num in order[::3])], 1)


@pytest.mark.parametrize("name, order", [("hybrid", (16, 19, 8)), ("hybrid", (3, 23, 20)), ("attention", (5, 18, 8))])
@pytest.mark.parametrize("size", [(4, 8, 8), (3, 5, 64)], ids=str)
def test_pages_alone_are_no_reason_to_skip_with_the_small_models(name, order, size, worlds):  # fault A1
    assert serve_as_known(worlds[name], size, [A, *(shared(num) for num in order), A])[-1] > 0


@sizes
@pytest.mark.parametrize("name", ["ledger", "attention ledger"])
def test_the_same_prompt_twice_runs_its_last_token_once(name, size, worlds):  # faults A3, C10
    for lengths in (range(1, 9), (16, 17, 24, 9, 15)):
        reused = serve_as_known(worlds[name], size, [A[:num] for num in lengths for _ in range(2)])
        assert all(cached < num for cached, num in zip(reused[1::2], lengths, strict=True))


@pytest.mark.parametrize("size", [(4, 8, 8), (1, 3, 5)], ids=str)
def test_the_same_prompt_twice_with_the_small_model(size, worlds):  # fault A3
    reused = serve_as_known(worlds["hybrid"], size, [A[:num] for num in (1, 8, 16, 24, 9, 17) for _ in range(2)])
    assert reused[0] == reused[1] == 0 and any(reused)


@pytest.mark.parametrize("start, size", [*product((0, 3, 11), SIZES[:5])], ids=str)
@pytest.mark.parametrize("name", ["ledger", "hybrid"])
def test_a_slice_that_passes_points_keeps_the_state_of_each(name, start, size, worlds):  # fault A4
    page_size, every, _ = size
    model, plain = worlds[name]
    engine = engine_of(model, (page_size, every, 64))
    serve_right(engine, plain, one_by_one([*([A[:start]] if start else []), A[:19]]))
    ((hit, stop), _) = slices(engine, "1.0" if start else "0.0")
    points = sorted({*range(every, 20, every), 18 // page_size * page_size} - {*range(hit + 1)})
    assert stop == 19
    for point in points[-8:]:
        node = engine.cache.tree.match(A[:point]).path[-1]
        assert node.stop == point and node in engine.cache.snapshots
    order = [shared(point, point + 3) for point in points[-8:]]
    serve_right(engine, plain, one_by_one(order))
    assert [cached for _, cached in cached_tokens(engine)[-len(order) :]] == points[-8:]


@pytest.mark.parametrize("length, num_shared", [(19, 16), (19, 17), (18, 16), (23, 18), (17, 16)])
def test_a_state_published_for_a_boundary_that_it_passed_is_refused(length, num_shared, worlds):  # fault A4
    model, plain = worlds["hybrid"]
    prompts = [A[:length], shared(num_shared)]

    def published_too_low(pool):
        """An engine whose prompts are read in one slice, and whose state is kept as that of the boundary before."""
        engine = engine_of(model, (4, 16, 64), Parts(state_pool=pool) if pool else None)
        prefixes, right = engine.cache.prefixes, engine.cache.prefixes.publish

        def publish(request, num_tokens, pages, slot):
            table, low = right(request, num_tokens, pages, None), num_tokens // 16 * 16
            if slot is not None and low:
                prefixes.snapshots.put(prefixes.tree.insert(request.tokens[:low], pages), slot)
            return table

        prefixes.publish, prefixes.points = publish, lambda _, stop: [stop]
        return engine

    serve_right(engine_of(model, (4, 16, 64)), plain, one_by_one(prompts))
    assert num_wrong(published_too_low(TrustingPool), plain, one_by_one(prompts))
    with pytest.raises(StateError, match=f"has seen {length} tokens; its reader expects 16"):
        serve(published_too_low(None), one_by_one(prompts))


@pytest.mark.parametrize("size", SIZES[:5], ids=str)
def test_a_then_b_then_a_with_the_cache_on_and_off(size, worlds):  # fault A6
    model, plain = worlds["ledger"]
    for num in (1, 8, 13, 19):
        order = [A, shared(num), A, A[:num], shared(num, 21), A]
        reused = serve_as_known((model, plain), size, order, max_tokens=3)
        assert reused[2] > 0
        off = engine_of(model, size, prefix_cache=False)
        serve_right(off, plain, one_by_one(order, 3))
        assert not any(cached for _, cached in cached_tokens(off))
        assert off.cache.allocator.num_free == off.sizes.num_pages


@pytest.mark.parametrize("num", [8, 13, 19])
def test_a_then_b_then_a_with_the_small_model(num, worlds):  # fault A6
    model, plain = worlds["hybrid"]
    for on in (True, False):
        engine = engine_of(model, (4, 8, 8), prefix_cache=on)
        serve_right(engine, plain, one_by_one([A, shared(num), A]))
        assert (cached_tokens(engine)[2][1] > 0) == on


@pytest.mark.parametrize("name", ["ledger", "hybrid"])
@pytest.mark.parametrize("num_tokens, num_shared", [(24, 16), (21, 13), (17, 8)])
def test_a_request_that_finds_no_room_for_many_steps_takes_nothing(name, num_tokens, num_shared, worlds):  # fault A7
    model, plain = worlds[name]
    other, prompt = tokens(8, seed=3), shared(num_shared, num_tokens)
    engine = engine_of(model, (4, 4, 8), num_pages=24, num_states=6)
    serve_right(engine, plain, one_by_one([A[:num_shared]]))
    first, second = Ask(other, params(25 if name == "ledger" else 12), 0), Ask(prompt, params(), 3)
    before, num_waits = engine.cache.admit, []

    def held():
        cache = engine.cache
        states = {slot: cache.states.ref_count(slot) for slot in cache.states.held}
        return states, cache.num_takeable, cache.tree.num_protected, cache.holders

    def admit(request, hit, spare_pages):
        """As it is, but while the other one runs there is never room for the late one."""
        if request.prompt_ids != prompt or not engine.batcher.running:
            return before(request, hit, spare_pages)
        was = held()
        assert hit.num_tokens and not before(request, hit, 100) and held() == was
        num_waits.append(request)
        return False

    engine.cache.admit = admit
    serve_right(engine, plain, [first, second])
    assert len(num_waits) > 5
    check_idle(engine)


@pytest.mark.parametrize("page_size", [2, 4, 16, 32])
@pytest.mark.parametrize("name", ["ledger", "attention ledger"])
def test_prompts_shorter_than_a_page(name, page_size, worlds):  # fault A13
    lengths = [*range(1, min(9, page_size)), page_size - 3, page_size - 2, page_size - 1]
    lengths = [num for num in lengths if num > 0]
    for every, batch_tokens in ((64, 64), (8, 3)):
        prompts = [tokens(num, seed=2) for num in lengths for _ in range(2)]
        for order, max_tokens in ((prompts, 2), (prompts[::-1], 1)):
            assert serve_as_known(worlds[name], (page_size, every, batch_tokens), order, max_tokens)[0] == 0
