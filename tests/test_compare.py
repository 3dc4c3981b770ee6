"""Two models on the same probes: known answers, what differs between the sides, files, the page."""

import io
import itertools
import json
import re
from types import SimpleNamespace
from typing import ClassVar

import hf_models
import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import perturbed, tiny, tiny_config
from typer.testing import CliRunner

import interp
from interp import registry
from interp.cli import app
from interp.comparison import Comparison, compare
from interp.comparison.inputs import shared_corpus
from interp.comparison.result import rank_correlation
from interp.data.corpus import HELD_OUT, read_corpus
from interp.data.repeated import induction_targets
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import AnalysisError, ConfigError, ModelError, ShapeError
from interp.measure import analyze, head_values, score_heads, sequence_documents
from interp.models.transformer import Transformer
from interp.tables import strict_json
from interp.text_inputs import corpus_inputs, text_inputs
from interp.views.figures.comparison import HeadMap, head_maps
from interp.views.pages.comparison import compare_page, findings, short_names
from interp.views.pages.page import Plot
from interp.views.report import comparison_page, write_report

# Sums of a few float32 probabilities in another order.
ROUNDING = 1e-6
SCORES = ["duplicate_token", "induction", "previous_token", "sinks"]
INDUCTION = SCORES.index("induction")
NASTY = "<b>\"'&amp;</script><script>alert(1)</script>$x$%{z}"

# --- models made by hand --------------------------------------------------------------------


class HandMade:
    """A model whose patterns are made by hand from the tokens: no weights, no arithmetic."""

    # What no analysis here asks for.
    source = run_with_cache = None
    hook_dict: ClassVar = {}
    blocks = (SimpleNamespace(attn=SimpleNamespace(window=None)),) * 4

    def to_tokens(self, text):
        raise AssertionError

    def __init__(self, *layers, name="by hand", n_ctx=128, d_vocab=60, bos=None, special=()):
        self.layers = layers
        self.seen = []
        self.vocabulary = Ids(d_vocab, special, bos)
        self.cfg = SimpleNamespace(
            n_layers=len(layers),
            n_heads=len(layers[0]),
            pruned_heads={},
            heads=lambda layer: tuple(range(len(layers[0]))),
            n_ctx=n_ctx,
            d_vocab=d_vocab,
            bos_token_id=bos,
            attention_dir="causal",
            device="cpu",
            model_name=name,
        )

    def modules(self):
        return iter(())

    def run_with_hooks(self, tokens, *, fwd_hooks, return_type, attention_mask=None):
        self.seen.append(tokens)
        for layer, (name, hook) in enumerate(fwd_hooks):
            assert name == f"blocks.{layer}.attn.hook_pattern"
            heads = self.layers[layer]
            pattern = torch.stack([torch.stack([head(row) for head in heads]) for row in tokens])
            hook(pattern, hook=SimpleNamespace(name=name))


class Ids:
    """A vocabulary of ids without texts."""

    def __init__(self, size, special, bos):
        self.size, self.special_ids, self.bos_token_id = size, frozenset(special), bos

    def __len__(self):
        return self.size


def looks_at(keys):
    """A pattern in which query q puts everything on keys[q]."""
    return torch.nn.functional.one_hot(torch.tensor(keys), len(keys)).float()


def itself(row):
    """Every token looks at itself: none of the scores."""
    return looks_at(list(range(len(row))))


def inducing(weight):
    """`weight` of the attention goes to the induction target, the rest to the query itself."""

    def head(row):
        targets = induction_targets(row[None])[0].tolist()
        found = looks_at([key if key >= 0 else q for q, key in enumerate(targets)])
        return weight * found + (1 - weight) * itself(row)

    return head


def by_sequence(shift):
    """An induction head whose weight depends on the sequence's first token, and on `shift`."""
    return lambda row: inducing(float(row[0]) / 100 + shift)(row)


def previous(row):
    """The token before."""
    return looks_at([max(q - 1, 0) for q in range(len(row))])


WEIGHTS = [[0.1, 0.3, 0.5], [0.2, 0.4, 0.9]]


def weighted(weights, **more):
    """A model with an induction head of each weight."""
    return HandMade(*[[inducing(weight) for weight in layer] for layer in weights], **more)


# --- known answers --------------------------------------------------------------------------


def test_a_model_against_itself_has_no_difference_and_rank_correlation_one():
    first, second = tiny("gqa"), tiny("gqa")
    found = compare(first, second)
    assert found.labels == ("custom (A)", "custom (B)")
    assert list(found.differences) == [
        "layer",
        "head",
        *(f"{score}{end}" for score in SCORES for end in ("", "_se")),
    ]
    assert (found.differences[SCORES] == 0).all(axis=None)
    assert found.rank_correlations == pytest.approx(dict.fromkeys(SCORES, 1.0), abs=1e-12)
    assert findings(found)[-1] == "Every head scores exactly the same in both."


def test_an_induction_head_stands_out_against_none():
    found = compare(
        HandMade([itself, inducing(1.0)], name="induces", d_vocab=120),
        HandMade([itself, itself], name="idle", d_vocab=120),
    )
    induction = found.table.set_index(["model", "head"])["induction"]
    assert induction.to_dict() == {
        ("induces", 0): 0.0,
        ("induces", 1): 1.0,
        ("idle", 0): 0.0,
        ("idle", 1): 0.0,
    }
    spread = found.distributions.set_index(["score", "model"])
    # A perfect induction head finds nothing where nothing repeats.
    assert spread.loc[("induction", "induces"), "largest_null"] == 0
    assert spread.loc[("induction", "induces"), ["selected", "share_selected"]].tolist() == [1, 0.5]
    assert spread.loc[("induction", "idle"), "selected"] == 0
    assert found.table["induction_selected"].tolist() == [False, True, False, False]
    assert found.table["induction_held_out"].tolist() == [0, 1, 0, 0]
    assert findings(found)[INDUCTION] == (
        "Induction: the strongest heads are induces L0H1 at 1 and idle L0H0 at 0; "
        "selected are 1 of 2 in induces and 0 of 2 in idle."
    )
    assert "induction −1 ± 0 at L0H1" in findings(found)[len(SCORES)]


