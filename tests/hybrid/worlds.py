"""Models with what each says plainly, and prompts that are served by them one after the other."""

from known_prefixes import KnownPrefixes
from ledger import Ledger, PlainLedger
from served import Plain, cached_tokens, check_idle, make_engine, one_by_one, serve_right, small_models, tokens

A = tokens(24)
# Page size, snapshot spacing and budget: equal, coprime, larger and smaller than one another.
SIZES = [(4, 8, 8), (3, 8, 5), (1, 3, 64), (4, 64, 3), (16, 5, 7), (5, 1, 14), (8, 4, 2), (7, 12, 11)]


def all_worlds():
    """A model and what it says plainly, by name."""
    ledgers = {"ledger": Ledger(), "attention ledger": Ledger(has_states=False)}
    return {name: (model, Plain(model)) for name, model in small_models().items()} | {
        name: (model, PlainLedger(model)) for name, model in ledgers.items()
    }


def engine_of(model, size, parts=None, **more):
    """An engine of these sizes, with room for all that is kept unless the test says otherwise."""
    page_size, every, batch_tokens = size
    own = {"num_pages": 1600 // page_size, "num_states": 700}
    return make_engine(model, parts, page_size=page_size, snapshot_every=every, batch_tokens=batch_tokens, **own | more)


def serve_as_known(world, size, prompts, max_tokens=2, parts=None):
    """Serve prompts one after the other; fail unless each is right and reuses what is known by then, token for token.

    Returns how many tokens each reused.
    """
    model, plain = world
    engine, asks = engine_of(model, size, parts), one_by_one(prompts, max_tokens)
    answers = serve_right(engine, plain, asks)
    known = KnownPrefixes(*size, has_states=engine.cache.snapshots is not None)
    wanted = [known.serve(ask.prompt_ids, answer.token_ids) for ask, answer in zip(asks, answers, strict=True)]
    assert [cached for _, cached in cached_tokens(engine)] == wanted
    check_idle(engine)
    return wanted


def shared(num, length=24, seed=1):
    """A prompt that shares so many tokens with A, and goes on by itself."""
    return (*A[:num], *((token + 1 + (i == 0)) % 25 for i, token in enumerate(A[num:length], start=seed)))
