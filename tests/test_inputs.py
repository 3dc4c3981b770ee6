"""Windows of a corpus: which documents, which tokens, what leads them, what is said of them."""

import hashlib

import numpy as np
import pytest
import torch
from tiny_models import perturbed, tiny_config
from tiny_tokenizers import byte_pairs, reader

import interp
from interp import registry
from interp.data.corpus import HELD_OUT
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import AnalysisError, ConfigError, ModelError
from interp.measure import score_heads
from interp.text_inputs import CORPUS_SEQUENCES, corpus_inputs, text_inputs

LETTERS = "bcdfgijklmnopqrsuvwxyz"


def held_out_names(names):
    """What training holds out, by the rule alone: the tenth of the files with the least hashes."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return sorted(ordered[: max(1, round(len(names) / 10))])


@pytest.fixture
def folder(tmp_path):
    """Forty documents, of which four are held out: of 3, 8, 12 and 20 letters."""
    root = tmp_path / "mine"
    root.mkdir()
    names = [f"{n:02}.txt" for n in range(40)]
    sizes = dict(zip(held_out_names(names), (3, 8, 12, 20), strict=True))
    for n, name in enumerate(names):
        (root / name).write_text(LETTERS[n % len(LETTERS)] * sizes.get(name, 50))
    return root


def ids_of(model, text):
    return model.vocabulary.encode(text, prepend_bos=False)[0]


def test_each_document_gives_its_first_window_before_any_gives_its_second(folder):
    model = reader()
    names = held_out_names([path.name for path in folder.iterdir()])
    letters = [ids_of(model, (folder / name).read_text())[0] for name in names]
    inputs = corpus_inputs(model, str(folder), 5, seed=1)
    (batch,) = inputs.batches
    # Windows of BOS and four letters: none of the first, then 2, 3 and 5.
    assert batch.tokens.shape == (10, 5)
    assert (batch.tokens[:, 0] == 0).all()
    first_letters = batch.tokens[:, 1].tolist()
    assert sorted(first_letters[:3]) == sorted(letters[1:])
    assert first_letters[:3] == first_letters[3:6]
    assert sorted(first_letters[6:8]) == sorted(letters[2:])
    assert first_letters[8:] == [letters[3]] * 2
    assert (batch.tokens[:, 1:] == batch.tokens[:, 1:2]).all()
    # One number for each document, the same wherever its windows are.
    numbers = dict(zip(first_letters, batch.documents.tolist(), strict=True))
    assert [numbers[letter] for letter in first_letters] == batch.documents.tolist()
    assert sorted(numbers.values()) == [0, 1, 2]
    few = corpus_inputs(model, str(folder), 5, sequences=4, seed=1)
    assert torch.equal(few.batches[0].tokens, batch.tokens[:4])


def test_the_description_and_params_say_where_windows_come_from(folder):
    model = reader()
    inputs = corpus_inputs(model, str(folder), 5)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    short = digest.hexdigest()[:12]
    assert inputs.description == (
        f"10 windows of 5 tokens from 3 documents of mine (held out, sha256 {short}), each led by "
        "BOS = 0; 1 of 4 documents are shorter and left out"
    )
    assert inputs.params == {
        "shape": [10, 5],
        "corpus": "mine",
        "documents": 3,
        "documents_left_out": 1,
        "sha256": short,
        "length": 5,
        "bos": 0,
    }
    bare = corpus_inputs(model, str(folder), 3, False)
    assert bare.description.endswith("), no BOS")
    assert bare.params["bos"] is None
    assert (bare.batches[0].tokens != 0).all()


def test_the_seed_alone_orders_documents_and_the_callers_state_stays(folder):
    model = reader()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    orders = {
        tuple(corpus_inputs(model, str(folder), 5, seed=seed).batches[0].tokens[:3, 1].tolist())
        for seed in (0, 0, 1, 2, 3, 4, 5)
    }
    assert len(orders) > 1
    first, again = (corpus_inputs(model, str(folder), 5, seed=3) for _ in range(2))
    assert torch.equal(first.batches[0].tokens, again.batches[0].tokens)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_standard_errors_are_clustered_by_document(folder):
    model = reader()
    inputs = corpus_inputs(model, str(folder), 9)
    (batch,) = inputs.batches
    scores = score_heads(model, registry.get("previous-token"), inputs)
    _, cache = model.run_with_cache(batch.tokens)
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"].double().numpy()
        for head in range(pattern.shape[1]):
            each = [
                np.mean([pattern[row, head, query, query - 1] for query in range(1, 9)])
                for row in range(len(batch.tokens))
            ]
            mean = np.mean(each)
            sums = {}
            for value, document in zip(each, batch.documents.tolist(), strict=True):
                sums[document] = sums.get(document, 0) + value - mean
            n = len(sums)
            error = np.sqrt(sum(s**2 for s in sums.values()) * n / (n - 1)) / len(each)
            row = scores.table.query("layer == @layer and head == @head").iloc[0]
            assert row["previous_token"] == pytest.approx(mean, abs=1e-6)
            assert row["previous_token_se"] == pytest.approx(error, abs=1e-6)
            assert row["n"] == len(each)


def test_windows_of_one_document_count_as_independent(folder, tmp_path):
    model = reader()
    inputs = corpus_inputs(model, str(folder), 15)
    assert inputs.batches[0].documents is None
    assert inputs.description.startswith("1 window of 15 tokens from one text of mine (held out,")
    path = tmp_path / "one.txt"
    path.write_text("b" * 900 + "c" * 100)
    # A file alone holds out its last tenth.
    inputs = corpus_inputs(model, str(path), 11)
    assert inputs.batches[0].tokens.shape == (10, 11)
    assert (inputs.batches[0].tokens[:, 1:] == ids_of(model, "c")[0]).all()
    assert inputs.batches[0].documents is None
    assert HELD_OUT == 0.1


def test_the_null_of_a_corpus_keeps_what_leads_a_window(folder):
    inputs = corpus_inputs(reader(), str(folder), 5)
    (null,) = inputs.unrepeated
    assert (null.tokens[:, 0] == 0).all()
    assert all(len(set(row)) == 5 for row in null.tokens.tolist())
    assert torch.equal(null.documents, inputs.batches[0].documents)


def test_the_prose_of_the_library_is_a_corpus_without_a_network():
    model = reader()
    inputs = corpus_inputs(model, "docs")
    (batch,) = inputs.batches
    assert batch.tokens.shape == (CORPUS_SEQUENCES, 40)
    assert len(torch.unique(batch.documents)) == CORPUS_SEQUENCES
    table = score_heads(model, registry.get("sinks"), inputs).table
    assert (table["n"] == CORPUS_SEQUENCES).all()
    assert np.isfinite(table["sinks_se"]).all()


def test_a_window_fits_the_model_and_says_so(folder, tmp_path):
    model = reader()
    text = tmp_path / "x.txt"
    text.write_text("bcdfgijk" * 40)
    for make, source in ((corpus_inputs, str(folder)), (text_inputs, text)):
        for length, message in (
            (41, "length = 41 is longer than n_ctx = 40"),
            (1, "length = 1: at least 2 are needed, BOS and all"),
            (-3, "length = -3: at least 2 are needed, BOS and all"),
        ):
            with pytest.raises(AnalysisError) as caught:
                make(model, source, length)
            assert str(caught.value) == message
        with pytest.raises(AnalysisError, match="sequences = 0: at least one is needed"):
            make(model, source, 5, sequences=0)
    assert text_inputs(model, text, 40).batches[0].tokens.shape == (8, 40)


def test_fewer_windows_of_a_text_lie_evenly_over_it(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("bbccddffggiijjkk")
    model = reader()
    inputs = text_inputs(model, path, 3, sequences=4)
    expected = [[0, *ids_of(model, letter * 2)] for letter in "bdgj"]
    assert inputs.batches[0].tokens.tolist() == expected
    assert inputs.description == "4 windows of 3 tokens from x.txt, each led by BOS = 0"
    assert len(text_inputs(model, path, 3, sequences=100).batches[0].tokens) == 8


def test_a_corpus_that_cannot_be_used_is_refused(folder, tmp_path):
    model = reader()
    (tmp_path / "empty").mkdir()
    for kind, name, message in (
        (ConfigError, "nowhere", "no corpus 'nowhere': it should be stdlib or docs, or the path"),
        (ConfigError, str(tmp_path / "empty"), "no UTF-8 text file in this folder"),
    ):
        with pytest.raises(kind, match=message):
            corpus_inputs(model, name)
    with pytest.raises(AnalysisError) as caught:
        corpus_inputs(model, str(folder), 30)
    assert str(caught.value) == (
        f"{folder}: none of the 4 held-out documents has 30 tokens, BOS and all; the longest has "
        "21: a length of that is possible"
    )
    corpus_inputs(model, str(folder), 21)
    with pytest.raises(ModelError, match="this model has no tokenizer"):
        corpus_inputs(perturbed(tiny_config()), str(folder))
    without = reader(vocabulary=BytePairVocabulary(byte_pairs()))
    with pytest.raises(AnalysisError, match="has no BOS token"):
        corpus_inputs(without, str(folder), 5, True)
    assert corpus_inputs(without, str(folder), 4).params["bos"] is None


def test_a_corpus_changes_neither_the_model_nor_the_result_twice(folder):
    model = reader()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, again = (
        score_heads(model, registry.get("sinks"), corpus_inputs(model, str(folder), 9)).to_json()
        for _ in range(2)
    )
    assert first == again
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert interp.analyze(model, "sinks", seed=0).inputs != first
