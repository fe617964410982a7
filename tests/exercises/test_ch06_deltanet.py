"""Checks of chapter 6's exercises. See AUTHORS.md in exercises/."""

import math
from functools import cache

import torch
from checks import AtLeast, Case
from one_at_a_time import random
from torch.utils._python_dispatch import TorchDispatchMode

from minserve import LLM
from minserve.model.naive import NaiveMemory
from minserve.model.step import Step
from minserve.tuning.workload import standard_library_text


def test_6_1_conv_tail(ex):
    def case(num_before, tokens, channels, kernel, stops, note):
        x, weight = random(num_before + tokens, channels, seed=1), random(channels, kernel, seed=2)
        padded = torch.cat([torch.zeros(kernel - 1, channels, dtype=x.dtype), x])  # what came before the request
        out = torch.nn.functional.conv1d(padded.T[None], weight[:, None], groups=channels)[0].T[num_before:]
        tails = [padded[num_before + stop :][: kernel - 1] for stop in stops]
        args = {"x": x[num_before:], "weight": weight, "tail": padded[num_before:][: kernel - 1], "stops": stops}
        return Case(args, (torch.nn.functional.silu(out), tails), note)

    ex.check("conv_tail", [
        case(0, 1, 1, 2, [], "a convolution of two, the first token"), case(1, 1, 1, 2, [1], "one token more"),
        case(1, 1, 1, 2, [0], "after none of its tokens"), case(0, 2, 1, 2, [1, 2], "after each of two tokens"),
        case(3, 3, 1, 3, [2], "from inside the chunk"), case(0, 1, 1, 4, [1], "a token, and nothing before it"),
        case(4, 1, 1, 4, [1], "a token is shorter than the tail"),  # fault A11
        case(4, 2, 1, 4, [0, 1, 2], "two tokens are shorter than the tail"), case(4, 3, 1, 4, [3], "as long as it"),
        case(4, 4, 1, 4, [1, 3, 4], "longer"), case(5, 0, 2, 4, [0], "no token"),
        case(2, 7, 3, 4, [5, 0, 7], "a chunk"),
    ])  # fmt: skip


def kept(StatePool, num_slots, calls):
    """For each call what came back, and how many slots are free; calls name slots by the order in which they came.

    All values are written from one pair of tensors, which is changed in place from call to call, as a step may do.
    """
    state, tail, slots, held, found = torch.zeros(1, 2, 2), torch.zeros(3, 2), [], set(), []
    pool = StatePool(num_slots, state_shape=(1, 2, 2), tail_shape=(3, 2))
    for name, *args in calls:
        try:
            if name == "write":
                which, value, num_tokens = args
                state.fill_(value), tail.fill_(10 * value)
                answer = pool.write(slots[which], state, tail, num_tokens)
            else:
                answer = getattr(pool, name)(*([slots[args[0]], *args[1:]] if args else []))
        except ValueError:
            answer = "ValueError"
        if name == "read" and isinstance(answer, tuple):
            answer = f"state {answer[0].unique().tolist()}, tail {answer[1].unique().tolist()}"
        if name in ("take", "snapshot") and isinstance(answer, int):
            slots.append(answer)
            answer = "a slot" if answer in {*range(num_slots)} - held else "a slot that is not free"
            held.add(slots[-1])
        if name == "release" and answer is None:
            held.discard(slots[args[0]])
        found.append(f"{name}: {answer}; {pool.num_free} free")
    return found


