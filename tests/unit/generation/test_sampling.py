"""Tokens are drawn as the settings say, and text is sent on only when nothing can change it any more."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from chat_samples import TOKENIZERS
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from raycl.generation.requests import Sampling
from raycl.generation.sampling import NOT_FINITE, DecodedText, pick

EOS = 0
LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=12)


def drawn(logits: list[float], seed: int = 0, **settings: Any) -> int:
    """Return one token."""
    draw = torch.Generator().manual_seed(seed)
    return pick(torch.tensor([logits]), [Sampling(1, **settings)], [draw])[0]


# ---- pick ------------------------------------------------------------------------------------------------------------


@given(LOGITS, st.integers(0, 2**63 - 1))
def test_temperature_zero_takes_the_first_most_likely_token(logits: list[float], seed: int) -> None:
    assert drawn(logits, seed) == logits.index(max(logits))
    assert max(logits) - logits[drawn(logits, seed, temperature=2.0, top_p=1e-9)] < 1e-6, "a nucleus of one"


@given(LOGITS, st.floats(0, 1e-6, exclude_min=True), st.integers(0, 100))
def test_tiny_temperatures_do_not_overflow(logits: list[float], heat: float, seed: int) -> None:
    best = max(logits)
    likely = {index for index, value in enumerate(logits) if best - value < 0.01}
    assert drawn(logits, seed, temperature=heat) in likely


@given(LOGITS, st.floats(0.05, 2), st.floats(0.01, 1), st.integers(0, 2**63 - 1))
def test_only_the_nucleus_is_drawn_from(logits: list[float], heat: float, top_p: float, seed: int) -> None:
    chances = (torch.tensor(logits, dtype=torch.float64) / heat).softmax(0).tolist()
    order = sorted(range(len(logits)), key=lambda token: (-chances[token], token))
    before = [math.fsum(chances[token] for token in order[:index]) for index in range(len(order))]
    allowed = {token for token, sum_before in zip(order, before, strict=True) if sum_before < top_p + 1e-9}
    assert drawn(logits, seed, temperature=heat, top_p=top_p) in allowed


@given(
    st.lists(
        st.tuples(LOGITS, st.floats(0, 2), st.floats(0, 1, exclude_min=True), st.integers(0, 2**64 - 1)),
        min_size=1,
        max_size=6,
    )
)
@example([([0.0, 1.0, 2.0], 1.0, 5e-324, 0), ([3.0, 1.0], 0.5, 0.9, 1)])
@example([([0.0, 1.0], 5e-324, 1e-46, 0), ([3.0, 3.0], 2.0, 1 - 2**-53, 2**64 - 1)])
def test_whatever_a_row_asks_for_every_row_gets_the_token_that_it_gets_alone(
    rows: list[tuple[list[float], float, float, int]],
) -> None:
    width = max(len(logits) for logits, *_ in rows)
    batch = torch.tensor([[*logits, *[-math.inf] * (width - len(logits))] for logits, *_ in rows])
    settings = [Sampling(1, temperature, top_p, seed) for _, temperature, top_p, seed in rows]
    tokens = pick(batch, settings, [torch.Generator().manual_seed(setting.seed) for setting in settings])
    for row, (logits, temperature, top_p, seed) in enumerate(rows):
        assert tokens[row] == drawn(logits, seed, temperature=temperature, top_p=top_p) < len(logits)


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.6])
def test_tokens_come_as_often_as_they_should(top_p: float) -> None:
    logits, heat, count = [1.0, 3.0, 2.0, 3.0, -40.0], 1.3, 4000
    chances = (torch.tensor(logits) / heat).softmax(0)
    order = chances.argsort(descending=True, stable=True)
    kept = order[chances[order].cumsum(0) - chances[order] < top_p]
    expected = torch.zeros(5).index_put((kept,), chances[kept] / chances[kept].sum())
    draw = torch.Generator().manual_seed(7)
    sampling, rows = Sampling(1, temperature=heat, top_p=top_p), 50
    seen = Counter(
        token
        for _ in range(count // rows)
        for token in pick(torch.tensor([logits] * rows), [sampling] * rows, [draw] * rows)
    )
    for token in range(5):
        assert abs(seen[token] / count - float(expected[token])) < 4 * 0.5 / math.sqrt(count), (token, seen)
    assert seen[4] == 0


def test_equally_likely_tokens_are_all_drawn_and_the_nucleus_takes_the_first_of_them() -> None:
    same = [1.0] * 4
    assert {drawn(same, seed, temperature=1.0) for seed in range(60)} == {0, 1, 2, 3}
    assert {drawn(same, seed, temperature=1.0, top_p=0.5) for seed in range(60)} == {0, 1}


@given(st.lists(st.tuples(LOGITS.filter(lambda row: len(row) == 4), st.floats(0, 2), st.floats(0.1, 1)), max_size=4))
def test_a_row_draws_the_same_in_any_batch(others: list[tuple[list[float], float, float]]) -> None:
    logits = [0.5, 0.1, -1.0, 0.4]
    for mine in (Sampling(1, 1.0, seed=3), Sampling(1, 0.7, 0.9, seed=4), Sampling(1)):
        alone = [drawn(logits, mine.seed, temperature=mine.temperature, top_p=mine.top_p)]
        rows = [*(row for row, _, _ in others), logits]
        settings = [*(Sampling(1, heat, top_p) for _, heat, top_p in others), mine]
        draws = [torch.Generator().manual_seed(setting.seed) for setting in settings]
        assert pick(torch.tensor(rows), settings, draws)[-1:] == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_nan_rows_are_an_error(bad: float, settings: dict[str, float]) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0], [0.0, bad, 1.0], [3.0, -math.inf, -math.inf]])
    draws = [torch.Generator().manual_seed(0) for _ in range(3)]
    first, second, third = pick(logits, [Sampling(1, **settings)] * 3, draws)
    assert first in (0, 1, 2) and second == NOT_FINITE and third == 0


def test_half_precision_logits_are_drawn_in_double() -> None:
    logits = torch.zeros(1, 5000, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    seen = {pick(logits, [Sampling(1, 1.0)], [draw])[0] for _ in range(200)}
    assert len(seen) > 180 and max(seen) > 4500, "a sum of 5000 chances in bfloat16 would end early"


# ---- Spoken ----------------------------------------------------------------------------------------------------------


TURN = "<|end|>"
"""A special token."""


class Words:
    """Ids to pieces, put together without anything between."""

    def __init__(self, pieces: list[str], tidies: bool = False) -> None:
        self.pieces = ["", *pieces]
        self.clean_up_tokenization_spaces = tidies

    def decode(
        self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        pieces = (self.pieces[number] for number in ids)
        text = "".join(piece for piece in pieces if not (skip_special_tokens and piece == TURN))
        tidies = self.clean_up_tokenization_spaces and clean_up_tokenization_spaces is not False
        return text.replace(" 's", "'s").replace(" .", ".") if tidies else text


def decoded(
    pieces: list[str],
    tidies: bool = False,
    eos: bool = True,
    continues: list[int] | None = None,
    **settings: Any,
) -> tuple[list[str], DecodedText]:
    """Return what is sent for each token, one a piece, up to the end."""
    sampling = Sampling(**{"max_tokens": 100, **settings})
    decoded_text = DecodedText(Words(pieces, tidies), {EOS}, sampling, continues, [TURN])
    sent = []
    for token in [*range(1, len(pieces) + 1), *([EOS] if eos else [])]:
        sent.append(decoded_text.push(token))
        if decoded_text.finish:
            break
    return sent, decoded_text


def test_white_space_around_the_answer_is_not_sent() -> None:
    sent, first = decoded([" ", "\n", " Hel", "lo ", "  ", "world", " \n"])
    assert sent == ["", "", "Hel", "lo", "", "   world", "", ""]
    assert first.finish == "stop" and len(first.ids) == 7, "the end token is none of the answer's"


def test_a_continuation_is_exactly_what_its_tokens_say() -> None:
    sent, first = decoded([" Paris", " \n", "    return", " it", " 's"], tidies=True, continues=[1])
    assert sent == [" Paris", " \n", "    return", " it", " 's", ""] and first.finish == "stop"
    assert decoded([" "], continues=[])[0] == [" ", ""] and decoded([" "])[0] == ["", ""]


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_continuation_keeps_the_space_that_a_decoder_drops_from_a_first_word(scheme: str) -> None:
    """SentencePiece's decoder: `_is` `_Paris` is " Paris" behind "is", and "Paris" alone."""
    vocabulary = {"</s>": EOS, "\u2581is": 1, "\u2581Paris": 2}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    for continues, expected in (([1], " Paris"), ([], "Paris"), (None, "Paris")):
        decoded_text = DecodedText(tokenizer, {EOS}, Sampling(9), continues)
        assert decoded_text.push(2) + decoded_text.push(EOS) == expected


