"""Command line: ``python -m scheduler replay SCENARIO.json``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import commandline
from commandline import Parser, user_input
from scheduler.replay import load_scenario, replay


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m scheduler", description="The scheduler's decisions, step by step."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "replay",
        help="replay a scenario file and print one JSON object a step",
        description="Replay a scenario and print its decisions, one JSON object a step: who was granted how "
        "many tokens, admitted, preempted and finished, which blocks were taken, hit and evicted. "
        "Field by field the decision log of vLLM's scheduler for the same scenario, but for requests "
        "that can never be served: those are refused at arrival (`refuse`).",
    )
    command.add_argument("scenario", type=Path, metavar="SCENARIO.json")
    command.add_argument(
        "--explain",
        action="store_true",
        help="say in words, instead of the log, why each refusal and preemption happened",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 ran, 2 the scenario cannot be run)."""
    args = build_parser().parse_args(argv)
    return commandline.run(lambda: _replay(args))


def _replay(args: argparse.Namespace) -> int:
    sentences: list[str] = []
    with user_input():
        scenario = load_scenario(args.scenario)
    for entry in replay(scenario, explain=sentences):
        if not args.explain:
            print(json.dumps(entry, separators=(",", ":")))
    if args.explain:
        print("\n".join(sentences) or "nothing was refused or preempted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
