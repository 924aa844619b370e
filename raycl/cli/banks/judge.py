"""Compare a snapshot's answers with those of the backbone without adapters, by a judge behind an endpoint.

The prompts are those of TRACE's instruction following and safety (helpful/<set>/test.json, harmless/<set>/test.json),
or your own in this layout. The judge sees each pair of answers in both orders. The endpoint's key is read from the
environment (--key-env).

raycl judge runs/mine/bank HHH --url http://127.0.0.1:8000/v1 --model judge
raycl judge runs/mine/bank@main HHH --url https://api.openai.com/v1 --model gpt-4 --to judged --limit 50
"""

import argparse

from raycl.cli.banks import predict
from raycl.cli.commands import at_least, is_override, log_to_stderr, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bank", metavar="BANK[@REF]", help="branch, tag, latest, number or hash of a snapshot; default: main"
    )
    parser.add_argument("words", nargs="+", metavar="FOLDER key.path=value", help="prompts; settings of serving")
    parser.add_argument("--url", required=True, metavar="URL", help="endpoint of OpenAI's chat completions")
    parser.add_argument("--model", required=True, metavar="NAME", help="the judge's model there")
    parser.add_argument("--key-env", metavar="NAME", help="variable with the endpoint's key (default: OPENAI_API_KEY)")
    parser.add_argument("--at-once", metavar="N", type=int, help="requests at the same time (default: 8)")
    parser.add_argument("--timeout-s", metavar="S", type=float, help="seconds for a verdict (default: 120)")
    parser.add_argument(
        "--wait-s", metavar="S", type=float, help="seconds before a request is sent again, twice each time (default: 2)"
    )
    parser.add_argument("--to", default="judged", metavar="FOLDER", help="judged prompts (default: judged)")
    parser.add_argument("--limit", metavar="N", type=at_least(1), help="prompts of each set (default: all)")
    parser.add_argument("--max-tokens", type=at_least(1), default=512, help="of an answer (default: 512)")
    parser.add_argument("--chat-template", action="store_true", help="write prompts as messages of the chat template")


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Separate the folder from settings."""
    options.overrides = [word for word in options.words if is_override(word)]
    folders = [word for word in options.words if not is_override(word)]
    if len(folders) != 1:
        parser.error(f"{len(folders)} folders of prompts: expected one")
    options.folder = folders[0]


def run(options: argparse.Namespace) -> int:
    """Answer all prompts twice, ask the judge, print wins, ties, losses and deltas."""
    from raycl import config as configs
    from raycl.operations.report.tables import judged_table
    from raycl.serve.offline.judge_endpoint import JudgeConfig, JudgeEndpoint
    from raycl.serve.offline.judged_answers import compare, prompt_sets

    log_to_stderr(options)
    given = {name: getattr(options, name) for name in ("url", "model", "key_env", "at_once", "timeout_s", "wait_s")}
    judge = configs.validate(JudgeConfig, {name: value for name, value in given.items() if value is not None})
    sets = prompt_sets(options.folder, options.limit)
    with predict.open_model(options) as model:
        tree = compare(model, sets, JudgeEndpoint(judge), options.to, options.max_tokens, options.chat_template)
    show(options, judged_table(tree), tree)
    return 0