def test_permuted_heads_give_the_permuted_table_and_a_known_correlation():
    order = [2, 0, 1]
    permuted = [[layer[head] for head in order] for layer in WEIGHTS]
    found = compare(weighted(WEIGHTS), weighted(permuted), blocks=[6], batch=2)
    first, second = (found.heads_of(label)["induction"].to_numpy() for label in found.labels)
    assert first == pytest.approx(np.ravel(WEIGHTS), abs=ROUNDING)
    assert second == pytest.approx(np.ravel(permuted), abs=ROUNDING)
    gaps = np.ravel(permuted) - np.ravel(WEIGHTS)
    assert found.differences["induction"].to_numpy() == pytest.approx(gaps, abs=ROUNDING)
    # Ranks 1 3 5 2 4 6 against 5 1 3 6 2 4: squared differences sum to 16+4+4+16+4+4 = 48.
    assert found.rank_correlations["induction"] == pytest.approx(1 - 6 * 48 / (6 * 35))
    # Every head keeps to itself and its target: no previous-token head, so no ranks.
    assert np.isnan(found.rank_correlations["previous_token"])
    summary = found.summary["induction"]
    assert summary["largest_difference"]["head"] == "1.0"
    assert summary["largest_difference"]["value"] == pytest.approx(0.7, abs=ROUNDING)
    assert summary["best"][found.labels[1]]["head"] == "1.0"


def test_a_transformer_whose_heads_are_permuted_gives_the_permuted_table():
    """Through real weights: the heads of the last layer trade places, nothing else changes."""
    model = tiny("mha")
    order = torch.tensor([3, 1, 0, 2])
    other = tiny("mha")
    attention = other.blocks[1].attn
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.copy_(projection.weight.view(4, 6, -1)[order].reshape(24, -1))
            projection.bias.copy_(projection.bias.view(4, 6)[order].reshape(24))
        weight = attention.o_proj.weight
        weight.copy_(weight.view(24, 4, 6)[:, order].reshape(24, 24))
    found = compare(model, other)
    for score in SCORES:
        first, second = (
            found.heads_of(label)[score].to_numpy().reshape(2, 4) for label in found.labels
        )
        assert second[0] == pytest.approx(first[0], abs=ROUNDING)
        assert second[1] == pytest.approx(first[1][order], abs=ROUNDING)
        assert abs(second[1] - first[1]).max() > 1e-3


def test_each_side_has_the_numbers_that_an_analysis_alone_gives_it():
    model = tiny("llama", bos_token_id=3)
    found = compare(model, tiny("llama", seed=1, bos_token_id=3), blocks=[4, 5], batch=3, seed=7)
    mine = found.heads_of("custom (A)")
    names = [score.replace("_", "-") for score in SCORES]
    for name in names:
        alone = analyze(model, name, blocks=[4, 5], batch=3, seed=7).table
        score = registry.get(name).score
        for column, own in ((score, score), (f"{score}_se",) * 2, (f"{score}_null",) * 2):
            assert mine[column].tolist() == alone[own].tolist(), column
        assert mine[f"{score}_n"].tolist() == alone["n"].tolist()
        assert mine[f"{score}_selected"].tolist() == alone["selected"].tolist()
        assert mine[f"{score}_held_out"].tolist() == alone[f"{score}_held_out"].tolist()
    assert found.units == {registry.get(n).score: registry.get(n).unit for n in names}


def test_all_analyses_share_one_pass_over_the_inputs_and_one_over_their_null():
    model = HandMade([itself])
    compare(model, HandMade([previous]), blocks=[4, 5, 6], batch=2)
    assert len(model.seen) == 2 * 3


@pytest.mark.parametrize("n", [2, 5, 12])
def test_rank_correlation_is_that_of_the_textbook_formula(n):
    random = np.random.default_rng(n)
    first, second = random.permutation(n) * 1.0, random.permutation(n) * 1.0
    expected = 1 - 6 * ((first - second) ** 2).sum() / (n * (n**2 - 1))
    # Only the order counts.
    assert rank_correlation(first**3, np.exp(second)) == pytest.approx(expected, abs=1e-12)
    assert rank_correlation(first, -first) == pytest.approx(-1, abs=1e-12)


def test_rank_correlation_with_ties_gaps_and_constants():
    # Ranks 1 2.5 2.5 4 and 1 2 3 4, centred: -1.5 0 0 1.5 and -1.5 -0.5 0.5 1.5.
    tied = rank_correlation(np.array([0.0, 1, 1, 2]), np.array([5.0, 6, 7, 8]))
    assert tied == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    gap = rank_correlation(np.array([1.0, np.nan, 2, 3]), np.array([1.0, 9, 2, 3]))
    assert gap == pytest.approx(1)
    assert np.isnan(rank_correlation(np.ones(3), np.arange(3.0)))
    assert np.isnan(rank_correlation(np.full(3, np.nan), np.arange(3.0)))


