"""Incremental text: equal to the one-shot decoding however the tokens are cut, whole characters, stop strings anywhere."""

import codecs
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from trivet_checkpoint import bundle_of, open_checkpoint, resolve_model
from trivet_frontend.text import IncrementalText, TokenBytes

_FILES = bundle_of(open_checkpoint(resolve_model(None))).files
TOKENIZER = Tokenizer.from_str(_FILES["tokenizer.json"].decode())
BYTES = TokenBytes(TOKENIZER, _FILES["tokenizer.json"])

# The model's vocabulary lacks some bytes, such as those that begin the planes nobody uses; its tokenizer cannot write them.
LONE_BYTES = {BYTES.of(token_id)[0] for token_id in range(49152) if len(BYTES.of(token_id)) == 1}
IDS = st.lists(st.integers(0, 49151) | st.sampled_from([10813, 235, 229, 143, 233, 24211, 230, 131]), max_size=12)
STOP_IDS = [33203, 23960, 57, 58]  # DEF GH I J


def text_for(stops: tuple[str, ...] = (), *, include: bool = False, min_tokens: int = 0, skip: bool = True) -> IncrementalText:
    return IncrementalText(BYTES, stops=stops, include_stop=include, skip_special_tokens=skip, min_tokens=min_tokens)


def run(text: IncrementalText, pieces: list[list[int]]) -> tuple[list[str], int, str | None]:
    """Texts of the releases, tokens released, and the stop string."""
    texts, tokens = [], 0
    for place, piece in enumerate(pieces):
        release = text.push(piece, finished=place == len(pieces) - 1, stop_token=False)
        texts.append(release.text)
        tokens += release.tokens
        if release.stop is not None:
            return texts, tokens, release.stop
    return texts, tokens, None


def cut(ids: list[int], places: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(place % (len(ids) + 1) for place in places), len(ids)]
    return [ids[start:end] for start, end in pairwise(bounds)]


@settings(max_examples=200)
@given(ids=IDS, places=st.lists(st.integers(0, 20), max_size=6))
def test_deltas_join_to_the_one_shot_decoding(ids: list[int], places: list[int]) -> None:
    texts, tokens, _ = run(text_for(skip=False), cut(ids, places))
    assert "".join(texts) == TOKENIZER.decode(ids, skip_special_tokens=False)
    assert tokens == len(ids)


def test_a_character_comes_whole_and_a_real_replacement_character_passes() -> None:
    texts, _, _ = run(text_for(), [[10813], [235], [229], [143], [233], [24211], []])
    assert texts == ["", "", "\N{WAVING HAND SIGN}", "", "ď", "�", ""]


@pytest.mark.parametrize(
    ("stops", "without", "included", "tokens"),
    [(("DE",), "", "DE", 1), (("DEFGHIJ",), "", "DEFGHIJ", 4), (("EFG",), "D", "DEFG", 2), (("ZZ", "GHI"), "DEF", "DEFGHI", 3)],
)
def test_stop_strings_are_found_for_every_cut(stops: tuple[str, ...], without: str, included: str, tokens: int) -> None:
    for include, expected in ((False, without), (True, included)):
        for mask in range(8):
            places = [place + 1 for place in range(3) if mask >> place & 1]
            texts, released, stop = run(text_for(stops, include=include), cut([*STOP_IDS, 1000], places))
            assert ("".join(texts), released, stop) == (expected, tokens, stops[-1])


@settings(max_examples=200)
@given(
    letters=st.text("ab", min_size=1, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 20), max_size=6),
    include=st.booleans(),
)
def test_the_stop_that_completes_first_ends_the_text(letters: str, stops: list[str], places: list[int], include: bool) -> None:
    ids = [BYTES_OF_LETTER[letter] for letter in letters]
    texts, released, stop = run(text_for(tuple(stops), include=include), cut(ids, places))
    ends = [end for end in range(1, len(letters) + 1) if any(letters[:end].endswith(one) for one in stops)]
    if not ends:
        assert ("".join(texts), released, stop) == (letters, len(ids), None)
        return
    assert stop is not None
    assert released == ends[0]
    assert "".join(texts) == letters[: ends[0] if include else ends[0] - len(stop)]


BYTES_OF_LETTER = {letter: TOKENIZER.token_to_id(letter) for letter in "ab"}


