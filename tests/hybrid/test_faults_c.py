"""Faults of shared prefixes, told again of whole engines: each kind at nearby lengths and orders.

A fault that is a wrong tree must show when that tree is put in.
"""

from functools import partial
from itertools import product

import pytest
import torch
from known_prefixes import num_common
from served import (
    Ask,
    cached_tokens,
    check_idle,
    make_engine,
    num_wrong,
    one_by_one,
    params,
    serve,
    serve_right,
    slices,
    tokens,
)
from worlds import A, engine_of, serve_as_known, shared

from minserve.errors import MinserveError
from minserve.events import EventKind
from minserve.parts import Parts
from minserve.radix.radix_tree import RadixTree

names = pytest.mark.parametrize("name", ["ledger", "attention ledger", "hybrid"])


class LocksAbove(RadixTree):
    """Locks what is above the node that was matched, and not the node."""  # fault C1

    def lock(self, match_or_node, num_tokens=None):
        node = super().lock(match_or_node, num_tokens)
        if node.parent is not None:
            super().lock(node.parent)
            super().unlock(node)
        return node

    def unlock(self, node):
        super().unlock(node.parent or node)


class LocksTooMuch(RadixTree):
    """Locks the whole edge that a match ends inside."""  # fault C3

    def lock(self, match_or_node, num_tokens=None):
        return super().lock(match_or_node.path[-1] if getattr(match_or_node, "path", ()) else match_or_node)


class HashesTokens(RadixTree):
    """Compares sums of tokens instead of tokens: a hash of a few bits."""  # fault C5

    def _compare(self, edge, tokens, at):
        num = min(len(edge), len(tokens) - at)
        return next((n for n in range(num, 0, -1) if (sum(edge[:n]) - sum(tokens[at : at + n])) % 8 == 0), 1)


class ForgetsSalts(RadixTree):
    """Keeps all sequences in one place."""  # fault C7

    def namespace(self, salt=None):
        return super().namespace()


class EvictsAll(RadixTree):
    """Is asked for a few pages, and gives all."""  # fault C13

    def evict(self, num_pages):
        return super().evict(self._allocator.num_free + 10**6)


