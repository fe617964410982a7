"""The command line: `minserve generate`, `doctor`, `bench`, `train`."""

from __future__ import annotations

import argparse
import sys

from minserve.errors import MinserveError


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status; an error of ours is one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="minserve", description="Serve a hybrid language model, from scratch.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands)
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


def _add_bench(commands: argparse._SubParsersAction) -> None:
    """The options of `minserve bench`. Changes: the parser."""
    bench = commands.add_parser("bench", help="decode speed at batch 1, as a ratio against a peer in the same run")
    bench.add_argument("--model", help="a checkpoint folder; the shipped model unless given")
    bench.add_argument("--against", choices=("transformers",), help="a peer on the same weights")
    bench.add_argument("--max-tokens", type=int, default=128)
    bench.add_argument("--rounds", type=int, default=5)
    bench.add_argument("--json", action="store_true", help="print JSON instead of a table")
    bench.set_defaults(run=run_bench)


def _add_train(commands: argparse._SubParsersAction) -> None:
    """The options of `minserve train`. Changes: the parser."""
    train = commands.add_parser("train", help="train a model that ships from the Python standard library")
    train.add_argument("--shape", choices=("tiny", "tiny_attention"), default="tiny")
    train.add_argument("--minutes", type=float, default=82.0)
    train.add_argument("--out", required=True, help="a folder; a training begun there goes on")
    train.set_defaults(run=run_train)


def run_generate(args: argparse.Namespace) -> int:
    """Stream one completion, then its figures."""
    from minserve.llm import LLM, EngineConfig, SamplingParams
    from minserve.model.tokenizer import chat_prompt

    llm = LLM(args.model, config=EngineConfig(dtype=args.dtype))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed)
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


def run_bench(args: argparse.Namespace) -> int:
    """Measure decode speed and print it."""
    from minserve.bench import bench_decode, table, to_json

    results = bench_decode(args.model, num_tokens=args.max_tokens, rounds=args.rounds, against=args.against)
    print(to_json(results) if args.json else table(results))
    return 0


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
