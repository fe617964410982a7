"""Shared beginnings in the engine: who waits for whom, what is found again, and that a full pool stops nobody."""

import pytest
from small_engine import (
    ATTENTION_ONLY,
    CONFIG,
    Scripted,
    alone,
    ask,
    check_idle,
    check_story,
    family,
    make_engine,
    poison_free,
    run_all,
    scripted_tokens,
    small_model,
)

from minserve.events import EventKind
from minserve.metrics import steps
from minserve.request import FinishReason, Status

MODELS = {"hybrid": CONFIG, "attention only": ATTENTION_ONLY}
PROMPT = [*range(20)]
kinds = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture(scope="module", params=MODELS)
def served(request):
    """A small model of either kind, and its engine without a request."""
    config = MODELS[request.param]
    model = small_model(config)
    return model, lambda **knobs: make_engine(model, model_config=config, **knobs)


def cached(engine, name):
    """How many tokens a request found, each time it was let in."""
    return [event.data["cached_tokens"] for event in engine.log.of(name) if event.kind is EventKind.ADMITTED]


def num_run(engine):
    """Tokens computed so far."""
    return sum(run.num_tokens for run in steps(engine.log))


def serve(engine, *requests):
    """Serve requests, in memory full of NaN; all progress."""
    for request in requests:
        engine.add(request)
    if engine.memory is not None:
        poison_free(engine)
    return run_all(engine)


@kinds
@pytest.mark.parametrize("num_others", [1, 3])
def test_one_computes_what_all_begin_with(kind, num_others):  # fault C9
    """Who comes at the same time waits for the first, and somebody else overtakes them."""
    engine = make_engine(Scripted(), model_config=MODELS[kind], batch_tokens=30)
    same = [ask(name, PROMPT, 2) for name in range(1 + num_others)]
    other = ask("other", [23, 24, 5], 9)
    for request in (*same, other):
        engine.add(request)
    progress = engine.step()
    assert list(engine.batcher.running) == [0, "other"] and engine.batcher.waiting == same[1:]
    run_all(engine, progress)
    check_story(engine, [*same, other], progress)
    assert all(request.output_ids == scripted_tokens(request) for request in (*same, other))
    for request in same[1:]:
        assert cached(engine, request.id)[0] >= 16  # the last page boundary that leaves one token over
    assert num_run(engine) <= (20 + 1) + num_others * (4 + 1) + (3 + 8)
    check_idle(engine)


@kinds
@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_who_waits_goes_on_when_the_one_awaited_is_aborted(kind, num_steps, fails):  # fault C9
    """What that one had computed until then is there; what it was just computing is not."""

    def leave(number, step):
        if number == num_steps:
            engine.abort("first")
            if fails:
                raise ZeroDivisionError

    engine = make_engine(Scripted(during=leave), model_config=MODELS[kind], batch_tokens=5)
    first, second, third = requests = [ask(name, PROMPT, 2) for name in ("first", "second", "third")]
    for request in requests:
        engine.add(request)
    progress, num_computed = [], 0
    while first.status is not Status.FINISHED:
        num_computed = first.num_computed
        try:
            progress += engine.step()
        except ZeroDivisionError:
            assert fails
        assert engine.batcher.waiting == [second, third]
    run_all(engine, progress)
    check_story(engine, requests, progress)
    assert num_computed == 5 * num_steps
    assert cached(engine, "second") == [num_computed]  # the state of who leaves is kept
    assert second.output_ids == third.output_ids == scripted_tokens(second) and first.output_ids == []
    check_idle(engine)


@kinds
def test_new_weights_find_nothing_of_before(kind):
    engine = make_engine(Scripted(), model_config=MODELS[kind])
    for name in ("old", "old again"):
        serve(engine, ask(name, PROMPT, 2))
    engine.weights_changed()
    check_idle(engine)
    assert engine.cache.tree.num_pages == 0 and engine.cache.allocator.num_free == engine.sizes.num_pages
    for name in ("new", "new again"):
        serve(engine, ask(name, PROMPT, 2))
    assert cached(engine, "old") == cached(engine, "new") == [0]
    assert cached(engine, "old again") == cached(engine, "new again") >= [16]
    check_idle(engine)


@kinds
@pytest.mark.parametrize("num_steps", range(1, 6))
def test_who_runs_when_the_weights_change_leaves_nothing_to_others(kind, num_steps):
    """It goes on, and its branches with it; who waited for it waits no more."""
    engine = make_engine(Scripted(), model_config=MODELS[kind], snapshot_every=8)
    old, waits, after = family("old", PROMPT, 2, 4), ask("waits", PROMPT, 2), ask("after", PROMPT, 2)
    engine.add(old[0], old[1:])
    engine.add(waits)
    progress = [one for _ in range(num_steps) for one in engine.step()]
    had_waited = waits.status is Status.WAITING
    engine.weights_changed()
    engine.check()
    run_all(engine, progress)
    check_story(engine, [*old, waits], progress)
    assert cached(engine, "waits") == [0] or not had_waited
    serve(engine, after)
    assert (cached(engine, "after") > [0]) == had_waited
    assert all(one.output_ids == scripted_tokens(one) for one in (*old, waits, after))
    check_idle(engine)


