"""The claims of chapter 1, each asserted on what is exact: counts, steps, virtual time."""

import functools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minserve import LLM, EngineConfig
from minserve.clock import VirtualClock
from minserve.events import EventLog
from minserve.metrics import summary
from minserve.model.counting import FLOAT32, FP8_EXPERTS, count_step
from minserve.model.hybrid_lm import HybridLM
from minserve.model.losses import TrainMemory
from minserve.model.model_figures import named_config
from minserve.model.naive import NaiveMemory
from minserve.model.static_batch import serve_static
from minserve.model.step import Step
from minserve.request import Request, SamplingParams
from minserve.tuning.cost_model import Machine, machine, step_time
from minserve.tuning.traces import trace_names, trace_shape, workload_like
from minserve.tuning.workload import gamma_times, quantile_lengths, standard_library_text

GPU = machine("h200", overhead_s=40 * 80e-6)


@pytest.fixture(scope="module")
def llm():
    return LLM(config=EngineConfig(prefix_cache=False))


@pytest.fixture(scope="module")
def text(llm):
    return llm.tokenizer.encode(standard_library_text(40_000))


def requests(prompts, wanted, times=None):
    times = [0.0] * len(prompts) if times is None else times
    params = [SamplingParams(max_tokens=int(num), ignore_eos=True) for num in wanted]
    rows = enumerate(zip(times, prompts, params, strict=True))
    return [(float(time_s), Request(i, *what, seed=i)) for i, (time_s, *what) in rows]


def play(arrivals, batch_size, max_wait_s=0.0, cost=lambda rows: 1.0, model=None):
    log = EventLog(VirtualClock())
    serve_static(model, arrivals, log, batch_size, max_wait_s, cost)
    return summary(log)


@functools.cache
def step_s(num_rows, context, width):
    count = count_step(named_config("qwen3.5-35b-a3b"), [(context, context + width)] * num_rows)
    return step_time(count, GPU).total_s