def test_the_error_of_a_difference_is_taken_within_sequences():
    """A shift that is the same in every sequence is certain, however much the sequences differ."""
    first = HandMade([by_sequence(0.0), by_sequence(0.0)], name="a")
    second = HandMade([by_sequence(0.25), inducing(0.5)], name="b")
    found = compare(first, second, blocks=[5], batch=8)
    (shifted, other), mine = found.differences.to_dict("records"), found.heads_of("a")
    assert found.paired
    assert shifted["induction"] == pytest.approx(0.25, abs=ROUNDING)
    assert shifted["induction_se"] == pytest.approx(0, abs=ROUNDING)
    assert mine["induction_se"][0] > 0.01
    # Against a head that is the same in all sequences the difference is as uncertain as its head.
    assert other["induction_se"] == pytest.approx(mine["induction_se"][1], rel=1e-5)


def test_strongest_heads_are_ranked_and_ties_go_by_layer_and_head():
    found = compare(weighted([[0.2, 0.9], [0.9, 0.4]], name="a"), weighted([[0.1, 0.2]], name="b"))
    top = found.strongest(3)
    mine = top[(top["score"] == "induction") & (top["model"] == "a")]
    assert mine[["rank", "layer", "head"]].to_numpy().tolist() == [[1, 0, 1], [2, 1, 0], [3, 1, 1]]
    assert mine["value"].tolist() == pytest.approx([0.9, 0.9, 0.4], abs=ROUNDING)
    assert (top[top["model"] == "b"].groupby("score").size() == 2).all()


def test_distributions_are_quantiles_over_heads():
    weights = [[0.0, 0.05, 0.2, 0.3, 0.4]]
    found = compare(weighted(weights, name="a"), weighted(WEIGHTS, name="b"))
    spread = found.distributions
    row = spread.set_index(["score", "model"]).loc[("induction", "a")]
    assert row[["min", "q05", "q25", "median", "q75", "q95", "max"]].tolist() == pytest.approx(
        [0.0, 0.01, 0.05, 0.2, 0.3, 0.38, 0.4], abs=ROUNDING
    )
    assert row["heads"] == 5
    # Two heads are less than the effect above their null, which is nothing.
    assert row["selected"] == 3
    assert found.params["effect"]["induction"] == 0.1


# --- what differs between the sides ---------------------------------------------------------


def test_other_shapes_have_a_reason_instead_of_differences(tmp_path):
    found = compare(weighted([[0.1, 0.3]], name="small"), weighted(WEIGHTS, name="large"))
    assert found.why_no_differences == (
        "small has 1 layers of 2 heads, large has 2 layers of 3 heads: no head of one corresponds "
        "to a head of the other"
    )
    assert found.differences.empty
    assert found.rank_correlations == {}
    assert "largest_difference" not in found.summary["induction"]
    assert found.why_no_differences in findings(found)[-1]
    assert [section.name for section in compare_page(found).sections] == [
        "heads",
        "distributions",
        "strongest",
        "caveats",
        "facts",
    ]
    (tmp_path / "compare_differences.csv").write_text("of an earlier comparison")
    assert [path.name for path in found.save(tmp_path)] == ["compare.csv", "compare.json"]
    assert not (tmp_path / "compare_differences.csv").exists()


def test_as_many_layers_of_other_heads_are_other_shapes():
    found = compare(weighted([[0.1, 0.3]], name="two"), weighted([[0.1, 0.3, 0.5]], name="three"))
    assert found.why_no_differences.startswith(
        "two has 1 layers of 2 heads, three has 1 layers of 3 heads: "
    )
    assert found.differences.empty


def test_a_bos_on_one_side_only_leads_the_same_ids():
    bare, led = HandMade([previous], name="bare"), HandMade([previous], name="led", bos=7)
    found = compare(bare, led, blocks=[4, 6], batch=3, seed=5)
    for without, with_bos in zip(bare.seen, led.seen, strict=True):
        assert (with_bos[:, 0] == 7).all()
        assert torch.equal(with_bos[:, 1:], without)
        assert not (without == 7).any()
    assert found.paired
    assert found.inputs == (
        "blocks of 4, 6 distinct random tokens twice, 3 sequences of each, of 59 ids below 60 that "
        "both models have. bare: no BOS; led: BOS 7 in front"
    )


def test_bos_on_neither_side_where_that_is_asked_for_and_never_where_there_is_none():
    bare, led = HandMade([previous], name="bare"), HandMade([previous], name="led", bos=7)
    found = compare(bare, led, blocks=[4], prepend_bos=False)
    for one, other in zip(bare.seen, led.seen, strict=True):
        assert torch.equal(one, other)
    assert found.inputs.endswith("bare: no BOS; led: no BOS")
    with pytest.raises(AnalysisError, match="bare has no BOS token to put in front"):
        compare(bare, led, prepend_bos=True)


def test_ids_are_those_that_both_vocabularies_have_without_special_ones_of_either():
    small = HandMade([itself], name="small", d_vocab=12, special={0, 3})
    large = HandMade([itself], name="large", d_vocab=400, bos=5, special={4, 399})
    found = compare(small, large, batch=16)
    allowed = {1, 2, 6, 7, 8, 9, 10, 11}
    assert set(torch.cat([rows.ravel() for rows in small.seen]).tolist()) == allowed
    assert set(torch.cat([rows[:, 1:].ravel() for rows in large.seen]).tolist()) == allowed
    # The default block lengths that eight ids allow.
    assert found.params["blocks"] == [8]
    assert "of 8 ids below 12 that both models have" in found.inputs


def test_a_short_context_of_either_side_bounds_the_default_blocks():
    found = compare(HandMade([itself], n_ctx=33), HandMade([itself], n_ctx=33, bos=0))
    assert found.params["blocks"] == [8, 12, 16]
    for pair in ((13, 128), (128, 13)):
        found = compare(*(HandMade([itself], n_ctx=n_ctx) for n_ctx in pair))
        assert found.params["blocks"] == [6]


