"""Chats: every turn begins with the turns before it, every session with the system prompt."""

import numpy as np
import pytest

from minserve.errors import InvalidValue
from minserve.model.tokenizer import ByteTokenizer, chat_prompt
from minserve.tuning.sessions import ChatShape, chat_sessions
from minserve.tuning.workload import standard_library_text

TEXT = standard_library_text(100_000)


def by_session(workload) -> dict[int, list]:
    """The arrivals of each session in order of turns."""
    sessions: dict[int, list] = {}
    for arrival in workload:
        sessions.setdefault(arrival.session, []).append(arrival)
    return sessions


def test_turns_grow_out_of_one_another():
    sessions = by_session(chat_sessions(40, 2.0, TEXT, np.random.default_rng(0)))
    assert len(sessions) == 40
    assert max(map(len, sessions.values())) >= 4
    for turns in sessions.values():
        assert [arrival.turn for arrival in turns] == list(range(len(turns)))
        for earlier, later in zip(turns, turns[1:], strict=False):
            assert earlier.time_s < later.time_s
            assert later.prompt[: earlier.prompt_tokens] == earlier.prompt
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens


def test_sessions_share_the_system_prompt_alone():
    shape = ChatShape(system="Be brief.")
    workload = chat_sessions(10, 2.0, TEXT, np.random.default_rng(1), shape)
    firsts = [turns[0].prompt for turns in by_session(workload).values()]
    opening = tuple(chat_prompt([{"role": "system", "content": "Be brief."}]))[: -len("xassistant\n")]
    assert {prompt[: len(opening)] for prompt in firsts} == {opening}
    assert len({prompt[: len(opening) + 40] for prompt in firsts}) == 10


def test_prompts_are_chat_text_within_the_limit():
    shape = ChatShape(mean_turns=20, max_prompt_tokens=1500)
    workload = chat_sessions(5, 1.0, TEXT, np.random.default_rng(2), shape)
    assert max(arrival.prompt_tokens for arrival in workload) <= 1500
    spelled = ByteTokenizer().decode(workload.arrivals[0].prompt, skip_special=False)
    assert spelled.startswith("<|im_start|>system\n") and spelled.endswith("<|im_start|>assistant\n")


def test_the_mean_number_of_turns_is_the_one_asked_for():
    shape = ChatShape(mean_turns=4, max_prompt_tokens=10**6)
    workload = chat_sessions(300, 1.0, TEXT, np.random.default_rng(3), shape)
    assert len(workload) / 300 == pytest.approx(4, rel=0.15)


def test_the_same_seed_gives_the_same_chats():
    first, again = (chat_sessions(4, 1.0, TEXT, np.random.default_rng(5)) for _ in range(2))
    assert first == again


def test_bad_values_are_named():
    with pytest.raises(InvalidValue, match="text"):
        chat_sessions(1, 1.0, "", np.random.default_rng(0))
    with pytest.raises(InvalidValue, match="mean_turns"):
        ChatShape(mean_turns=0.5)
    with pytest.raises(InvalidValue, match="think_s"):
        ChatShape(think_s=0)
