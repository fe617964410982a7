"""The batcher's plans: who runs, in which order, and how much of the budget each gets."""

import pytest
from counted_room import Asked, Play, Room, shown

from minserve.batching.batcher import POLICIES, Batcher, BatcherError, Phase
from minserve.batching.queue_order import MOST_OVERTAKEN
from minserve.errors import InvalidValue


def test_decodes_come_first_then_prompts_in_slices_then_new_requests():
    play = Play(Asked("a", 3), Asked("b", 20))
    assert play.steps(1) == [[("a", 0, 3, "p"), ("b", 0, 5, "p")]]
    play.add(Asked("c", 2))
    assert play.steps(2) == [[("a", 3, 4, "d"), ("b", 5, 12, "p")], [("a", 4, 5, "d"), ("b", 12, 19, "p")]]
    assert [request.id for request in play.batcher.waiting] == ["c"]
    assert play.steps(2) == [
        [("a", 5, 6, "d"), ("b", 19, 20, "p"), ("c", 0, 2, "p")],
        [("a", 6, 7, "d"), ("b", 20, 21, "d"), ("c", 2, 3, "d")],
    ]


@pytest.mark.parametrize("batch_tokens", range(1, 10))
def test_the_budget_is_used_up_and_never_passed(batch_tokens):
    play = Play(*(Asked(number, num, 3) for number, num in enumerate((5, 40, 1, 9, 17))), batch_tokens=batch_tokens)
    while play.batcher.has_work:
        asked = sum(request.num_committed - request.num_computed for request in play.batcher.waiting + play.running)
        used = sum(piece.stop - piece.start for piece in play.step().slices)
        assert used == min(batch_tokens, asked)


def test_more_decoding_rows_than_tokens_take_turns_as_they_leave():
    play = Play(*(Asked(number, 1, 4) for number in range(5)), batch_tokens=2)
    assert play.run_all(13) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize("cached", [0, 3, 7, 8, 9, 16])
def test_a_prompt_is_read_from_where_the_hit_ends(length, cached):  # fault B9: first the match, then the size
    play = Play(Asked("a", length, 1, cached=cached), page_size=4)
    slices = []
    while play.batcher.has_work:
        slices += shown(play.step())
    starts = range(min(cached, length - 1), length, 8)
    assert slices == [("a", start, min(start + 8, length), "p") for start in starts]