def test_given_tokens_reach_both_models_as_they_are():
    first, second = HandMade([itself], bos=1, d_vocab=30), HandMade([itself], d_vocab=20)
    tokens = np.array([[4, 5, 6, 4, 5, 6, 4, 5, 6]] * 2)
    found = compare(first, second, tokens)
    for model in (first, second):
        assert model.seen[0].tolist() == tokens.tolist()
    assert found.paired
    assert found.inputs == "2 given sequences of 9 tokens"


def corpus(tmp_path):
    """A text file, and its text."""
    text = "the cat sat on the mat and the dog sat on the log; " * 12
    path = tmp_path / "text.txt"
    path.write_text(text)
    return path, text


def reader(text, size, *, seed=0, name="reader", n_ctx=24):
    """A tiny model with a tokenizer of its own."""
    vocabulary = BytePairVocabulary.train([text], size)
    config = tiny_config(d_vocab=len(vocabulary), n_ctx=n_ctx)
    return Transformer(config, seed=seed, vocabulary=vocabulary, model_name=name)


def test_a_text_through_one_tokenizer_is_paired_in_windows_that_fit_both(tmp_path):
    path, text = corpus(tmp_path)
    found = compare(reader(text, 260), reader(text, 260, seed=1, n_ctx=20), text=path)
    assert found.paired
    assert found.params["length"] == 20
    assert re.fullmatch(r"\d+ windows of 20 tokens from text.txt", found.inputs)
    assert found.differences[SCORES].abs().to_numpy().max() > 0


def test_a_text_through_two_tokenizers_is_not_paired_and_says_so(tmp_path):
    path, text = corpus(tmp_path)
    small, large = reader(text, 258, name="small"), reader(text, 270, name="large")
    found = compare(small, large, text=path)
    assert not found.paired
    assert re.fullmatch(
        r"small: \d+ windows of 24 tokens from text.txt; large: \d+ windows of 24 tokens from "
        r"text.txt; each by its own tokenizer, so that the tokens are not the same",
        found.inputs,
    )
    first, second = (found.heads_of(label) for label in found.labels)
    assert first["sinks_n"][0] > second["sinks_n"][0]
    gap = second["sinks"] - first["sinks"]
    error = np.hypot(first["sinks_se"], second["sinks_se"])
    assert found.differences["sinks"].tolist() == pytest.approx(gap.tolist(), abs=1e-15)
    assert found.differences["sinks_se"].tolist() == pytest.approx(error.tolist(), abs=1e-15)
    assert any("own tokenizer" in line for line in caveats(found))


def test_a_text_honours_length_and_sequences(tmp_path):
    path, text = corpus(tmp_path)
    small, large = reader(text, 258, name="small"), reader(text, 270, name="large")
    found = compare(small, large, text=path, length=10, sequences=7)
    assert found.inputs.startswith("small: 7 windows of 10 tokens from text.txt; large: 7 windows")
    assert set(found.table["sinks_n"]) == {7}
    assert found.params["length"] == 10
    alone = text_inputs(small, path, 10, sequences=7)
    expected = score_heads(small, registry.get("sinks"), alone).table
    mine = found.heads_of("small")
    assert mine["sinks"].tolist() == expected["sinks"].tolist()


