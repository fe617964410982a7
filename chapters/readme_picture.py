"""Draw the README's picture: python chapters/readme_picture.py

It is counted from a published configuration, not drawn by hand.
"""

from pathlib import Path

from minserve import plots
from minserve.model.counting import kv_bytes_per_token, state_bytes
from minserve.model.model_figures import named_config

MODEL = "qwen3.8-2.4t-a95b"
PICTURE = Path(__file__).with_name("readme.png")


def crossing_tokens() -> float:
    """The context at which a request's bfloat16 KV cache has grown as large as its float32 state and convolution tail."""
    config = named_config(MODEL)
    return state_bytes(config) / kv_bytes_per_token(config)


def draw():
    """The figure: what one request makes the server keep, against its length."""
    config, contexts = named_config(MODEL), [2**i for i in range(9, 18)]
    kv = [kv_bytes_per_token(config) * n / 1e6 for n in contexts]
    state = [state_bytes(config) / 1e6] * len(contexts)
    return plots.lines(
        "What must the server keep for one request of Qwen3.8-2.4T?",
        {"KV cache: grows, can be cut into pages": (contexts, kv), "state: fixed, cannot be cut": (contexts, state)},
        "tokens so far", "MB", log_x=True, log_y=True,
    )  # fmt: skip


if __name__ == "__main__":
    draw().savefig(PICTURE, bbox_inches="tight")
    print(f"{PICTURE.name}: the lines cross at {crossing_tokens():,.0f} tokens")
