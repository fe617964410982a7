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
        case(4, 4, 1, 4, [1, 3, 4], "longer"), case(5, 0, 2, 4, [0], "no token"), case(2, 7, 3, 4, [5, 0, 7], "a chunk"),
    ])  # fmt: skip


def kept(StatePool, num_slots, calls):
    """For each call what came back, and how many slots are free; slots are named by the order in which they came.

    All values are written from one pair of tensors, which is changed in place from call to call, as a step may do.
    """
    state, tail, pool, slots, found = torch.zeros(1, 2, 2), torch.zeros(3, 2), None, [], []
    pool = StatePool(num_slots, state_shape=(1, 2, 2), tail_shape=(3, 2))
    for name, *args in calls:
        try:
            if name == "write":
                which, value, num_tokens = args
                state.fill_(value), tail.fill_(-value)
                answer = pool.write(slots[which], state, tail, num_tokens)
            else:
                answer = getattr(pool, name)(*([slots[args[0]], *args[1:]] if args else []))
        except ValueError:
            answer = "ValueError"
        if name == "read" and isinstance(answer, tuple):
            answer = f"state {answer[0].unique().tolist()}, tail {answer[1].unique().tolist()}"
        if name in ("take", "snapshot") and isinstance(answer, int):
            slots.append(answer)
            answer = f"slot {len({*slots[:-1]} - {answer})}" if answer in range(num_slots) else "a slot of nobody"
        found.append(f"{name}: {answer}; {pool.num_free} free")
    return found


def test_6_2_state_pool(ex):
    def case(num_slots, note, *rows):
        """Rows of (call, its arguments ..., what came back, free slots); a read gives the value that was written."""
        calls, want = [row[:-2] for row in rows], []
        for name, *_, answer, num_free in rows:
            if name == "read" and answer != "ValueError":
                answer = f"state [{float(answer)}], tail [{-float(answer)}]"
            want.append(f"{name}: {answer}; {num_free} free")
        return Case({"num_slots": num_slots, "calls": calls}, want, note + "; slot 0 is the first that came", run=kept)

    one, full = ("take", "slot 0", 2), ("write", 0, 7, 4, None, 2)
    snap = ("snapshot", 0, "slot 1", 1)
    error = "ValueError"
    ex.check("StatePool", [
        case(1, "all of a pool of one", ("take", "slot 0", 0), ("take", None, 0)),
        case(3, "zeros, which have seen nothing", one, ("read", 0, 0, "0", 2)),
        case(3, "written and read", one, full, ("read", 0, 4, "7", 2)),
        case(3, "read for the token before", one, full, ("read", 0, 3, error, 2)),
        case(3, "read for the token after", one, full, ("read", 0, 5, error, 2)),
        case(3, "read as if it had seen nothing", one, full, ("read", 0, 0, error, 2)),
        case(3, "written twice", one, full, ("write", 0, 8, 5, None, 2), ("read", 0, 5, "8", 2)),
        case(3, "two slots, written one after the other", one, ("take", "slot 1", 1), ("write", 0, 7, 4, None, 1),
             ("write", 1, 8, 6, None, 1), ("read", 0, 4, "7", 1), ("read", 1, 6, "8", 1)),
        case(3, "a snapshot", one, full, snap, ("read", 1, 4, "7", 1)),
        case(3, "a snapshot has the stamp of what it was made of", one, full, snap, ("read", 1, 0, error, 1)),
        case(3, "its request goes on", one, full, snap, ("write", 0, 8, 5, None, 1), ("read", 1, 4, "7", 1),
             ("read", 0, 5, "8", 1)),
        case(3, "somebody goes on from the snapshot itself", one, full, snap, ("write", 1, 8, 5, None, 1),
             ("read", 0, 4, "7", 1), ("read", 1, 5, "8", 1)),
        case(3, "the request ends, its snapshot stays", one, full, snap, ("release", 0, None, 2),
             ("read", 1, 4, "7", 2), ("read", 0, 4, error, 2)),
        case(3, "a snapshot of a snapshot", one, full, snap, ("snapshot", 1, "slot 2", 0), ("release", 1, None, 1),
             ("read", 2, 4, "7", 1)),
        case(1, "there is no room for a snapshot", ("take", "slot 0", 0), ("write", 0, 7, 4, None, 0),
             ("snapshot", 0, None, 0), ("read", 0, 4, "7", 0)),
        case(1, "taken anew, with zeros in it", ("take", "slot 0", 0), ("write", 0, 7, 4, None, 0),
             ("release", 0, None, 1), ("take", "slot 0", 0), ("read", 0, 4, error, 0), ("read", 0, 0, "0", 0)),
        case(3, "given back twice", one, ("release", 0, None, 3), ("release", 0, error, 3)),
        case(3, "written after it was given back", one, ("release", 0, None, 3), ("write", 0, 7, 4, error, 3),
             ("take", "slot 0", 2), ("read", 0, 0, "0", 2)),
        case(3, "a snapshot of nobody's slot", one, ("release", 0, None, 3), ("snapshot", 0, error, 3)),
    ])  # fmt: skip