@pytest.mark.parametrize("continues", [None, [1]])
def test_a_stop_may_be_the_white_space_that_an_answer_begins_with(continues: list[int] | None) -> None:
    sent, first = decoded(["\n", "Paris"], stop=("\n",), continues=continues)
    assert (sent, first.finish, len(first.ids)) == ([""], "stop", 1)
    sent, _ = decoded([" ", "\n", "Par", "is"], stop=(" \nParis",), continues=continues)
    assert "".join(sent) == ""


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["4", TURN, "\n", "more"], TURN, "4"),
        (["4", TURN, "\n", "more"], f"{TURN}\n", "4"),
        (["4", TURN, "user", "5"], f"{TURN}assistant", "4user5"),
        (["4", TURN, "5"], "5", "4"),
    ],
)
def test_a_stop_may_hold_a_special_token_which_is_never_sent(pieces: list[str], stop: str, expected: str) -> None:
    for continues in (None, []):
        sent, first = decoded(pieces, stop=(stop,), continues=continues)
        assert "".join(sent) == expected and first.finish == "stop"


def test_each_end_token_ends_an_answer() -> None:
    decoded_text = DecodedText(Words(["a", "b"]), {EOS, 2}, Sampling(9))
    assert [decoded_text.push(1), decoded_text.push(2)] == ["a", ""]
    assert decoded_text.finish == "stop" and decoded_text.ids == [1]


