"""Checks of chapter 2's exercises. See AUTHORS.md in exercises/."""

from dataclasses import asdict

import torch
from checks import AtLeast, Case


def random(*shape, seed=0):
    """Random numbers; a few are rounded, to be easy on the eye."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.round(decimals=1) if numbers.numel() <= 16 else numbers


def turned(x, positions):
    """RoPE as a multiplication of complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous())
    z = z * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], dim=-1)


def attended_at_once(q, k, v):
    """Causal attention over a whole sequence, without a cache, one head and one token at a time."""
    positions, out = torch.arange(len(q)), torch.empty_like(q)
    q, k = turned(q, positions), turned(k, positions)
    for token in range(len(q)):
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = k[: token + 1, kv_head] @ q[token, head] / q.shape[-1] ** 0.5
            out[token, head] = scores.softmax(-1) @ v[: token + 1, kv_head]
    return out, k


def test_2_1_attend_cached(ex):
    def chunk(context, tokens, heads, kv_heads, dim, note):
        q = random(context + tokens, heads, dim, seed=1)
        k, v = random(2, context + tokens, kv_heads, dim, seed=2)
        out, rotated = attended_at_once(q, k, v)
        args = {"q": q[context:], "k": k[context:], "v": v[context:],
                "k_cache": rotated[:context].clone(), "v_cache": v[:context].clone()}  # fmt: skip
        return Case(args, want=(out[context:], rotated, v), note=note)

    ex.check("attend_cached", [
        chunk(0, 1, 1, 1, 2, "the first token of all"),
        chunk(0, 2, 1, 1, 2, "two tokens, nothing cached"),
        chunk(1, 1, 1, 1, 2, "decode, one token cached"),
        chunk(1, 2, 1, 1, 2, "a chunk of two, one token cached"),
        chunk(0, 1, 4, 2, 2, "four heads share two KV heads"),
        chunk(5, 1, 4, 2, 8, "decode"), chunk(3, 4, 6, 2, 8, "a chunk in the middle"),
        chunk(0, 7, 4, 1, 4, "a prompt at once"), chunk(6, 3, 4, 4, 6, "as many KV heads as heads"),
    ])  # fmt: skip


def test_2_2_split_query_gate(ex):
    def case(tokens, heads, dim, note=""):
        numbers = torch.arange(1.0, 1 + tokens * heads * 2 * dim, dtype=torch.float64)
        pairs = numbers.view(tokens, heads, 2, dim)
        args = {"projected": numbers.view(tokens, -1), "num_heads": heads}
        return Case(args, want=(pairs[:, :, 0].clone(), pairs[:, :, 1].clone()), note=note)

    ex.check("split_query_gate", [
        case(1, 1, 2, "one head"), case(1, 2, 1, "two heads"), case(2, 1, 1), case(1, 2, 2), case(3, 4, 5),
    ])  # fmt: skip


def test_2_3_gate_output(ex):
    def case(tokens, heads, dim, hidden):
        attended, gate = random(2, tokens, heads, dim, seed=3)
        w_out = random(hidden, heads * dim, seed=4)
        want = torch.zeros(tokens, hidden, dtype=torch.float64)
        for head in range(heads):
            passed = attended[:, head] / (1 + torch.exp(-gate[:, head]))
            want += passed @ w_out[:, head * dim : (head + 1) * dim].T
        return Case({"attended": attended, "gate": gate, "w_out": w_out}, want)

    ex.check("gate_output", [case(1, 1, 1, 1), case(1, 2, 1, 2), case(2, 2, 3, 6), case(3, 2, 4, 5)])


def test_2_4_delta_step(ex):
    def case(key_dim, value_dim, g, beta, note="", state=None):
        state = random(key_dim, value_dim, seed=5) if state is None else state
        q, k, v = random(key_dim, seed=6), random(key_dim, seed=8), random(value_dim, seed=7)
        k = torch.tensor([0.6, 0.8], dtype=torch.float64) if key_dim == 2 else k / k.norm()
        # The same step as one matrix: S = e^g (1 - beta k k^T) S + beta k v^T.
        keep = torch.eye(key_dim, dtype=torch.float64) - beta * torch.outer(k, k)
        new_state = 2.718281828459045**g * (keep @ state) + beta * torch.outer(k, v)
        out = (new_state * q[:, None]).sum(0)
        return Case({"state": state, "q": q, "k": k, "v": v, "g": g, "beta": beta}, want=(out, new_state), note=note)

    ex.check("delta_step", [
        case(1, 1, 0.0, 1.0, "an empty state", torch.zeros(1, 1, dtype=torch.float64)),
        case(1, 2, 0.0, 1.0, "beta 1 replaces what was there"), case(1, 2, -0.7, 0.0, "beta 0 only forgets"),
        case(2, 1, -0.7, 0.5, "forget and correct"), case(2, 3, -0.7, 0.5, "dk and dv differ"),
        case(3, 3, -0.2, 0.8, "dk = dv"), case(8, 5, -1.5, 0.3),
    ])  # fmt: skip