def test_6_3_crossing_point(ex):
    def case(want, note, kv_dtype_bytes=2, state_dtype_bytes=4, **changes):
        nothing = dict(num_layers=2, full_attention_interval=2, num_kv_heads=1, head_dim=1, num_key_heads=1,
                       num_value_heads=1, key_dim=1, value_dim=1, conv_kernel=1)  # fmt: skip
        args = {"model": ex.Hybrid(**nothing | changes), "kv_dtype_bytes": kv_dtype_bytes}
        return Case(args | {"state_dtype_bytes": state_dtype_bytes}, want, note)

    published = dict(num_layers=92, full_attention_interval=4, num_kv_heads=4, head_dim=256, num_key_heads=16,
                     num_value_heads=128, key_dim=128, value_dim=128, conv_kernel=4)  # fmt: skip
    shipped = dict(num_layers=8, full_attention_interval=4, num_kv_heads=2, head_dim=32, num_key_heads=1,
                   num_value_heads=2, key_dim=64, value_dim=64, conv_kernel=4)  # fmt: skip
    ex.check("crossing_point", [
        case((1, 4e-9), "a matrix of one number, 4 bytes, and 4 bytes a token"),
        case((2, 8e-9), "two numbers, 8 bytes, and 4 bytes a token", value_dim=2),
        case((4, 16e-9), "two value heads", num_value_heads=2, value_dim=2),
        case((4, 8e-9), "the KV cache in FP8", kv_dtype_bytes=1, key_dim=2),
        case((3, 12e-9), "bfloat16 matrices", state_dtype_bytes=2, value_dim=6),
        case((4, 16e-9), "a convolution of three: two inputs of three channels are kept", conv_kernel=3),
        case((6, 24e-9), "five channels of it, and two keys of two", conv_kernel=2, num_key_heads=2, key_dim=2,
             value_dim=1, num_value_heads=1) if False else
        case((6, 22e-9), "two key heads", conv_kernel=4, num_key_heads=1 + 1, num_value_heads=1, key_dim=1, value_dim=1,
             ) if False else case((3, 12e-9), "four layers, one of them attention", num_layers=4,
                                  full_attention_interval=4),
        case((2, 8e-9), "two thirds are linear", num_layers=6, full_attention_interval=3) if False else
        case((2, 16e-9), "six layers, two of them attention", num_layers=6, full_attention_interval=3),
        case((1, 4e-9), "a wide KV head", num_kv_heads=3, head_dim=5),
        case((402, 205_824e-9), "the shipped model", **shipped),
        case((6234, 0.587292672), "the 2.4T", **published),
        case((12468, 0.587292672), "the 2.4T, its KV cache in FP8", kv_dtype_bytes=1, **published),
        case((3163, 0.297885696 + 69 * 20_480 * 6e-9 - 8_478_720e-9), "the 2.4T", state_dtype_bytes=2, **published),
    ])  # fmt: skip
