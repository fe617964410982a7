"""Abort at every moment of a request's life: no token after it, one end, nothing kept, and nobody else notices."""

import pytest
from small_engine import STEP_S, Scripted, ask, check_idle, check_story, family, make_engine, run_all, scripted_tokens

from minserve.clock import VirtualClock
from minserve.events import EventKind
from minserve.request import FinishReason

MOMENTS = pytest.mark.parametrize("moment", ["before a step", "while the model runs", "while time passes"])


def beside_another():
    return {}, [[ask("b", 5, 4)], [ask("v", 20, 3)]]


def waiting_for_a_place():
    return {"max_running": 1}, [[ask("b", 5, 2)], [ask("v", 9, 3)], [ask("c", 3, 1)]]


def put_back():
    return {"num_pages": 5, "page_size": 2}, [[ask("b", 2, 7)], [ask("v", 1, 7)], [ask("c", 1, 1)]]


def waiting_for_a_prefix():
    return {"batch_tokens": 30}, [[ask("b", 20, 3)], [ask("v", 20, 3)], [ask("w", 20, 2)], [ask("c", 7, 2)]]


def three_branches():
    return {}, [family("v", 12, 3, 3), [ask("b", 5, 4)]]


def branches_of_one_token():
    return {}, [family("v", 8, 3, 1), [ask("b", 9, 1)]]


def branches_without_room():
    return {"num_pages": 4}, [family("v", 6, 3, 5), [ask("b", 5, 1)]]


def scored_branches():
    return {}, [family("v", 12, 2, 0, prompt_logprobs=0), [ask("b", 5, 4)]]


SCENES = [
    *[(scene, ("v",)) for scene in (beside_another, waiting_for_a_place, put_back)],
    *[(waiting_for_a_prefix, victims) for victims in (("v",), ("b",), ("b", "v"))],
    *[(three_branches, victims) for victims in (("v0",), ("v1",), ("v2",), ("v1", "v2"), ("v0", "v1", "v2"))],
    *[(branches_of_one_token, victims) for victims in (("v0",), ("v1",), ("v1", "v2"))],
    *[(branches_without_room, victims) for victims in (("v0",), ("v2",), ("v0", "v2"))],
    *[(scored_branches, victims) for victims in (("v0",), ("v1",))],
]
scenes = pytest.mark.parametrize("scene, victims", SCENES, ids=lambda x: getattr(x, "__name__", None) or "+".join(x))


class Played:
    """A scene in which victims are aborted at one moment of one step.

    Attributes: `had` the output tokens that each victim had then, `was_there` what `abort` said of each.
    """

    def __init__(self, scene, victims, moment, at, fails=False):
        config, families = scene()
        self.victims, self.moment, self.at, self.fails = victims, moment, at, fails
        self.requests = [request for members in families for request in members]
        self.had, self.was_there, self.num_costs = None, {}, 0
        self.engine = make_engine(Scripted(during=self.during), cost=self.cost, **config)
        for first, *riders in families:
            self.engine.add(first, riders)

    def abort(self, moment, number):
        """Abort the victims if this is the moment, and only once."""
        if (moment, number) == (self.moment, self.at) and self.had is None:
            self.had = {request.id: len(request.output_ids) for request in self.requests if request.id in self.victims}
            self.was_there = {name: self.engine.abort(name) for name in self.victims}
            return True
        return False

    def during(self, number, step):
        if self.abort("while the model runs", number) and self.fails:
            raise RuntimeError("the model fails")

    def cost(self, rows):
        self.num_costs += 1
        self.abort("while time passes", self.num_costs - 1)
        return STEP_S

    def run(self):
        """Play to the end. Fails where an aborted request still has a place after the step; all progress."""
        progress, number = [], 0
        while self.engine.has_work:
            self.abort("before a step", number)
            try:
                progress += self.engine.step()
            except RuntimeError:
                assert self.fails
            number += 1
            if self.had is not None:
                waiting = [request.id for request in self.engine.batcher.waiting]
                places = {*waiting, *self.engine.batcher.running, *self.engine.cache.tables, *self.engine.cache.slot_of}
                assert not places & {*self.victims}
        return progress + self.engine.step()

    def check(self, progress):
        """Fail unless the victims got nothing more, and everybody else got all of theirs."""
        check_story(self.engine, self.requests, progress)
        check_idle(self.engine)
        for request in self.requests:
            gone = self.was_there.get(request.id, False)
            num = self.had[request.id] if gone else request.params.max_tokens
            assert request.output_ids == scripted_tokens(request)[:num]
            assert request.finish_reason is (FinishReason.ABORT if gone else FinishReason.LENGTH)
            assert not self.engine.abort(request.id)


@scenes
@MOMENTS
def test_an_abort_at_any_moment_is_an_end(scene, victims, moment):  # faults D8, I10
    num_aborted = 0
    for at in range(60):
        played = Played(scene, victims, moment, at)
        played.check(played.run())
        if played.had is None:  # the scene was over before
            break
        num_aborted += any(played.was_there.values())
    assert at < 59 and num_aborted >= 1


@scenes
def test_an_abort_in_a_step_that_fails_is_an_end(scene, victims):  # fault D8
    for at in range(60):
        played = Played(scene, victims, "while the model runs", at, fails=True)
        played.check(played.run())
        if played.had is None:
            break
    assert 1 <= at < 59


