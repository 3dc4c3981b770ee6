"""Token sequences: repeated tokens and their targets, text corpora, tokenizer and windows."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interp.config import RepeatedDataConfig, RunConfig
from interp.data import corpus as corpus_module
from interp.data import stream as stream_module
from interp.data.corpus import read_corpus, read_text
from interp.data.repeated import (
    RepeatedStream,
    induction_targets,
    predictable_pairs,
    repeated_tokens,
    unrepeated_tokens,
)
from interp.data.stream import TextStream, cache_folder, open_stream
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import AnalysisError, ConfigError, ModelError

# --- repeated tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [None, 0, 7, 49])
def test_a_block_follows_bos_and_repeats_exactly(bos):
    batch = repeated_tokens(4, 10, 50, seed=0, bos=bos)
    lead = int(bos is not None)
    assert batch.tokens.shape == (4, 20 + lead)
    assert batch.tokens.dtype == torch.int64
    if bos is not None:
        assert (batch.tokens[:, 0] == bos).all()
        assert (batch.tokens[:, 1:] != bos).all()
    first, second = batch.tokens[:, lead : lead + 10], batch.tokens[:, lead + 10 :]
    assert torch.equal(first, second)
    assert all(len(set(row)) == 10 for row in first.tolist())
    assert (batch.block, batch.bos, batch.key_mask) == (10, bos is not None, None)


@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize("block", [3, 8])
@pytest.mark.parametrize("make", [repeated_tokens, unrepeated_tokens])
def test_query_p_of_the_second_copy_has_the_target_p_minus_n_plus_1(make, block, bos):
    lead = int(bos is not None)
    targets = make(2, block, 40, seed=0, bos=bos).targets
    queries = range(block + lead, 2 * block + lead)
    expected = [-1] * queries.start + [p - block + 1 for p in queries]
    assert targets.tolist() == [expected, expected]


def test_targets_agree_with_the_rule_for_any_tokens():
    batch = repeated_tokens(3, 8, 40, seed=0, bos=1)
    assert torch.equal(batch.targets, induction_targets(batch.tokens))


def test_nothing_repeats_in_unrepeated_tokens():
    batch = unrepeated_tokens(5, 10, 40, seed=0, bos=2, excluded=[4])
    assert all(len(set(row)) == 21 for row in batch.tokens.tolist())
    assert not (batch.tokens == 4).any()
    assert (induction_targets(batch.tokens) == -1).all()


def test_a_small_vocabulary_draws_the_second_block_independently():
    batch = unrepeated_tokens(200, 6, 8, seed=0)
    first, second = batch.tokens[:, :6], batch.tokens[:, 6:]
    assert all(len(set(row)) == 6 for row in (*first.tolist(), *second.tolist()))
    # Equal in 1/8 of places by chance; 1,200 places have a standard deviation of 0.01.
    assert (first == second).double().mean().item() == pytest.approx(1 / 8, abs=0.04)


def test_draws_are_uniform_over_the_allowed_ids():
    d_vocab, bos, excluded = 1000, 0, (1, 2, 998, 999)
    tokens = repeated_tokens(2000, 50, d_vocab, seed=0, bos=bos, excluded=excluded).tokens[:, 1:51]
    counts = np.bincount(tokens.flatten().numpy(), minlength=d_vocab)
    forbidden = [bos, *excluded]
    assert counts[forbidden].sum() == 0
    allowed = np.delete(counts, forbidden)
    assert tokens.numel() == 100_000
    assert tokens.min() < 200
    assert tokens.max() > 0.9 * d_vocab
    # 995 ids: chi-square has mean 994 and standard deviation 45 (less, since blocks are distinct).
    expected = tokens.numel() / len(allowed)
    assert ((allowed - expected) ** 2 / expected).sum() < 994 + 5 * 45
    # Each place of a block on its own: 2000 draws with mean 499.5 and standard error 6.5.
    means = tokens.double().mean(dim=0).numpy()
    assert np.abs(means - np.mean([i for i in range(d_vocab) if i not in forbidden])).max() < 30


def test_a_toy_vocabulary_gives_only_ids_that_it_has():
    batch = repeated_tokens(100, 20, 50, seed=0, bos=49, excluded=[0, 1, 48])
    body = batch.tokens[:, 1:]
    assert set(body.flatten().tolist()) == set(range(2, 48))


@pytest.mark.parametrize("make", [repeated_tokens, unrepeated_tokens])
@pytest.mark.parametrize(
    ("block", "d_vocab", "given", "message"),
    [
        (
            1,
            50,
            {},
            "block = 1 should be at least 3: with 1 the induction target is the query itself, "
            "with 2 it is the previous token",
        ),
        (
            2,
            50,
            {},
            "block = 2 should be at least 3: with 1 the induction target is the query itself, "
            "with 2 it is the previous token",
        ),
        (
            5,
            6,
            {"bos": 0, "excluded": [1]},
            "block = 5 needs that many distinct tokens; the vocabulary offers 4",
        ),
    ],
)
def test_blocks_that_say_nothing_or_do_not_exist_are_refused(make, block, d_vocab, given, message):
    with pytest.raises(AnalysisError) as caught:
        make(2, block, d_vocab, seed=0, **given)
    assert str(caught.value) == message


def test_three_is_a_block_and_may_use_the_whole_vocabulary():
    batch = repeated_tokens(1, 3, 5, seed=0, bos=0, excluded=[1])
    assert sorted(batch.tokens[0, 1:4].tolist()) == [2, 3, 4]


@pytest.mark.parametrize("make", [repeated_tokens, unrepeated_tokens])
def test_a_seed_fixes_the_tokens_and_the_callers_random_state_is_untouched(make):
    np.random.seed(5)
    torch.manual_seed(5)
    before = (np.random.get_state()[1].copy(), torch.get_rng_state())
    first = make(3, 8, 50, seed=1).tokens
    np.random.seed(6)
    torch.manual_seed(6)
    assert torch.equal(make(3, 8, 50, seed=1).tokens, first)
    assert not torch.equal(make(3, 8, 50, seed=2).tokens, first)
    np.random.seed(5)
    torch.manual_seed(5)
    make(3, 8, 50, seed=1)
    assert (np.random.get_state()[1] == before[0]).all()
    assert torch.equal(torch.get_rng_state(), before[1])


# --- targets and pairs of any tokens --------------------------------------------------------

X, Y, Z = 7, 8, 9


@pytest.mark.parametrize(
    ("tokens", "targets"),
    [
        ([X, Y, X, Y], [-1, -1, 1, 2]),
        ([X, X, Z], [-1, -1, -1]),  # the target would be the query itself
        ([X, X, X], [-1, -1, -1]),
        ([X, Y, X, Z, X], [-1, -1, 1, -1, 3]),  # the latest copy counts
        ([X, Y, X, X], [-1, -1, 1, -1]),
        ([X, Y, Z], [-1, -1, -1]),
        ([X], [-1]),
    ],
)
def test_the_target_is_the_token_after_the_latest_earlier_copy(tokens, targets):
    assert induction_targets(torch.tensor([tokens])).tolist() == [targets]


def test_padding_is_neither_a_copy_nor_a_query():
    tokens = torch.tensor([[X, Y, X, Y, X], [X, Y, X, Y, X]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    assert induction_targets(tokens, mask).tolist() == [[-1, -1, -1, -1, 3], [-1, -1, 1, -1, -1]]


def brute_force_pairs(row):
    seen, found = set(), []
    for pair in itertools.pairwise(row):
        found.append(pair in seen)
        seen.add(pair)
    return found


def brute_force_targets(row):
    found = []
    for q, token in enumerate(row):
        copies = [k for k in range(q) if row[k] == token]
        found.append(copies[-1] + 1 if copies and copies[-1] + 1 != q else -1)
    return found


ROWS = st.integers(2, 12).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1, max_size=3)
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ROWS)
def test_pairs_and_targets_equal_a_search_through_the_tokens(rows):
    tokens = torch.tensor(rows)
    assert predictable_pairs(tokens).tolist() == [brute_force_pairs(row) for row in rows]
    assert induction_targets(tokens).tolist() == [brute_force_targets(row) for row in rows]


def test_a_pair_that_is_repeated_overlapping_itself_counts():
    assert predictable_pairs(torch.tensor([[X, X, X]])).tolist() == [[False, True]]


# --- the training stream of repeated tokens -------------------------------------------------


def repeated_stream(span=(3, 6), n_ctx=24, d_vocab=30, bos=None, **given):
    return RepeatedStream(RepeatedDataConfig(span=span, **given), n_ctx, d_vocab, bos)


def test_a_batch_follows_from_seed_and_step_alone():
    stream, other = repeated_stream(), repeated_stream()
    batch = stream.batch(3, 100, 4)
    stream.batch(3, 101, 4)
    assert torch.equal(stream.batch(3, 100, 4), batch)
    assert torch.equal(other.batch(3, 100, 4), batch)
    assert not torch.equal(stream.batch(3, 101, 4), batch)
    assert not torch.equal(stream.batch(4, 100, 4), batch)


def test_held_out_sequences_are_not_those_of_training():
    stream = repeated_stream()
    held_out = stream.held_out(4)
    assert torch.equal(stream.held_out(4), held_out)
    assert not any(torch.equal(stream.batch(0, step, 4), held_out) for step in range(5))


@pytest.mark.parametrize("bos", [None, 5])
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("frequencies", ["uniform", "zipf"])
def test_a_block_of_its_own_length_repeats_until_the_context_is_full(bos, distinct, frequencies):
    stream = repeated_stream(bos=bos, distinct=distinct, frequencies=frequencies)
    tokens = stream.batch(0, 0, 200)
    assert tokens.shape == (200, 24)
    lengths = set()
    for row in tokens.tolist():
        if bos is not None:
            assert row.pop(0) == bos
            assert bos not in row
        fits = [n for n in range(3, 7) if row == [row[i % n] for i in range(len(row))]]
        assert fits
        lengths.add(fits[0])
        if distinct:
            assert len(set(row)) == fits[0]
    assert lengths == {3, 4, 5, 6}


@pytest.mark.parametrize("distinct", [False, True])
def test_zipf_frequencies_fall_with_the_rank(distinct):
    stream = repeated_stream(span=(3, 3), d_vocab=10, distinct=distinct)
    first = stream.batch(0, 0, 20_000)[:, 0].numpy()
    share = np.bincount(first, minlength=10) / len(first)
    harmonic = 1 / np.arange(1, 11)
    # The first token of a block is a plain draw, either way. Standard errors are below 0.0035.
    assert np.abs(share - harmonic / harmonic.sum()).max() < 0.015


def test_uniform_frequencies_are_equal():
    stream = repeated_stream(span=(3, 3), d_vocab=10, bos=0, frequencies="uniform")
    share = np.bincount(stream.batch(0, 0, 20_000)[:, 1].numpy(), minlength=10) / 20_000
    assert share[0] == 0
    assert np.abs(share[1:] - 1 / 9).max() < 0.01  # standard errors are 0.0022


def test_the_stream_leaves_the_callers_random_state_alone():
    np.random.seed(1)
    before = (np.random.get_state()[1].copy(), torch.get_rng_state())
    repeated_stream().batch(0, 0, 4)
    assert (np.random.get_state()[1] == before[0]).all()
    assert torch.equal(torch.get_rng_state(), before[1])


# --- text corpora ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stdlib():
    return read_corpus("stdlib", 0.1)


def test_pythons_own_library_is_split_by_file(stdlib):
    files = len(stdlib.training) + len(stdlib.held_out)
    assert not stdlib.training.keys() & stdlib.held_out.keys()
    assert len(stdlib.held_out) == round(0.1 * files)
    assert sum(map(len, stdlib.training.values())) > 1_000_000
    names = [*stdlib.training, *stdlib.held_out]
    assert not any("site-packages" in name or "/test/" in f"/{name}" for name in names)
    facts = stdlib.facts()
    assert facts["files"] == len(stdlib.training)
    assert facts["sha256"] == stdlib.sha256


def test_the_prose_of_the_library_is_its_topics_and_docstrings(stdlib, monkeypatch):
    sources = {**stdlib.training, **stdlib.held_out}
    # A parse of the whole library takes ten seconds. Templates in it are not valid Python.
    few = {"textwrap.py": sources["textwrap.py"], "broken.py": "def :", "silent.py": "x = 1"}
    monkeypatch.setattr(corpus_module, "_library_sources", lambda: iter(few.items()))
    docs = read_corpus("docs", 0.1)
    texts = {**docs.training, **docs.held_out}
    assert "def dedent(" in sources["textwrap.py"]
    assert "def dedent(" not in texts["textwrap.py"]
    assert "Remove any common leading whitespace" in texts["textwrap.py"]
    assert len([file for file in texts if file.startswith("topics/")]) > 50
    assert not texts.keys() & {"broken.py", "silent.py"}
    assert docs.sha256 != stdlib.sha256


def write_folder(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_a_folder_holds_out_whole_files_and_skips_what_is_no_text(tmp_path):
    texts = {f"{i}.txt": f"text number {i}\n" for i in range(20)}
    junk = {"image.bin": b"\x89PNG\0\xff", "zeros": b"a\0b", "empty.txt": "", "blank.txt": " \n"}
    write_folder(tmp_path, {**texts, **junk, "deep/er.txt": "é 😀"})
    corpus = read_corpus(str(tmp_path), 0.25)
    assert {**corpus.training, **corpus.held_out} == {**texts, "deep/er.txt": "é 😀"}
    assert len(corpus.held_out) == 5
    assert not corpus.training.keys() & corpus.held_out.keys()


def test_a_corpus_is_the_same_again_and_its_hash_sees_names_and_text(tmp_path):
    write_folder(tmp_path, {"a": "one", "b": "two", "c": "three"})
    first = read_corpus(str(tmp_path), 0.3)
    assert read_corpus(str(tmp_path), 0.3) == first
    hashes = {first.sha256}
    (tmp_path / "a").write_text("One")
    hashes.add(read_corpus(str(tmp_path), 0.3).sha256)
    (tmp_path / "a").rename(tmp_path / "aa")  # in the same place of the order
    hashes.add(read_corpus(str(tmp_path), 0.3).sha256)
    assert len(hashes) == 3


def test_a_split_does_not_depend_on_what_other_files_say(tmp_path):
    write_folder(tmp_path, {f"{i}.txt": "x" for i in range(10)})
    before = read_corpus(str(tmp_path), 0.2).held_out.keys()
    write_folder(tmp_path, {f"{i}.txt": "other" for i in range(10)})
    assert read_corpus(str(tmp_path), 0.2).held_out.keys() == before


def test_of_a_single_file_the_last_part_is_held_out(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("0123456789")
    corpus = read_corpus(str(path), 0.3)
    assert corpus.training == {"one.txt": "0123456"}
    assert corpus.held_out == {"one.txt": "789"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "the text file is empty"),
        ("blank.txt", b" \n\t", "the text file is empty"),
        ("image.png", b"\x89PNG\xff", "not a UTF-8 text file"),
        ("utf16.txt", "a".encode("utf-16-le"), "not a UTF-8 text file"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    for read in (lambda: read_text(path), lambda: read_corpus(str(path), 0.1)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value) == f"{path}: {message}"


def test_a_missing_corpus_lists_what_it_could_be(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_corpus("stdlb", 0.1)
    assert str(caught.value) == (
        "no corpus 'stdlb': it should be stdlib or docs, or the path of a text file or of a folder "
        "of them"
    )
    with pytest.raises(ConfigError, match="no UTF-8 text file in this folder"):
        read_corpus(str(tmp_path), 0.1)
    with pytest.raises(ConfigError, match=r"missing\.txt: cannot be read: No such file"):
        read_text(tmp_path / "missing.txt")


# --- windows of text ------------------------------------------------------------------------


def text_stream(n_training=100, n_held_out=30, n_ctx=8):
    return TextStream(np.arange(n_training), 1000 + np.arange(n_held_out), n_ctx, {"kind": "text"})


def test_windows_begin_anywhere_and_are_consecutive_tokens():
    stream = text_stream(n_training=11)
    windows = torch.cat([stream.batch(0, step, 8) for step in range(10)])
    assert windows.shape == (80, 8)
    assert (windows.diff(dim=1) == 1).all()
    assert set(windows[:, 0].tolist()) == {0, 1, 2, 3}  # the last window ends with the text
    assert torch.equal(stream.batch(2, 3, 4), stream.batch(2, 3, 4))
    assert not torch.equal(stream.batch(2, 3, 4), stream.batch(2, 4, 4))
    assert not torch.equal(stream.batch(2, 3, 4), stream.batch(1, 3, 4))


@pytest.mark.parametrize(
    ("wanted", "starts"), [(1, [1000]), (2, [1000, 1022]), (3, [1000, 1011, 1022])]
)
def test_held_out_windows_are_spread_over_the_text(wanted, starts):
    held_out = text_stream().held_out(wanted)
    assert held_out[:, 0].tolist() == starts
    assert (held_out.diff(dim=1) == 1).all()


def test_held_out_windows_are_fewer_rather_than_overlapping():
    held_out = text_stream().held_out(64)
    assert len(held_out) == 3
    assert held_out.unique().numel() == held_out.numel()


# --- the tokenizer --------------------------------------------------------------------------

SAMPLES = ["", " a", "\n\t", "naïve café", "emoji 😀👩‍👩‍👧", "日本語", "\x00\x7f", "a" * 50]


@pytest.fixture(scope="module")
def vocabulary():
    return BytePairVocabulary.train(["the cat sat on the mat. " * 50, "café 😀 " * 20], 270)


def test_text_comes_back_from_its_ids(vocabulary, tmp_path):
    assert len(vocabulary) == 270
    (tmp_path / "tokenizer.json").write_text(vocabulary.to_json(), encoding="utf-8")
    for known in (vocabulary, BytePairVocabulary.load(tmp_path / "tokenizer.json")):
        ids = known.encode(SAMPLES)
        assert [known.decode(row) for row in ids] == SAMPLES
        assert ids == vocabulary.encode(SAMPLES)
        assert all(0 <= i < 270 for row in ids for i in row)


def test_half_a_character_is_the_replacement_character(vocabulary):
    (ids,) = vocabulary.encode("日")
    assert len(ids) == 3
    assert vocabulary.decode(ids[:1]) == "�"
    assert vocabulary.decode(ids) == "日"


def test_the_whole_vocabulary_may_stand_in_random_blocks(vocabulary):
    assert vocabulary.special_ids == frozenset()
    assert vocabulary.bos_token_id is None


def test_a_single_token_is_one(vocabulary):
    assert vocabulary.decode([vocabulary.single_token("a")]) == "a"
    for text, message in (("日", "'日' is 3 tokens, not one"), ("", "'' is 0 tokens, not one")):
        with pytest.raises(ModelError) as caught:
            vocabulary.single_token(text)
        assert str(caught.value) == message


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer file: "):
        BytePairVocabulary.load(path)


# --- the tokens of a run --------------------------------------------------------------------


def run_config(corpus, n_ctx=8, d_vocab=260):
    return RunConfig.model_validate(
        {
            "model": {
                "n_layers": 1,
                "d_model": 8,
                "n_ctx": n_ctx,
                "d_vocab": d_vocab,
                "attention": {"n_heads": 2},
            },
            "train": {"steps": 1, "batch_size": 1, "lr": 0.1},
            "data": {"kind": "text", "corpus": str(corpus)},
            "probe": {"icl_early": [1, 1], "icl_late": [2, 2], "blocks": [3]},
        }
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "interp"


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    write_folder(folder, {f"{i}.txt": f"file {i} " * 20 for i in range(10)})
    return folder


def test_a_tokenizer_is_trained_once_and_kept_in_the_cache(cache, corpus, monkeypatch):
    stream, vocabulary = open_stream(run_config(corpus))
    assert cache_folder() == cache
    assert len(list((cache / "tokens").iterdir())) == 1

    def refuse(texts, size):
        raise AssertionError("trained again")

    monkeypatch.setattr(stream_module.BytePairVocabulary, "train", refuse)
    again, same = open_stream(run_config(corpus))
    assert torch.equal(again.batch(0, 0, 4), stream.batch(0, 0, 4))
    assert torch.equal(again.held_out(4), stream.held_out(4))
    assert same.encode("file 3") == vocabulary.encode("file 3")
    # Another size, and another text, are other tokenizers.
    with pytest.raises(AssertionError, match="trained again"):
        open_stream(run_config(corpus, d_vocab=270))
    (corpus / "0.txt").write_text("changed " * 20)
    with pytest.raises(AssertionError, match="trained again"):
        open_stream(run_config(corpus))
    assert [path.name for path in (cache / "tokens").glob(".making*")] == []


def test_held_out_windows_come_from_held_out_files(cache, corpus):
    stream, vocabulary = open_stream(run_config(corpus))
    held_out_file = next(iter(read_corpus(str(corpus), 0.1).held_out)).removesuffix(".txt")
    assert held_out_file in vocabulary.decode(stream.held_out(2).flatten().tolist())
    training = torch.cat([stream.batch(0, step, 16) for step in range(40)])
    assert held_out_file not in vocabulary.decode(training.flatten().tolist())
    facts = stream.facts()
    assert (facts["files"], facts["held_out_files"]) == (9, 1)
    assert facts["vocabulary"] == len(vocabulary) <= 260
    assert len(str(facts["sha256"])) == 64


def test_the_cache_is_under_the_home_folder_unless_told(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache" / "interp"


def test_a_corpus_shorter_than_a_window_is_refused(cache, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abc def")
    with pytest.raises(ConfigError) as caught:
        open_stream(run_config(path))
    message = r"corpus (.*): \d training tokens are fewer than one window of n_ctx = 8"
    assert re.fullmatch(message, str(caught.value))[1] == str(path)


def test_training_text_without_its_held_out_window_is_refused(cache, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abcdefghij" * 3)
    with pytest.raises(ConfigError, match="held-out tokens are fewer than one window of n_ctx = 8"):
        open_stream(run_config(path))


def test_repeated_data_has_no_vocabulary(cache):
    config = run_config("x").model_copy(update={"data": RepeatedDataConfig(span=(3, 4))})
    stream, vocabulary = open_stream(config)
    assert vocabulary is None
    assert isinstance(stream, RepeatedStream)
    assert not cache.exists()