def test_6_2_state_pool(ex):
    def case(num_slots, note, *rows):
        """Rows of (call, its arguments ..., what came back, free slots); a read gives the value that was written."""
        calls, want = [row[:-2] for row in rows], []
        for name, *_, answer, num_free in rows:
            if name == "read" and answer != "ValueError":
                answer = f"state [{float(answer)}], tail [{10 * float(answer)}]"
            want.append(f"{name}: {answer}; {num_free} free")
        return Case({"num_slots": num_slots, "calls": calls}, want, note + "; slot 0 is the first that came", run=kept)

    one, full = ("take", "a slot", 2), ("write", 0, 7, 4, None, 2)
    snap = ("snapshot", 0, "a slot", 1)
    error = "ValueError"
    ex.check("StatePool", [
        case(1, "all of a pool of one", ("take", "a slot", 0), ("take", None, 0)),
        case(3, "zeros, which have seen nothing", one, ("read", 0, 0, "0", 2)),
        *(case(3, note, one, full, ("read", 0, num_tokens, answer, 2)) for note, num_tokens, answer in (
            ("written and read", 4, "7"), ("read for the token before", 3, error),
            ("read for the token after", 5, error), ("read as if it had seen nothing", 0, error))),
        case(3, "written twice", one, full, ("write", 0, 8, 5, None, 2), ("read", 0, 5, "8", 2)),
        case(3, "two slots, written one after the other", one, ("take", "a slot", 1), ("write", 0, 7, 4, None, 1),
             ("write", 1, 8, 6, None, 1), ("read", 0, 4, "7", 1), ("read", 1, 6, "8", 1)),
        *(case(3, "a snapshot", one, full, snap, ("read", 1, *read, 1)) for read in ((4, "7"), (0, error))),
        case(3, "its request goes on", one, full, snap, ("write", 0, 8, 5, None, 1), ("read", 1, 4, "7", 1),
             ("read", 0, 5, "8", 1)),
        case(3, "somebody goes on from the snapshot itself", one, full, snap, ("write", 1, 8, 5, None, 1),
             ("read", 0, 4, "7", 1), ("read", 1, 5, "8", 1)),
        case(3, "the request ends, its snapshot stays", one, full, snap, ("release", 0, None, 2),
             ("read", 1, 4, "7", 2), ("read", 0, 4, error, 2)),
        case(3, "a snapshot of a snapshot", one, full, snap, ("snapshot", 1, "a slot", 0), ("release", 1, None, 1),
             ("read", 2, 4, "7", 1)),
        case(1, "there is no room for a snapshot", ("take", "a slot", 0), ("write", 0, 7, 4, None, 0),
             ("snapshot", 0, None, 0), ("read", 0, 4, "7", 0)),
        case(1, "taken anew, with zeros in it", ("take", "a slot", 0), ("write", 0, 7, 4, None, 0),
             ("release", 0, None, 1), ("take", "a slot", 0), ("read", 0, 4, error, 0), ("read", 0, 0, "0", 0)),
        case(3, "given back twice", one, ("release", 0, None, 3), ("release", 0, error, 3)),
        case(3, "written after it was given back", one, ("release", 0, None, 3), ("write", 0, 7, 4, error, 3),
             ("take", "a slot", 2), ("read", 1, 0, "0", 2)),
        case(3, "a snapshot of nobody's slot", one, ("release", 0, None, 3), ("snapshot", 0, error, 3)),
    ])  # fmt: skip


def test_6_3_crossing_point(ex):
    def case(num_tokens, gb, note, kv_dtype_bytes=2, state_dtype_bytes=4, **changes):
        sizes = dict(num_layers=2, full_attention_interval=2, num_kv_heads=1, head_dim=1, num_key_heads=1,
                     num_value_heads=1, key_dim=1, value_dim=1, conv_kernel=1)  # fmt: skip
        args = {"model": ex.Hybrid(**sizes | changes), "kv_dtype_bytes": kv_dtype_bytes}
        return Case(args | {"state_dtype_bytes": state_dtype_bytes}, (num_tokens, gb), note, atol=0)

    large = dict(num_layers=92, full_attention_interval=4, num_kv_heads=4, head_dim=256, num_key_heads=16,
                 num_value_heads=128, key_dim=128, value_dim=128, conv_kernel=4)  # fmt: skip
    shipped = dict(num_layers=8, full_attention_interval=4, num_kv_heads=2, head_dim=32, num_key_heads=1,
                   num_value_heads=2, key_dim=64, value_dim=64, conv_kernel=4)  # fmt: skip
    ex.check("crossing_point", [
        case(1, 4e-9, "a state of one number, 4 bytes, and 4 bytes a token"),
        case(4, 16e-9, "two value heads of two numbers", num_value_heads=2, value_dim=2),
        case(4, 8e-9, "the KV cache in FP8", kv_dtype_bytes=1, key_dim=2),
        case(3, 10e-9, "bfloat16 matrices: two tokens and a half", state_dtype_bytes=2, value_dim=5),
        case(4, 16e-9, "a convolution of three keeps two inputs of three channels", conv_kernel=3),
        case(34, 136e-9, "a convolution of two keeps one input of 20 channels", conv_kernel=2, num_key_heads=2,
             num_value_heads=4, key_dim=2, value_dim=3),
        case(3, 12e-9, "four layers, one of them attention", num_layers=4, full_attention_interval=4),
        case(2, 16e-9, "six layers, two of them attention", num_layers=6, full_attention_interval=3),
        case(3, 128e-9, "three KV heads of five", num_kv_heads=3, head_dim=5, value_dim=32),
        case(402, 205_824e-9, "the shipped model", **shipped), case(6234, 0.587292672, "the 2.4T", **large),
        case(12468, 0.587292672, "the 2.4T, its KV cache in FP8", kv_dtype_bytes=1, **large),
        case(3162, 0.297885696, "the 2.4T, bfloat16 matrices", state_dtype_bytes=2, **large),
    ])  # fmt: skip


