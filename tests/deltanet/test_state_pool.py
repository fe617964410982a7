"""State slots: written while one holds them, and read only by whoever expects exactly the tokens they have seen."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from minserve.deltanet.state_pool import EMPTY, StateError, StatePool
from minserve.errors import InvalidValue


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_pool_has_a_slot(num_slots):
    with pytest.raises(InvalidValue, match="num_slots.*EngineConfig.num_states"):
        StatePool(num_slots)


def test_slots_are_taken_until_none_is_free():
    pool = StatePool(3)
    slots = [pool.take() for _ in range(4)]
    assert sorted(slots[:3]) == [0, 1, 2] and slots[3] is None
    assert pool.num_free == 0 and sorted(pool.held) == [0, 1, 2]
    pool.release(slots[1])
    assert pool.num_free == 1 and pool.take() == slots[1]
    pool.check()


@pytest.mark.parametrize("seen", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("expected", [0, 1, 7, 8, 9])
def test_a_state_is_read_for_its_own_count_only(seen, expected):  # the stamps that faults A3, A4, A6 lack
    pool = StatePool(2)
    slot = pool.take()
    pool.stamp(slot, seen)
    if seen == expected:
        pool.expect(slot, expected)
        assert pool.held == {slot}
    else:
        with pytest.raises(StateError, match=f"slot {slot} has seen {seen} tokens; its reader expects {expected}"):
            pool.expect(slot, expected)


def test_the_empty_state_has_seen_nothing():
    pool = StatePool(1)
    pool.expect(EMPTY, 0)
    with pytest.raises(StateError, match="has seen 0"):
        pool.expect(EMPTY, 1)
    assert pool.num_free == 1


def test_a_slot_that_changes_hands_has_seen_nothing():
    pool = StatePool(1)
    slot = pool.take()
    pool.stamp(slot, 8)
    pool.release(slot)
    assert pool.take() == slot
    pool.expect(slot, 0)
    with pytest.raises(StateError, match="has seen 0 tokens; its reader expects 8"):
        pool.expect(slot, 8)


@pytest.mark.parametrize("slot", [EMPTY, 1, 2, 7])
@pytest.mark.parametrize("seen", [0, 4])
def test_a_free_slot_can_be_neither_stamped_read_shared_nor_given_back(slot, seen):  # fault B1, of slots
    pool = StatePool(2)
    for taken in (pool.take(), pool.take()):
        pool.stamp(taken, 4)
    pool.release(1)
    for change in (lambda: pool.stamp(slot, seen), lambda: pool.release(slot), lambda: pool.share(slot)):
        with pytest.raises(StateError):
            change()
        assert pool.num_free == 1 and sorted(pool.held) == [0] and pool.ref_count(slot) == 0
        pool.check()
    if slot != EMPTY:
        with pytest.raises(StateError, match="free"):
            pool.expect(slot, seen)


@pytest.mark.parametrize("seen", [0, 5])
def test_a_slot_is_given_back_once(seen):  # fault B1, of slots
    pool = StatePool(2)
    slot = pool.take()
    pool.stamp(slot, seen)
    pool.release(slot)
    with pytest.raises(StateError, match="nobody holds it"):
        pool.release(slot)
    assert pool.num_free == 2 and pool.take() != pool.take()


@pytest.mark.parametrize("num_shares", [1, 2, 5])
def test_a_shared_slot_is_free_when_the_last_reference_is_given_back(num_shares):
    pool = StatePool(2)
    slot = pool.take()
    pool.stamp(slot, 8)
    for number in range(num_shares):
        assert pool.ref_count(slot) == number + 1
        pool.share(slot)
    for number in range(num_shares, -1, -1):
        pool.expect(slot, 8)
        assert (pool.ref_count(slot), pool.num_free) == (number + 1, 1)
        pool.release(slot)
    assert (pool.ref_count(slot), pool.num_free) == (0, 2)
    with pytest.raises(StateError, match="nobody holds it"):
        pool.release(slot)
    pool.check()


@pytest.mark.parametrize("num_tokens", [0, 7, 8, 9])
def test_a_slot_that_another_relies_on_cannot_be_stamped(num_tokens):  # a snapshot never advances: fault A6
    pool = StatePool(2)
    slot = pool.take()
    pool.stamp(slot, 8)
    pool.share(slot)
    with pytest.raises(StateError, match=f"slot {slot} has 2 references"):
        pool.stamp(slot, num_tokens)
    pool.expect(slot, 8)
    pool.release(slot)
    pool.stamp(slot, num_tokens)
    pool.expect(slot, num_tokens)


@pytest.mark.parametrize("references", [{}, {0: 0}, {0: -1}, {1: 1}, {0: 1, 1: 1}], ids=str)
def test_references_to_other_slots_than_those_held_are_found(references):
    pool = StatePool(2)
    assert pool.take() == 0
    pool.check()
    pool._references = references
    with pytest.raises(StateError, match="references"):
        pool.check()


@pytest.mark.parametrize("free", [[2, 2], [0, 1, 2], [0, 2], [1], []], ids=str)
def test_a_pool_that_contradicts_itself_is_found(free):
    pool = StatePool(3)
    for slot in [pool.take() for _ in range(3)]:
        if slot:
            pool.release(slot)
    pool.check()
    pool._free = free
    with pytest.raises(StateError):
        pool.check()


class SlotsModel(RuleBasedStateMachine):
    """Any sequence of operations, against a dict of stamps and one of references; a slot is in the bundle for each."""

    slots = Bundle("slots")

    @initialize(num_slots=st.integers(1, 5))
    def start(self, num_slots):
        self.pool, self.num_slots, self.stamps, self.num_held = StatePool(num_slots), num_slots, {}, {}

    @rule(target=slots)
    def take(self):
        slot = self.pool.take()
        assert (slot is None) == (len(self.stamps) == self.num_slots) and slot not in self.stamps
        if slot is None:
            return multiple()
        self.stamps[slot], self.num_held[slot] = 0, 1
        return slot

    @rule(target=slots, slot=slots)
    def share(self, slot):
        self.pool.share(slot)
        self.num_held[slot] += 1
        return slot

    @rule(slot=slots, num_tokens=st.integers(0, 9))
    def stamp(self, slot, num_tokens):
        if self.num_held[slot] > 1:
            with pytest.raises(StateError):
                self.pool.stamp(slot, num_tokens)
        else:
            self.pool.stamp(slot, num_tokens)
            self.stamps[slot] = num_tokens

    @rule(slot=consumes(slots))
    def release(self, slot):
        self.pool.release(slot)
        self.num_held[slot] -= 1
        if not self.num_held[slot]:
            del self.stamps[slot]

    @rule(slot=st.integers(-1, 5))
    def use_what_nobody_holds(self, slot):
        if slot not in self.stamps:
            for use in (self.pool.release, self.pool.share, lambda slot: self.pool.stamp(slot, 0)):
                with pytest.raises(StateError):
                    use(slot)

    @invariant()
    def adds_up(self):
        self.pool.check()
        assert sorted(self.pool.held) == sorted(self.stamps)
        assert self.pool.num_free == self.num_slots - len(self.stamps)
        assert all(self.pool.ref_count(slot) == num for slot, num in self.num_held.items())
        for slot, seen in self.stamps.items():
            self.pool.expect(slot, seen)


TestSlots = SlotsModel.TestCase
TestSlots.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
