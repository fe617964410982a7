"""Check shapes and types for real: every annotated tensor function of these modules runs under jaxtyping and beartype.

It costs some 50 microseconds a call. The notebooks run without it, in processes of their own.
"""

from importlib.util import find_spec

import jaxtyping
import pytest

CHECKED = [  # kernels are none of them: Triton wants a function as it is written
    "minserve.attention_merge",
    "minserve.batching.ragged_attention",
    "minserve.choosing",
    "minserve.deltanet.conv_tail",
    "minserve.deltanet.gated_delta",
    "minserve.deltanet.tail_copy",
    "minserve.experts.expert_mix",
    "minserve.hybrid.cache_memory",
    "minserve.hybrid.packing",
    "minserve.model.joined_projections",
    "minserve.model.layers",
    "minserve.model.losses",
    "minserve.model.mtp",
    "minserve.model.naive",
    "minserve.model.optimizer",
    "minserve.model.static_memory",
    "minserve.model.step",
    "minserve.paging.paged_attention",
    "minserve.radix.shared_prefix_attention",
    "minserve.sampling",
    "minserve.speculation.verify",
]

if find_spec("beartype"):
    jaxtyping.install_import_hook(CHECKED, "beartype.beartype")


@pytest.fixture(scope="module")
def shapes_unchecked():
    """Leaves the shape checks out of files that run thousands of short steps: they cost more than a step."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
