"""minserve computes what transformers computes: in one piece, in chunks of every length, and token by token."""

from __future__ import annotations

import pytest
import torch
from oracle import (
    CHUNKS,
    KINDS,
    NUM_TOKENS,
    Oracle,
    add_mtp_head,
    difference,
    minserve_logits,
    new_memory,
    reference_logits,
    reference_model,
    widened_modelling,
    write_oracle,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minserve.model.checkpoint import read_config, read_tensors
from minserve.model.hybrid_lm import HybridLM
from minserve.model.step import Step

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
LAYOUTS = {"dense": ("flat", "tied"), "moe": ("flat", "per-expert"),
           "next": ("flat", "fused-projections", "per-expert")}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def oracle(request, tmp_path_factory) -> Oracle:
    return write_oracle(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=TOLERANCE, ids=str)
def pair(request, oracle) -> tuple[HybridLM, torch.Tensor, Oracle]:
    """minserve's model of the checkpoint, and transformers' logits from it, in one dtype."""
    dtype = request.param
    return HybridLM.from_checkpoint(oracle.path, dtype=dtype), reference_logits(oracle, dtype), oracle


@pytest.mark.parametrize("chunks", [(NUM_TOKENS,), CHUNKS[1:], (1,)], ids=["at once", "chunks", "token by token"])
def test_logits(pair, chunks):
    model, wanted, oracle = pair
    for chunk in chunks:
        found = difference(minserve_logits(model, oracle.token_ids, chunk), wanted)
        assert found < TOLERANCE[wanted.dtype], f"prefill in chunks of {chunk}: off by {found:.1e} of the largest logit"


def test_the_logits_are_worth_comparing(oracle):
    """They vary, and tokens far back still matter: else equality would say little about the state."""
    wanted = reference_logits(oracle, torch.float64)
    assert wanted.std() > 0.5
    changed = Oracle(oracle.kind, oracle.path, [*oracle.token_ids[:-60], *[0] * 59, oracle.token_ids[-1]])
    forgotten = Oracle(oracle.kind, oracle.path, [(oracle.token_ids[0] + 1) % 96, *oracle.token_ids[1:]])
    assert difference(reference_logits(changed, torch.float64)[-1], wanted[-1]) > 1e-2
    assert difference(reference_logits(forgotten, torch.float64)[-1], wanted[-1]) > 1e-5


def test_widening_was_needed_and_happened(oracle):
    """In float64 transformers as it stands is off by its float32 casts; widened it has none."""
    ids = torch.tensor([oracle.token_ids])
    as_it_stands, widened = reference_model(oracle, torch.float32).double(), reference_model(oracle, torch.float64)
    with torch.no_grad(), NoFloat32():
        wanted = widened(ids, use_cache=False).logits
    with torch.no_grad():
        assert difference(as_it_stands(ids, use_cache=False).logits, wanted) > 1e-8


def test_the_layouts_that_transformers_writes(oracle):
    config = read_config(oracle.path)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in HybridLM(config).state_dict().items()}
    _, report = read_tensors(oracle.path, config, shapes, torch.float32)
    assert report.layouts == LAYOUTS[oracle.kind]
    assert config.eos_token_ids == (5, 6) and config.mtp_num_hidden_layers == 0