def test_6_4_half_life(ex):
    def case(A_log, dt_bias, a, want, note):
        A_log, dt_bias, a, want = (torch.tensor(x, dtype=torch.float64) for x in (A_log, dt_bias, a, want))
        return Case({"A_log": A_log, "dt_bias": dt_bias, "a": a}, want, note)

    def steps_until_half(A_log, dt_bias, a, note):
        """Fade a state by the middle one of all shares, by a thousandth of a token at a time, until half is left."""
        shares, lives = torch.exp(-torch.exp(A_log) * torch.log(1 + torch.exp(a + dt_bias))), []
        for h in range(len(A_log)):
            share, left, life = sorted(shares[:, h].tolist())[len(a) // 2] ** 0.001, 1.0, 0
            while left > 0.5:
                left, life = left * share, life + 1
            lives.append(life / 1000)
        args = {"A_log": A_log, "dt_bias": dt_bias, "a": a}
        return Case(args, torch.tensor(lives, dtype=torch.float64), note, rtol=0, atol=2e-3)

    ln2 = math.log(2)
    ex.check("half_life", [
        case([0.0], [0.0], [[0.0]], [1.0], "softplus(0) = log 2: a token leaves a half"),
        case([math.log(0.5)], [0.0], [[0.0]], [2.0], "e^A_log = 0.5: two tokens leave a half"),
        case([0.0], [-2.0], [[0.0]], [ln2 / math.log(1 + math.exp(-2))], "a bias"),
        case([0.0], [0.0], [[2.0]], [ln2 / math.log(1 + math.exp(2))], "the token counts as well"),
        case([0.0], [0.0], [[0.0], [0.0], [9.0]], [1.0], "three tokens, one of which wipes nearly all"),
        case([0.0, math.log(0.25)], [0.0, 0.0], [[0.0, 0.0]], [1.0, 4.0], "two heads"),
        steps_until_half(random(3, seed=1), random(3, seed=2), random(5, 3, seed=3), "three heads, five tokens"),
        steps_until_half(random(2, seed=4) - 2, random(2, seed=5), 2 * random(41, 2, seed=6), "slower heads"),
    ])  # fmt: skip


class WholeStates(TorchDispatchMode):
    """Counts the tensors that are made and have at least so many numbers."""

    def __init__(self, size):
        super().__init__()
        self.size, self.num = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        is_view = getattr(function, "is_view", False)
        self.num += isinstance(made, torch.Tensor) and not is_view and made.numel() >= self.size
        return made


def states_made(delta_chunk, **args):
    """Whether the state is touched a few times a chunk, or for every token; the chunk is as long as the input."""
    with WholeStates(args["state"].numel()) as counted:
        delta_chunk(**args)
    return "a few" if counted.num < 20 else f"{counted.num} tensors as large as the state, for {len(args['v'])} tokens"


def test_6_5_delta_chunk(ex):
    def inputs(tokens, heads, key_dim, value_dim, decay=0.5, chunk=4, empty=False):
        q, k = random(2, tokens, heads, key_dim, seed=1)
        g, beta = -decay * random(tokens, heads, seed=2).abs(), random(tokens, heads, seed=3).sigmoid()
        state = random(heads, key_dim, value_dim, seed=4) * (not empty)
        k = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-9)
        v = random(tokens, heads, value_dim, seed=5)
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state, "chunk": chunk}

    def case(tokens, heads, key_dim, value_dim, note, **how):
        args = inputs(tokens, heads, key_dim, value_dim, **how)
        out, state = torch.zeros_like(args["v"]), args["state"].clone()
        for t in range(tokens):
            for h in range(heads):  # S = e^g (1 - beta k k^T) S + beta k v^T
                k, beta = args["k"][t, h], args["beta"][t, h]
                keep = torch.eye(key_dim, dtype=torch.float64) - beta * torch.outer(k, k)
                state[h] = args["g"][t, h].exp() * (keep @ state[h]) + beta * torch.outer(k, args["v"][t, h])
                out[t, h] = (state[h] * args["q"][t, h][:, None]).sum(0)
        return Case(args, (out, state), note)

    ex.check("delta_chunk", [
        case(0, 1, 1, 1, "no token"), case(1, 1, 1, 1, "one token, an empty state", empty=True),
        case(1, 1, 1, 1, "one token"), case(1, 1, 2, 1, "one token, a key of two"),
        case(2, 1, 1, 1, "two tokens, an empty state", empty=True), case(2, 1, 1, 1, "two tokens"),
        case(2, 1, 1, 1, "two tokens, nothing is forgotten", decay=0), case(2, 1, 2, 3, "key and value differ in size"),
        case(1, 2, 1, 1, "two heads"), case(2, 1, 1, 1, "two chunks of one", chunk=1),
        case(3, 1, 1, 1, "a full chunk and one of a single token", chunk=2),  # fault A10, and A11
        case(4, 1, 2, 2, "two full chunks", chunk=2),
        case(2, 1, 2, 2, "a token wipes all: e^1000 is no number", decay=1000),
        *(case(tokens, 2, 3, 5, f"{tokens} tokens in chunks of 8", chunk=8) for tokens in (7, 8, 9, 15, 16, 17, 20)),
        case(9, 3, 4, 2, "chunks of three", chunk=3), case(12, 1, 3, 3, "fast forgetting", decay=300, chunk=6),
        Case(inputs(32, 1, 48, 48, chunk=32), "a few", "how often is the state touched in a chunk?", run=states_made),
    ])  # fmt: skip