@settings(max_examples=200)
@given(
    ids=IDS,
    places=st.lists(st.integers(0, 20), max_size=6),
    stops=st.lists(st.text("abeo \N{HOT PEPPER}\x01", min_size=1, max_size=6), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_every_cut_gives_the_same_text_tokens_and_stop(ids: list[int], places: list[int], stops: list[str], include: bool) -> None:
    whole = run(text_for(tuple(stops), include=include), [ids, []])
    parts = run(text_for(tuple(stops), include=include), cut(ids, places))
    assert ("".join(parts[0]), *parts[1:]) == ("".join(whole[0]), *whole[1:])


@settings(max_examples=200)
@given(ids=IDS, stops=st.lists(st.text("\x01\x02\x03", min_size=1, max_size=6), max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop(ids: list[int], stops: list[str]) -> None:
    text, hold = text_for(tuple(stops)), max(map(len, stops), default=1) - 1
    sent, tokens = "", 0
    for count, token_id in enumerate(ids, start=1):
        release = text.push([token_id], finished=False, stop_token=False)
        if release.stop is not None:
            return
        sent, tokens = sent + release.text, tokens + release.tokens
        seen = whole_characters(ids[:count])
        assert seen.startswith(sent)
        assert len(seen) - len(sent) <= hold
        # What a client has in text, it has in ids; ids run ahead by less than one token's text.
        assert whole_characters(ids[:tokens]).startswith(sent) or len(BYTES.joined(ids[:tokens], skip_special_tokens=True)) >= len(sent)
        assert tokens == 0 or len(whole_characters(ids[: tokens - 1])) <= len(sent)


def whole_characters(ids: list[int]) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(b"".join(BYTES.of(token_id, skip_special_tokens=True) for token_id in ids))


@settings(max_examples=500)
@given(text=st.text(st.characters(exclude_categories=["Cs"]).filter(lambda letter: set(letter.encode()) <= LONE_BYTES), max_size=60))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    assert BYTES.joined(TOKENIZER.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_an_id_out_of_range_is_logged_once_and_has_no_text(caplog: pytest.LogCaptureFixture) -> None:
    token_bytes = TokenBytes(TOKENIZER, _FILES["tokenizer.json"])
    assert [token_bytes.of(token_id) for token_id in (10**6, 10**6, -1)] == [b""] * 3
    assert [record.args[0] for record in caplog.records if record.args] == [10**6, -1]


def test_stops_are_not_searched_before_min_tokens() -> None:
    texts, _, stop = run(text_for(("GH",), min_tokens=2), [[token] for token in [*STOP_IDS, 33203, 23960, 1000]])
    assert ("".join(texts), stop) == ("DEFGHIJDEF", "GH")


def test_a_stop_token_gives_no_text_and_ids_out_of_range_give_none() -> None:
    assert text_for().push([33203, 23960], finished=True, stop_token=True).text == "DEF"
    assert text_for((), include=True).push([33203, 23960], finished=True, stop_token=True).text == "DEFGH"
    assert text_for().push([10**6, -1, 33203], finished=True, stop_token=False).text == "DEF"


PEPPER_WITHOUT_ITS_END = [19556, 905, 15107, 230]


@pytest.mark.parametrize(
    ("ids", "expected"), [([131, 7042], " Paris"), ([7042], " Paris"), ([131], ""), ([], ""), ([10813, 235, 229], "\N{WAVING HAND SIGN}")]
)
def test_a_character_that_the_prompt_began_gives_no_text(ids: list[int], expected: str) -> None:
    for pieces in ([ids], [*([token] for token in ids), []]):
        text = IncrementalText(
            BYTES,
            stops=(),
            include_stop=False,
            skip_special_tokens=True,
            min_tokens=0,
            prompt_tail=BYTES.unfinished(PEPPER_WITHOUT_ITS_END),
        )
        texts, tokens, _ = run(text, pieces)
        assert ("".join(texts), tokens) == (expected, len(ids))


def test_a_prompt_of_whole_characters_leaves_nothing_unfinished() -> None:
    assert [BYTES.unfinished(ids) for ids in ([], [19556], [10813, 235, 229])] == [b"", b"", b""]
    assert BYTES.unfinished(PEPPER_WITHOUT_ITS_END) == "\N{HOT PEPPER}".encode()[:3]
