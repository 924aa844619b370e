"""Tests of what an engine cannot train: it is refused in one sentence before any work."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import Lab

from raycl.errors import ConfigError
from raycl.training.setup.checks import check
from raycl.training.setup.method_checks import check_engine

PROMPTS: dict[str, tuple[dict[str, Any], int]] = {
    "prompt": ({"prompt_length": 41}, 41),
    "l2p": ({"prompt_length": 21, "top_k": 2}, 42),
    "progprompt": ({"prompt_length": 21}, 42),
    "mocl": ({"value": "prompt", "prompt_length": 41}, 41),
    "epi": ({"value": "prompt", "prompt_length": 41}, 41),
    "sapt": ({"value": "prompt", "prompt_length_by_task": {"animal": 41}}, 41),
    "slm": ({"value": "prompt", "prompt_length": 7, "keys": {"groups": 4, "slots": 3}}, 42),
}
"""Method -> settings, and the positions of the prompts beside a text of 24 tokens on a model of 64."""


@pytest.mark.parametrize("name", PROMPTS)
def test_soft_prompts_have_positions_beside_the_text(lab: Lab, name: str) -> None:
    settings, positions = PROMPTS[name]
    config = lab.config("bert", {"name": name, **settings})
    with pytest.raises(ConfigError, match=rf"up to {positions} positions of soft prompts .* than the 64 positions"):
        check(config)
    check(lab.config("bert", {"name": name, **settings}, stream={"max_source_tokens": 64 - positions}))
    check(lab.config("t5", {"name": name, **settings}))


@pytest.mark.parametrize(
    ("method", "sections", "message"),
    [
        ("agem", {}, r"'agem' computes gradients of its own, which engine=fsdp does not support: use engine=torch"),
        (
            "lora",
            {"train": {"optimizer": "adafactor"}},
            r"adafactor updates whole parameters",
        ),
        ({"name": "replay", "source": "generated"}, {}, r"'replay' generates pseudo-samples, .* use engine=torch, or"),
        ({"name": "sapt", "arm": {"source": "generated"}}, {}, r"'sapt' generates pseudo-samples, .* engine=fsdp"),
    ],
    ids=["gradients", "adafactor", "replay", "sapt"],
)
def test_what_fsdp_cannot_train_is_refused(lab: Lab, method: Any, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(lab.config("t5", method, "fsdp", **sections))
    check_engine(lab.config("t5", method, "torch", **sections))
