"""Chapter 3, batching: who runs in a step, and how rows of different lengths share one call.

A packed batch holds the tokens of all rows one after another: row r owns tokens row_starts[r] to row_starts[r + 1] - 1.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch


def pack(rows: list[tuple[list[int], int, int]]) -> dict[str, list]:
    """Lay the slices that run in this step one after another, and say which of them get a new token.

    Args:
        rows: (tokens, start, stop) of each request: all its tokens so far, and the slice [start, stop) that runs. A row
            that is idle in this step has start = stop.

    Returns:
        "token_ids" and "positions" in the request, of every packed token. "row_starts", one number more than rows.
        "chosen_at", for each row: the packed index of the token from which its next one is chosen, or None. Only a row
        that runs its last token so far gets a new one: not a prompt in the middle, not an idle row.

    >>> packed = pack([([5, 6, 7], 2, 3), ([8, 9], 0, 1)])
    >>> packed["token_ids"], packed["positions"], packed["row_starts"], packed["chosen_at"]
    ([7, 8], [2, 0], [0, 1, 2], [0, None])
    """
    # solution: 3.1 [10 min, easy] one loop over the rows; where does a row's last token land?
    token_ids, positions, row_starts, chosen_at = [], [], [0], []
    for tokens, start, stop in rows:
        token_ids += tokens[start:stop]
        positions += range(start, stop)
        row_starts.append(len(token_ids))
        runs_last = start < stop == len(tokens)
        chosen_at.append(len(token_ids) - 1 if runs_last else None)
    return {"token_ids": token_ids, "positions": positions, "row_starts": row_starts, "chosen_at": chosen_at}
    # end


def merge_softmax(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two attentions of the same queries, over different keys, as if all keys had been attended to at once.

    The log-sum-exp of a query's scores says how much weight stands behind its output: e^lse.

    Args:
        out_a, out_b: [tokens, dim], each part's output, its softmax over its own keys.
        lse_a, lse_b: [tokens], log of the sum of e^score over these keys. A part without a key has lse -inf and out 0.

    Returns:
        The output [tokens, dim] and lse [tokens] over all keys. Where neither part has a key: 0 and -inf, never NaN.

    >>> out, lse = merge_softmax(torch.tensor([[8.0]]), torch.tensor([0.0]), torch.tensor([[4.0]]), torch.tensor([0.0]))
    >>> out.tolist(), round(lse.item(), 3)
    ([[6.0]], 0.693)
    """
    # solution: 3.2 [15 min, medium] the weights are e^lse; subtract the larger lse first, unless it is -inf
    top = torch.maximum(lse_a, lse_b)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    out = weight_a[:, None] * out_a + weight_b[:, None] * out_b
    return out / total.clamp(min=1.0)[:, None], top + torch.log(total)  # total is 0, or 1 to 2
    # end