STOP_AT, GO_ON, TEXTS = 400, 48, 3


@cache
def stopped_requests():
    """The shipped model, and for some requests that have stopped: their memory, and what comes next, right."""
    llm = LLM()
    text, found = llm.tokenizer.encode(standard_library_text(40_000)), []
    for i in range(TEXTS):
        ids, memory = text[9_000 * i :], NaiveMemory(llm.model.config, STOP_AT + GO_ON)
        llm.model(Step.one_row(ids[:STOP_AT], 0), memory)
        after = Step.one_row(ids[STOP_AT:][:GO_ON], STOP_AT, every_logit=True)
        kept = [dict(part) for part in (memory.tails, memory.states, memory.lengths)]
        found.append((memory, kept, after, llm.model(after, memory).logits.double().log_softmax(-1)))
    return llm.model, found


@torch.inference_mode()
def closeness(Squeezer, num_bytes):
    """Minus log10 of the KL divergence in bits, mean over what the requests predict when they go on."""
    (model, requests), losses = stopped_requests(), []
    for memory, kept, after, right in requests:
        memory.tails, memory.states, memory.lengths = (dict(part) for part in kept)
        states = torch.cat(list(memory.states.values())).clone()
        pieces = Squeezer().pack(states.clone(), num_bytes)
        if (size := sum(piece.nbytes for piece in pieces)) > num_bytes:
            raise ValueError(f"{size:,} bytes, and there is room for {num_bytes:,}")
        restored = Squeezer().unpack([piece.clone() for piece in pieces], states.shape)
        memory.states = {layer: restored[i : i + 1] for i, layer in enumerate(memory.states)}
        found = model(after, memory).logits.double().log_softmax(-1)
        losses.append((right.exp() * (right - found)).sum(-1).mean() / math.log(2))
    return -math.log10(max(float(torch.stack(losses).mean()), 1e-12))


def test_6_6_squeezer(ex):
    ex.check("Squeezer", [
        Case({"num_bytes": 6_144}, want=AtLeast(2.4), run=closeness, note="bytes for a request's matrices"),
    ])  # fmt: skip