class NoFloat32(TorchDispatchMode):
    """Fails where an operation takes or gives a float32 tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            assert not (isinstance(value, torch.Tensor) and value.dtype == torch.float32), f"float32 in {func}"
        return result


def test_no_float32_in_float64_mode(oracle_with_mtp):
    oracle, _ = oracle_with_mtp
    model = HybridLM.from_checkpoint(oracle.path, dtype=torch.float64)
    with NoFloat32():
        memory = new_memory(model)
        for start, stop in [(0, 70), (70, 71), (71, 75)]:
            step = Step.one_row(oracle.token_ids[start:stop], start)
            hidden, logits, _ = model(step, memory)
        drafted, _ = model.draft_hidden(step, hidden, memory)
        assert model.logits(drafted).dtype == logits.dtype == torch.float64


# --- the MTP head, which transformers does not have: its own layer class between norms and a matrix written out here


@pytest.fixture(scope="module")
def oracle_with_mtp(oracle, tmp_path_factory) -> tuple[Oracle, dict[str, torch.Tensor]]:
    copy = write_oracle(oracle.kind, tmp_path_factory.mktemp("mtp"))
    return copy, {name: weight.double() for name, weight in add_mtp_head(copy).items()}


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)


def run_head(oracle, head, embedded, hidden):
    """h' of every entry, recomputed whole: entry i of a row is (embedding of token i, h of token i - 1), i from 1."""
    model = reference_model(oracle, torch.float64)
    full = model.config.layer_types.index("full_attention")
    layer = type(model.model.layers[full])(model.config, full).double()
    prefix = "mtp.layers.0."
    layer.load_state_dict({name.removeprefix(prefix): w for name, w in head.items() if name.startswith(prefix)})
    parts = [rms_norm(embedded, head["mtp.pre_fc_norm_embedding.weight"]),
             rms_norm(hidden, head["mtp.pre_fc_norm_hidden.weight"])]  # fmt: skip
    x = (torch.cat(parts, dim=-1) @ head["mtp.fc.weight"].T)[None]
    num = x.shape[1]
    rotation = model.model.rotary_emb(x, torch.arange(1, num + 1)[None])
    mask = torch.full((num, num), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    return rms_norm(layer(x, position_embeddings=rotation, attention_mask=mask)[0], head["mtp.norm.weight"])


@pytest.mark.parametrize("chunk", [NUM_TOKENS - 1, 17, 1])
@torch.no_grad()
def test_mtp_head(oracle_with_mtp, chunk):
    """Depth 1 over a whole text, in chunks; then depth 2 and 3, which feed the head its own output."""
    oracle, head = oracle_with_mtp
    model = HybridLM.from_checkpoint(oracle.path, dtype=torch.float64)
    reference = reference_model(oracle, torch.float64)
    ids = torch.tensor(oracle.token_ids)
    trunk = reference.model(ids[None], use_cache=False).last_hidden_state[0]
    embed = reference.model.embed_tokens.weight
    wanted = run_head(oracle, head, embed[ids[1:]], trunk[:-1])

    memory = new_memory(model)
    steps = [Step.one_row(oracle.token_ids[i : i + chunk], i) for i in range(1, NUM_TOKENS, chunk)]
    drafted = torch.cat([model.draft_hidden(step, trunk[step.positions - 1], memory)[0] for step in steps])
    assert difference(drafted, wanted) < 1e-9
    assert difference(model.logits(drafted), wanted @ reference.lm_head.weight.T) < 1e-9

    inputs, embedded = trunk[:-1], embed[ids[1:]]
    for depth, token in enumerate([3, 8]):
        drafted, _ = model.draft_hidden(Step.one_row([token], NUM_TOKENS + depth), drafted[-1:], memory)
        inputs, embedded = torch.cat([inputs, wanted[-1:]]), torch.cat([embedded, embed[token][None]])
        wanted = run_head(oracle, head, embedded, inputs)
        assert difference(drafted[-1], wanted[-1]) < 1e-9


@torch.no_grad()
def test_the_trunk_gives_the_head_its_hidden_states_after_the_norm(oracle):
    model = HybridLM.from_checkpoint(oracle.path, dtype=torch.float64)
    reference = reference_model(oracle, torch.float64)
    wanted = reference.model(torch.tensor([oracle.token_ids]), use_cache=False).last_hidden_state[0]
    found = model(Step.one_row(oracle.token_ids, 0), new_memory(model))
    assert difference(found.hidden, wanted) < 1e-9
    assert found.logits.shape == (1, model.config.vocab_size)


def test_the_mtp_head_changes_nothing_in_the_trunk(oracle_with_mtp):
    oracle, _ = oracle_with_mtp
    assert read_config(oracle.path).mtp_num_hidden_layers == 1
    model = HybridLM.from_checkpoint(oracle.path, dtype=torch.float64)
    assert difference(minserve_logits(model, oracle.token_ids, 64), reference_logits(oracle, torch.float64)) < 1e-9


def test_the_widened_module_is_a_module_of_its_own():
    module = widened_modelling("moe")
    assert module.Qwen3_5MoeRMSNorm(4)(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64
    assert module is widened_modelling("moe") and not module.__name__.endswith("qwen3_5_moe")