def test_a_text_shorter_than_a_window_is_one_of_the_same_width_for_both(tmp_path):
    path, text = tmp_path / "short.txt", "the cat sat on the mat"
    path.write_text(text)
    letters = reader("zq" * 9, 258, name="letters")
    words = reader(text * 20, 270, name="words")
    found = compare(letters, words, text=path)
    width = found.params["length"]
    assert 2 <= width < 22
    windows = re.findall(rf"(\d+) windows? of {width} tokens from short.txt", found.inputs)
    assert [int(n) for n in windows] == [22 // width, 1]


def library(tmp_path):
    """A folder of texts of very different lengths, and all of them together."""
    folder = tmp_path / "library"
    folder.mkdir()
    texts = []
    for number in range(60):
        words = ("the cat", "a dog", f"sat on mat {number}", "and looked at the log")
        texts.append(" ".join(words[(number * place) % 4] for place in range(3 + number % 9)))
        (folder / f"{number:02}.txt").write_text(texts[-1])
    return folder, " ".join(texts)


def by_hand(model, texts, width):
    """Windows of every text, by the tokenizer alone."""
    encoded = [model.vocabulary.encode([text])[0] for text in texts]
    return [
        [ids[at : at + width] for at in range(0, len(ids) - width + 1, width)] for ids in encoded
    ]


def test_a_corpus_gives_both_models_the_same_documents_in_the_same_order(tmp_path):
    folder, text = library(tmp_path)
    letters = reader("zq" * 9, 258, name="letters")
    words = reader(text, 300, name="words")
    width = 20
    shared = shared_corpus((letters, words), ("l", "w"), str(folder), width, 99, 3, None)
    first, second = shared.first, shared.second
    texts = list(read_corpus(str(folder), HELD_OUT).held_out.values())
    fine, coarse = (by_hand(model, texts, width) for model in (letters, words))
    # Some documents are long enough for one model only, and no document is for the other only.
    n_windows = [min(len(a), len(b)) for a, b in zip(fine, coarse, strict=True)]
    assert 0 < sum(n > 0 for n in n_windows) < sum(len(own) > 0 for own in fine)
    rows = [
        (batch.tokens.tolist(), sequence_documents([batch]).tolist())
        for batch in (first.batches[0], second.batches[0])
    ]
    assert rows[0][1] == rows[1][1]
    assert len(rows[0][0]) == len(rows[1][0]) == sum(n_windows)
    for a, b in zip(rows[0][0], rows[1][0], strict=True):
        places = [
            (n, at) for n, own in enumerate(fine) for at, window in enumerate(own) if window == a
        ]
        assert any(coarse[n][at : at + 1] == [b] for n, at in places)


def test_errors_of_a_corpus_are_clustered_by_document_and_so_are_differences(tmp_path):
    folder, text = library(tmp_path)
    first, second = (reader(text, 258, seed=seed, n_ctx=12, name=str(seed)) for seed in (0, 1))
    found = compare(first, second, corpus=str(folder), length=8, sequences=40)
    assert found.paired
    inputs = corpus_inputs(first, str(folder), 8, sequences=40)
    documents = inputs.batches[0].documents.numpy()
    assert 1 < len(set(documents)) < len(documents)
    values = [head_values(model, ["sinks"], inputs.batches)["sinks"] for model in (first, second)]
    gap = found.differences["sinks_se"].tolist()
    assert gap == pytest.approx(clustered(values[1] - values[0], documents), rel=1e-9)
    assert found.heads_of("0")["sinks_se"].tolist() == pytest.approx(
        clustered(values[0], documents), rel=1e-9
    )
    # Selection halves the documents as it does for one model.
    alone = analyze(first, "sinks", corpus=str(folder), length=8, sequences=40).table
    assert found.heads_of("0")["sinks_held_out"].tolist() == alone["sinks_held_out"].tolist()
    assert found.params["corpus"] == "library"
    assert any("clustered by document" in line for line in caveats(found))


def clustered(values, documents):
    """The standard error of each head's mean over sequences, by a loop over the documents."""
    n_layers, n_sequences, n_heads = values.shape
    errors = []
    for layer in range(n_layers):
        for head in range(n_heads):
            own = values[layer, :, head]
            sums = [(own[documents == d] - own.mean()).sum() for d in sorted(set(documents))]
            scale = len(sums) / (len(sums) - 1)
            errors.append((scale * sum(x * x for x in sums)) ** 0.5 / n_sequences)
    return errors


def test_a_corpus_through_two_tokenizers_is_clustered_on_either_side(tmp_path):
    folder, text = library(tmp_path)
    small, large = reader(text, 258, name="small"), reader(text, 300, name="large")
    found = compare(small, large, corpus=str(folder), length=10, sequences=30)
    assert not found.paired
    first, second = (found.heads_of(label)["sinks_se"] for label in found.labels)
    assert found.differences["sinks_se"].tolist() == pytest.approx(
        np.hypot(first, second).tolist(), abs=1e-15
    )
    assert (first > 0).all()
    assert "small: " in found.inputs
    assert "large: " in found.inputs
    assert found.inputs.count(f"{found.params['documents']} documents of library") == 2


def caveats(found):
    """The sentences of the page's section of caveats."""
    (section,) = [part for part in compare_page(found).sections if part.name == "caveats"]
    return section.parts[0].items


def test_native_and_bridge_of_one_model_agree():
    model = hf_models.gpt2()
    native = interp.load_model(model)
    bridged = interp.load_model(model, backend="bridge")
    found = compare(native, bridged)
    assert [label.rpartition(" ")[2] for label in found.labels] == ["(native)", "(bridge)"]
    gap = found.differences[SCORES].abs().to_numpy().max()
    assert gap < 1e-4
    assert min(found.rank_correlations.values()) > 0.99
    # The heads differ from each other by far more than the two readings of one head.
    assert (found.table[SCORES].std() > 100 * gap).all()


# --- refusals -------------------------------------------------------------------------------


def test_models_that_share_too_few_ids_are_refused():
    first = HandMade([itself], name="one", d_vocab=5, special={0})
    second = HandMade([itself], name="two", d_vocab=90, bos=1, special={2})
    message = (
        "one and two share 2 ids (below 5, without the special ids of both); repeated blocks need "
        "at least 3"
    )
    with pytest.raises(AnalysisError, match=re.escape(message)):
        compare(first, second)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            [8, 16],
            "block = 16: twice that is longer than n_ctx = 20 of short; at most 9 fits both models",
        ),
        ([9, 50], "block = 50: twice that is longer than n_ctx = 20 of short; at most 9 fits both"),
        ([2], "block = 2 should be at least 3"),
        ([], "blocks: at least one length is needed"),
    ],
)
def test_blocks_that_do_not_fit_both_are_refused(blocks, message):
    short = HandMade([itself], name="short", n_ctx=20, bos=0)
    with pytest.raises(AnalysisError, match=re.escape(message)):
        compare(HandMade([itself], name="long"), short, blocks=blocks)


def test_a_block_longer_than_the_shared_ids_is_refused():
    few = HandMade([itself], name="few", d_vocab=10)
    message = "block = 12 needs that many distinct tokens; few and many share 10 ids"
    with pytest.raises(AnalysisError, match=message):
        compare(few, HandMade([itself], name="many"), blocks=[12])


def test_a_context_without_room_for_two_blocks_is_refused():
    message = "tight has room for 2 tokens twice; repeated blocks need at least 3"
    with pytest.raises(AnalysisError, match=message):
        compare(HandMade([itself], name="wide"), HandMade([itself], name="tight", n_ctx=5))


def test_no_sequences_are_refused():
    with pytest.raises(AnalysisError, match="batch = 0: at least one sequence"):
        compare(HandMade([itself]), HandMade([itself]), batch=0)


def test_tokens_that_one_model_cannot_read_name_the_model():
    first, second = HandMade([itself], name="a"), HandMade([itself], name="b", d_vocab=20, n_ctx=9)
    with pytest.raises(ShapeError, match=r"^b: token ids should be within 0 and d_vocab - 1 = 19"):
        compare(first, second, [[1, 2, 30]])
    with pytest.raises(ShapeError, match=r"^b: sequence 10 > n_ctx 9$"):
        compare(first, second, [list(range(10))])


