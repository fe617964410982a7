"""Verification at the size of a real vocabulary."""

from __future__ import annotations

import torch
from pair import INDEX_BYTES, Pair, copied_differences, indices

from minserve.speculation.verify import verify

UNIFORM_BYTES = 8  # random numbers have 53 bits


def verify_tensors(num_rows: int, num_drafts: int, vocab: int, dtype: torch.dtype, device: torch.device):
    """Rows that keep all drafts but the last, so that nobody reads more of the others than one number: the rest is NaN.

    A draft is the token that q likes best; p gives the last none of its probability.
    """
    generator = torch.Generator(device).manual_seed(0)
    p, q = (torch.full((num_rows, num + num_drafts, vocab), torch.nan, device=device, dtype=dtype) for num in (1, 0))
    for x in (p, q):
        logits = torch.randn(num_rows, vocab, generator=generator, device=device)
        x[:, num_drafts - 1] = logits.softmax(-1).to(dtype)
    draft_ids = torch.randint(vocab, (num_rows, num_drafts), generator=generator, device=device)
    draft_ids[:, -1] = q[:, -1].argmax(-1)
    for x in (p[:, :num_drafts], q):
        x[:, :-1] = x[:, :-1].scatter(2, draft_ids[:, :-1, None], 0.5)
    p[:, num_drafts - 1] = p[:, num_drafts - 1].scatter(1, draft_ids[:, -1:], 0)
    accept_u = torch.zeros(num_rows * num_drafts, device=device, dtype=torch.float64)
    sample_u = torch.rand(num_rows, generator=generator, device=device, dtype=torch.float64)
    row_starts = indices((row * (num_drafts + 1) for row in range(num_rows + 1)), device)
    return p.flatten(0, 1), draft_ids.flatten(), q.flatten(0, 1), row_starts, accept_u, sample_u


def verify_pair(num_rows: int, num_drafts: int, vocab: int) -> Pair:
    """A step's drafts verified, and a token chosen for each row."""
    drafts = num_rows * num_drafts
    numbers = 2 * (num_rows * vocab + drafts - num_rows)  # of each row's last draft all, of the others one, in p and q
    tables = (drafts + 3 * num_rows + 1) * INDEX_BYTES  # drafts and where rows begin; two results for each
    return Pair(
        "verify", f"{num_rows} rows of {num_drafts} drafts, {vocab:,} tokens",
        tensors=lambda dtype, device: verify_tensors(num_rows, num_drafts, vocab, dtype, device),
        num_bytes=lambda dtype: numbers * dtype.itemsize + (drafts + num_rows) * UNIFORM_BYTES + tables,
        reference=verify, differences=copied_differences,
    )  # fmt: skip
