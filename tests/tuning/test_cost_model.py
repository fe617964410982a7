"""The cost model: the published roofline of the large model, ridge points, regimes, named errors."""

from dataclasses import replace

import pytest

from minserve.errors import InvalidValue
from minserve.model.counting import FP8_EXPERTS, NVFP4_EXPERTS, count_step
from minserve.model.model_figures import named_config
from minserve.tuning.cost_model import (
    Machine,
    StepTime,
    hardware_source,
    link_bytes_per_s,
    machine,
    machine_names,
    nodes_needed,
    step_time,
)
from minserve.tuning.prices import prices

LARGE = named_config("qwen3.8-2.4t-a95b")
LAPTOP = Machine("laptop", memory_bytes=16e9, bandwidth_bytes_per_s=50e9, flops_per_s={"bfloat16": 1e12})


def decode(batch: int, weight_bytes, machine, context: int = 8192):
    """One decode step of `batch` requests: FP8 cache, float32 state, uniform routing."""
    rows = [(context - 1, context)] * batch
    count = count_step(LARGE, rows, weight_bytes=weight_bytes, kv_dtype_bytes=1)
    return count, step_time(count, machine, "fp8")


# batch: distinct experts, weights in TB, ms, tokens per second and GPU (FP8 on 16), ms (NVFP4 on 8)
ROOFLINE = {
    1: (10, "0.140", "1.4", 44, "2.5"),
    32: (240, "1.20", "12.6", 158, "15.5"),
    64: (367, "1.79", "19.1", 210, "23.2"),
    128: (471, "2.28", "25.0", 321, "30.7"),
    256: (509, "2.45", "28.7", 557, "36.7"),
    1024: (512, "2.47", "41", 1563, "61"),
}


def printed(figure: str):
    """What a printed figure stands for: itself, give or take half its last digit (and the printer's own rounding)."""
    return pytest.approx(float(figure), abs=0.55 * 10.0 ** -len(figure.partition(".")[2]))


@pytest.mark.parametrize("batch", ROOFLINE)
def test_decode_roofline_of_the_large_model(batch):
    experts, terabytes, fp8_ms, tokens_per_s, nvfp4_ms = ROOFLINE[batch]
    count, fp8 = decode(batch, FP8_EXPERTS, machine("b300").times(16))
    _, nvfp4 = decode(batch, NVFP4_EXPERTS, machine("b300").times(8))
    assert round(count.distinct_experts) == experts
    assert count.bytes.weights / 1e12 == printed(terabytes)
    assert 1e3 * fp8.total_s == printed(fp8_ms)
    assert batch / fp8.total_s / 16 == printed(str(tokens_per_s))
    assert 1e3 * nvfp4.total_s == printed(nvfp4_ms)
    assert fp8.regime == nvfp4.regime == "bytes"


def test_growth_with_the_batch_is_coverage_and_not_arithmetic():
    count, time = decode(128, FP8_EXPERTS, machine("b300").times(16))
    assert time.arithmetic_s < 1e-3
    assert count.bytes.expert_weights / decode(1, FP8_EXPERTS, machine("b300"))[0].bytes.expert_weights > 40


def test_state_of_a_thousand_requests():
    count, _ = decode(1024, FP8_EXPERTS, machine("b300"))
    assert round((count.bytes.state_read + count.bytes.state_written) / 1e12, 1) == 1.2


def test_prefill_is_bound_by_arithmetic_and_a_tiny_step_by_overhead():
    prefill = count_step(LARGE, [(0, 8192)], weight_bytes=FP8_EXPERTS)
    assert step_time(prefill, machine("b300").times(16)).regime == "arithmetic"
    small = count_step(named_config("qwen3.5-0.8b"), [(10, 11)])
    assert step_time(small, machine("b300", overhead_s=0.01)).regime == "overhead"
    assert step_time(small, machine("b300")).regime == "bytes"


@pytest.mark.parametrize(("name", "ridge"), [("h100", 591), ("h200", 412), ("b200", 584), ("b300", 581)])
def test_ridge_points(name, ridge):
    assert round(machine(name).ridge("fp8")) == ridge


def test_step_time_by_hand():
    count = count_step(named_config("qwen3.5-0.8b"), [(0, 1)])
    time = step_time(count, replace(LAPTOP, overhead_s=0.5))
    assert time.bytes_s == pytest.approx(count.bytes.total / 40e9)
    assert time.arithmetic_s == pytest.approx(count.flops.total / 1e12)
    assert time.total_s == 0.5 + max(time.bytes_s, time.arithmetic_s)
    assert StepTime(1, 2, 3).total_s == 4
    assert [StepTime(*t).regime for t in ((3, 1, 2), (1, 3, 2), (1, 2, 3))] == ["overhead", "bytes", "arithmetic"]


def test_experts_may_run_in_another_format():
    count = count_step(LARGE, [(0, 64)], weight_bytes=FP8_EXPERTS)
    h100 = machine("h100")
    mixed = step_time(count, h100, "bfloat16", expert_format="fp8").arithmetic_s
    by_hand = (count.flops.total - count.flops.experts) / 989e12 + count.flops.experts / 1979e12
    assert mixed == pytest.approx(by_hand)


def test_several_devices_act_as_one():
    sixteen = machine("b300", overhead_s=0.001).times(16)
    assert (sixteen.num_devices, sixteen.memory_bytes, sixteen.overhead_s) == (16, 16 * 288e9, 0.001)
    assert sixteen.rate("fp8") == 16 * 4500e12
    assert sixteen.ridge("fp8") == machine("b300").ridge("fp8")


def test_a_published_day_of_serving():
    """DeepSeek, 27-28 February 2025: tokens and tokens per second per node give the nodes that were in use."""
    prefill, decoding = nodes_needed(608e9, 73.7e3), nodes_needed(168e9, 14.8e3)
    assert (round(prefill, 1), round(decoding, 1)) == (95.5, 131.4)
    assert prefill + decoding == pytest.approx(226.75, abs=0.2)


def test_bad_values_are_named():
    with pytest.raises(InvalidValue, match="one of a100, h100"):
        machine("tpu")
    with pytest.raises(InvalidValue, match="infiniband-400"):
        link_bytes_per_s("carrier pigeon")
    with pytest.raises(InvalidValue, match="number_format.*bfloat16"):
        machine("a100").rate("fp8")
    for field, value in (("efficiency", 1.5), ("overhead_s", -1), ("bandwidth_bytes_per_s", float("nan"))):
        with pytest.raises(InvalidValue, match=field):
            replace(LAPTOP, **{field: value})


def test_tables_are_dated_and_whole():
    assert "2026" in hardware_source()
    for name in machine_names():
        assert machine(name).ridge() > 100
    assert link_bytes_per_s("pcie5-x16") == 64e9
    for price in prices():
        assert price.as_of.startswith("20")
        assert 0 < price.cached < price.input < price.output
    assert [price.as_of for price in prices()] == sorted((price.as_of for price in prices()), reverse=True)
