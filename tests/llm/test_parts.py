"""A reader's parts in the engine: the solved exercises serve a batch, and give the library's tokens."""

import importlib.util
from pathlib import Path

import pytest

from minserve.batching.batcher import BatcherError
from minserve.events import EventKind
from minserve.llm import LLM, EngineConfig
from minserve.parts import Parts
from minserve.request import FinishReason, SamplingParams

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"
PROMPTS = ["def area(", "import os\n", "class A:" * 5, "x", "[1, 2, 3]"]
CONFIG = EngineConfig(dtype="float64", batch_tokens=7, page_size=4, num_pages=24, max_running=4, check=True)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def solved(chapter, name):
    spec = importlib.util.spec_from_file_location(f"solved_{chapter}", SOLUTIONS / f"{chapter}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def serve(folder, parts=None, config=CONFIG, prompts=PROMPTS):
    llm = LLM(folder, config=config, parts=parts)
    outputs = llm.generate(prompts, PARAMS)
    assert not llm.engine.has_work and llm.engine.cache.num_takeable == config.num_pages
    return [output.token_ids for output in outputs], llm


@pytest.mark.parametrize(
    "field, chapter, name",
    [
        ("page_allocator", "ch04_paging", "PageAllocator"),
        ("paged_attention", "ch04_paging", "paged_attention"),
        ("plan", "ch03_batching", "plan"),
        ("radix_tree", "ch05_radix", "RadixTree"),
        ("match_hybrid", "ch07_hybrid", "match_hybrid"),
    ],
)
def test_a_solved_exercise_serves_a_batch_with_the_librarys_tokens(small_folder, field, chapter, name):
    prompts = [*PROMPTS, *PROMPTS, "class A:" * 4 + "pass"]  # some begin alike
    wanted, library = serve(small_folder, prompts=prompts)
    found, mine = serve(small_folder, Parts(**{field: solved(chapter, name)}), prompts=prompts)
    cached = [sum(e.data["cached_tokens"] for e in llm.log if e.kind is EventKind.ADMITTED) for llm in (library, mine)]
    assert found == wanted and min(cached) > 0


def test_a_readers_plan_leaves_making_room_to_the_library(small_folder):
    tight = EngineConfig(dtype="float64", batch_tokens=7, page_size=4, num_pages=14, max_running=4, check=True)
    wanted, _ = serve(small_folder)
    found, llm = serve(small_folder, Parts(plan=solved("ch03_batching", "plan")), tight)
    assert found == wanted and any(event.kind is EventKind.PREEMPTED for event in llm.log)


@pytest.mark.parametrize(
    "slices, said",
    [
        ([(99, 0, 1, "prefill")], "neither runs nor waits"),
        ([(0, 1, 2, "prefill")], "tokens 1 to 2 of request 0"),
        ([(0, 0, 8, "prefill")], "8 tokens in all; batch_tokens is 7"),
        ([(0, 0, 0, "prefill")], "tokens 0 to 0"),
        ([(0, 0, 2, "prefill"), (0, 0, 2, "prefill")], "names a request twice"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(small_folder, slices, said):
    llm = LLM(small_folder, config=CONFIG, parts=Parts(plan=lambda *_: slices))
    with pytest.raises(BatcherError, match=said):
        llm.generate("def area(", PARAMS)
    assert not llm.engine.has_work and llm.engine.cache.allocator.num_free == CONFIG.num_pages


def test_a_plan_that_fails_half_way_takes_nothing(small_folder):
    llm = LLM(small_folder, config=CONFIG, parts=Parts(plan=lambda _, waiting, *limits: [
        (waiting[0].id, 0, 2, "prefill"), (waiting[1].id, 1, 3, "prefill")
    ]))  # fmt: skip
    with pytest.raises(BatcherError, match="tokens 1 to 3"):
        llm.generate(["def area(", "xyz"], PARAMS)
    llm.engine.check()
    assert not llm.engine.has_work and llm.engine.cache.states.num_free == llm.engine.cache.states.num_slots
    assert llm.engine.cache.allocator.num_free == CONFIG.num_pages and llm.engine.cache.tree.num_protected == 0


def test_a_plan_that_refuses_a_request_does_not_end_it(small_folder):
    """The engine has turned away whoever does not fit; a plan knows nothing of pages that the tree can give back."""
    refuses = Parts(plan=lambda _, waiting, *limits: [(one.id, 0, 0, "refused") for one in waiting])
    llm = LLM(small_folder, config=CONFIG, parts=refuses)
    (output,) = llm.generate("def area(", PARAMS)
    assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == PARAMS.max_tokens
