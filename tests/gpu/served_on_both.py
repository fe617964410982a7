"""The shipped model served twice, by the reference on a CPU and by the kernels on a device, and the answers compared.

Greedy outputs may part where two tokens are equally likely, and stay apart from there. So the comparison is forced: the
CPU's outputs are scored by both, token for token, on the same tokens before them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minserve import LLM, EngineConfig, SamplingParams
from minserve.request import Output

TOLERANCE = 1e-4  # of the largest logit: what float32 is allowed everywhere in this project
NUM_LIKELIEST = 5  # tokens among which the other one of a tie is looked for
PROMPTS = (
    "def area(",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "for i in range(10):\n",
    '"""Read a file, line by line."""\n\nwith open(name) as file:\n    for line in file:\n        ',
    "x",
    "def fib(n):\n    if n < 2:\n        return n\n    return " + "fib(n - 1) + " * 12,
    "try:\n    value = int(text)\nexcept ValueError",
)


class Served(NamedTuple):
    """What came of it.

    Fields: `error` the largest difference between the two log-probabilities of a token, and its `bound`; `num_scored`
    tokens; of `num_outputs` greedy ones, `num_same` are equal to the last token; `gaps` of the others: how much
    likelier on the CPU its own token was than the device's, where they first differ.
    """

    error: float
    bound: float
    num_scored: int
    num_outputs: int
    num_same: int
    gaps: tuple[float, ...]

    @property
    def num_wrong(self) -> int:
        """Outputs that part where no tie explains it."""
        return sum(not gap <= self.bound for gap in self.gaps)


def config_for(device: str, **options) -> EngineConfig:
    """Kernels and drafts on the device, steps smaller than the prompts together, and every invariant checked."""
    drafts = {"draft": "mtp", "adapt_drafts": False}
    return EngineConfig(device=device, impl="triton", batch_tokens=64, check=True, **drafts, **options)


def served_on_both(device: str, prompts: tuple[str, ...] = PROMPTS, max_tokens: int = 64) -> Served:
    """Serve the prompts greedily on both, and have both score what the CPU wrote."""
    on_cpu, on_device = LLM(config=EngineConfig(batch_tokens=64)), LLM(config=config_for(device))
    largest = torch.zeros(1)
    on_cpu.model.register_forward_hook(lambda module, args, output: note_largest(largest, output.logits))
    greedy = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=NUM_LIKELIEST)
    wanted, found = on_cpu.generate(list(prompts), greedy), on_device.generate(list(prompts), greedy)
    texts = [[*on_cpu.tokenizer.encode(x), *output.token_ids] for x, output in zip(prompts, wanted, strict=True)]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    scores = [scores_of(llm.generate(texts, scored), texts) for llm in (on_cpu, on_device)]
    differences = (scores[0] - scores[1]).abs()
    gaps = [gap_where_they_part(x, y) for x, y in zip(wanted, found, strict=True) if x.token_ids != y.token_ids]
    # A log-probability is a logit less a log-sum-exp, and each of them is off by as much.
    bound = 2 * TOLERANCE * largest.item()
    num_same = len(prompts) - len(gaps)
    return Served(differences.max().item(), bound, len(differences), len(prompts), num_same, tuple(gaps))


def note_largest(largest: torch.Tensor, logits: torch.Tensor) -> None:
    """Keep the largest logit so far. Changes: `largest`."""
    if logits.numel():
        torch.maximum(largest, logits.abs().max(), out=largest)


def scores_of(outputs: list[Output], texts: list[list[int]]) -> torch.Tensor:
    """The log-probability of each token but the first of each text, all in one row; NaN for what is missing."""
    scores = [
        (entry or {}).get(token, float("nan"))
        for output, text in zip(outputs, texts, strict=True)
        for entry, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)
    ]
    return torch.tensor(scores, dtype=torch.float64)


def gap_where_they_part(wanted: Output, found: Output) -> float:
    """How much likelier, on the CPU, its own token was than the device's, where they first differ; 0 is a tie."""
    for ours, theirs, likeliest in zip(wanted.token_ids, found.token_ids, wanted.logprobs, strict=False):
        if ours != theirs:
            return likeliest[ours] - likeliest.get(theirs, float("-inf"))
    return float("inf")  # one of them ended early


def every_knob(device: str, dtype: str, prompts: tuple[str, ...] = PROMPTS, max_tokens: int = 12) -> list[str]:
    """Serve three prompts with all that sampling knows, and with forks, on a device; how each output ended."""
    knobs = dict(max_tokens=max_tokens, ignore_eos=True, logprobs=3, prompt_logprobs=1, logit_bias={65: 1.0, 66: -1.0})
    knobs |= dict(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)
    params = [
        SamplingParams(**knobs),
        SamplingParams(**knobs, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, n=3),
    ]
    outputs = LLM(config=config_for(device, dtype=dtype)).generate(list(prompts[:3]), params)
    return [output.error or output.finish_reason for output in outputs]