def test_2_5_route(ex):
    def by_expert(function, **args):
        ids, weights, shared = function(**args)
        weights = dict(zip(ids.tolist(), weights.tolist(), strict=True))
        return {"weight by expert": dict(sorted(weights.items())), "shared expert": float(shared)}

    def case(logits, shared_logit, num_chosen, note=""):
        logits, shared_logit = (torch.tensor(x, dtype=torch.float64) for x in (logits, shared_logit))
        chosen = sorted(range(len(logits)), key=lambda i: -logits[i])[:num_chosen]
        total = sum(logits[i].exp() for i in chosen)
        weights = {i: float(logits[i].exp() / total) for i in sorted(chosen)}
        want = {"weight by expert": weights, "shared expert": float(1 / (1 + (-shared_logit).exp()))}
        args = {"router_logits": logits, "shared_logit": shared_logit, "num_chosen": num_chosen}
        return Case(args, want, note, run=by_expert)

    ex.check("route", [
        case([2.0, 1.0], -1.0, 1, "one expert of two: its weight is 1"), case([1.0, 0.0, 2.0], 0.5, 2),
        case([0.1, -0.4, 1.3, 0.7, -2.0, 0.9], 2.0, 3), case([0.1, -0.4, 1.3, 0.7], -3.0, 4, "all are chosen"),
    ])  # fmt: skip


def test_2_6_bytes_to_remember(ex):
    def case(num_tokens, kv, state, conv, note, dtype_bytes=2, state_dtype_bytes=4, **sizes):
        nothing = dict.fromkeys(asdict(LARGE), 0) | {"conv_kernel": 1}
        shape = ex.Shape(**(nothing | sizes))
        args = {"shape": shape, "num_tokens": num_tokens, "dtype_bytes": dtype_bytes,
                "state_dtype_bytes": state_dtype_bytes}  # fmt: skip
        return Case(args, {"kv_bytes": kv, "state_bytes": state, "conv_bytes": conv}, note)

    LARGE = ex.Shape(num_full_layers=23, num_linear_layers=69, num_mtp_layers=0, num_query_heads=64, num_kv_heads=4,
                     head_dim=256, num_key_heads=16, num_value_heads=128, key_dim=128, value_dim=128,
                     conv_kernel=4)  # fmt: skip
    attention = dict(num_full_layers=2, num_query_heads=8, num_kv_heads=2, head_dim=3)
    linear = dict(num_linear_layers=3, num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=5)
    mib = 2**20
    ex.check("bytes_to_remember", [
        case(1, 48, 0, 0, "two attention layers, one token", **attention),
        case(7, 7 * 48, 0, 0, "two attention layers, seven tokens", **attention),
        case(7, 7 * 24, 0, 0, "FP8 keys and values", dtype_bytes=1, **attention),
        case(7, 7 * 72, 0, 0, "an MTP layer is an attention layer", num_mtp_layers=1, **attention),
        case(7, 0, 3 * 120 * 4, 0, "three DeltaNet layers, a convolution of one", **linear),
        case(7, 0, 3 * 120 * 2, 3 * 46 * 2 * 2, "a convolution of three, bfloat16 states", state_dtype_bytes=2,
             **linear | {"conv_kernel": 3}),
        case(7, 7 * 48, 3 * 120 * 4, 3 * 46 * 3 * 2, "both kinds", **attention | linear | {"conv_kernel": 4}),
        case(8192, 8192 * 94_208, 552 * mib, 69 * 20_480 * 3 * 2, "the 2.4T model", **asdict(LARGE)),
    ])  # fmt: skip