def cost_of_the_35b(rows):
    return step_s(len(rows), sum(start for start, _ in rows) // len(rows) // 64 * 64, rows[0][1] - rows[0][0])


def weight_bytes_per_token(config, size, **how):
    return count_step(config, [(40, 41)] * size, **how).bytes.weights / size


def test_1a_one_at_a_time_reads_all_weights_for_every_token(llm, text):
    published = map(named_config, ("qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.8-2.4t-a95b"))
    shares = [weight_bytes_per_token(config, 64) / weight_bytes_per_token(config, 1) for config in published]
    assert shares == pytest.approx([1 / 64, 0.159, 0.291], rel=0.01)  # sparse ones share less: more experts are read

    prompts, routed = [text[500 * i :][:32] for i in range(64)], []
    hook = llm.model.register_forward_hook(lambda model, args, out: routed.append(out.routing))
    total = play(requests(prompts, [3] * 64), 64, model=llm.model)
    hook.remove()
    assert total.num_steps == 3 and play(requests(prompts, [3] * 64), 1).num_steps == 3 * 64
    distinct = np.mean([len(layer.expert_ids.unique()) for layer in routed[-1]])
    config = llm.model.config
    share = weight_bytes_per_token(config, 64, distinct_experts=distinct) / weight_bytes_per_token(config, 1)
    assert 1 / 64 < share < 1 / 20

    tokens_per_s = [size / step_s(size, 1024, 1) for size in (1, 8, 64)]
    assert tokens_per_s[1] > 4 * tokens_per_s[0] and tokens_per_s[2] > 12 * tokens_per_s[0]


def chats(rate, cv, num=100):
    rng, shape = np.random.default_rng(0), trace_shape("azure_conversation")
    prompts = quantile_lengths(num, shape.prompt_tokens.quantiles, rng)
    outputs = quantile_lengths(num, shape.output_tokens.quantiles, rng)
    return requests([[0] * length for length in prompts], outputs, gamma_times(num, rate, cv, rng))


def test_1b_waiting_to_fill_a_batch_makes_the_first_user_wait():
    loads = {"calm": (0.2, 1), "bursts": (0.2, 3), "busy": (2.0, 1)}
    alone = {name: play(chats(*load), 1, 2.0, cost_of_the_35b) for name, load in loads.items()}
    batch = {name: play(chats(*load), 8, 2.0, cost_of_the_35b) for name, load in loads.items()}
    assert alone["calm"].ttft.p50 < 0.05 and batch["calm"].ttft.p50 > 2.0
    assert alone["bursts"].ttft.p50 < batch["bursts"].ttft.p50
    assert alone["bursts"].ttft.p99 > 2 * batch["bursts"].ttft.p99
    assert alone["busy"].ttft.p50 > 10 * batch["busy"].ttft.p50
    assert batch["busy"].tokens_per_s > 1.7 * alone["busy"].tokens_per_s
    assert batch["busy"].padded_share > 0.5 and alone["busy"].padded_share == 0


class CountCalls(TorchDispatchMode):
    """Counts the operations that torch starts."""

    num_calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_calls += 1
        return function(*args, **(kwargs or {}))


def test_1c_decode_is_bound_by_hauling_and_prefill_by_arithmetic():
    config = named_config("qwen3.5-35b-a3b")
    decode = [step_time(count_step(config, [(2048, 2049)] * n), GPU) for n in (64, 512, 4096, 16384)]
    prefill = [step_time(count_step(config, [(0, n)]), GPU) for n in (64, 512, 4096, 16384)]
    assert [time.regime for time in decode] == ["bytes"] * 4
    assert [time.regime for time in prefill] == ["bytes", "bytes", "arithmetic", "arithmetic"]
    assert step_time(count_step(config, [(2048, 2049)]), GPU).regime == "overhead"
    # In a dense model arithmetic takes over at the ridge, 32 times sooner than where 8 of 256 experts work.
    dense = named_config("qwen3.5-27b")
    assert [step_time(count_step(dense, [(0, n)]), GPU).regime for n in (64, 512)] == ["bytes", "arithmetic"]


def test_1c_what_a_step_hauls_changes_with_batch_and_context():
    def shares(size, context):
        moved = count_step(named_config("qwen3.8-2.4t-a95b"), [(context - 1, context)] * size,
                           weight_bytes=FP8_EXPERTS, kv_dtype_bytes=1).bytes  # fmt: skip
        parts = (moved.dense_weights + moved.head, moved.expert_weights, moved.state_read + moved.state_written,
                 moved.kv_read + moved.kv_written)  # fmt: skip
        assert sum(parts) == pytest.approx(moved.total)
        return np.argmax(parts), parts / np.sum(parts)

    assert shares(1, 8192)[0] == 0 and shares(64, 8192)[0] == 1
    assert shares(1, 8192)[1][2:].sum() < 0.02 and shares(512, 8192)[1][2:].sum() > 0.2
    assert shares(64, 131072)[1][3] > 10 * shares(64, 8192)[1][3]


def test_1c_the_shipped_model_is_bound_by_overhead(llm):
    slow = Machine("a slow laptop", 8e9, bandwidth_bytes_per_s=10e9, flops_per_s={"float32": 20e9}, efficiency=1.0)
    count = count_step(llm.model.config, [(40, 41)], weight_bytes=FLOAT32, kv_dtype_bytes=4, conv_dtype_bytes=4)
    assert step_time(count, slow, "float32").total_s < 0.001
    with torch.no_grad(), CountCalls() as counted:
        llm.model(Step.one_row([5], 0), NaiveMemory(llm.model.config, 1))
    # Each call costs at least a microsecond before it does anything: more than all bytes and all arithmetic together.
    assert 1_000 < counted.num_calls < 2_500


def test_1d_arrivals_are_bursty_and_lengths_skewed():
    shapes = {name: trace_shape(name) for name in trace_names()}
    assert (min(s.cv for s in shapes.values()), max(s.cv for s in shapes.values())) == (1.01, 13.15)
    azure, mooncake = shapes["azure_conversation"], shapes["mooncake_conversation"]
    assert azure.cv < mooncake.cv and azure.dispersion > mooncake.dispersion  # which is burstier depends on the window
    for shape in shapes.values():
        for lengths in (shape.prompt_tokens.quantiles, shape.output_tokens.quantiles):
            assert lengths[99] > 3 * lengths[50] and lengths[99] > 30 * lengths[1]
    waits = [play(requests([[0]] * 400, [1] * 400, gamma_times(400, 0.5, cv, np.random.default_rng(7))), 1).ttft.p90
             for cv in (0, 1, 3)]  # fmt: skip
    assert waits[0] == 1.0 and 1.5 < waits[1] < 5 and waits[2] > 10


def test_1e_training_and_serving_use_the_same_weights_in_another_way(llm, text):
    trainer = HybridLM(llm.model.config, impl="train")
    trainer.load_state_dict(llm.model.state_dict())
    tokens = torch.tensor(text[:512])
    step = Step(tokens, torch.arange(256).repeat(2), torch.tensor([0, 256, 512]), torch.arange(512))
    with torch.no_grad():
        trained = trainer(step, TrainMemory(num_rows=2, row_tokens=256)).logits
        served = llm.model(Step.one_row(text[:256], 0, every_logit=True), NaiveMemory(llm.model.config, 256)).logits
    assert len(trained) == len(tokens)  # every position is somebody's: it predicts a token that is known
    assert (trained[:256] - served).abs().max() < 1e-4 * served.abs().max()

    load = workload_like("azure_conversation", 16, np.random.default_rng(3)).shrunk(16)
    prompts = [text[900 * i :][: arrival.prompt_tokens] for i, arrival in enumerate(load)]
    batch = play(requests(prompts, [arrival.output_tokens for arrival in load]), 16)
    assert batch.rows_per_step == 16 and batch.padded_share > 0.5
    alone = play([(0.0, Request(9, text[:32], SamplingParams(max_tokens=8), seed=0))], 1)
    assert alone.rows_per_step == 1 and alone.padded_share == 0
