"""Named streams: every published task order under a name that means one thing.

SAPT's order 3 is GainLoRA's 4, and SLM's order 7 is not MIGU's 7; so each order has a platform name and the papers'
numbers are aliases with the paper in front.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from raycl import plugins
from raycl.data.benchmarks.knowledge import PublishedTask, canonical
from raycl.errors import ConfigError, PluginError, meant
from raycl.plugins import load

BUILTIN = "builtin"
"""The stream of short tasks that need no files."""


@dataclass(frozen=True)
class Benchmark:
    """A published order of tasks (canonical names).

    Attributes:
        test_only: its tasks are never trained on, so no train files are needed.
        known: task -> what is known of it, where `knowledge.TASKS` does not have it.
        folder: name of the release's folder that holds its tasks, where a release has several; "": none.
    """

    name: str
    tasks: tuple[str, ...]
    test_only: bool = False
    known: Mapping[str, PublishedTask] = field(default_factory=dict)
    folder: str = ""


def find(name: str) -> Benchmark | None:
    """Return the benchmark called `name`, or whose alias that is, else one of an installed package, else None.

    Case does not matter but for those of packages.

    Raises:
        PluginError: the package cannot be used.
    """
    folded = name.lower()
    benchmark = _BY_NAME.get(ALIASES.get(folded, folded))
    if benchmark is None and name != BUILTIN:
        benchmark = load("order", name, Benchmark)
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


def _superni(*numbers: int) -> tuple[str, ...]:
    return tuple(canonical(f"task{number:03d}") for number in numbers)


_TRACE = ("C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
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
        "superni-1": _superni(1572, 363, 1290, 181, 2, 1510, 639, 1729, 73, 1590, 748, 511, 591, 1687, 875),
        "superni-2": _superni(748, 73, 1590, 639, 1572, 1687, 591, 363, 1510, 1729, 181, 511, 2, 1290, 875),
        "superni-unseen": _superni(360, 574, 1714, 180, 678, 1410, 339, 670, 1327, 522, 1356, 1499, 421, 833, 929),
        "das": ("restaurant", "acl", "ai", "phone", "pubmed", "camera"),
        "trace": _TRACE,
        "trace-2": (
            *("NumGLUE-cm", "NumGLUE-ds", "FOMC", "20Minuten", "C-STANCE", "Py150", "MeetingBank", "ScienceQA"),
        ),
        "trace-500": _TRACE,
    }
)
"""Orders 1 to 3 as in SLM (T5), O-LoRA and MIGU; bert, llama: SLM; idbr: IDBR as in SLM's code; long, superni: SAPT
and O-LoRA; das: MIGU, whose paper confirms the first three tasks, the rest follow the first line of ContinualLM; trace:
TRACE's orders 1 and 2, and order 1 with the release's 500 train rows of each task."""

FOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "trace": "LLM-CL-Benchmark_5000",
        "trace-2": "LLM-CL-Benchmark_5000",
        "trace-500": "LLM-CL-Benchmark_500",
    }
)
"""Order -> the folder of its release, where that has several with the same tasks."""

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
        "trace-1": "trace",
    }
)
"""The papers' numbers, in lower case."""

_BY_NAME: Mapping[str, Benchmark] = MappingProxyType(
    {
        name.lower(): Benchmark(name, tasks, name == "superni-unseen", folder=FOLDERS.get(name, ""))
        for name, tasks in ORDERS.items()
    }
)
