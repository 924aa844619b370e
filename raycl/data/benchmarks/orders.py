"""Named streams: every published task order under a name that means one thing.

SAPT's order 3 is GainLoRA's 4, and SLM's order 7 is not MIGU's 7; so each order has a platform name and the papers'
numbers are aliases with the paper in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from raycl import plugins
from raycl.data.benchmarks.knowledge import PublishedTask
from raycl.errors import ConfigError, PluginError, meant
from raycl.plugins import load_object

BUILTIN = "builtin"
"""The stream of short tasks that need no files."""


@dataclass(frozen=True)
class Benchmark:
    """A published order of tasks (canonical names).

    Attributes:
        test_only: its tasks are never trained on, so no train files are needed.
        known: task -> what is known of it, where `knowledge.TASKS` does not have it.
    """

    name: str
    tasks: tuple[str, ...]
    test_only: bool = False
    known: Mapping[str, PublishedTask] = field(default_factory=dict)


def find(name: str) -> Benchmark | None:
    """Return the benchmark called `name`, or whose alias that is, else one of an installed package, else None.

    Case does not matter but for those of packages.

    Raises:
        PluginError: the package cannot be used.
    """
    folded = name.lower()
    benchmark = _BY_NAME.get(ALIASES.get(folded, folded))
    if benchmark is None and name != BUILTIN:
        benchmark = load_object("order", name, Benchmark)
        if benchmark is not None and benchmark.name != name:
            raise PluginError(
                f"{plugins.find('order', name)} is a benchmark of the name '{benchmark.name}': expected the same"
            )
    return benchmark


def require(name: str) -> Benchmark:
    """Return the benchmark called `name`.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    benchmark = find(name)
    if benchmark is None:
        hint = meant(name, sorted({BUILTIN, *ORDERS, *ALIASES, *plugins.names("order")}))
        raise ConfigError(f"unknown stream '{name}': {hint}; a stream of your own needs 'tasks'")
    return benchmark


_MIDDLE = ("imdb", "sst2", "dbpedia", "agnews")

ORDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "std-1": ("dbpedia", "amazon", "yahoo", "agnews"),
        "std-2": ("dbpedia", "amazon", "agnews", "yahoo"),
        "std-3": ("yahoo", "amazon", "agnews", "dbpedia"),
        "bert-4": ("agnews", "yelp", "amazon", "yahoo", "dbpedia"),
        "bert-5": ("yelp", "yahoo", "amazon", "dbpedia", "agnews"),
        "bert-6": ("dbpedia", "yahoo", "agnews", "amazon", "yelp"),
        "bert-7": ("yelp", "agnews", "dbpedia", "amazon", "yahoo"),
        "idbr-1": ("agnews", "yelp", "yahoo"),
        "idbr-2": ("yelp", "yahoo", "agnews"),
        "idbr-3": ("yahoo", "agnews", "yelp"),
        "llama-8": ("medical", "mmlu", "finance"),
        "llama-9": ("finance", "mmlu", "medical"),
        "long-A": (
            *("mnli", "cb", "wic", "copa", "qqp", "boolq", "rte", "imdb"),
            *("yelp", "amazon", "sst2", "dbpedia", "agnews", "multirc", "yahoo"),
        ),
        "long-B": ("multirc", "boolq", "wic", "mnli", "cb", "copa", "qqp", "rte", *_MIDDLE, "yelp", "amazon", "yahoo"),
        "long-C": ("yelp", "amazon", "mnli", "cb", "copa", "qqp", "rte", *_MIDDLE, "yahoo", "multirc", "boolq", "wic"),
        "superni-1": (
            *("task1572_samsum_summary", "task363_sst2_polarity_classification", "task1290_xsum_summarization"),
            *("task181_outcome_extraction", "task002_quoref_answer_generation"),
            *("task1510_evalution_relation_extraction", "task639_multi_woz_user_utterance_generation"),
            *("task1729_personachat_generate_next", "task073_commonsenseqa_answer_generation"),
            *("task1590_diplomacy_text_generation", "task748_glucose_reverse_cause_event_detection"),
            *("task511_reddit_tifu_long_text_summarization", "task591_sciq_answer_generation"),
            *("task1687_sentiment140_classification", "task875_emotion_classification"),
        ),
        "superni-2": (
            *("task748_glucose_reverse_cause_event_detection", "task073_commonsenseqa_answer_generation"),
            *("task1590_diplomacy_text_generation", "task639_multi_woz_user_utterance_generation"),
            *("task1572_samsum_summary", "task1687_sentiment140_classification", "task591_sciq_answer_generation"),
            *("task363_sst2_polarity_classification", "task1510_evalution_relation_extraction"),
            *("task1729_personachat_generate_next", "task181_outcome_extraction"),
            *("task511_reddit_tifu_long_text_summarization", "task002_quoref_answer_generation"),
            *("task1290_xsum_summarization", "task875_emotion_classification"),
        ),
        "superni-unseen": (
            *("task360_spolin_yesand_response_generation", "task574_air_dialogue_sentence_generation"),
            *("task1714_convai3_sentence_generation", "task180_intervention_extraction"),
            *("task678_ollie_actual_relationship_answer_generation", "task1410_dart_relationship_extraction"),
            *("task339_record_answer_generation", "task670_ambigqa_question_generation"),
            *("task1327_qa_zre_answer_generation_from_question", "task522_news_editorial_summary"),
            *("task1356_xlsum_title_generation", "task1499_dstc3_summarization"),
            *("task421_persent_sentence_sentiment_classification", "task833_poem_sentiment_classification"),
            "task929_products_reviews_classification",
        ),
        "das": ("restaurant", "acl", "ai", "phone", "pubmed", "camera"),
    }
)
"""Orders 1 to 3 as in SLM (T5), O-LoRA and MIGU; bert, llama: SLM; idbr: IDBR as in SLM's code; long, superni: SAPT
and O-LoRA; das: MIGU, whose paper confirms the first three tasks, the rest follow the first line of ContinualLM."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "sapt-1": "superni-1",
        "sapt-2": "superni-2",
        "sapt-3": "long-a",
        "sapt-4": "long-c",
        "gainlora-3": "long-c",
        "gainlora-4": "long-a",
        **{f"{paper}-{number}": f"std-{number}" for paper in ("migu", "olora", "slm") for number in (1, 2, 3)},
        **{f"{paper}-4": "long-a" for paper in ("migu", "olora")},
        **{f"{paper}-5": "long-b" for paper in ("migu", "olora")},
        **{f"{paper}-6": "long-c" for paper in ("migu", "olora")},
        "migu-7": "das",
        **{f"slm-{number}": f"bert-{number}" for number in (4, 5, 6, 7)},
        **{f"slm-{number}": f"llama-{number}" for number in (8, 9)},
    }
)
"""The papers' numbers, in lower case."""

_BY_NAME: Mapping[str, Benchmark] = MappingProxyType(
    {name.lower(): Benchmark(name, tasks, name == "superni-unseen") for name, tasks in ORDERS.items()}
)
