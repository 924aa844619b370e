"""Prompt templates: what stands before and behind an input text.

Why it exists: each paper wraps its inputs differently (methods' published prompts), and truncation must cut only
the input, so a template is a pair (prefix, suffix) and never a format string: braces in data stay braces.
What it does not know: tokenizers, files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PromptName = Literal["auto", "superni", "long", "olora", "llama2_chat", "plain"]


@dataclass(frozen=True)
class Prompt:
    """What is put around an input text."""

    prefix: str = ""
    suffix: str = ""

    def around(self, text: str) -> str:
        """The whole prompt of one example."""
        return f"{self.prefix}{text}{self.suffix}"


def superni(definition: str) -> Prompt:
    """SuperNI tasks of SAPT; an empty definition leaves its paragraph out."""
    head = f"Definition: {definition}\n\n" if definition else ""
    return Prompt(f"{head}Now complete the following example -\nInput: ", "\nOutput: ")


def long(definition: str) -> Prompt:
    """Long Sequence tasks of SAPT; nothing stands before the text where the definition is empty (copa)."""
    return Prompt(f"{definition}\n" if definition else "", "\nOutput: ")


def olora(
    instruction: str, labels: Sequence[str] | None, group: str = "", dataset: str = "", prompt_names: bool = False
) -> Prompt:
    """O-LoRA and MIGU: instruction and options; no options where there is no instruction (COPA).

    Args:
        prompt_names: write the two lines that name task group and dataset, as the official runs do, **also at
            test**, which gives the task away; off for task-free results.
    """
    names = f"Task:{group}\nDataset:{dataset}\n" if prompt_names else ""
    options = f"Option: {', '.join(labels)} \n" if labels and instruction else ""
    return Prompt(f"{names}{instruction}\n{options}" if instruction else names, "\nAnswer:")


def llama2_chat(instruction: str) -> Prompt:
    """Llama-2 chat form as in SLM's LLaMA runs; the system block only where there is an instruction."""
    system = f"<<SYS>>\n{instruction}\n<</SYS>>\n\n" if instruction else ""
    return Prompt(f"[INST] {system}", " [/INST] ")