def test_the_limit_ends_the_answer() -> None:
    sent, first = decoded(["a", "b ", "c"], max_tokens=2)
    assert sent == ["a", "b"] and first.finish == "length" and len(first.ids) == 2
    assert decoded(["a"], max_tokens=1)[1].finish == "length"
    assert decoded(["END"], max_tokens=1, stop=("END",))[1].finish == "stop", "a stop at the limit is a stop"


@pytest.mark.parametrize(
    ("pieces", "stop", "sent"),
    [
        (["one ", "E", "N", "D", " two"], ("END",), ["one", "", "", ""]),
        (["one ", "E", "N", "ough"], ("END",), ["one", "", "", " ENough", ""]),
        (["one", "\n", "\n", "two"], ("\n\n",), ["one", "", ""]),
        (["a", "ab", "c"], ("abc",), ["", "a", ""]),
        (["x", "aXbY", "z"], ("Y", "X"), ["x", "a"]),
        (["a b", " c"], ("b c", "nothing"), ["a", ""]),
        (["stop"], ("stop",), [""]),
    ],
)
def test_a_stop_is_found_across_tokens_and_never_sent(
    pieces: list[str], stop: tuple[str, ...], sent: list[str]
) -> None:
    result, first = decoded(pieces, stop=stop)
    assert result == sent and first.finish == "stop"