def ragged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_starts: torch.Tensor, context_starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the rows of a packed batch attend in one call, each causally to its own context, however long that is.

    A row's queries are the last tokens of its context: a decoding row has one query, a prompt at once as many as keys.

    Args:
        q: [tokens, heads, dim]; row r owns queries row_starts[r] to row_starts[r + 1] - 1, maybe none.
        k, v: [positions, kv_heads, dim]; row r's context is positions context_starts[r] to context_starts[r + 1] - 1,
            its own queries' included. Heads 0..n-1 share KV head 0, the next n KV head 1, and so on.
        row_starts, context_starts: int, [rows + 1]. A row that only fills a batch up has queries and no context.

    Returns:
        The output [tokens, heads, dim], scores scaled by dim ** -0.5, and the log-sum-exp of the scores
        [tokens, heads]; 0 and -inf for a row that has no context.

    >>> one, bounds = torch.ones(3, 1, 1), torch.tensor([0, 1, 3])
    >>> ragged_attention(one, one, torch.tensor([[[5.0]], [[6.0]], [[8.0]]]), bounds, bounds)[0].flatten().tolist()
    [5.0, 6.0, 7.0]
    """
    # solution: 3.3 [30 min, medium] one row at a time; the last query sees all of its context
    out, lse = torch.zeros_like(q), torch.zeros_like(q[:, :, 0])
    share = q.shape[1] // k.shape[1]
    for row in range(len(row_starts) - 1):
        mine, context = slice(*row_starts[row : row + 2]), slice(*context_starts[row : row + 2])
        keys, values = k[context].repeat_interleave(share, dim=1), v[context].repeat_interleave(share, dim=1)
        queries = q[mine]
        positions = torch.arange(len(keys) - len(queries), len(keys))
        scores = torch.einsum("thd,shd->ths", queries, keys) * q.shape[-1] ** -0.5
        hidden = torch.arange(len(keys)) > positions[:, None]
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        out[mine] = torch.einsum("ths,shd->thd", scores.softmax(-1), values)
        lse[mine] = scores.logsumexp(-1)
    return out, lse
    # end


@dataclass(frozen=True)
class Request:
    """Where a request stands: what a batcher must know of it."""

    id: int
    arrived_s: float
    num_tokens: int  # known so far: the prompt, then the output too
    num_computed: int  # of these, those that have run: their keys and values are in pages
    num_pages: int  # pages that it holds
    phase: str  # "prefill" until all that is known when it starts has run, then "decode": one token a step


def plan(
    running: list[Request], waiting: list[Request], batch_tokens: int, max_running: int, free_pages: int, page_size: int
) -> list[tuple[int, int, int, str]]:
    """Decide who runs in a step and which of its tokens: a batch that requests join and leave at every step.

    All share one budget of tokens. First every decoding row runs its one token, so that nobody who is reading waits.
    What is left goes to the running prompts, then to the queue. A slice begins at num_computed and ends at num_tokens,
    or before: where the budget ends, or the room in the pages (its own and the free ones). Who gets no token is left
    out. Pages are taken as slices need them.

    From the queue the oldest goes first, and nobody overtakes. A request is admitted, maybe for a part of its prompt,
    while fewer than max_running run and the pages that are free by then would do for all its tokens. One for whom the
    free pages and those of all running together would not do is refused at its turn, or it would block the queue for
    ever: (id, 0, 0, "refused").

    Args:
        running, waiting: in the order in which they are served, before this step.
        batch_tokens, max_running: tokens in this step and requests that run at the same time, at most.
        free_pages: pages that nobody holds.
        page_size: tokens that fit in a page.

    Returns:
        (id, start, stop, phase): decoding rows, running prompts, then the queue. The phase is the request's own.

    >>> old, new = Request(7, 0.0, 9, 8, 3, "decode"), Request(8, 1.0, 20, 0, 0, "prefill")
    >>> plan([old], [new], batch_tokens=8, max_running=4, free_pages=5, page_size=4)
    [(7, 8, 9, 'decode'), (8, 0, 7, 'prefill')]
    """
    # solution: 3.4 [45 min, hard] three kinds of requests, one way to run a slice; count budget and pages down
    decoding = [request for request in running if request.phase == "decode"]
    prefilling = [request for request in running if request.phase == "prefill"]
    pool = free_pages + sum(request.num_pages for request in running)
    num_running, planned = len(running), []
    for request in decoding + prefilling + waiting:
        if request in waiting:
            missing = math.ceil(request.num_tokens / page_size) - request.num_pages
            if missing > pool:
                planned.append((request.id, 0, 0, "refused"))
                continue
            if num_running == max_running or missing > free_pages:
                break
            num_running += 1
        start = request.num_computed
        room = (request.num_pages + free_pages) * page_size
        stop = min(request.num_tokens, start + batch_tokens, room)
        if stop > start:
            planned.append((request.id, start, stop, request.phase))
            batch_tokens -= stop - start
            free_pages -= max(0, math.ceil(stop / page_size) - request.num_pages)
    return planned
    # end


def preempt(
    needy: int, running: list[Request], planned: list[tuple[int, int, int, str]], batch_tokens: int, free_pages: int
) -> dict[str, object] | None:
    """Make room when a running request needs a page and none is free: who was let in last gives all its pages back.

    It goes back to the queue, and what it has said stays known: all its num_tokens will be computed again, as one
    prompt. A slice that it has in this step is undone. Who was let in first is never asked: somebody always gets done.

    Args:
        needy: the id of the request that needs a page.
        running: in the order in which they were let in; num_pages counts what they have taken in this step too.
        planned: the slices of this step so far, as `plan` gives them.
        batch_tokens, free_pages: what is left of both in this step.

    Returns:
        "victim", the request as it goes back; "running" without it; "planned", "batch_tokens" and "free_pages" as if it
        had had no part in this step. None when the needy one was itself let in last: it waits for the others.

    Raises:
        ValueError: it is alone. All pages are its own already, so that no waiting will help: it has to end.

    >>> two = [Request(1, 0.5, 9, 8, 2, "decode"), Request(2, 0.7, 30, 4, 1, "prefill")]
    >>> after = preempt(1, two, planned=[], batch_tokens=8, free_pages=0)
    >>> after["victim"].id, after["victim"].num_computed, after["free_pages"]
    (2, 0, 1)
    """
    # solution: 3.5 [15 min, medium] who was let in last? dataclasses.replace makes a request with other counts
    victim = running[-1]
    if len(running) == 1:
        raise ValueError(f"request {needy} needs more pages than there are")
    if victim.id == needy:
        return None
    undone_tokens = sum(stop - start for number, start, stop, _ in planned if number == victim.id)
    return {
        "victim": replace(victim, num_computed=0, num_pages=0, phase="prefill"),
        "running": running[:-1],
        "planned": [row for row in planned if row[0] != victim.id],
        "batch_tokens": batch_tokens + undone_tokens,
        "free_pages": free_pages + victim.num_pages,
    }
    # end


@dataclass(frozen=True)
class StepCost:
    """What a step takes: an overhead, so much per token, and so much per position that a token attends to."""

    overhead_s: float
    per_token_s: float
    per_position_s: float


def budget_for_itl(
    cost: StepCost, decode_contexts: list[int], prompts: list[int], target_s: float, max_batch_tokens: int
) -> int:
    """Find the largest batch_tokens with which the prompts of others do not hold up those who are reading.

    Prompts are computed one after another. Each step runs one token of every decoding row and, with the rest of the
    budget, the next chunk of the prompt (its last one may be shorter). So each step is a gap, an ITL, of those rows.

    Args:
        cost: what a step takes.
        decode_contexts: for each decoding row, the positions that its token attends to, the same in all steps.
        prompts: tokens of each prompt; the token at position p attends to p + 1 positions.
        target_s: seconds that the 99th percentile (np.percentile's) of all these gaps must not exceed.
        max_batch_tokens: the largest budget to consider; the smallest leaves a chunk of one token.

    Returns:
        The budget; 0 if none will do.

    >>> budget_for_itl(StepCost(1.0, 0.5, 0.0), [40, 60], prompts=[8], target_s=4.1, max_batch_tokens=99)
    6
    """
    # solution: 3.6 [25 min, medium] play the steps for one budget, then try budgets: a smaller one may be slower
    rows = len(decode_contexts)
    for batch_tokens in range(max_batch_tokens, rows, -1):
        chunk, gaps_s = batch_tokens - rows, []
        for prompt in prompts:
            for start in range(0, prompt, chunk):
                stop = min(start + chunk, prompt)
                positions = sum(decode_contexts) + sum(range(start + 1, stop + 1))
                tokens = rows + stop - start
                gaps_s.append(cost.overhead_s + cost.per_token_s * tokens + cost.per_position_s * positions)
        if np.percentile(gaps_s, 99) <= target_s:
            return batch_tokens
    return 0
    # end


def share_step(
    now_s: float, num_rows: int, prompts: list[tuple[float, int]], cost: StepCost, max_ttft_s: float, max_itl_s: float
) -> list[tuple[int, int]]:
    """Share a step among the prompts that wait: this one is scored, and there is no best answer.

    Each step runs a token of every decoding row and the chunks that you return; as long as it takes, all of these rows
    wait for their next token. The score is the share of requests whose first token comes within max_ttft_s of arrival
    and of which no later one takes over max_itl_s, mean of several loads, calm and bursty. The whole queue at once
    reaches about 0.20, oldest first in chunks of 64 tokens about 0.50. per_position_s is 0.

    Args:
        now_s, num_rows: the time at which the step begins, and the decoding rows in it.
        prompts: (arrived_s, tokens still to compute) of each request without a first token, oldest first.
        cost: what a step takes.
        max_ttft_s, max_itl_s: the objective.

    Returns:
        (position in `prompts`, tokens of it), each at most once; at least one token where nothing decodes.

    >>> share_step(5.0, 2, [(4.5, 90), (4.8, 30)], StepCost(0.01, 0.001, 0.0), max_ttft_s=1.0, max_itl_s=0.0501)
    [(1, 30), (0, 8)]
    """
    # solution: 3.7 [30 min, open] how long may the step be? Whom can these tokens still help?
    left = max(1, int((max_itl_s - cost.overhead_s) / cost.per_token_s) - num_rows)

    def urgency(i: int) -> tuple[bool, int]:
        arrived_s, num_tokens = prompts[i]
        first_token_s = now_s + cost.overhead_s + cost.per_token_s * num_tokens
        return first_token_s > arrived_s + max_ttft_s, num_tokens

    chunks = []
    for i in sorted(range(len(prompts)), key=urgency):
        if left > 0:
            chunks.append((i, min(left, prompts[i][1])))
            left -= chunks[-1][1]
    return chunks
    # end
