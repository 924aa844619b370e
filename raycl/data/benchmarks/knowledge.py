"""Facts about the public tasks: label sets, metrics, folder names, prompts.

Files do not contain which answers are allowed or how a paper scores them. Sources: SAPT's and O-LoRA's data releases
and papers, TRACE's code and measurements of its data by others; metrics as each paper reports them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from raycl.data.sources.fields import CHOICES_HEADER, Columns
from raycl.types import PromptName

_GRADES = ("very negative", "negative", "neutral", "positive", "very positive")
_TRUTH = ("True", "False")


@dataclass(frozen=True)
class PublishedTask:
    """One public task.

    Attributes:
        labels: its closed label set, None for free text, "auto" where the release fixes none.
        metric: name of its score.
        folders: further names of its folder on disk (case, `-` and `_` never matter).
        group: O-LoRA's task group, which chooses the instruction; empty outside that benchmark.
        prompt: meaning of `prompt: auto` for text backbones (O-LoRA's file layout means `olora`).
        unlabelled: label texts that mark a row without a label.
        instruction: the paper's text before every input; None: the file's, if it has one.
        around: text between instruction and input, and behind the input (TRACE), which rows of the release contain with
            the instruction. It is taken off the rows, and the prompt puts it back.
        columns: columns of text and answer in its published files.
        type: its kind, in SAPT's table 3.
        words: label -> the single word that stands for it where answers are one word each.
    """

    labels: tuple[str, ...] | Literal["auto"] | None
    metric: str = "exact_match"
    folders: tuple[str, ...] = ()
    group: str = ""
    prompt: PromptName = "long"
    unlabelled: tuple[str, ...] = ()
    instruction: str | None = None
    around: tuple[str, str] = ("", "")
    columns: Columns = field(default_factory=Columns)
    type: str = ""
    words: Mapping[str, str] = field(default_factory=dict)


OLORA_GROUPS = ("SC", "TC", "NLI", "QQP", "BoolQA", "COPA", "MultiRC", "WiC")

OLORA_INSTRUCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "SC": "What is the sentiment of the following paragraph? Choose one from the option.",
        "TC": "What is the topic of the following paragraph? Choose one from the option.",
        "NLI": 'What is the logical relationship between the "sentence 1" and the "sentence 2"? '
        "Choose one from the option.",
        "QQP": 'Whether the "first sentence" and the "second sentence" have the same meaning? '
        "Choose one from the option.",
        "BoolQA": "According to the following passage, is the question true or false? Choose one from the option.",
        "MultiRC": "According to the following passage and question, is the candidate answer true or false? "
        "Choose one from the option.",
        "WiC": "Given a word and two sentences, whether the word is used with the same sense in both sentence? "
        "Choose one from the option.",
    }
)
"""O-LoRA paper, appendix table of instructions, word for word; COPA has none."""

_GRADE_WORDS = MappingProxyType(dict(zip(_GRADES, ("terrible", "bad", "middle", "good", "wonderful"), strict=True)))
"""These words and those below: the labels of LFPT5's few-shot files, cut to their first word (SLM, appendix A.4)."""

_AG = ("World", "Sports", "Business", "Science or Technology")
_AG_WORDS = MappingProxyType({name: name.split()[0].lower() for name in _AG})
_DBPEDIA_WORDS = MappingProxyType(
    {
        **{name: name.lower() for name in ("Company", "Artist", "Athlete", "Building", "Village", "Animal", "Plant")},
        **{name: name.lower().replace(" ", "") for name in ("Educational Institution", "Office Holder")},
        **{name: name.lower().replace(" ", "") for name in ("Mean of Transportation", "Natural Place", "Written Work")},
        "Album": "album",
        "Film": "film",
    }
)
_YAHOO = (
    *("Society & Culture", "Science & Mathematics", "Health", "Education & Reference", "Computers & Internet"),
    *("Sports", "Business & Finance", "Entertainment & Music", "Family & Relationships", "Politics & Government"),
)
_YAHOO_WORDS = MappingProxyType({name: name.split()[0].lower() for name in _YAHOO})

_LONG: Mapping[str, PublishedTask] = {
    "yelp": PublishedTask(_GRADES, group="SC", words=_GRADE_WORDS),
    "amazon": PublishedTask(_GRADES, group="SC", words=_GRADE_WORDS),
    "sst2": PublishedTask(("Good", "Bad"), group="SC"),
    "imdb": PublishedTask(("Good", "Bad"), group="SC"),
    "agnews": PublishedTask(_AG, folders=("ag",), group="TC", words=_AG_WORDS),
    "dbpedia": PublishedTask(
        (
            *("Company", "Educational Institution", "Artist", "Athlete", "Office Holder"),
            *("Mean of Transportation", "Building", "Natural Place", "Village", "Animal"),
            *("Plant", "Album", "Film", "Written Work"),
        ),
        folders=("db", "dbpedia14"),
        group="TC",
        words=_DBPEDIA_WORDS,
    ),
    "yahoo": PublishedTask(_YAHOO, group="TC", words=_YAHOO_WORDS),
    "mnli": PublishedTask(("contradiction", "entailment", "neutral"), group="NLI", unlabelled=("-",)),
    "cb": PublishedTask(("contradiction", "entailment", "neutral"), group="NLI"),
    "rte": PublishedTask(("contradiction", "entailment"), group="NLI"),
    "qqp": PublishedTask(("yes", "no"), group="QQP"),
    "boolq": PublishedTask(_TRUTH, folders=("boolqa",), group="BoolQA"),
    "multirc": PublishedTask(_TRUTH, group="MultiRC"),
    "wic": PublishedTask(_TRUTH, group="WiC"),
    "copa": PublishedTask(("A", "B"), group="COPA"),
}

_SUPERNI_TEXT = (
    *("task1572_samsum_summary", "task1290_xsum_summarization", "task181_outcome_extraction"),
    *("task002_quoref_answer_generation", "task1510_evalution_relation_extraction"),
    *("task639_multi_woz_user_utterance_generation", "task1729_personachat_generate_next"),
    *("task073_commonsenseqa_answer_generation", "task1590_diplomacy_text_generation"),
    *("task748_glucose_reverse_cause_event_detection", "task511_reddit_tifu_long_text_summarization"),
    "task591_sciq_answer_generation",
)
_SENTIMENT: tuple[str, ...] = (
    *("task1687_sentiment140_classification", "task421_persent_sentence_sentiment_classification"),
    *("task833_poem_sentiment_classification", "task929_products_reviews_classification"),
)
_UNSEEN_TEXT = (
    *("task360_spolin_yesand_response_generation", "task574_air_dialogue_sentence_generation"),
    *("task1714_convai3_sentence_generation", "task180_intervention_extraction"),
    *("task678_ollie_actual_relationship_answer_generation", "task1410_dart_relationship_extraction"),
    *("task339_record_answer_generation", "task670_ambigqa_question_generation"),
    *("task1327_qa_zre_answer_generation_from_question", "task522_news_editorial_summary"),
    *("task1356_xlsum_title_generation", "task1499_dstc3_summarization"),
)

_TYPES: Mapping[str, tuple[int, ...]] = {
    "dialogue": (639, 1590, 1729, 360, 574, 1714),
    "extraction": (181, 748, 1510, 180, 678, 1410),
    "question answering": (2, 73, 591, 339, 670, 1327),
    "summary": (511, 1290, 1572, 522, 1356, 1499),
    "sentiment": (363, 875, 1687, 421, 833, 929),
}


def _superni(name: str, labels: tuple[str, ...] | Literal["auto"] | None, metric: str = "exact_match") -> PublishedTask:
    number = int(name.partition("_")[0].removeprefix("task"))
    return PublishedTask(
        labels, metric, prompt="superni", type=next(kind for kind, numbers in _TYPES.items() if number in numbers)
    )


_SUPERNI: Mapping[str, PublishedTask] = {
    **{name: _superni(name, None, "rouge_l") for name in _SUPERNI_TEXT + _UNSEEN_TEXT},
    **{name: _superni(name, "auto") for name in _SENTIMENT},
    "task363_sst2_polarity_classification": _superni("task363_sst2_polarity_classification", ("POS", "NEG")),
    "task875_emotion_classification": _superni(
        "task875_emotion_classification", ("sadness", "joy", "love", "anger", "fear", "surprise")
    ),
}

_LLAMA: Mapping[str, PublishedTask] = {
    "medical": PublishedTask(
        None,
        "bertscore",
        ("chatdoctor", "chatdoctor200k"),
        prompt="llama2_chat",
        instruction="If you are a doctor, please answer the medical questions based on the patient's description.",
        columns=Columns(("input", "text"), ("output", "label")),
    ),
    "mmlu": PublishedTask(
        ("A", "B", "C", "D"), "first_word", ("history",), prompt="llama2_chat", columns=Columns(header=CHOICES_HEADER)
    ),
    "finance": PublishedTask(
        "auto",
        "first_word",
        prompt="llama2_chat",
        instruction="What is the sentiment of this tweet? Please choose an answer from {negative/neutral/positive}",
        columns=Columns(("input", "sentence", "text"), ("output", "label")),
    ),
}
"""SLM's benchmark for LLaMA; instructions of its table 9 (MMLU has none), first words scored (appendix A.4)."""

_DAS: Mapping[str, PublishedTask] = {
    **{name: PublishedTask("auto", "macro_f1") for name in ("restaurant", "acl", "ai", "phone", "camera")},
    "pubmed": PublishedTask("auto", "micro_f1"),
}
"""ChemProt (pubmed) is reported as micro-F1 in the macro column."""

_STANCES = ("A", "B", "C")


def _trace(
    metric: str,
    instruction: str | None = None,
    around: tuple[str, str] = ("", ""),
    labels: tuple[str, ...] | None = None,
) -> PublishedTask:
    return PublishedTask(
        labels,
        metric,
        prompt="trace",
        instruction=instruction,
        around=around,
        columns=Columns(("prompt",), ("answer",)),
    )


_TRACE: Mapping[str, PublishedTask] = {
    "C-STANCE": _trace(
        "accuracy",
        "判断以下文本对指定对象的态度，选择一项：A.支持，B.反对，C.中立。输出A，B或者C。",
        ("文本：\n", "\n态度："),
        _STANCES,
    ),
    "FOMC": _trace(
        "accuracy",
        "What is the monetary policy stance for the following text? A. dovish, B. hawkish, C. neutral. Choose one from "
        "A, B and C.",
        ("Text:\n", "\nStance:"),
        _STANCES,
    ),
    "MeetingBank": _trace(
        "rouge_l", "Write a summary of the following meeting transcripts.", ("Meeting transcripts:\n", "\nSummary:")
    ),
    "Py150": _trace("edit_similarity_py150"),
    "ScienceQA": _trace(
        "first_character",
        "Choose an answer for the following question and give your reasons.",
        ("\nQuestion:\n", "\n\nAnswer:"),
    ),
    **{
        name: _trace("accuracy", "Solve the following math problem.", ("Question:\n", "\nAnswer:"))
        for name in ("NumGLUE-cm", "NumGLUE-ds")
    },
    "20Minuten": _trace(
        "sari",
        "Provide a simplified version of the following paragraph in German.",
        ("\nParagraph:\n", "\n\nSimplification:"),
    ),
}
"""TRACE (arXiv 2310.06762): instructions of inference/ICL.py, metrics of evaluations/."""


TASKS: Mapping[str, PublishedTask] = MappingProxyType({**_LONG, **_SUPERNI, **_LLAMA, **_DAS, **_TRACE})
"""Every known task under its canonical name."""


def fold(name: str) -> str:
    """Return a name without case, `-`, `_` and spaces, about which files and papers differ."""
    return re.sub(r"[-_ ]", "", name.lower())


def canonical(name: str) -> str:
    """Return the canonical name of a task given under any of its names; unknown names come back unchanged.

    SuperNI tasks may be called by their number alone (`task1572`).
    """
    return _CANONICAL.get(fold(name), name)


def folder_names(name: str, info: PublishedTask | None = None) -> frozenset[str]:
    """Return folded names that the task's folder may have on disk.

    Args:
        info: facts about the task; None: those in `TASKS`.
    """
    info = info or TASKS.get(name)
    return frozenset({fold(name), *(fold(other) for other in (info.folders if info else ()))})


_CANONICAL: Mapping[str, str] = MappingProxyType(
    {folded: name for name in TASKS for folded in folder_names(name)}
    | {fold(name.partition("_")[0]): name for name in _SUPERNI}
)