def test_an_abort_before_a_step_that_fails_is_reported_by_the_next():  # fault D8
    failing = Scripted(during=lambda number, step: 1 / 0 if number in (1, 2) else None)
    engine, requests = make_engine(failing), [ask("v", 5), ask("b", 5), ask("w", 5)]
    for request in requests:
        engine.add(request)
    progress = engine.step()
    for name in ("v", "w"):
        engine.abort(name)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    check_story(engine, requests, run_all(engine, progress))
    check_idle(engine)


def test_the_last_abort_is_work_until_it_is_reported():
    engine, request = make_engine(), ask("v", 5)
    engine.add(request)
    progress = engine.step()
    assert engine.abort("v") and engine.has_work
    check_story(engine, [request], progress + engine.step())
    assert not engine.has_work
    check_idle(engine)


def test_late_and_foreign_messages_change_nothing():  # fault D8
    engine, request = make_engine(), ask("a", 5, 2)
    engine.add(request)
    assert not engine.abort("unknown") and not engine.abort(None)
    progress = run_all(engine)
    num_events = len(engine.log)
    assert not engine.abort("a") and len(engine.log) == num_events and engine.step() == []
    check_story(engine, [request], progress)


def test_an_old_abort_does_not_reach_a_new_request_of_that_name():  # fault D8
    asked = [ask("v", 12, 3), ask("r", 12, 3), ask("r", 3, 2)]
    engine = make_engine(Scripted())
    engine.add(asked[0], [asked[1]])
    progress = engine.step()
    engine.abort("r")
    progress += engine.step()
    engine.add(asked[2])  # the rider is gone; this is another one, with its name
    progress = run_all(engine, progress)
    assert [request.output_ids for request in asked] == [scripted_tokens(asked[0]), [], scripted_tokens(asked[2])]
    assert [one.finish_reason for one in progress if one.request is asked[2] and one.finish_reason] == ["length"]
    check_idle(engine)


@pytest.mark.parametrize("num", [2, 3])
def test_a_name_is_free_again_while_the_others_of_its_family_read(num):  # fault D8
    branches = family("v", 20, num, 3)
    engine = make_engine(Scripted())
    engine.add(branches[0], branches[1:])
    engine.step()
    engine.abort("v1")
    again = ask("v1", 4, 2)
    engine.add(again)
    run_all(engine)
    assert again.output_ids == scripted_tokens(again) and branches[1].output_ids == []
    assert all(one.output_ids == scripted_tokens(one) for one in branches if one is not branches[1])
    check_idle(engine)


def test_a_text_that_was_held_back_comes_with_the_abort():
    engine, request = make_engine(), ask("a", 3, 5, stop="aab")  # without a model every token is an a
    engine.add(request)
    pieces = [one.text for _ in range(3) for one in engine.step()]
    assert pieces == ["", "", "a"]
    engine.abort("a")
    assert [(one.text, one.finish_reason) for one in engine.step()] == [("aa", FinishReason.ABORT)]
    assert [event.kind for event in engine.log][-1] is EventKind.FINISHED


def test_the_scenes_are_what_they_are_called():
    kinds = {}
    for scene, _ in SCENES:
        played = Played(scene, (), "never", 0)
        progress = played.run()
        played.check(progress)
        kinds[scene] = [(event.kind, event.request_id) for event in played.engine.log]
    assert (EventKind.PREEMPTED, "v") in kinds[put_back]
    assert kinds[waiting_for_a_prefix].index((EventKind.ADMITTED, "v")) > kinds[waiting_for_a_prefix].index(
        (EventKind.ADMITTED, "c")
    )
    late = [name for kind, name in kinds[branches_without_room] if kind is EventKind.SLICE and name != "v0"]
    assert {"v1", "v2"} & {*late}  # at least one reads the prompt by itself
    assert kinds[waiting_for_a_place].index((EventKind.ADMITTED, "v")) > kinds[waiting_for_a_place].index(
        (EventKind.FINISHED, "b")
    )


def test_aborts_in_one_step_are_ends_in_their_order():
    """A set would have an order of its own, and for names another one in every process."""
    order = [5, 8, 1, 6]
    abort_all = Scripted(during=lambda number, step: [engine.abort(name) for name in order] if number == 1 else None)
    engine = make_engine(abort_all, max_running=1)
    for number in range(9):
        engine.add(ask(number, 3, 2))
    run_all(engine)
    assert [event.request_id for event in engine.log if event.data.get("reason") == "abort"] == order


class Aborting(VirtualClock):
    """A clock that has a client leave at its n-th look after the model ran, in the middle of the commit."""

    engine, names, looks = None, (), None

    def now(self):
        if self.looks is not None:
            self.looks -= 1
            if self.looks == 0:
                for name in self.names:
                    self.engine.abort(name)
        return super().now()


@pytest.mark.parametrize("looks", [1, 2, 3, 4])
@pytest.mark.parametrize("names", [("v0",), ("v1",), ("v2",), ("v0", "v1", "v2")])
def test_who_leaves_during_the_commit_gets_this_steps_token(looks, names):  # fault D8
    engine, requests = make_engine(), family("v", 4, 3)
    clock = engine.log.clock = Aborting()
    clock.engine, clock.names = engine, names
    engine.add(requests[0], requests[1:])
    engine._cost = lambda rows: setattr(clock, "looks", looks) or STEP_S
    progress = engine.step()
    engine._cost = lambda rows: STEP_S
    clock.looks = None
    assert all(len(request.output_ids) == 1 for request in requests)
    check_story(engine, requests, run_all(engine, progress))
    check_idle(engine)