@given(
    st.lists(st.text("ab �", min_size=1, max_size=3), max_size=8),
    st.lists(st.text("ab ", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
def test_deltas_join_to_the_answer_at_any_token_borders(pieces: list[str], stop: list[str], eos: bool) -> None:
    sent, first = decoded(pieces, stop=tuple(stop), eos=eos, max_tokens=max(1, len(pieces)))
    whole = "".join(pieces)
    ends = [whole.find(first) for first in stop if first in whole]
    text = "".join(sent)
    if first.finish:
        assert text == whole[: min(ends, default=len(whole))].strip()
    else:
        assert not pieces, "max_tokens ends it"
    assert not any(first in text for first in stop)


def test_what_a_tokenizer_tidies_up_is_not_sent_before() -> None:
    sent, first = decoded(["it", " '", "s", " fine", " ."], tidies=True)
    assert "".join(sent) == "it's fine." and first.finish == "stop"
    assert sent[0] == "", "the last word may still change"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_part_of_a_character_is_sent(kind: str) -> None:
    text = "a😀é😀b"
    tokenizer, ids = _bytes(kind, text)
    decoded_text = DecodedText(tokenizer, {EOS}, Sampling(100, stop=("é😀b!",)))
    sent = [decoded_text.push(token) for token in [*ids, EOS]]
    assert "".join(sent) == text and not any("�" in piece for piece in sent)
    assert sent[:5] == ["a", "", "", "", "😀"]
    stopped = DecodedText(tokenizer, {EOS}, Sampling(100, stop=("é😀",)))
    sent = []
    for token in ids:
        sent.append(stopped.push(token))
        if stopped.finish:
            break
    assert "".join(sent) == "a😀" and stopped.finish == "stop"


@pytest.mark.parametrize("kind", ["words", "pieces", "bytes", "wordpiece", "byte_level", "byte_fallback"])
@pytest.mark.parametrize("continues", [None, [3, 4]])
def test_a_long_answer_is_what_its_tokens_say_and_each_is_decoded_a_few_times(
    kind: str, continues: list[int] | None
) -> None:
    draw = random.Random(kind)
    words = ["the", "sky", "is", "blue", "é😀", "日本語", "it's", "12,5", "  ", "\n", "�"]
    text = " ".join(draw.choice(words) for _ in range(400))
    if kind in TOKENIZERS:
        tokenizer = TOKENIZERS[kind]()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        tokenizer, ids = _bytes(kind, text)
    counting = Counting(tokenizer)
    decoded_text = DecodedText(counting, {-1}, Sampling(10**6), continues)
    sent = "".join(decoded_text.push(token) for token in [*ids, -1])
    front = tokenizer.decode(continues or [], skip_special_tokens=True)
    whole = tokenizer.decode([*(continues or []), *ids], skip_special_tokens=True)[len(front) :]
    assert sent == (whole.strip() if continues is None else whole)
    assert counting.tokens < 150 * len(ids) < len(ids) ** 2 / 2


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def decode(self, ids: list[int], **settings: Any) -> str:
        """Decode."""
        self.tokens += len(ids)
        return str(self.tokenizer.decode(ids, **settings))


def _bytes(kind: str, text: str) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Return a tokenizer whose tokens are bytes, as byte-level BPE and sentencepiece with byte fallback have them."""
    if kind == "byte_level":
        from tokenizers.pre_tokenizers import ByteLevel

        names = sorted(ByteLevel.alphabet())
        of_byte = {byte: ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(byte))[0][0] for byte in range(128)}
        vocabulary = {"</s>": 0, **{name: number + 1 for number, name in enumerate(names)}}
        made = Tokenizer(models.BPE(vocabulary, []))
        made.decoder = decoders.ByteLevel()
        split = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
        ids = [vocabulary[letter] for word, _ in split for letter in word]
        assert of_byte[ord("a")] == "a"
    else:
        vocabulary = {"</s>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
        made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        ids = [byte + 1 for byte in text.encode()]
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>"), ids