def pressed(seed, num=14, salts=(None,)):
    """Requests that share beginnings in groups, too many for the pages, all within a few steps."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high: int(torch.randint(0, high, (), generator=generator))  # noqa: E731
    asks = []
    for i in range(num):
        prompt = shared(4 + draw(17), 6 + draw(16), seed=draw(3)) if draw(3) else tokens(3 + draw(12), seed=draw(4))
        asks.append(Ask(prompt, params(1 + draw(6), cache_salt=salts[draw(len(salts))]), i * draw(3)))
    return asks


@names
@pytest.mark.parametrize("num_pages", [8, 11])
@pytest.mark.parametrize("num_states", [1, 3, 6])
def test_answers_stay_right_while_memory_is_short(name, num_pages, num_states, worlds):  # faults C1, C3
    model, plain = worlds[name]
    for seed in range(1 if name == "hybrid" else 2):
        config = {"num_pages": num_pages, "num_states": num_states, "max_running": min(3, num_states)}
        engine = make_engine(model, snapshot_every=(4, 3)[seed], batch_tokens=(8, 5)[seed], **config)
        serve_right(engine, plain, pressed(seed))
        check_idle(engine)
        engine.cache.prefixes.evict(num_pages)
        assert engine.cache.allocator.num_free == num_pages and not engine.cache.states.held


@pytest.mark.parametrize("tree, kind", [(LocksAbove, "pressed"), (LocksTooMuch, "branches")])
def test_a_lock_that_holds_too_little_or_too_much_is_seen(tree, kind, worlds):  # faults C1, C3
    model, plain = worlds["attention ledger"]
    for seed in range(2):
        asks = pressed(seed) if kind == "pressed" else one_by_one([A, shared(5), shared(8, 20, 2), A])
        serve_right(make_engine(model, num_pages=9), plain, asks)
        with pytest.raises((MinserveError, AssertionError)):
            serve(make_engine(model, Parts(radix_tree=tree), num_pages=9), asks)


@pytest.mark.parametrize("lengths", [(12, 5, 8), (12, 8, 5), (9, 4, 4), (13, 7, 6), (8, 1, 3)])
@names
def test_a_lock_covers_what_was_matched_and_all_can_go_afterwards(name, lengths, worlds):  # fault C3
    model, plain = worlds[name]
    num, first, second = lengths
    engine = make_engine(model, snapshot_every=1)
    serve_right(engine, plain, one_by_one([A[:num]], 1))
    asks = [Ask(shared(first, 16), params(6), 0), Ask(shared(second, 17, 2), params(3), 1), Ask(A[:num], params(2), 2)]
    serve_right(engine, plain, asks)
    check_idle(engine)
    engine.cache.prefixes.evict(32)
    assert engine.cache.allocator.num_free == 32 and not list(engine.cache.tree.nodes())


@pytest.mark.parametrize("num_letters", [2, 3])
@pytest.mark.parametrize("name", ["ledger", "attention ledger"])
def test_many_random_prompts_hit_only_what_they_begin_with(name, num_letters, worlds):  # fault C5
    generator = torch.Generator().manual_seed(num_letters)
    lengths = torch.randint(1, 12, (90,), generator=generator).tolist()
    prompts = [torch.randint(0, num_letters, (n,), generator=generator).tolist() for n in lengths]
    prompts = [(*prompt, 20 + i % 4) for i, prompt in enumerate(prompts)]
    assert any(serve_as_known(worlds[name], (4, 3, 64), prompts, 1))


@pytest.mark.parametrize("name", ["attention ledger", "attention"])
def test_a_tree_that_compares_hashes_is_seen(name, worlds):  # fault C5
    model, plain = worlds[name]
    prompts = one_by_one([(1, 2, 3, 4, 5, 6, 7, 8, 10), (1, 2, 4, 3, 5, 6, 7, 8, 12)])  # of equal sums
    serve_right(make_engine(model), plain, prompts)
    assert num_wrong(make_engine(model, Parts(radix_tree=HashesTokens)), plain, prompts)


@names
@pytest.mark.parametrize("salts", [("a", "b", "a"), (None, "a", None), ("0", None, "0")], ids=str)
@pytest.mark.parametrize("num", [8, 17])
def test_a_prefix_is_shared_within_a_salt_alone(name, salts, num, worlds):  # fault C7
    model, plain = worlds[name]
    asks = [ask for salt in salts for ask in one_by_one([A[:num]], cache_salt=salt)]
    engine = make_engine(model)
    serve_right(engine, plain, asks)
    cached = [count for _, count in cached_tokens(engine)]
    assert cached[:2] == [0, 0] and cached[2] > 0
    engine = make_engine(model)
    serve_right(engine, plain, [Ask(ask.prompt_ids, ask.params, 0) for ask in asks])  # all at once
    assert [count > 0 for _, count in sorted(cached_tokens(engine))] == [False, False, True]
    forgetful = make_engine(model, Parts(radix_tree=ForgetsSalts))
    serve_right(forgetful, plain, asks)
    assert cached_tokens(forgetful)[1][1] > 0


@names
@pytest.mark.parametrize("leaves", [None, 1, 3])
@pytest.mark.parametrize("num", [1, 8, 19])
def test_equal_prompts_in_one_step(name, num, leaves, worlds):  # fault C9
    model, plain = worlds[name]
    for batch_tokens in (8, 64):
        asks = [Ask(A[:num], params(3), 0, leaves), *(Ask(A[:num], params(3), at) for at in (0, 0, 1))]
        engine = make_engine(model, batch_tokens=batch_tokens)
        serve_right(engine, plain, asks)
        last = engine.cache.tree.match(A[:num])
        assert last.num_tokens == num
        check_idle(engine)
        engine.cache.prefixes.evict(32)
        assert engine.cache.allocator.num_free == 32


@names
@pytest.mark.parametrize("num", [8, 9, 13])
def test_nothing_is_found_before_it_is_committed(name, num, worlds):  # fault C9
    model, plain = worlds[name]

    class Leaving:
        """The model, in the first forwards of which the first request is aborted, or which fail."""

        def __init__(self, at, fails):
            self.model, self.config, self.num, self.at, self.fails = model.model, model.config, 0, at, fails

        def __call__(self, step, memory):
            self.num += 1
            if self.num == self.at:
                assert engine.cache.tree.match(A[:num]).num_tokens <= 8 * (self.num - 1)
                engine.abort("0.0")
                if self.fails:
                    raise ZeroDivisionError
            return model(step, memory)

    for at, fails in product((1, 2, 3), (False, True)):
        engine = make_engine(Leaving(at, fails))
        engine.step = partial(step_again, engine.step)
        asks = [Ask(A[:num], params(3), 0), Ask(A[:num], params(3), 0)]
        (first,), (second,) = serve(engine, asks)
        assert first.finish_reason == "abort" and not plain.wrong(asks[1], second)
        check_idle(engine)


def step_again(step):
    """A step; one that fails brings nothing."""
    try:
        return step()
    except ZeroDivisionError:
        return []


@names
@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_a_prompt_that_is_there_to_its_last_token_runs_one_token_at_least(name, page_size, worlds):  # fault C10
    for every in (page_size, 64):
        model, plain = worlds[name]
        lengths = (8,) if name == "hybrid" else (1, page_size, 7, 8, 9, 16)
        engine = engine_of(model, (page_size, every, 64), num_pages=200)
        asks = one_by_one([A[:num] for num in lengths for _ in range(3)])
        serve_right(engine, plain, asks)
        for i, ask in enumerate(asks):
            (start, stop), num = slices(engine, f"{i}.0")[0], len(ask.prompt_ids)
            assert start < stop and start <= num - 1
            assert name != "attention ledger" or i % 3 == 0 or start == num - 1


@pytest.mark.parametrize("num_wanted", range(1, 6))
@pytest.mark.parametrize("has_states", [True, False])
def test_few_pages_wanted_are_few_pages_gone_and_the_oldest_first(num_wanted, has_states, worlds):  # fault C13
    model, plain = worlds["ledger" if has_states else "attention ledger"]
    prompts = [(seed, *tokens(7, seed=seed)) for seed in (3, 1, 5, 2, 4)]

    def left(tree):
        """How much of each is there, of two pages each in a full pool, after so many pages have been wanted."""
        engine = make_engine(model, Parts(radix_tree=tree), num_pages=10, snapshot_every=64)
        serve_right(engine, plain, one_by_one([*prompts, (9, *tokens(4 * num_wanted - 1, seed=9))], 1))
        nodes = [*engine.cache.tree.nodes()]
        assert not has_states or {*engine.cache.snapshots._slot_of} <= {*nodes}
        return [engine.cache.tree.match(prompt).num_tokens for prompt in prompts]

    gone = [min(2, max(0, num_wanted - 2 * i)) for i in range(5)]  # with states, an edge ends at each page
    assert left(RadixTree) == [8 - (4 * num if has_states else 8 * (num > 0)) for num in gone]
    assert left(EvictsAll) == [0] * 5


def test_the_log_says_how_much_was_found(worlds):
    engine = make_engine(worlds["ledger"][0])
    serve(engine, one_by_one([A, shared(17)]))
    admitted = [event for event in engine.log if event.kind is EventKind.ADMITTED]
    assert [event.data["cached_tokens"] for event in admitted] == [0, 16]
    assert num_common(A, shared(17)) == 17
