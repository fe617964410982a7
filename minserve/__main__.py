"""The command line: `minserve generate`, `race`, `doctor`, `bench`, `train`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import MappingProxyType

from minserve.errors import InvalidValue, MinserveError

# what `minserve bench` measures, and which options each takes besides --model, --rounds, --threads and --json
BENCHES = MappingProxyType(
    {
        "serve": ("against", "requests", "batch_size", "prompt_tokens", "output_tokens", "trace", "timeline"),
        "decode": ("against", "max_tokens"),
        "engine": ("requests",),
        "prefix": ("max_tokens",),
        "tree": (),
        "delta": (),
        "drafts": ("draft", "batch", "temperature", "draft_tokens", "draft_model", "max_tokens", "quick"),
    }
)


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status; an error of ours is one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="minserve", description="Serve a hybrid language model, from scratch.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands)
    _add_race(commands)
    doctor = commands.add_parser("doctor", help="what this machine has, what the model is, what is missing for what")
    doctor.add_argument("--model", help="a checkpoint folder; the shipped model unless given")
    doctor.set_defaults(run=run_doctor)
    _add_bench(commands)
    _add_train(commands)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except MinserveError as error:
        print(f"minserve: {error}", file=sys.stderr)
        return 2


def _add_generate(commands: argparse._SubParsersAction) -> None:
    """The options of `minserve generate`. Changes: the parser."""
    generate = commands.add_parser("generate", help="stream a completion, then say where the time went")
    generate.add_argument("prompt")
    generate.add_argument("--model", help="a checkpoint folder; the shipped model unless given")
    generate.add_argument("--dtype", default="float32")
    generate.add_argument("--max-tokens", type=int, default=200)
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    generate.add_argument("--top-p", type=float, default=0.95)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message in a chat")
    generate.set_defaults(run=run_generate)


def _add_race(commands: argparse._SubParsersAction) -> None:
    """The options of `minserve race`. Changes: the parser."""
    race = commands.add_parser("race", help="eight prompts, one of them yours: generate() in a loop against the engine")
    race.add_argument("prompt", nargs="?", default="def area(", help="yours (default 'def area(')")
    race.add_argument("--model", help="a checkpoint folder; the shipped model unless given")
    race.add_argument("--dtype", default="float32")
    race.add_argument("--max-tokens", type=int, default=120, help="of your output (default 120)")
    race.add_argument("--seed", type=int, default=0)
    race.add_argument("--speed", type=float, default=1.0, help="of the replay: 0.5 is half as fast as it was")
    race.set_defaults(run=run_race)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    """The options of `minserve bench`. Changes: the parser."""
    bench = commands.add_parser("bench", help="speeds as ratios against a peer in the same run")
    what = "serve: many requests at once (the default); decode: one request; engine: a step without the model; prefix: "
    what += "requests with the same beginning; tree: the prefix cache's; delta: the delta rule in chunks; "
    what += "drafts: who guesses tokens ahead"
    bench.add_argument("what", nargs="?", choices=tuple(BENCHES), default="serve", help=what)
    bench.add_argument("--model", help="a checkpoint folder; the shipped model unless given")
    bench.add_argument("--rounds", type=int, help="how often each runs (default 3; decode 5)")
    bench.add_argument("--threads", type=int, help="torch's threads")
    bench.add_argument("--json", action="store_true", help="print JSON instead of a table")
    bench.add_argument("--against", choices=("transformers",), help="serve, decode: a peer on the same weights")
    bench.add_argument("--requests", type=int, help="serve, engine: how many (default 64; engine 256)")
    bench.add_argument("--batch-size", type=int, help="serve: of the static batches (default: all requests in one)")
    lengths = {"type": int, "nargs": 2, "metavar": ("SHORTEST", "LONGEST")}
    bench.add_argument("--prompt-tokens", **lengths, help="serve: lengths of prompts (default 32 512)")
    bench.add_argument("--output-tokens", **lengths, help="serve: lengths of outputs (default 16 128)")
    bench.add_argument("--trace", metavar="FILE", help="serve: write the engine's run for ui.perfetto.dev")
    bench.add_argument("--timeline", metavar="FILE.png", help="serve: draw the static batch beside the engine")
    bench.add_argument(
        "--max-tokens", type=int, help="decode, drafts, prefix: length of outputs (default 128; prefix 32)"
    )
    several = "drafts: {} (default {}), several at once"
    drafters = "drafts: none, ngram, mtp, model, shuffled; all drafts in each step with -always behind the name "
    drafters += "(default ngram mtp model shuffled shuffled-always)"
    bench.add_argument("--draft", nargs="+", metavar="WHO", help=drafters)
    bench.add_argument("--batch", nargs="+", type=int, help=several.format("requests in a step", "1 32"))
    bench.add_argument("--temperature", nargs="+", type=float, help=several.format("temperatures", "0 0.8"))
    bench.add_argument("--draft-tokens", type=int, help="drafts: of a request in a step, at most (default 3)")
    bench.add_argument("--draft-model", help="drafts: model's checkpoint folder; the small one that ships unless given")
    bench.add_argument("--quick", action="store_true", default=None, help="drafts: a few tokens, to see that it runs")
    bench.set_defaults(run=run_bench)


def _add_train(commands: argparse._SubParsersAction) -> None:
    """The options of `minserve train`. Changes: the parser."""
    train = commands.add_parser("train", help="train a model that ships from the Python standard library")
    train.add_argument("--shape", choices=("tiny", "tiny_attention", "tiny_draft"), default="tiny")
    train.add_argument("--minutes", type=float, default=82.0)
    train.add_argument("--out", required=True, help="a folder; a training begun there goes on")
    train.set_defaults(run=run_train)


def run_generate(args: argparse.Namespace) -> int:
    """Stream one completion, then its figures."""
    from minserve.llm import LLM, EngineConfig, SamplingParams
    from minserve.model.tokenizer import chat_prompt

    llm = LLM(args.model, config=EngineConfig(dtype=args.dtype))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    print(f"caches: {llm.engine.sizes}\n", file=sys.stderr)
    message = [{"role": "user", "content": args.prompt}]
    output = None
    print("" if args.chat else args.prompt, end="")
    for piece in llm.stream(chat_prompt(message, llm.tokenizer) if args.chat else args.prompt, params):
        print(piece.text, end="", flush=True)
        output = piece.output
    if output.error:
        print(f"\nminserve: {output.error}", file=sys.stderr)
        return 2
    times, usage = output.timings, output.usage
    rate = (usage.completion_tokens - 1) / (times.finished - times.first_token) if usage.completion_tokens > 1 else 0
    print(f"\n\nTTFT {times.ttft * 1e3:.1f} ms, then {rate:.0f} tokens/s\n\n{output.explain()}")
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    """Print what there is and what is missing."""
    from minserve.doctor import report

    print(report(args.model))
    return 0


def run_race(args: argparse.Namespace) -> int:
    """Record both sides, replay them where there is a terminal, and say how it ended."""
    import shutil
    import time

    from minserve.clock import RealClock
    from minserve.race import recording, screen

    screen.check_speed(args.speed)
    size = shutil.get_terminal_size()
    fits = size.columns >= screen.MIN_COLUMNS and size.lines >= screen.MIN_LINES
    shown = sys.stdout.isatty() and fits
    if shown:
        print("recording the loop, then the engine; the replay shows both on one clock", flush=True)
    race = recording.run_race(args.prompt, args.model, args.max_tokens, args.seed, args.dtype)
    if shown:
        screen.replay(race, sys.stdout, size.columns, RealClock(), time.sleep, args.speed)
        print()
    print(screen.result(race))
    return 0


def run_bench(args: argparse.Namespace) -> int:
    """Measure what was asked for and print it."""
    for name in sorted({name for names in BENCHES.values() for name in names} - {*BENCHES[args.what]}):
        if getattr(args, name) is not None:
            raise InvalidValue(f"--{name.replace('_', '-')}", getattr(args, name), f"left out of bench {args.what}")
    if args.threads is not None:
        import torch

        if args.threads < 1:
            raise InvalidValue("--threads", args.threads, "at least 1")
        torch.set_num_threads(args.threads)
    benches = {"serve": _bench_serve, "decode": _bench_decode, "engine": _bench_engine, "prefix": _bench_prefix,
               "tree": _bench_tree, "delta": _bench_delta, "drafts": _bench_drafts}  # fmt: skip
    print(benches[args.what](args))
    return 0


def _given(**options: object) -> dict[str, object]:
    """The options that were given; the others keep the defaults of the function that is called."""
    return {name: value for name, value in options.items() if value is not None}


def _bench_serve(args: argparse.Namespace) -> str:
    """Many requests at once."""
    from minserve.bench import serving

    for file in filter(None, (args.trace, args.timeline)):
        if not Path(file).absolute().parent.is_dir():
            raise InvalidValue("file", file, "in a folder that exists")
    if args.timeline:
        from minserve import plots  # first of all: without matplotlib, better now than after minutes
    lengths = {name: tuple(getattr(args, name) or ()) or None for name in ("prompt_tokens", "output_tokens")}
    bench = serving.bench_serving(
        args.model, against=args.against, batch_size=args.batch_size,
        **_given(num_requests=args.requests, rounds=args.rounds, **lengths),
    )  # fmt: skip
    if args.trace:
        from minserve.spans import chrome_trace

        chrome_trace(bench.logs["continuous"], args.trace)
    if args.timeline:
        logs = {name: bench.logs[name] for name in ("static", "continuous")}
        plots.timeline("What is each request doing, in a static batch and in the engine?", logs).savefig(args.timeline)
    return serving.to_json(bench) if args.json else serving.table(bench)


def _bench_decode(args: argparse.Namespace) -> str:
    """One request alone."""
    from minserve.bench import decode

    given = _given(num_tokens=args.max_tokens, rounds=args.rounds)
    results = decode.bench_decode(args.model, against=args.against, **given)
    return decode.to_json(results) if args.json else decode.table(results, args.against or "naive")


def _bench_engine(args: argparse.Namespace) -> str:
    """A step without the model."""
    from minserve.bench import bookkeeping

    given = _given(num_requests=args.requests, rounds=args.rounds)
    results = bookkeeping.bench_bookkeeping(args.model, **given)
    return bookkeeping.to_json(results) if args.json else bookkeeping.table(results)


def _bench_prefix(args: argparse.Namespace) -> str:
    """Requests with the same beginning."""
    from minserve.bench import prefix

    results = prefix.bench_prefix(args.model, **_given(max_tokens=args.max_tokens, rounds=args.rounds))
    return prefix.to_json(results) if args.json else prefix.table(results)


def _bench_tree(args: argparse.Namespace) -> str:
    """The tree of the prefix cache, by itself."""
    from minserve.bench import tree

    if args.model is not None:
        raise InvalidValue("--model", args.model, "left out of bench tree")
    results = tree.bench_tree(**_given(rounds=args.rounds))
    return tree.to_json(results) if args.json else tree.table(results)


def _bench_delta(args: argparse.Namespace) -> str:
    """The delta rule of one layer, in chunks and token by token."""
    from minserve.bench import delta

    results = delta.bench_delta(args.model, **_given(rounds=args.rounds))
    return delta.to_json(results) if args.json else delta.table(results)


def _bench_drafts(args: argparse.Namespace) -> str:
    """Who guesses tokens ahead, against nobody."""
    from minserve.bench import drafts

    given = _given(drafters=args.draft, batches=args.batch, temperatures=args.temperature, rounds=args.rounds,
                   draft_tokens=args.draft_tokens, num_tokens=args.max_tokens, draft_path=args.draft_model)  # fmt: skip
    bench = drafts.bench_drafts(args.model, **{**(drafts.QUICK if args.quick else {}), **given})
    return drafts.to_json(bench) if args.json else drafts.table(bench)


def run_train(args: argparse.Namespace) -> int:
    """Train, then measure and write the checkpoint."""
    from minserve.model.publish import publish
    from minserve.model.shipped_shapes import shape
    from minserve.model.train import TrainConfig, train

    config = shape(args.shape)
    state = train(config, TrainConfig(minutes=args.minutes), args.out)
    print(f"wrote {publish(state, config, state / args.shape)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
