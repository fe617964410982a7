"""The loads on which the scored exercises of chapters 3 and 4 are tried, and the clocks that play them."""

import numpy as np


def share_in_time(share_step, rate_per_s, cv, max_ttft_s, max_itl_s, cost, seed):
    """Serve 200 requests whose prompts `share_step` computes in chunks; the share that came in time, every token."""
    rng, num_requests = np.random.default_rng(seed), 200
    arrived_s = np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate_per_s, num_requests)).tolist()
    left = rng.lognormal(5.0, 1.2, num_requests).clip(4, 2000).astype(int).tolist()  # prompt tokens still to compute
    outputs = rng.geometric(1 / 30, num_requests).tolist()  # output tokens still to come
    coming, prompts, decoding, good, now_s = [*range(num_requests)], [], [], {*range(num_requests)}, 0.0
    while coming or prompts or decoding:
        now_s = now_s if prompts or decoding else max(now_s, arrived_s[coming[0]])
        while coming and arrived_s[coming[0]] <= now_s:
            prompts.append(coming.pop(0))
        shown = [(arrived_s[i], left[i]) for i in prompts]
        chunks = share_step(now_s, len(decoding), list(shown), cost, max_ttft_s, max_itl_s)
        refuse_no_share(chunks, shown, decoding)
        step_s = cost.overhead_s + cost.per_token_s * (len(decoding) + sum(num for _, num in chunks))
        now_s += step_s
        good -= {*decoding} if step_s > max_itl_s else set()
        for place, num_tokens in chunks:
            left[prompts[place]] -= num_tokens
        begun = [i for i in prompts if left[i] == 0]
        good -= {i for i in begun if now_s > arrived_s[i] + max_ttft_s}
        prompts, decoding = [i for i in prompts if left[i]], decoding + begun
        for i in decoding:
            outputs[i] -= 1
        decoding = [i for i in decoding if outputs[i]]
    return len(good) / num_requests


def refuse_no_share(chunks, prompts, decoding):
    """Raise unless these are (position, tokens), each position once, tokens that are left, and some progress."""
    places = [place for place, _ in chunks]
    if len(places) != len({*places}) or not {*places} <= {*range(len(prompts))}:
        raise ValueError(f"{places} are not different positions among {len(prompts)} prompts")
    if any(not 0 <= num_tokens <= prompts[place][1] for place, num_tokens in chunks):
        raise ValueError(f"{chunks} has more tokens than are left, or fewer than none; (arrived, left): {prompts}")
    if not decoding and not any(num_tokens for _, num_tokens in chunks):
        raise ValueError("nothing runs in this step, for ever")


def share_finished(admit, num_pages, page_size, num_steps, seed):
    """Let `admit` choose among 150 requests for so many steps; the share of them that finished."""
    rng, num_requests = np.random.default_rng(seed), 150
    prompts = rng.lognormal(4.0, 0.8, num_requests).clip(1, 300).astype(int).tolist()
    waiting = list(zip(prompts, rng.lognormal(4.0, 1.0, num_requests).clip(1, 300).astype(int).tolist(), strict=True))
    running, num_finished = [], 0

    def num_held(requests):
        return sum(-(-tokens // page_size) for tokens, _ in requests)

    for _ in range(num_steps):
        chosen = admit(list(running), list(waiting), num_pages - num_held(running), page_size)
        if len(chosen) != len({*chosen}) or not {*chosen} <= {*range(len(waiting))}:
            raise ValueError(f"{chosen} are not different positions among {len(waiting)} waiting")
        running += [waiting[i] for i in chosen]
        waiting = [request for i, request in enumerate(waiting) if i not in chosen]
        running = [(tokens + 1, left - 1) for tokens, left in running]
        while num_held(running) > num_pages:
            running.pop()
        num_finished += sum(left == 0 for _, left in running)
        running = [request for request in running if request[1]]
    return num_finished / num_requests