def test_text_for_a_model_without_a_tokenizer_names_the_model(tmp_path):
    path, text = corpus(tmp_path)
    bare = perturbed(tiny_config(d_vocab=300))
    with pytest.raises(ModelError, match=r"^custom: this model has no tokenizer"):
        compare(reader(text, 260), bare, text=path)


def test_a_corpus_that_does_not_fit_says_whose_fault_it_is(tmp_path):
    folder, text = library(tmp_path)
    name = str(folder)
    letters = reader("zq" * 9, 258, name="letters", n_ctx=90)
    words = reader(text, 300, name="words", n_ctx=70)
    with pytest.raises(ConfigError, match=r"^no corpus 'dosc': it should be stdlib or docs"):
        compare(letters, words, corpus="dosc")
    with pytest.raises(AnalysisError, match=r"^words: length = 80 is longer than n_ctx = 70"):
        compare(letters, words, corpus=name, length=80)
    with pytest.raises(AnalysisError, match=r"^words: .*none of the 6 held-out documents has 70"):
        compare(letters, words, corpus=name, length=70)
    with pytest.raises(AnalysisError, match="sequences = 0: at least one"):
        compare(letters, words, corpus=name, length=10, sequences=0)
    bare = perturbed(tiny_config(d_vocab=300))
    with pytest.raises(ModelError, match=r"^custom: this model has no tokenizer"):
        compare(letters, bare, corpus=name)


def test_documents_that_are_each_long_enough_for_one_model_only_are_refused(tmp_path):
    folder = tmp_path / "two"
    folder.mkdir()
    for number in range(20):
        word = "abcd" if number % 2 else "wxyz"
        (folder / f"{number}.txt").write_text(word * 10)
    first = reader("abcd" * 99, 300, name="first")
    second = reader("wxyz" * 99, 300, name="second")
    message = "none of the 2 held-out documents has 20 tokens, BOS and all, for both first and sec"
    with pytest.raises(AnalysisError, match=message):
        compare(first, second, corpus=str(folder), length=20)


def test_windows_are_for_text():
    model = HandMade([itself])
    for more in ({"length": 8}, {"sequences": 2}):
        with pytest.raises(AnalysisError, match="length and sequences belong to text or a corpus"):
            compare(model, model, **more)


def test_two_sources_of_tokens_are_refused(tmp_path):
    model = HandMade([itself])
    for more in ({"text": tmp_path / "text.txt"}, {"blocks": [4]}, {"corpus": "docs"}):
        with pytest.raises(AnalysisError, match="one source of tokens at a time"):
            compare(model, model, [[1, 2, 3]], **more)


def test_tokens_on_which_nothing_is_measurable_are_refused():
    with pytest.raises(AnalysisError, match="nothing is measurable on these tokens: 1 given"):
        compare(HandMade([itself]), HandMade([itself]), [[4]])


def test_an_unknown_model_in_a_comparison_names_those_it_has():
    found = compare(HandMade([itself], name="a"), HandMade([itself], name="b"))
    with pytest.raises(AnalysisError, match="no model 'c' here; there are a and b"):
        found.heads_of("c")


# --- files ----------------------------------------------------------------------------------


def refuse(name):
    raise AssertionError(f"{name} is not JSON")


def test_a_comparison_reads_back_as_it_was_written(tmp_path):
    found = compare(tiny("gqa"), tiny("gqa", seed=1), seed=3)
    written = found.save(tmp_path)
    assert [path.name for path in written] == [
        "compare.csv",
        "compare.json",
        "compare_differences.csv",
    ]
    back = Comparison.load(tmp_path / "compare.json")
    pd.testing.assert_frame_equal(back.table, found.table)
    pd.testing.assert_frame_equal(back.differences, found.differences)
    assert back.to_json() == found.to_json()
    assert back.labels == found.labels
    csv = pd.read_csv(tmp_path / "compare.csv")
    assert list(csv) == list(found.table)
    assert csv["induction"].tolist() == found.table["induction"].tolist()
    assert len(pd.read_csv(tmp_path / "compare_differences.csv")) == 8


def test_a_score_that_is_not_measurable_is_null_in_strict_json_and_said_on_the_page(tmp_path):
    tokens = [[*range(9)], [*range(9, 18)]]
    found = compare(HandMade([previous], name="a"), HandMade([itself], name="b"), tokens)
    saved = json.loads(found.to_json(), parse_constant=refuse)
    assert [row["induction"] for row in saved["table"]] == [None, None]
    assert saved["summary"]["induction"]["best"] == {}
    assert saved["distributions"][0]["median"] is None
    assert saved["kind"] == "compare"
    assert findings(found)[INDUCTION] == "Induction: not measurable on these tokens."
    found.save(tmp_path)
    back = Comparison.load(tmp_path / "compare.json")
    assert comparison_page(back) == comparison_page(found)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not():
    def made(seed):
        found = compare(tiny("gqa"), tiny("gqa", seed=1), batch=2, seed=seed)
        return found.to_json(), comparison_page(found)

    assert made(0) == made(0)
    assert made(0)[0] != made(1)[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a comparison of two models: "),
        ("{}", "not a comparison of two models: 'kind'"),
        ('{"kind": "run"}', "not a comparison of two models: its kind is 'run'"),
        ('{"kind": "compare", "models": ["a"]}', "not a comparison of two models: not enough"),
    ],
)
def test_another_file_is_no_comparison(tmp_path, content, message):
    path = tmp_path / "compare.json"
    path.write_text(content)
    with pytest.raises(AnalysisError, match=f"compare.json: {message}"):
        Comparison.load(path)


def test_a_comparison_without_a_column_is_refused(tmp_path):
    path = tmp_path / "compare.json"
    saved = json.loads(compare(tiny(), tiny()).to_json())
    for row in saved["table"]:
        del row["sinks_null"]
    path.write_text(strict_json(saved))
    with pytest.raises(AnalysisError, match="its table has no column 'sinks_null'"):
        Comparison.load(path)
    with pytest.raises(AnalysisError, match=r"absent\.json: no such file"):
        Comparison.load(tmp_path / "absent.json")


