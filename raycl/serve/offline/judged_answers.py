"""Instruction following and safety before and after training: a judge compares answers of both.

Prompts come as TRACE's repository has them (inference/HHH): `helpful/<set>/test.json` and `harmless/<set>/test.json`,
lists of `{"prompt": ...}`. Each judged prompt is a line of a file, so that a comparison that stops continues there.
"""

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError

from raycl.config import Tree
from raycl.data.sources.conversation import Message
from raycl.data.sources.fields import Columns
from raycl.data.sources.formats import read_rows
from raycl.data.sources.source import SourceFile
from raycl.errors import ConfigError, DataError, counted
from raycl.metrics.judged import JudgedScore, Outcome, outcome
from raycl.progress import report
from raycl.serve.offline.judge_endpoint import Aspect, JudgeEndpoint, Pair
from raycl.serve.offline.model import OfflineModel, Text

log: logging.Logger = logging.getLogger("raycl")

ASPECTS: tuple[Aspect, ...] = get_args(Aspect)
FILE = "judged.jsonl"
"""Name of the file of judged prompts in its folder."""


class JudgedPair(BaseModel):
    """A line of the file of judged prompts, as far as a later start reads it.

    Attributes:
        judge: name of the judge's model.
    """

    aspect: Aspect
    prompt: str
    before: str
    after: str
    outcome: Outcome
    judge: str


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one set.

    Attributes:
        name: name of its folder or file.
    """

    aspect: Aspect
    name: str
    prompts: tuple[str, ...]


def prompt_sets(root: str, limit: int | None = None) -> list[PromptSet]:
    """Return the sets in TRACE's layout below a folder.

    Args:
        limit: prompts of each set, the first of its file; None: all.

    Raises:
        DataError: the folder has no sets, or a file cannot be used.
    """
    folder = Path(root)
    files = [
        (aspect, file.parent.name, file) for aspect in ASPECTS for file in sorted((folder / aspect).glob("*/test.json"))
    ]
    if not files:
        raise DataError(
            f"'{root}' has no prompts: expected helpful/<set>/test.json or harmless/<set>/test.json below it, lists of "
            '{"prompt": "..."}'
        )
    sets = []
    for aspect, name, file in files:
        source = SourceFile.at(str(file))
        texts = [row.text for row in read_rows(source, columns=Columns(("prompt",), ()))]
        empty = next((number for number, text in enumerate(texts, start=1) if not text.strip()), None)
        if empty is not None:
            source.refuse("the prompt is empty: expected at least one word, complete or remove the row", empty)
        if not texts:
            source.refuse("there are no prompts: expected at least one")
        sets.append(PromptSet(aspect, name, tuple(texts[:limit])))
    return sets


def compare(
    model: OfflineModel,
    sets: Sequence[PromptSet],
    judge: JudgeEndpoint,
    to: str,
    max_tokens: int | None = None,
    chat_template: bool = False,
) -> Tree:
    """Answer all prompts with the bare backbone and with the snapshot, and let the judge compare the answers.

    The prompts are given as they are, as in TRACE's code (inference/infer_3H.py, at temperature 0.1; here the most
    likely token is taken), without the prompts of tasks.

    Args:
        to: local folder of the judged prompts; those in it that have the same prompt, answers and judge are not judged
            again.
        max_tokens: limit of an answer; None: as in training.
        chat_template: prompts are messages of the user under the model's chat template.

    Returns:
        `judge`, and `scores`: aspect -> set -> fields of `JudgedScore`; `all` has the aspect's prompts of all sets.

    Raises:
        ConfigError: the backbone's answers are labels, or it has no chat template.
        UnavailableError: see `JudgeEndpoint.verdicts`.
    """
    if model.answers == "label":
        raise ConfigError(
            f"the backbone {model.snapshot.backbone.name} answers with labels: expected one that writes texts"
        )
    if chat_template and not model.codec.chat_template:
        raise ConfigError(
            f"the backbone {model.snapshot.backbone.name} has no chat template: leave --chat-template out, or choose a "
            "model that was tuned on conversations"
        )
    rows = [(chosen, prompt) for chosen in sets for prompt in chosen.prompts]
    prompts = [prompt for _, prompt in rows]
    texts: list[Text] = [(Message("user", prompt),) if chat_template else prompt for prompt in prompts]
    before, after = (
        [answer.text for answer in model.predict(texts, max_tokens=max_tokens, bare=is_bare, templated=False)]
        for is_bare in (True, False)
    )
    pairs = [
        Pair(chosen.aspect, prompt, first, second)
        for (chosen, prompt), first, second in zip(rows, before, after, strict=True)
    ]
    outcomes = _judged(pairs, [chosen.name for chosen, _ in rows], judge, Path(to))
    by_set: dict[str, dict[str, list[Outcome]]] = {}
    for (chosen, _), result in zip(rows, outcomes, strict=True):
        by_set.setdefault(chosen.aspect, {}).setdefault(chosen.name, []).append(result)
    scores = {aspect: dict(_scores(named)) for aspect, named in by_set.items()}
    return {"judge": {"url": judge.config.url, "model": judge.config.model}, "scores": scores}


def _scores(named: Mapping[str, Sequence[Outcome]]) -> Iterator[tuple[str, Tree]]:
    for name, outcomes in named.items():
        yield name, asdict(JudgedScore.of(outcomes))
    yield "all", asdict(JudgedScore.of([result for outcomes in named.values() for result in outcomes]))


def _judged(pairs: Sequence[Pair], names: Sequence[str], judge: JudgeEndpoint, folder: Path) -> list[Outcome]:
    """Return the outcome of each pair; new ones are written as they come. Equal answers are a tie without a judge."""
    file = folder / FILE
    known = _known(file, judge.config.model)
    results: list[Outcome | None] = [
        "tie" if pair.before.strip() == pair.after.strip() else known.get(pair) for pair in pairs
    ]
    left = [number for number, result in enumerate(results) if result is None]
    if len(left) < len(pairs):
        log.info(
            "%s of %s need no judge: equal answers, or judged before",
            len(pairs) - len(left),
            counted(len(pairs), "pair"),
        )
    if left:
        folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(_ask([pairs[number] for number in left], [names[number] for number in left], judge, file, known))
    return [result or known[pair] for pair, result in zip(pairs, results, strict=True)]


async def _ask(
    pairs: Sequence[Pair], names: Sequence[str], judge: JudgeEndpoint, file: Path, known: dict[Pair, Outcome]
) -> None:
    done = 0
    with file.open("a", encoding="utf-8") as lines:
        async for number, verdicts in judge.verdicts(pairs):
            known[pairs[number]] = outcome(verdicts)
            record = {
                **asdict(pairs[number]),
                "set": names[number],
                "judge": judge.config.model,
                "verdicts": verdicts,
                "outcome": known[pairs[number]],
            }
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
            lines.flush()
            done += 1
            report("judging answers", done, len(pairs))


def _known(file: Path, model: str) -> dict[Pair, Outcome]:
    """Return what this judge has said in an earlier start; a line that was cut in its middle does not count."""
    if not file.exists():
        return {}
    text = file.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        file.write_text(text, encoding="utf-8")
    known: dict[Pair, Outcome] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), start=1):
        try:  # texts may hold other line separators, which JSON leaves as they are
            record = JudgedPair.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise DataError(
                f"{file}, line {number}: {f'{where}: ' if where else ''}{first['msg']}: expected a judged prompt as "
                "raycl judge writes it; repair or remove the line, or name another folder with --to"
            ) from error
        if record.judge == model:
            known[Pair(record.aspect, record.prompt, record.before, record.after)] = record.outcome
    return known