@pytest.mark.parametrize("left", [1, 3, 7])
def test_a_hit_longer_than_the_budget_leaves_the_budget_to_run(left):  # fault D13
    play = Play(Asked("a", 8 - left, 1), Asked("b", 40, cached=16), page_size=4)
    assert play.steps(1) == [[("a", 0, 8 - left, "p"), ("b", 16, 16 + left, "p")]]
    assert play.room.pages["b"] == -(-(16 + left) // 4)


@pytest.mark.parametrize("length, cached", [(9, 0), (17, 0), (1, 0), (9, 8), (3, 8), (10, 1)])
def test_a_slice_of_one_token_may_be_a_prompts_last(length, cached):  # fault D15
    new = Asked("new", length, cached=cached)
    play = Play(Asked("old", 2), batch_tokens=9)  # eight, and one for the decoding row
    play.step()
    play.add(new)
    slices = [[piece for piece in play.step().slices if piece.request is new][0] for _ in range(4)]
    reading = [piece for piece in slices if piece.start < length]
    assert reading[-1].stop - reading[-1].start == 1 and reading[-1].stop == length
    assert {piece.phase for piece in reading} == {Phase.PREFILL}
    assert {piece.phase for piece in slices[len(reading) :]} == {Phase.DECODE}


def test_a_request_decodes_once_it_is_said_to_and_not_because_of_its_counts():  # fault D15
    batcher, room, request = Batcher(8, 1), Room(), Asked("a", 9)
    batcher.add(request)
    for stop in (8, 9, 10, 11):
        (piece,) = batcher.plan(room).slices
        assert (piece.stop, piece.phase) == (stop, Phase.DECODE if stop == 11 else Phase.PREFILL)
        request.num_computed, request.num_committed = stop, max(9, stop + 1)
        if stop == 10:
            batcher.starts_decoding(request)


@pytest.mark.parametrize("max_running", [1, 2, 5])
def test_no_more_run_than_may(max_running):
    play = Play(*(Asked(number, 2, 3) for number in range(6)), batch_tokens=64, max_running=max_running)
    play.step()
    assert [request.id for request in play.running] == [*range(max_running)]
    assert not play.batcher.adopt(Asked("fork", 3), Phase.DECODE)
    assert play.run_all(40) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("policy, wanted", [("fcfs", [0, 1, 2, 3, 4]), ("priority", [2, 4, 0, 3, 1])])
def test_who_is_first_in_line(policy, wanted):
    asked = [Asked(number, 2, 1, priority) for number, priority in enumerate((0, -1, 5, 0, 5))]
    play = Play(*asked, max_running=1, policy=policy)
    assert [request.id for request in play.batcher.waiting] == wanted
    assert play.run_all(10) == wanted


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_nobody_overtakes_the_first_that_does_not_fit(policy):
    play = Play(Asked("a", 4, 3), Asked("big", 8, 1), Asked("small", 1, 1), num_pages=10, policy=policy)
    assert [request.id for request in play.step().admitted] == ["a"]
    assert play.run_all(20) == ["a", "big", "small"]


def test_a_big_request_is_not_starved_by_small_ones():
    play = Play(Asked(0, 1, 2), Asked("big", 9, 1), num_pages=10)
    for number in range(1, 30):
        play.add(Asked(number, 1, 2))
        play.step()
    assert [request.id for request in play.done[:2]] == [0, "big"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest_prefix"])
@pytest.mark.parametrize("later", [1, 2, 5])
def test_who_is_told_to_wait_is_overtaken_and_stays_first_in_line(policy, later):
    play = Play(Asked("a", 3), Asked("told", 2, 1, later=later), batch_tokens=16, policy=policy)
    for number in range(later):
        play.add(Asked(number, 2))
        assert [request.id for request in play.step().admitted] == ["a", number][number > 0 :]
        assert [request.id for request in play.batcher.waiting] == ["told"]
    play.add(Asked("last", 2))
    assert [request.id for request in play.step().admitted] == ["told", "last"]


def test_behind_one_who_is_told_to_wait_nobody_overtakes_the_first_that_does_not_fit():
    play = Play(Asked("a", 4, 3), num_pages=10)
    play.step()
    play.add(Asked("told", 1, 1, later=9), Asked("big", 8, 1), Asked("small", 1, 1))
    assert play.step().admitted == [] and [request.later for request in play.batcher.waiting] == [8, 0, 0]
    assert {*play.run_all(20)[:2]} == {"a", "told"}  # when a has left nobody runs, and nobody is told to wait


@pytest.mark.parametrize("max_running", [1, 2, 4])
def test_the_longest_cached_prefix_is_first_and_of_equals_who_came_first(max_running):
    asked = [Asked(number, 40, 1, cached=cached) for number, cached in enumerate((0, 4, 16, 4, 99, 0, 16))]
    play = Play(*asked, batch_tokens=160, max_running=max_running, policy="longest_prefix")
    assert [request.id for request in play.batcher.waiting] == [*range(7)]
    order = []
    while play.batcher.has_work:
        order += [request.id for request in play.step().admitted]
    assert order == [4, 2, 6, 1, 3, 0, 5]


def test_what_is_cached_is_looked_up_before_each_admission():
    asked = [Asked(name, 8, 1, cached=cached) for name, cached in (("first", 2), ("other", 1), ("same", 0))]
    play, (first, other, same) = Play(*asked, max_running=1, policy="longest_prefix"), asked
    assert play.step().admitted == [first]
    same.cached = 7  # the first one has computed it
    assert play.step().admitted == [same] and play.step().admitted == [other]


@pytest.mark.parametrize("max_running", [1, 3])
@pytest.mark.parametrize("num_cold", [1, 4])
def test_who_shares_nothing_is_not_starved_by_those_who_do(max_running, num_cold):
    """Every step as many come in whose prompt is cached as are let in."""
    cold = [Asked(f"cold{number}", 8, 1) for number in range(num_cold)]
    play = Play(*(Asked(("warm", i), 8, 1, cached=7) for i in range(max_running)), batch_tokens=64,
                max_running=max_running, policy="longest_prefix")  # fmt: skip
    play.step()
    play.add(*cold)
    overtaken = dict.fromkeys(cold, 0)
    for number in range(1, 3 * MOST_OVERTAKEN):
        play.add(*(Asked(("warm", number, i), 8, 1, cached=7) for i in range(max_running)))
        admitted = play.step().admitted
        for request in overtaken.keys() & {*play.batcher.waiting}:
            overtaken[request] += len(admitted)
    assert not {*cold} & {*play.batcher.waiting}
    assert all(MOST_OVERTAKEN <= times < MOST_OVERTAKEN + num_cold + max_running for times in overtaken.values())
    assert [request for request in play.done if request in cold] == cold


def test_a_long_prompt_is_read_beside_decoding_rows():
    rows, long = [Asked(number, 1, 60) for number in range(7)], Asked("long", 40, 1)
    play = Play(*rows)
    play.step()
    play.add(long)
    for _ in range(40):  # one token a step is left
        play.step()
    assert play.done == [long]


def test_a_fork_runs_without_having_queued():
    play, fork = Play(Asked("a", 3), Asked("long", 40)), Asked("fork", 4, num_computed=3)
    play.step()
    assert play.batcher.adopt(fork, Phase.DECODE)
    play.room.pages["fork"] = 3
    assert play.steps(1) == [[("a", 3, 4, "d"), ("fork", 3, 4, "d"), ("long", 5, 11, "p")]]


def places():
    """A play with a request in every place where one can be: running, reading, waiting, and put back."""
    play = Play(Asked("decode", 2), Asked("back", 1), batch_tokens=6, num_pages=8)
    while not play.put_back:
        play.step()
    play.add(Asked("waiting", 1))
    return play


@pytest.mark.parametrize("name", ["decode", "back", "waiting", "unknown"])
def test_a_request_can_leave_from_anywhere_and_come_again(name):
    play = places()
    asked = {request.id: request for request in play.batcher.waiting + play.running}
    assert {*asked} == {"decode", "back", "waiting"}
    for _ in range(2):  # the second time it is nowhere
        play.end(asked.get(name, Asked(name, 1)))
        play.batcher.check()
        assert name not in play.batcher.running and name not in [request.id for request in play.batcher.waiting]
    for request in [*play.batcher.waiting, *play.running]:
        request.num_out = 2
    play.add(Asked(name, 1, 1))
    assert {*play.run_all(30)} == {*asked, name}


@pytest.mark.parametrize("name", ["decode", "back", "waiting"])
def test_an_id_is_in_here_once(name):  # fault I8: duplicate request id
    play = places()
    waiting, running = play.batcher.waiting, play.running
    with pytest.raises(InvalidValue, match=f"request.id is '{name}'"):
        play.add(Asked(name, 1))
    assert (play.batcher.waiting, play.running) == (waiting, running)
    play.batcher.check()


def test_bad_limits_are_named():
    for limits, field in (((0, 1), "batch_tokens"), ((1, 0), "max_running"), ((-1, 1), "batch_tokens")):
        with pytest.raises(InvalidValue, match=f"{field} is.*EngineConfig.{field}"):
            Batcher(*limits)
    with pytest.raises(InvalidValue, match="policy is 'random'"):
        Batcher(1, 1, "random")


BREAK = {
    "lost": lambda batcher: batcher.running.pop("decode"),
    "in both queues": lambda batcher: batcher.running.update(back=(batcher.waiting[0], Phase.PREFILL)),
    "out of order": lambda batcher: batcher._queue.reverse(),
    "too many": lambda batcher: setattr(batcher, "max_running", 0),
    "unknown": lambda batcher: batcher._arrival.pop("back"),
}


@pytest.mark.parametrize("fault", BREAK)
def test_queues_that_contradict_one_another_are_found(fault):
    batcher = places().batcher
    batcher.check()
    BREAK[fault](batcher)
    with pytest.raises(BatcherError):
        batcher.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_looked_up_where_nobody_can_be_let_in(policy):
    play = Play(*(Asked(name, 4) for name in "abcdef"), max_running=2, policy=policy)
    play.step()
    lookups = []
    play.room.cached_tokens = lookups.append
    play.step()
    assert len(play.running) == 2 and not lookups
