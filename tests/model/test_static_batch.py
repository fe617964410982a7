"""The static batch: every request gets what it would have got alone, and the log tells the truth about the rest."""

import itertools
from dataclasses import replace

import pytest
import torch
from small_checkpoints import SPARSE, random_tensors

from minserve.clock import RealClock, VirtualClock
from minserve.errors import InvalidValue
from minserve.events import EventKind, EventLog
from minserve.metrics import request_metrics, steps, summary
from minserve.model.hybrid_lm import HybridLM
from minserve.model.naive import run_alone
from minserve.model.static_batch import newest_tokens, run_static, serve_static
from minserve.model.static_memory import StaticMemory
from minserve.request import Request, SamplingParams, Status

CONFIG = replace(SPARSE, num_hidden_layers=4, layer_types=("linear_attention",) * 3 + ("full_attention",))


@pytest.fixture(scope="module")
def model():
    """Random weights in float64, with gates that neither forget at once nor never."""
    tensors = {name: 0.3 * tensor.double() for name, tensor in random_tensors(CONFIG, seed=1).items()}
    model = HybridLM(CONFIG).double()
    model.load_state_dict(tensors)
    for name, tensor in model.requires_grad_(False).named_parameters():
        if name.endswith(("dt_bias", "A_log")):
            tensor.mul_(0.5).sub_(1.5)
    return model.eval()


def request(number, num_prompt, max_tokens, **params):
    ids = torch.randint(0, CONFIG.vocab_size, (num_prompt,), generator=torch.Generator().manual_seed(number)).tolist()
    return Request(number, ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params), seed=number)


def logged(*requests, clock=None):
    log = EventLog(clock or VirtualClock())
    for one in requests:
        log.record(EventKind.ARRIVED, one.id, prompt_tokens=len(one.prompt_ids))
    return log


def run_by_itself(model, one):
    """The same request alone: the loop that everything is measured against."""
    again = Request(one.id, one.prompt_ids, one.params, one.seed)
    list(itertools.islice(run_alone(model, again, logged(again)), one.params.max_tokens))
    return again.output_ids


@pytest.mark.parametrize(
    "prompts, wanted",
    [
        ((5, 40), (6, 6)),  # fault D10: a short prompt beside a long one
        ((1, 2, 3, 4), (4, 1, 3, 2)),  # shorter than the convolution
        ((64, 65, 63, 1), (3, 9, 5, 7)),  # fault A10: around the chunk of the delta rule
        ((7, 7, 7), (1, 5, 2)),
        ((1, 1), (3, 2)),
        ((130, 9), (2, 12)),  # the short prompt decodes long after the long one is done
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_equal_those_of_the_request_alone(model, prompts, wanted, temperature):
    batch = [request(i, *sizes, temperature=temperature) for i, sizes in enumerate(zip(prompts, wanted, strict=True))]
    run_static(model, batch, logged(*batch))
    assert [one.output_ids for one in batch] == [run_by_itself(model, one) for one in batch]


def test_a_row_knows_no_neighbours(model):
    """The last logits of a request are the same alone and between others, in whatever order."""
    logits = []
    for order in ([0], [0, 1, 2], [2, 1, 0]):
        batch, seen = [request(i, (9, 40, 1)[i], 1) for i in order], []
        hook = model.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.logits))
        run_static(model, batch, logged(*batch))
        hook.remove()
        logits.append(seen[0][order.index(0)])
    assert max((logits[0] - other).abs().max() for other in logits[1:]) < 1e-9


def test_only_the_longest_row_survives_a_wrong_newest_token(model):
    """Fault D10: rows that index the last, padded column get a token that continues nothing."""
    batch = [request(i, length, 8) for i, length in enumerate((5, 40, 23))]
    run_static(model, batch, logged(*batch), newest=lambda is_real: newest_tokens(torch.ones_like(is_real)))
    alone = [run_by_itself(model, one) for one in batch]
    assert [one.output_ids == ids for one, ids in zip(batch, alone, strict=True)] == [False, True, False]


def test_pads_that_update_the_state_are_seen(model):
    """Fault A10: without the rule for pads, the state of a short row is another one."""
    memories = []
    for is_honest in (True, False):
        memory = StaticMemory(CONFIG, 2, 16, torch.float64)
        memory.place(torch.arange(8).expand(2, 8), torch.tensor([8, 5]))
        memory.is_real |= not is_honest
        g = torch.Generator().manual_seed(0)
        sizes = ((2, 4), (2, 4), (6, 5))
        q, k, v = (torch.randn(16, *size, generator=g, dtype=torch.float64) for size in sizes)
        gate = torch.rand(16, 6, generator=g, dtype=torch.float64)
        memory.recur(0, q, k, v, -gate, gate)
        memories.append(memory.states[0])
    honest, padded = memories
    assert torch.allclose(honest[0], padded[0], atol=1e-12) and (honest[1] - padded[1]).abs().max() > 0.1


