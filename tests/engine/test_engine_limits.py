"""What is too large is refused before it waits, what is just small enough is served, and no page is taken beyond."""

import pytest
from small_engine import Scripted, alone, ask, check_idle, check_story, family, make_engine, run_all

from minserve.engine import EngineStuck
from minserve.errors import InvalidValue, PromptTooLong
from minserve.paging.page_table import PageAllocator
from minserve.parts import Parts
from minserve.request import FinishReason, SamplingParams

POOLS = [(8, 4), (7, 1), (3, 5), (1, 4), (1, 2), (2, 3)]
pools = pytest.mark.parametrize("num_pages, page_size", POOLS, ids=str)


def num_computed(prompt, max_tokens):
    """The tokens that are computed for a request, and so need a place: all but its last one."""
    return prompt + max(0, max_tokens - 1)


def sizes(usable):
    """Prompts and output limits around what so many tokens of cache can hold."""
    return [
        (prompt, max_tokens)
        for prompt in sorted({1, 2, usable // 2, usable - 2, usable - 1, usable, usable + 1, usable + 5})
        for max_tokens in {0, 1, 2, *range(usable - prompt, usable - prompt + 4), usable}
        if prompt >= 1 and max_tokens >= 0 and prompt + max_tokens <= 64  # the model's context
    ]


@pools
def test_what_never_fits_is_refused_and_what_fits_is_served(num_pages, page_size):  # faults D1, D9
    usable = num_pages * page_size
    for prompt, max_tokens in sizes(usable):
        engine = make_engine(Scripted(), num_pages=num_pages, page_size=page_size)
        request = ask("a", prompt, max_tokens, prompt_logprobs=None if max_tokens else 0)
        if num_computed(prompt, max_tokens) > usable:
            with pytest.raises(PromptTooLong, match=f"at most {num_pages} pages.*EngineConfig.num_pages"):
                engine.add(request)
            assert not engine.has_work and len(engine.log) == 0 and engine.step() == []
        else:
            engine.add(request)
            check_story(engine, [request], run_all(engine))
            assert len(request.output_ids) == max_tokens and request.finish_reason is FinishReason.LENGTH
        following = ask("b", 1, 1)
        engine.add(following)
        run_all(engine)
        assert following.finish_reason is FinishReason.LENGTH
        check_idle(engine)


@pools
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_of_the_whole_pool_is_served_among_others(num_pages, page_size, policy):  # fault D1
    usable = num_pages * page_size
    engine = make_engine(Scripted(), num_pages=num_pages, page_size=page_size, policy=policy)
    requests = [
        ask("small", 1, 1), ask("scored", usable, 0, prompt_logprobs=0), ask("one", usable, 1, priority=1),
        ask("many", 1, usable), ask("last", 1, 1, priority=-1),
    ]  # fmt: skip
    for request in requests:
        engine.add(request)
    check_story(engine, requests, run_all(engine))
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
    check_idle(engine)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_nobody_of_a_family_comes_in_when_one_is_refused(num):  # fault D1
    engine = make_engine(num_pages=2)
    small, large = family("a", 4, num, 5), family("b", 4, num, 6)
    with pytest.raises(PromptTooLong, match="2 pages"):
        engine.add(large[0], large[1:])
    with pytest.raises(PromptTooLong, match="2 pages"):
        engine.add(small[0], [*small[1:], large[-1]])
    assert not engine.has_work and len(engine.log) == 0
    engine.add(small[0], small[1:])
    check_story(engine, small, run_all(engine))
    check_idle(engine)


@pytest.mark.parametrize("prompt, max_tokens", [(19, 1), (20, 0), (18, 2), (1, 19), (20, 1), (19, 2), (21, 0), (1, 20)])
@pytest.mark.parametrize("scored", [False, True])
def test_prompts_at_the_limit_of_the_context(prompt, max_tokens, scored):  # fault D9
    engine = make_engine(Scripted(), max_context=20)
    if not max_tokens and not scored:
        with pytest.raises(InvalidValue, match="max_tokens is 0"):
            ask("a", prompt, max_tokens)
        return
    request = ask("a", prompt, max_tokens, prompt_logprobs=1 if scored else None)
    if prompt + max_tokens > 20:
        with pytest.raises(PromptTooLong, match="at most 20 tokens together.*max_context"):
            engine.add(request)
    else:
        engine.add(request)
        check_story(engine, [request], run_all(engine))
        assert len(request.output_ids) == max_tokens
        assert (request.prompt_logprobs is not None) == scored
    check_idle(engine)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 17])
def test_no_token_and_one_token_beside_others(model, length, num, max_tokens):  # fault D9
    scored = family("scored", length, num, max_tokens, prompt_logprobs=2)
    plain = [ask("plain", 9, 5)]
    engine = make_engine(model)
    engine.add(scored[0], scored[1:])
    engine.add(plain[0])
    check_story(engine, scored + plain, run_all(engine))
    tokens, _ = alone(model, ask("x", length, 1))
    for request in scored:
        assert request.output_ids == tokens[:max_tokens] and request.finish_reason is FinishReason.LENGTH
        assert len(request.prompt_logprobs) == length and request.prompt_logprobs[0] is None
        for token, scores in zip(request.prompt_ids[1:], request.prompt_logprobs[1:], strict=True):
            assert token in scores and len(scores) in (2, 3) and all(score <= 0 for score in scores.values())
    assert plain[0].output_ids == alone(model, plain[0])[0]
    check_idle(engine)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num", [1, 2])
def test_no_page_is_taken_past_the_last_token(page_size, num):  # fault B7
    for prompt in range(1, 10):
        requests = family("a", prompt, num, 10 - prompt)
        engine = make_engine(page_size=page_size, num_pages=20, max_context=10)
        engine.add(requests[0], requests[1:])
        most = 0
        while engine.has_work:
            engine.step()
            most = max([most, *(len(table.pages) for table in engine.cache.tables.values())])
        assert most <= -(-10 // page_size) and {request.finish_reason for request in requests} == {"length"}
        assert max(len(request.tokens) for request in requests) == 10
        check_idle(engine)


class Stingy(PageAllocator):
    """An allocator that keeps its last page to itself, against its word."""

    def take(self, num):
        return super().take(num) if num == 0 or self.num_free - num >= 1 else None


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("page_size", [2, 3, 4])
def test_a_request_alone_without_a_page_ends_and_the_engine_lives(page_size, others):  # fault D3
    engine = make_engine(Scripted(), Parts(page_allocator=Stingy), num_pages=4, page_size=page_size)
    requests = [ask("grows", page_size, 3 * page_size), *(ask(i, page_size, 1) for i in range(others))]
    for request in requests:
        engine.add(request)
    progress = run_all(engine)
    check_story(engine, requests, progress)
    (error,) = [one.error for one in progress if one.error]
    assert "4 pages" in error and "EngineConfig.num_pages" in error
    assert requests[0].finish_reason is FinishReason.ERROR and len(requests[0].output_ids) == 2 * page_size + 1
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests[1:])
    check_idle(engine)


def test_a_plan_without_a_slice_is_an_error_and_no_endless_wait():  # fault D1
    class Full(PageAllocator):
        """Says that all pages are in use."""

        num_free = 0

    engine = make_engine(None, Parts(page_allocator=Full), check=False)
    engine.add(ask("a", 3))
    with pytest.raises(EngineStuck, match="1 requests are unfinished"):
        engine.step()


def test_nobody_can_ask_for_no_token_and_no_score():  # fault D9
    with pytest.raises(InvalidValue, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)