# --- figures and the page -------------------------------------------------------------------


def plots(found):
    """The figures of the page by title."""
    return {
        part.figure.layout.title.text: part.figure
        for section in compare_page(found).sections
        for part in section.parts
        if isinstance(part, Plot)
    }


def test_maps_of_both_models_share_one_colour_range_and_hold_the_numbers():
    found = compare(weighted([[0.25, 0.5]], name="small"), weighted(WEIGHTS, name="large"))
    figure = plots(found)["Induction by head"]
    small, large = figure.data
    assert small.coloraxis == large.coloraxis == "coloraxis"
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    assert np.array(large.z) == pytest.approx(np.array(WEIGHTS), abs=1e-5)
    assert np.array(small.z) == pytest.approx(np.array([[0.25, 0.5]]), abs=1e-5)
    # Cells are equally high, the first layers side by side.
    tops = [figure.layout[f"yaxis{axis}"].domain for axis in (1, 2)]
    assert tops[0][1] == tops[1][1]
    assert 2 * (tops[0][1] - tops[0][0]) == pytest.approx(tops[1][1] - tops[1][0])


@pytest.mark.parametrize("n_heads", [(4, 9), (1, 64), (12, 12), (2, 2, 2)])
def test_maps_lie_side_by_side_without_overlap_and_none_is_a_sliver(n_heads):
    tables = [pd.DataFrame({"layer": 0, "head": range(n), "x": 0.5}) for n in n_heads]
    figure = head_maps(
        [HeadMap("a name that is long", table, "x") for table in tables],
        title="",
        subtitle="",
        caption="",
        bar="x",
    )
    domains = [figure.layout[f"xaxis{axis + 1}"].domain for axis in range(len(n_heads))]
    assert domains[0][0] == 0
    assert domains[-1][1] == pytest.approx(1)
    for (_, end), (start, _) in itertools.pairwise(domains):
        assert end < start
    assert all(end - start > 0.18 for start, end in domains)


def test_a_missing_cell_is_blank_and_named():
    table = pd.DataFrame({"layer": [0, 0], "head": [0, 1], "x": [0.5, np.nan]})
    figure = head_maps(
        [HeadMap("a", table, "x")], title="", subtitle="", caption="", bar="x", diverging=True
    )
    assert figure.layout.meta["notes"] == ["a: blank, without a finite value: L0H1 (1 of 2 heads)."]
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-0.5, 0.5)


def test_sorted_heads_fall_and_the_null_is_drawn():
    found = compare(weighted([[0.25, 0.5]], name="small"), weighted(WEIGHTS, name="large"))
    figure = plots(found)["Heads from the strongest to the weakest"]
    small, large = figure.data[2 * INDUCTION :][:2]
    assert list(small.x) == [25, 75]
    assert list(small.y) == pytest.approx([0.5, 0.25], abs=1e-5)
    assert list(large.y) == sorted(large.y, reverse=True)
    assert list(large.customdata)[:2] == ["L1H2", "L0H2"]
    assert len(figure.layout.shapes) == 2 * len(SCORES)


def test_where_shapes_agree_the_page_has_the_difference_and_each_head_in_both():
    found = compare(weighted(WEIGHTS, name="a"), weighted(WEIGHTS[::-1], name="b"))
    shown = plots(found)
    difference = shown["Difference by head: duplicate token, induction"].data[INDUCTION]
    expected = np.array(WEIGHTS[::-1]) - np.array(WEIGHTS)
    assert np.array(difference.z) == pytest.approx(expected, abs=1e-5)
    scatter = shown["The same head in both models"]
    induction = scatter.data[INDUCTION]
    assert list(induction.x) == pytest.approx(np.ravel(WEIGHTS).tolist(), abs=1e-5)
    assert list(induction.y) == pytest.approx(np.ravel(WEIGHTS[::-1]).tolist(), abs=1e-5)


def test_markup_in_a_name_is_text_everywhere_on_the_page():
    found = compare(HandMade([itself], name=NASTY), HandMade([previous], name="<i>other</i>"))
    page = comparison_page(found)
    assert "alert(1)</script>" not in page
    assert "<i>other" not in page
    assert "&lt;i&gt;other&lt;/i&gt;" in page
    # plotly reads markup, templates and formulas of its own; a click's name of a model it does not.
    figures = [figure.update_traces(meta=None) for figure in plots(found).values()]
    drawn = [text for figure in figures for text in texts(figure.to_plotly_json())]
    assert any("&lt;i&gt;other" in text for text in drawn)
    assert not any(mark in text for text in drawn for mark in ("<i>", "<script", "$x$", "%{z}"))


def texts(value):
    """Every text in a figure."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner)


def test_long_paths_are_shortened_to_their_last_part_where_that_tells_them_apart():
    assert short_names(("reports/x/two-layer", "org/gpt2")) == {
        "reports/x/two-layer": "two-layer",
        "org/gpt2": "gpt2",
    }
    same = ("a/run", "b/run")
    assert short_names(same) == dict(zip(same, same, strict=True))


def test_report_makes_the_page_of_a_folder_with_a_comparison(tmp_path):
    found = compare(tiny(), tiny(seed=1))
    found.save(tmp_path)
    assert write_report(tmp_path).read_text(encoding="utf-8") == comparison_page(found)
    analyze(tiny(), "sinks").save(tmp_path)
    both = write_report(tmp_path).read_text(encoding="utf-8")
    assert 'id="differences"' in both
    assert 'id="result-1"' in both


def test_the_public_name_is_the_function():
    assert interp.compare is compare
    assert interp.Comparison is Comparison


# --- the command ----------------------------------------------------------------------------

CONFIG = """
[model]
n_layers = 2
d_model = 24
n_ctx = 16
d_vocab = 19
bos_token_id = 0