def test_end_tokens_end_a_request_and_not_the_batch(model):
    alone = run_by_itself(model, request(3, 6, 12))
    stop = next(token for token in alone[1:] if token != alone[0])
    batch = [request(3, 6, 12, stop_token_ids=(stop,)), request(4, 11, 12)]
    log = logged(*batch)
    run_static(model, batch, log)
    assert batch[0].output_ids == alone[: alone.index(stop) + 1]
    assert [str(one.finish_reason) for one in batch] == ["stop", "length"]
    assert all(one.status is Status.FINISHED for one in batch)
    assert batch[1].output_ids == run_by_itself(model, batch[1])


def test_the_log_counts_positions_computed_for_nobody():
    """Two prompts of 3 and 5 tokens that want 2 and 4: by hand."""
    batch = [request(0, 3, 2), request(1, 5, 4)]
    log = logged(*batch)
    seen = []
    run_static(None, batch, log, cost=lambda rows: seen.append(rows) or 1.0)
    assert seen == [[(0, 5), (0, 5)], [(3, 4), (5, 6)], [(4, 5), (6, 7)], [(5, 6), (7, 8)]]
    assert [(s.start_s, s.duration_s, s.num_rows, s.num_tokens, s.num_padded) for s in steps(log)] == [
        (0.0, 1.0, 2, 8, 2), (1.0, 1.0, 2, 2, 0), (2.0, 1.0, 2, 1, 1), (3.0, 1.0, 2, 1, 1)]  # fmt: skip
    slices = [(e.data["start"], e.data["stop"], e.data["phase"]) for e in log.of(0) if e.kind is EventKind.SLICE]
    assert slices == [(0, 3, "prefill"), (3, 4, "decode"), (4, 5, "padded"), (5, 6, "padded")]
    lives = request_metrics(log)
    assert [(m.ttft, m.tpot, m.finished, m.completion_tokens) for m in lives.values()] == [(1, 1, 4, 2), (1, 1, 4, 4)]
    assert summary(log).padded_share == pytest.approx(4 / 16)


def test_the_model_and_the_play_write_one_log(model):
    logs = []
    for runner in (model, None):
        batch = [request(i, *sizes) for i, sizes in enumerate([(9, 3), (4, 6), (17, 1)])]
        logs.append(logged(*batch))
        run_static(runner, batch, logs[-1], cost=len)
    assert list(logs[0]) == list(logs[1])


def test_a_real_clock_measures(model):
    batch = [request(0, 4, 3)]
    log = logged(*batch, clock=RealClock())
    run_static(model, batch, log)
    assert len(steps(log)) == 3 and all(step.duration_s > 0 for step in steps(log))


def test_serving_in_batches_by_hand():
    """Batch size 2, 4 s of patience, steps of 1 s + 1 s per row: the example of exercise 1.6."""
    log = EventLog(VirtualClock())
    arrivals = [(time_s, request(i, 1, wanted)) for i, (time_s, wanted) in enumerate([(0.0, 1), (1.0, 2), (9.0, 1)])]
    serve_static(None, arrivals, log, batch_size=2, max_wait_s=4.0, cost=lambda rows: 1.0 + len(rows))
    lives = request_metrics(log)
    assert [(m.arrived, m.admitted, m.first_token, m.finished) for m in lives.values()] == [
        (0.0, 1.0, 4.0, 7.0), (1.0, 1.0, 4.0, 7.0), (9.0, 13.0, 15.0, 15.0)]  # fmt: skip


def test_batch_size_one_is_a_loop_around_generate():
    log = EventLog(VirtualClock())
    serve_static(None, [(0.0, request(0, 2, 3)), (1.0, request(1, 2, 1))], log, batch_size=1, cost=lambda rows: 1.0)
    assert [(m.queue_s, m.ttft) for m in request_metrics(log).values()] == [(0.0, 1.0), (2.0, 3.0)]
    assert summary(log).padded_share == 0


def test_serving_waits_on_a_real_clock():
    log = EventLog(RealClock())
    serve_static(None, [(0.0, request(0, 1, 1)), (0.02, request(1, 1, 1))], log, batch_size=1)
    assert request_metrics(log)[1].admitted >= 0.02


@pytest.mark.parametrize("params", [{"stop": "x"}, {"prompt_logprobs": 1}])
def test_what_it_does_not_do_is_named(model, params):
    batch = [request(0, 3, 2, **params)]
    with pytest.raises(InvalidValue, match="static batch"):
        run_static(model, batch, logged(*batch))


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"batch_size": 1, "max_wait_s": float("nan")}])
def test_a_server_that_cannot_be_is_refused(bad):
    with pytest.raises(InvalidValue, match="batch_size"):
        serve_static(None, [], EventLog(VirtualClock()), **bad)