@kinds
def test_only_the_same_salt_shares(kind):  # fault C7
    engine = make_engine(Scripted(), model_config=MODELS[kind], batch_tokens=64)
    salts = ["a", "b", None, "a", "b", None]
    requests = [ask(number, PROMPT, 2, cache_salt=salt) for number, salt in enumerate(salts)]
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.batcher.running.keys() == {0, 1, 2} and engine.batcher.waiting == requests[3:]
    run_all(engine)
    found = [cached(engine, number)[0] for number in range(6)]
    assert found[:3] == [0, 0, 0] and min(found[3:]) >= 16
    check_idle(engine)


def test_who_can_reuse_most_is_let_in_first():
    engine = make_engine(max_running=1, policy="longest_prefix")
    serve(engine, ask("warm", PROMPT, 1))
    prompts = {"cold": [9] * 12, "short": [0, 1, 2, 3, 4, 9], "long": [*PROMPT, 7]}
    serve(engine, *(ask(name, prompt, 1) for name, prompt in prompts.items()))
    admitted = [event.request_id for event in engine.log if event.kind is EventKind.ADMITTED]
    assert admitted == ["warm", "long", "cold", "short"]  # of short, there are pages, and no state
    assert cached(engine, "long") == [20] and cached(engine, "cold") == cached(engine, "short") == [0]


@pytest.mark.parametrize("common", range(1, 11))
@pytest.mark.parametrize("snapshot_every", [1, 3, 4, 256])
def test_what_is_reused_changes_no_answer(served, common, snapshot_every):  # faults A1, A3: REF
    model, engine_of = served
    engine = engine_of(snapshot_every=snapshot_every)
    first, second = ask("a", PROMPT[:10], 6), ask("b", [*PROMPT[:common], *range(24, 18, -1)], 4, logprobs=26)
    third = ask("c", PROMPT[:10], 4, logprobs=26)
    serve(engine, first)
    for request in (second, third):
        engine.add(request)
        poison_free(engine)
        progress = run_all(engine)
        tokens, logprobs = alone(model, request)
        found = [logprob for one in progress if one.request is request for logprob in one.logprobs]
        assert request.output_ids == tokens
        assert max(abs(x[t] - y[t]) for x, y in zip(found, logprobs, strict=True) for t in x) <= 1e-9
    (num_cached,) = cached(engine, "b")
    if engine.cache.snapshots is None:
        assert num_cached == common and cached(engine, "c") == [9]
    else:
        assert num_cached == max((n for n in kept_counts(snapshot_every) if n <= common), default=0)
    check_idle(engine)


def kept_counts(every):
    """Where the states of a 10-token prompt with 6 tokens of output are kept, of those up to its prompt's length."""
    return {8, *range(every, 11, every)}


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize("scored", [False, True])
@kinds
def test_a_request_of_the_whole_pool_is_served_after_others(kind, page_size, scored):  # fault D1
    """A path that leaves another in the middle of a page holds that page twice; alone, nobody needs to hold it."""
    for common in range(1, 9):
        for batch_tokens in (2, 3, 8):
            engine = make_engine(Scripted(), model_config=MODELS[kind], page_size=page_size, snapshot_every=1,
                                 num_pages=-(-12 // page_size), batch_tokens=batch_tokens)  # fmt: skip
            before = ask("before", PROMPT[:common], 1)
            prompt = [*PROMPT[:common], *[24] * (8 - common)]
            whole = ask("whole", prompt, 5, prompt_logprobs=0 if scored else None)
            serve(engine, before)
            serve(engine, whole)
            assert whole.finish_reason is FinishReason.LENGTH and whole.output_ids == scripted_tokens(whole)
            check_idle(engine)


@pytest.mark.parametrize("page_size", [2, 3, 4, 5])
def test_a_branch_of_the_whole_pool_is_served_when_the_first_has_left(page_size):  # fault D1
    """The branch holds the path to where it parted, the first one's last page with it, until it is short of pages."""
    for length in range(1, 9):
        num_pages = -(-12 // page_size)
        engine = make_engine(Scripted(), page_size=page_size, num_pages=num_pages)
        branches = family("f", PROMPT[:length], 2, 12 - length + 1)
        engine.add(branches[0], branches[1:])
        progress = []
        while not branches[1].output_ids:
            progress += engine.step()
            if branches[0].output_ids:
                engine.abort("f0")
        run_all(engine, progress)
        assert branches[1].finish_reason is FinishReason.LENGTH
        assert branches[1].output_ids == scripted_tokens(branches[1])
        check_idle(engine)