def test_2_7_sample(ex):
    def case(logits, want, note="", temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0, dtype=torch.float64):
        args = {"logits": torch.tensor(logits, dtype=dtype), "temperature": temperature, "top_k": top_k,
                "top_p": top_p, "min_p": min_p, "uniform": uniform}  # fmt: skip
        return Case(args, want, note)

    # Logits whose probabilities at temperature 1 are .1 .4 .2 .3.
    tenths = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log().tolist()
    cases = [case(tenths, want, "no filter", uniform=u) for u, want in [(0.05, 0), (0.3, 1), (0.6, 2), (0.8, 3)]]
    cases += [
        case([1.0, 2.0], 1, "greedy, whatever the random number", temperature=0.0),
        case([1.0, 2.0, 2.0], 1, "greedy, of equal ones the lowest id", temperature=0.0, uniform=0.9),
        case([2.0, 1.0], 0, "temperature 2 makes .62 of .73", temperature=2.0, uniform=0.61),
        case([2.0, 1.0], 1, "temperature 2 makes .62 of .73", temperature=2.0, uniform=0.65),
        case([2.0, 1.0], 0, "temperature 0.5 makes .88 of .73", temperature=0.5, uniform=0.85),
        case([20.0, 10.0], 0, "half precision, a tiny temperature", temperature=1e-4, uniform=0.9, dtype=torch.float16),
        case([-torch.inf, 1.0], 1, "a masked token, a tiny temperature", temperature=1e-4, uniform=0.0),
    ]
    cases += [
        case([0.0] * 4, 2, "four equal ones: .25 + .25 does not exceed .5", uniform=0.5),
        case([0.0] * 4, 1, "four equal ones: the first two reach top_p=.5", top_p=0.5, uniform=0.99),
        case([0.0] * 4, 1, "four equal ones: the lower ids come first", top_k=2, uniform=0.99),
        case([0.0] * 4, 3, "four equal ones: each is as likely as the likeliest", min_p=1.0, uniform=0.99),
    ]
    filters = [
        ("top_k=2 leaves .4 and .3", {"top_k": 2}, [(0.0, 1), (0.56, 1), (0.58, 3), (0.99, 3)]),
        ("top_k=1", {"top_k": 1}, [(0.99, 1)]),
        ("top_k larger than the vocabulary", {"top_k": 9}, [(0.05, 0), (0.95, 3)]),
        ("top_p=.5: .4 is not enough, .4 + .3 is", {"top_p": 0.5}, [(0.0, 1), (0.58, 3), (0.99, 3)]),
        ("top_p=.3: the first token reaches it", {"top_p": 0.3}, [(0.0, 1), (0.99, 1)]),
        ("top_p=.75 leaves .4, .3 and .2", {"top_p": 0.75}, [(0.0, 1), (0.5, 2), (0.7, 3)]),
        ("top_k=2, then top_p=.5 of these two", {"top_k": 2, "top_p": 0.5}, [(0.0, 1), (0.99, 1)]),
        ("min_p=.6 leaves what is at least .24", {"min_p": 0.6}, [(0.0, 1), (0.56, 1), (0.58, 3)]),
        ("min_p=.4 leaves what is at least .16", {"min_p": 0.4}, [(0.0, 1), (0.46, 2), (0.99, 3)]),
        ("temperature 2 makes .16 .33 .23 .28 of them, of which .33 + .28 is not enough",
         {"temperature": 2.0, "top_p": 0.65}, [(0.0, 1), (0.45, 2), (0.99, 3)]),
    ]  # fmt: skip
    cases += [case(tenths, want, note, uniform=u, **knobs) for note, knobs, rows in filters for u, want in rows]
    ex.check("sample", cases)


def share_recalled(write_gates, seeds):
    """Write 60 pairs into a state as the gates say; the share of questions answered right, mean over the seeds."""
    shares = []
    for seed in seeds:
        unit = torch.nn.functional.normalize
        keys, values = unit(random(40, 16, seed=seed), dim=-1), unit(random(64, 16, seed=seed + 100), dim=-1)
        draw = torch.Generator().manual_seed(seed)
        chances = torch.rand(40, generator=draw, dtype=torch.float64) ** 6
        pairs = [torch.randint(n, (60,), generator=draw).tolist() for n in (40, 64)]
        state = torch.zeros(16, 16, dtype=torch.float64)
        for key, value in zip(*pairs, strict=True):
            k, v = keys[key], values[value]
            g, beta = write_gates(state.clone(), k.clone(), v.clone(), float(chances[key]))
            if not (g <= 0 and 0 <= beta <= 1):
                raise ValueError(f"g = {g}, beta = {beta}; g must be at most 0, beta from 0 to 1")
            state = state * 2.718281828459045 ** float(g)
            state = state + torch.outer(k, beta * (v - k @ state))
        last = dict(zip(*pairs, strict=True))
        right = [chances[key] for key, value in last.items() if int((values @ (keys[key] @ state)).argmax()) == value]
        shares.append(float(sum(right) / sum(chances[key] for key in last)))
    return sum(shares) / len(shares)


def test_2_8_write_gates(ex):
    ex.check("write_gates", [Case({"seeds": list(range(1000, 1008))}, want=AtLeast(0.65), run=share_recalled)])
