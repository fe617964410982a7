"""What a request gets does not depend on the steps, pages and neighbours it had: ids equal, logits within 1e-9."""

from collections import Counter

import pytest
from small_engine import alone, ask, check_idle, check_story, family, make_engine, poison_free, run_all

from minserve.events import EventKind
from minserve.metrics import steps


def check_answers(model, requests, progress):
    """Fail unless each request got the tokens and log-probabilities that it gets alone. REF."""
    for request in requests:
        tokens, logprobs = alone(model, request)
        assert request.output_ids == tokens
        found = [logprob for one in progress if one.request is request for logprob in one.logprobs]
        for one, other in zip(found, logprobs, strict=True):
            if request.params.logprobs is not None:
                assert one.keys() == other.keys()
                assert max(abs(one[token] - other[token]) for token in one) <= 1e-9


def play(engine, requests, together=True):
    """Add requests, all at once or one per step, in memory full of NaN; all progress."""
    poison_free(engine)
    progress = []
    for request in requests:
        engine.add(request)
        if not together:
            progress += engine.step()
            poison_free(engine)
    return run_all(engine, progress)


@pytest.mark.parametrize("pair", [(5, 40), (40, 5), (7, 9), (8, 8), (1, 33), (8, 16), (9, 1)], ids=str)
def test_a_token_comes_only_from_a_last_known_token(model, pair):  # fault D10
    requests = [ask(name, length, 4, logprobs=26) for name, length in zip("ab", pair, strict=True)]
    engine = make_engine(model)
    progress = play(engine, requests)
    check_story(engine, requests, progress)
    check_answers(model, requests, progress)
    for request in requests:
        events = engine.log.of(request.id)
        before = [one for one, event in zip(events, events[1:], strict=False) if event.kind is EventKind.TOKENS]
        lengths = range(len(request.prompt_ids), len(request.prompt_ids) + 4)
        assert [(one.kind, one.data["stop"]) for one in before] == [(EventKind.SLICE, length) for length in lengths]


def test_the_answer_does_not_depend_on_the_company(model):  # faults J1, I3
    probes = [ask(f"probe{i}", 3 + 4 * i, 4, logprobs=26, temperature=0.9, seed=i) for i in range(5)]
    others = [ask(i, 1 + i % 9, 2 + i % 5, temperature=0.7 * (i % 2), seed=90 + i) for i in range(45)]
    engine = make_engine(model, batch_tokens=64, num_pages=300, max_running=64, check=False)
    progress = play(engine, [*others[:30], *probes, *others[30:]])
    check_answers(model, probes, progress)
    check_idle(engine)


def test_row_order_changes_nothing(model):  # faults J1, I3
    shapes = [(3, 0.9), (9, 0.0), (6, 0.9)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        requests = [ask(i, shapes[i][0], 4, temperature=shapes[i][1], seed=7 * i, logprobs=3) for i in order]
        engine = make_engine(model)
        check_answers(model, requests, play(engine, requests))


def test_asking_again_after_others_gives_the_same(model):  # standing patterns 4 and 5; fault B6: slots are rewritten
    engine = make_engine(model, num_pages=6, max_running=3)
    first, again = (ask(name, 9, 6, temperature=0.9) for name in ("first", "again"))
    play(engine, [first])
    branches = family("b", 7, 2, 9, temperature=1.0)
    engine.add(branches[0], branches[1:])
    engine.add(ask("c", 11, 13))
    for _ in range(3):
        engine.step()
        poison_free(engine)
    engine.abort("b0")
    play(engine, [])
    play(engine, [again])
    assert first.output_ids == again.output_ids == alone(model, first)[0]
    check_idle(engine)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_who_is_preempted_says_what_it_would_have_said(model, page_size, policy):  # faults B9, D5, I3
    requests = [ask(i, 4 + i, 12, temperature=0.9, seed=i, prompt_logprobs=0, priority=i % 2) for i in range(3)]
    engine = make_engine(model, page_size=page_size, num_pages=-(-20 // page_size), policy=policy)
    check_story(engine, requests, play(engine, requests, together=False))
    assert any(event.kind is EventKind.PREEMPTED for event in engine.log)
    for request in requests:
        assert request.output_ids == alone(model, request)[0]
        assert [*map(len, request.prompt_logprobs[1:])] == [1] * (len(request.prompt_ids) - 1)
    check_idle(engine)


@pytest.mark.parametrize("length", range(1, 10))
def test_branches_of_a_prompt_are_runs_of_their_own(model, length):  # fault B4
    requests = family("a", length, 3, 6, temperature=0.9, logprobs=5)
    engine = make_engine(model)
    poison_free(engine)
    engine.add(requests[0], requests[1:])
    progress = []
    while not requests[2].output_ids:
        progress += engine.step()
    tables = [engine.cache.tables[request.id].pages for request in requests]
    num_full, partial = divmod(length, 4)
    assert len({tuple(pages[:num_full]) for pages in tables}) == 1
    kept = Counter(page for node in engine.cache.tree.nodes() for page in node.pages)
    assert all(engine.cache.allocator.ref_count(page) == 3 + kept[page] for page in tables[0][:num_full])
    assert engine.sizes.num_pages - engine.cache.allocator.num_free == num_full + 3 * (partial > 0)
    poison_free(engine)
    run_all(engine, progress)
    check_story(engine, requests, progress)
    check_answers(model, requests, progress)
    assert len({tuple(request.output_ids) for request in requests}) > 1
    check_idle(engine)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 6, 8, 17])
def test_the_prompt_of_branches_is_computed_once(length, max_tokens):  # fault B4
    branches = family("a", length, 3, max_tokens)
    engine = make_engine()
    engine.add(branches[0], branches[1:])
    check_story(engine, branches, run_all(engine))
    assert sum(run.num_tokens for run in steps(engine.log)) == length + 3 * (max_tokens - 1)
    check_idle(engine)


@pytest.mark.parametrize("num_pages", range(3, 9))
def test_branches_without_room_come_later_and_are_the_same(model, num_pages):  # faults B4, B9
    requests = family("a", 6, 3, 6, temperature=0.9, prompt_logprobs=0)
    engine = make_engine(model, num_pages=num_pages)
    poison_free(engine)
    engine.add(requests[0], requests[1:])
    progress = run_all(engine)
    check_story(engine, requests, progress)
    check_answers(model, requests, progress)
    assert len({str(request.prompt_logprobs) for request in requests}) == 1
    check_idle(engine)
