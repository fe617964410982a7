"""Which functions compute: the one place where the engine's `impl` turns into code.

"torch" is the readable reference, and the default on a CPU. "triton" takes the kernel of every pair that has one.
"train" computes every expert on every token (see `expert_mix_dense`), and is the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from minserve.deltanet.conv_tail import conv_tail_ragged
from minserve.deltanet.gated_delta import gated_delta_ragged
from minserve.errors import InvalidValue
from minserve.experts.expert_mix import expert_mix, expert_mix_dense
from minserve.paging.paged_attention import paged_attention, write_pages
from minserve.radix.shared_prefix_attention import shared_prefix_attention
from minserve.speculation.verify import verify

IMPLEMENTATIONS = ("torch", "triton", "train")


class Implementation(NamedTuple):
    """The functions behind the layers and the memory, by the name of their reference."""

    expert_mix: Callable
    write_pages: Callable
    paged_attention: Callable
    shared_prefix_attention: Callable
    conv_tail_ragged: Callable
    gated_delta_ragged: Callable
    verify: Callable


def choose_implementation(impl: str) -> Implementation:
    """The functions of an implementation.

    Errors: InvalidValue for an unknown name; MissingRequirement for "triton" where that is not installed.
    """
    reference = Implementation(
        expert_mix, write_pages, paged_attention, shared_prefix_attention, conv_tail_ragged, gated_delta_ragged, verify
    )
    if impl == "torch":
        return reference
    if impl == "train":
        return reference._replace(expert_mix=expert_mix_dense)
    if impl == "triton":
        from minserve.deltanet import conv_tail_triton, gated_delta_triton
        from minserve.paging import paged_attention_triton as paging
        from minserve.radix import shared_prefix_attention_triton as radix
        from minserve.speculation import verify_triton

        return reference._replace(
            write_pages=paging.write_pages,
            paged_attention=paging.paged_attention,
            shared_prefix_attention=radix.shared_prefix_attention,
            conv_tail_ragged=conv_tail_triton.conv_tail_ragged,
            gated_delta_ragged=gated_delta_triton.gated_delta_ragged,
            verify=verify_triton.verify,
        )
    raise InvalidValue("impl", impl, "one of " + ", ".join(IMPLEMENTATIONS), "EngineConfig.impl")
