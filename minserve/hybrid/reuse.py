"""How much of a prompt two caches give back together, and where states are kept so that they can.

Pages hold every token, and can be cut anywhere. A state holds all tokens up to one count, and nothing can be taken out
of it again. So what a prompt reuses ends where a kept state ends, not where the pages do:

    prompt      |--------------------------------|        40 tokens
    pages hit   |--------------------|                    26: up to there the tokens are the same
    states kept         8       16          32            one past the page hit has seen somebody else's tokens
    reused      |---------------|                         16; tokens 16 .. 39 are run

Pan et al., Marconi: Prefix Caching for the Era of Hybrid LLMs (arXiv 2411.19379).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def match_hybrid(page_hit: int, snapshots: Sequence[int], num_tokens: int) -> int:
    """How many tokens of a request are reused: the deepest state at or below the page hit, and one token is left over.

    Arguments:
        page_hit: tokens whose keys and values are cached.
        snapshots: token counts of the states kept along the matched path, in any order; some may lie past the hit.
        num_tokens: the request's tokens, the last of which must be run, for its logits are wanted.

    >>> match_hybrid(26, [8, 16, 32], 40), match_hybrid(32, [8, 16, 32], 32), match_hybrid(7, [8], 40)
    (16, 16, 0)
    """
    return max((count for count in snapshots if count <= min(page_hit, num_tokens - 1)), default=0)


def next_snapshot(start: int, num_tokens: int, page_size: int, every: int, branches: Iterable[int] = ()) -> int | None:
    """Where the next state of a request is kept: the first such count after `start`, or None up to its last token.

    Arguments:
        start: tokens computed so far.
        num_tokens: tokens known.
        page_size: tokens per page; a state is kept at the last page boundary that another request with this very
            prompt could start from.
        every: a state is kept at each multiple of it.
        branches: where this request and others part.

    >>> next_snapshot(0, 21, page_size=4, every=8), next_snapshot(16, 21, 4, 8), next_snapshot(20, 21, 4, 8)
    (8, 20, None)
    """
    points = ((start // every + 1) * every, (num_tokens - 1) // page_size * page_size, *branches)
    return min((point for point in points if start < point <= num_tokens), default=None)