[model.attention]
n_heads = 4

[train]
steps = 2
batch_size = 2
lr = 1e-2
threads = 1

[data]
kind = "repeated"
span = [3, 6]

[probe]
every = 2
icl_early = [1, 3]
icl_late = [10, 15]
blocks = [4]
repeats = 2
sequences = 4
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two trained runs of other shapes, and a folder to work in."""
    folder = tmp_path_factory.mktemp("compare")
    config = folder / "tiny.toml"
    config.write_text(CONFIG)
    for name, sets in (("one", ()), ("two", ("model.n_layers=1", "model.attention.n_heads=2"))):
        flags = [word for pair in sets for word in ("--set", pair)]
        invoke("train", config, *flags, "--out", folder / name)
    return folder


def invoke(*words):
    """The result of a command that works."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


def refused(*words):
    """The one line of a command that is refused."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_the_command_prints_and_writes_what_the_function_returns(runs, tmp_path):
    one, two = runs / "one", runs / "two"
    result = invoke("compare", one, two, "--seed", 4, "--batch", 2, "--out", tmp_path)
    found = compare(interp.load_model(one), interp.load_model(two), batch=2, seed=4)
    assert (tmp_path / "compare.json").read_text(encoding="utf-8") == found.to_json() + "\n"
    page = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert page == comparison_page(found)
    assert not (tmp_path / "compare_differences.csv").exists()
    printed = " ".join(result.stdout.split())
    assert "no head of one corresponds to a head of the other" in printed
    assert "Induction 1" in printed
    assert "compare.html" in result.stderr
    csv = invoke("compare", one, two, "--seed", 4, "--batch", 2, "--format", "csv").stdout
    assert list(pd.read_csv(io.StringIO(csv))) == list(found.table)
    text = invoke("compare", one, one, "--block", "4", "--format", "json").stdout
    saved = json.loads(text, parse_constant=refuse)
    assert saved["params"]["blocks"] == [4]
    assert {row["induction"] for row in saved["differences"]} == {0.0}


def test_the_command_takes_tokens(runs, tmp_path):
    np.save(tmp_path / "tokens.npy", np.array([[1, 2, 3, 4, 1, 2, 3, 4, 1]]))
    found = invoke(
        "compare",
        runs / "one",
        runs / "two",
        "--tokens",
        tmp_path / "tokens.npy",
        "--format",
        "json",
    )
    assert json.loads(found.stdout)["inputs"] == "1 given sequence of 9 tokens"


def test_the_command_takes_a_corpus(tmp_path):
    folder, _ = library(tmp_path)
    config = tmp_path / "text.toml"
    config.write_text(
        CONFIG.replace("d_vocab = 19\nbos_token_id = 0", "d_vocab = 260").replace(
            'kind = "repeated"\nspan = [3, 6]', f'kind = "text"\ncorpus = "{folder}"'
        )
    )
    for seed in (0, 1):
        invoke("train", config, "--set", f"train.seed={seed}", "--out", tmp_path / str(seed))
    words = ("--corpus", folder, "--length", 9, "--sequences", 12)
    printed = invoke("compare", tmp_path / "0", tmp_path / "1", *words, "--format", "json").stdout
    saved = json.loads(printed)
    assert saved["inputs"].startswith("12 windows of 9 tokens from 6 documents of library")
    assert saved["paired"]


def test_the_second_backend_may_be_another(tmp_path):
    hf_models.gpt2().save_pretrained(tmp_path / "gpt2")
    text = invoke(
        *("compare", tmp_path / "gpt2", tmp_path / "gpt2", "--backend-b", "bridge", "--no-bos"),
        *("--block", "5", "--batch", 2, "--format", "json"),
    ).stdout
    saved = json.loads(text)
    assert saved["models"] == [f"{tmp_path / 'gpt2'} ({kind})" for kind in ("native", "bridge")]
    assert saved["inputs"].endswith(f"{saved['models'][0]}: no BOS; {saved['models'][1]}: no BOS")
    assert abs(saved["summary"]["sinks"]["largest_difference"]["value"]) < 1e-4


def test_mistakes_are_one_line(runs, tmp_path):
    one, two = runs / "one", runs / "two"
    assert "no model" in refused("compare", one, runs / "tow")
    assert "no model" in refused("compare", runs / "oen", two)
    assert "block = 9: twice that is longer than n_ctx = 16" in refused(
        "compare", one, two, "--block", "9"
    )
    assert "no such file" in refused("compare", one, two, "--tokens", tmp_path / "absent.npy")
    (tmp_path / "broken.npy").write_text("no array")
    assert "not an array of numbers" in refused(
        "compare", one, two, "--tokens", tmp_path / "broken.npy"
    )
    np.save(tmp_path / "large.npy", np.array([[1, 2, 99]]))
    line = refused("compare", one, two, "--tokens", tmp_path / "large.npy")
    assert "token ids should be within 0 and d_vocab - 1 = 18" in line
    assert "one source of tokens" in refused(
        "compare", one, two, "--block", "4", "--tokens", tmp_path / "large.npy"
    )
    assert "no corpus 'dosc'" in refused("compare", one, two, "--corpus", "dosc")
    assert "--text and --corpus: one source" in refused(
        "compare", one, two, "--corpus", "docs", "--text", tmp_path / "broken.npy"
    )
    assert "--length is for windows of text" in refused("compare", one, two, "--length", "8")
    assert "this model has no tokenizer" in refused("compare", one, two, "--corpus", "docs")
