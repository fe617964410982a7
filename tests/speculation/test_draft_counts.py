"""What became of drafts: counted by hand, and against outputs that are known."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest

from minserve.clock import VirtualClock
from minserve.draft_counts import DraftCounts, count_drafts, draft_counts
from minserve.engine_config import EngineConfig
from minserve.events import EventKind, EventLog
from minserve.llm import LLM
from minserve.request import SamplingParams
from minserve.speculation.depth import expected_tokens
from minserve.speculation.drafters import NGramDrafter

K = EventKind
# (drafts, kept) -> rows, as the module's docstring draws it
ROWS = {(3, 0): 1, (3, 1): 1, (3, 3): 4, (1, 1): 2, (0, 0): 2}


def row(log, name, phase="decode", drafts=None, count=1):
    """Write down one request's part in a step."""
    log.record(K.SLICE, name, start=0, stop=1, phase=phase, step=0)
    if drafts:
        log.record(K.DRAFTS, name, drafted=drafts[0], accepted=drafts[1])
    if count:
        log.record(K.TOKENS, name, count=count)


def test_each_depth_is_counted_with_those_who_came_that_far():
    counts = count_drafts(ROWS, num_tokens=25)
    assert counts == DraftCounts(10, 25, drafted=(8, 6, 6), reached=(8, 5, 4), accepted=(7, 4, 4))
    assert (counts.num_drafted, counts.num_accepted, counts.tokens_per_step) == (20, 15, 2.5)
    assert counts.acceptance == [7 / 8, 4 / 6, 4 / 6]
    assert counts.conditional_acceptance == [7 / 8, 4 / 5, 4 / 4]
    assert counts.rate == 15 / 17
    assert json.loads(json.dumps(asdict(counts)))["reached"] == [8, 5, 4]


def test_where_nobody_kept_the_first_nobody_knows_the_second():
    counts = count_drafts({(2, 0): 3}, num_tokens=3)
    assert counts.acceptance == [0, 0] and counts.conditional_acceptance == [0, None] and counts.rate == 0
    assert counts.iid_tokens_per_step == counts.tokens_per_step == 1


def test_without_drafts_or_rows():
    plain = count_drafts({(0, 0): 4}, num_tokens=4)
    assert plain.acceptance == plain.conditional_acceptance == [] and plain.rate is None
    assert plain.tokens_per_step == plain.iid_tokens_per_step == plain.tokens_at(1.0) == 1
    assert plain.rate_for(1.0) == 0 and plain.rate_for(1.01) is None
    nothing = draft_counts(EventLog(VirtualClock()))
    assert nothing == DraftCounts(0, 0, (), (), ()) and nothing.tokens_per_step == nothing.tokens_at(0.5) == 0


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.75, 1.0])
def test_one_rate_foretells_what_each_row_expects_of_it(rate):
    counts = count_drafts(ROWS, num_tokens=25)
    foretold = sum(num * expected_tokens([rate] * drafted) for (drafted, _), num in ROWS.items()) / 10
    assert counts.tokens_at(rate) == pytest.approx(foretold, rel=1e-14)
    assert counts.rate_for(foretold) == pytest.approx(rate, abs=1e-12)
    assert counts.iid_tokens_per_step == counts.tokens_at(15 / 17)
    assert counts.rate_for(counts.tokens_at(1.0) + 1e-9) is None


def test_a_log_is_read_row_by_row():
    log = EventLog(VirtualClock())
    row(log, "a", "prefill", count=0)
    row(log, "a", "prefill")  # the prompt's own token is no decode step's
    row(log, "a", drafts=(3, 3), count=4)
    row(log, "b", "prefill")
    log.record(K.TOKENS, "a fork of b", count=1)
    row(log, "a")  # a step without drafts, after one with
    row(log, "b", drafts=(2, 0))
    row(log, "a fork of b", drafts=(1, 1), count=2)
    log.record(K.STEP, step=0, start_s=0.0, duration_s=0.0, num_rows=2, num_tokens=4, num_padded=0)
    log.record(K.PREEMPTED, "b", num_computed=3)
    row(log, "b", "prefill")  # what it had is computed once more
    row(log, "a", drafts=(3, 2), count=2)  # its second draft was its end: nothing follows
    row(log, "b", drafts=(3, 1), count=0)  # aborted in the middle of the step
    assert draft_counts(log) == DraftCounts(5, 10, drafted=(4, 3, 2), reached=(4, 2, 2), accepted=(3, 2, 1))
    assert draft_counts(list(log)) == draft_counts(log)


class Watched(NGramDrafter):
    """Looks drafts up, and remembers what it said about which tokens."""

    def propose(self, tokens, most):
        """Look up and remember."""
        drafts = super().propose(tokens, most)
        self.said.append((tokens, drafts))
        return drafts


def test_what_a_log_says_is_what_outputs_and_drafts_say():
    """At temperature 0 a draft is kept if the output says so: no log is needed to know."""
    drafter = Watched(longest=3, shortest=1)
    object.__setattr__(drafter, "said", [])
    llm = LLM(config=EngineConfig(draft=drafter, draft_tokens=4, adapt_drafts=False, prefix_cache=False))
    prompts = [llm.tokenizer.encode(text) for text in ("x = 1\ny = 1\nx = ", "def area(", "import os\nimport ")]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    whole = [(*prompt, *output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    counted = Counter()
    for tokens, drafts in drafter.said:
        (text,) = (text for text in whole if text[: len(tokens)] == tokens)
        follows = text[len(tokens) :]
        kept = [n for n in range(len(drafts) + 1) if tuple(drafts[:n]) == follows[:n]]
        counted[len(drafts), max(kept)] += 1
    counts = draft_counts(llm.log)
    in_reach = {outcome: num for outcome, num in counted.items() if outcome[0]}
    assert counts.num_drafted == sum(drafted * num for (drafted, _), num in in_reach.items()) > 50
    expected = count_drafts(in_reach, 0)
    assert (counts.drafted, counts.reached, counts.accepted) == (expected.drafted, expected.reached, expected.accepted)
    assert counts.num_tokens == 3 * 39 and counts.num_rows == 3 * 39 - counts.num_accepted
    assert counts.num_drafted == sum(output.usage.drafted_tokens for output in outputs)
    assert counts.num_accepted == sum(output.usage.accepted_tokens for output in outputs) > 10
