"""Text into models and analyses: padding that changes nothing, windows, BOS, and memory."""

import json
from dataclasses import replace
from pathlib import Path

import hf_models
import numpy as np
import pytest
import torch
from tiny_models import perturbed, tiny_config
from tiny_tokenizers import END, KINDS, byte_pairs, gpt2_like, numbered, reader, wordpiece, wrapped
from typer.testing import CliRunner

import interp
from interp import registry
from interp.cli import app
from interp.data.pretrained_tokenizer import PretrainedVocabulary, load_pretrained_vocabulary
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import AnalysisError, ModelError, ShapeError
from interp.inputs import leading_bos, random_inputs, token_inputs
from interp.measure import PASS_NUMBERS, analyze, null_values, sequences_at_once
from interp.text_inputs import TEXT_WIDTH, text_inputs

# --- padding --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mha", "llama", "rotary"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pads", [1, 2, 5])
def test_a_padded_text_is_read_as_if_it_were_alone(family, side, pads):
    model = reader(family, PretrainedVocabulary(gpt2_like(padding_side=side)))
    texts = ["bcdefghi", "ihgfedcb"[pads:], "xyxyxyxy"[pads:]]
    logits, cache = model.run_with_cache(texts)
    for row, text in enumerate(texts):
        ids = model.vocabulary.encode(text)
        alone, own = model.run_with_cache(ids)
        n = len(ids[0])
        real = slice(9 - n, 9) if side == "left" else slice(0, n)
        assert (logits[row, real] - alone[0]).abs().max() < 1e-4
        for layer in range(2):
            name = f"blocks.{layer}.attn.hook_"
            pattern = cache[name + "pattern"][row, :, real, real]
            assert (pattern - own[name + "pattern"][0]).abs().max() < 1e-4
            assert (cache[name + "z"][row, real] - own[name + "z"][0]).abs().max() < 1e-4
    ids, mask = model.tokenize(texts)
    assert mask.sum(dim=1).tolist() == [9, 9 - pads, 9 - pads]
    # Looking at patterns took the dense path above.
    logits = model(texts)
    assert torch.equal(logits, model(ids, attention_mask=mask))
    assert torch.equal(logits, model.run_with_hooks(texts, fwd_hooks=[]))
    losses = [model(text, return_type="loss", loss_per_token=True).sum() for text in texts]
    mean = sum(losses) / int(mask.sum() - 3)
    assert model(texts, return_type="loss").item() == pytest.approx(mean.item(), abs=1e-5)


def test_texts_of_one_length_need_no_mask():
    model = reader()
    ids, mask = model.tokenize(["ab", "cd"])
    assert mask.all()
    assert torch.equal(model(["ab", "cd"]), model(ids))
    assert torch.equal(model.to_tokens(["ab", "cd"]), ids)


def test_to_tokens_does_not_lose_a_mask():
    with pytest.raises(ShapeError) as caught:
        reader().to_tokens(["ab", "c", "abc"])
    assert str(caught.value) == (
        "the texts have 2 to 4 tokens: tokenize(texts) pads them, and returns the attention_mask"
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_pads_may_begin_and_separate_too(side):
    model = reader(vocabulary=PretrainedVocabulary(gpt2_like(padding_side=side)))
    b, c, d = model.vocabulary.encode("bcd", prepend_bos=False)[0]
    ids, mask = model.tokenize(["bcd", f"b{END}", ""])
    assert torch.unique(ids[~mask]).tolist() == [0]
    assert ids[0].tolist() == [0, b, c, d]
    assert ids[1][mask[1]].tolist() == [0, b, 0]
    assert ids[2][mask[2]].tolist() == [0]
    first = {"left": [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]}
    first["right"] = [row[::-1] for row in first["left"]]
    assert mask.int().tolist() == first[side]
    _, cache = model.run_with_cache(["bcd", f"b{END}", ""])
    pattern = cache["blocks.0.attn.hook_pattern"]
    sight = pattern[1, :, int(mask[1].nonzero().max())]  # the last real query
    assert (sight[:, mask[1]] > 0).all()
    assert not sight[:, ~mask[1]].any()


def test_an_explicit_mask_always_wins():
    model = reader()
    texts = ["bcd", "b"]
    ids, _ = model.tokenize(texts)
    given = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(model(texts, attention_mask=given), model(ids, attention_mask=given))
    assert not torch.equal(model(texts), model(texts, attention_mask=given))
    table = analyze(model, "previous-token", texts, attention_mask=given.bool()).table
    other = analyze(model, "previous-token", ids, attention_mask=given.bool()).table
    assert table.equals(other)


@pytest.mark.parametrize("prepend_bos", [None, True, False])
def test_the_padding_side_survives_and_the_call_decides(prepend_bos, tmp_path):
    wrapped("does_not", padding_side="left").save_pretrained(tmp_path)
    model = reader(vocabulary=load_pretrained_vocabulary(tmp_path))
    texts, asked = ["abc", "a"], {"prepend_bos": prepend_bos}
    assert model.vocabulary.padding_side == "left"
    assert model.tokenize(texts, **asked)[1][1].int().argmin() == 0
    assert model.tokenize(texts, padding_side="right", **asked)[1][1, 0]
    assert not model.tokenize(texts, padding_side="left", **asked)[1][1, 0]
    assert model.vocabulary.tokenizer.padding_side == "left"
    assert reader(vocabulary=BytePairVocabulary(byte_pairs())).tokenize(texts)[1][1, 0]


def test_a_text_that_a_model_cannot_take_is_refused_in_one_line(capfd):
    model = reader(vocabulary=PretrainedVocabulary(gpt2_like(model_max_length=40)))
    assert model("x" * 39).shape == (1, 40, 270)
    for given in ("x" * 40, ["x", "x" * 40]):
        for run in (model, lambda text: model.run_with_cache(text)):
            with pytest.raises(ShapeError, match=r"^sequence 41 > n_ctx 40$"):
                run(given)
    with pytest.raises(ShapeError, match=r"^sequence 41 > n_ctx 40$"):
        analyze(model, "sinks", "x" * 40)
    without = reader(vocabulary=BytePairVocabulary(byte_pairs()))
    for given, message in (
        ("", "the prompt is empty: at least one token is needed"),
        (["", ""], "the prompt is empty: at least one token is needed"),
        (["a", ""], "text 1 of the batch is empty: it has no tokens"),
    ):
        with pytest.raises(ShapeError) as caught:
            without(given)
        assert str(caught.value) == message
    with pytest.raises(ShapeError, match=r"^to_str_tokens takes one sequence, got 2$"):
        model.to_str_tokens(["ab", "cd"])
    with pytest.raises(ModelError, match=r"^this model has no tokenizer: give token ids, not text"):
        perturbed(tiny_config()).to_str_tokens([1, 2])
    assert model.to_str_tokens([0, 269]) == [END, "<id 269>"]
    assert capfd.readouterr() == ("", "")


# --- two sizes of vocabulary ----------------------------------------------------------------


@pytest.fixture
def padded_model(tmp_path):
    """A tokenizer of 97 words, an embedding of 128 rows."""
    hf_models.gpt2(vocab_size=128, bos_token_id=None).save_pretrained(tmp_path / "padded")
    numbered(97).save_pretrained(tmp_path / "padded")
    return tmp_path / "padded"


def test_rows_of_the_embedding_without_a_token_are_never_used(padded_model):
    model = interp.load_model(padded_model)
    assert (len(model.vocabulary), model.cfg.d_vocab) == (97, 128)
    inputs = random_inputs(model, [20], 200, 0)
    given = token_inputs(model, np.full((40, 30), 127))
    for batches in (inputs.batches, inputs.unrepeated, given.unrepeated):
        drawn = torch.cat([batch.tokens.flatten() for batch in batches])
        assert torch.equal(torch.unique(drawn), torch.arange(97))
    assert model.to_str_tokens([96, 97, 120]) == ["w96", "<id 97>", "<id 120>"]


def test_a_tokenizer_larger_than_the_embedding_is_refused_at_load(tmp_path):
    hf_models.gpt2().save_pretrained(tmp_path)
    numbered(100).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has 100 tokens, more than d_vocab = 97"):
        interp.load_model(tmp_path)


# --- analyses -------------------------------------------------------------------------------


def test_random_tokens_are_led_as_the_model_expects_unless_told():
    leads = {None: 0, True: 0, False: None}
    model = reader()
    for asked, bos in leads.items():
        inputs = random_inputs(model, [5], 2, 0, asked)
        assert inputs.params["bos"] == leading_bos(model, asked) == bos
        assert (inputs.batches[0].tokens[:, 0] == 0).all() == (bos == 0)
        assert inputs.batches[0].tokens.shape[1] == 10 + (bos == 0)
        said = "[BOS = 0] + blocks of 5" if bos == 0 else "no BOS, blocks of 5"
        scores = analyze(model, "induction", blocks=[5], batch=2, prepend_bos=asked)
        assert scores.inputs.startswith(said)
    without = reader(vocabulary=BytePairVocabulary(byte_pairs()))
    assert leading_bos(without) is leading_bos(without, False) is None
    with pytest.raises(AnalysisError) as caught:
        analyze(without, "induction", prepend_bos=True)
    assert str(caught.value) == (
        "custom has no BOS token to put in front: its tokens come without unless prepend_bos or "
        "--bos asks for one"
    )


def test_the_tokenizer_knows_better_than_the_config_what_is_expected():
    """Qwen's configs name a BOS that its tokenizer never puts in front."""
    model = reader(vocabulary=BytePairVocabulary(byte_pairs()), bos_token_id=7)
    assert (leading_bos(model), leading_bos(model, True)) == (None, 7)
    ids_alone = perturbed(tiny_config(bos_token_id=7))
    assert (leading_bos(ids_alone), leading_bos(ids_alone, False)) == (7, None)


def test_ids_are_taken_with_the_bos_they_have():
    for asked in (True, False):
        with pytest.raises(AnalysisError, match="ids are taken exactly as given, with the BOS"):
            analyze(reader(), "sinks", [[1, 2, 3]], prepend_bos=asked)


def test_an_analysis_takes_text():
    model = reader()
    text = "the a the a bcd bcd"
    ids = model.vocabulary.encode(text)
    assert analyze(model, "sinks", text).table.equals(analyze(model, "sinks", ids).table)
    bare = model.vocabulary.encode(text, prepend_bos=False)
    found = analyze(model, "sinks", text, prepend_bos=False).table
    assert found.equals(analyze(model, "sinks", bare).table)
    texts = [text, "the a the a"]
    padded, mask = model.tokenize(texts)
    found = analyze(model, "previous-token", texts).table
    assert found.equals(analyze(model, "previous-token", padded, attention_mask=mask).table)
    assert found["n"].tolist() == [2] * 8


def test_each_window_of_text_begins_as_a_text_does(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("bcdefghijkl")
    model = reader(n_ctx=5)
    letters = model.vocabulary.encode("bcdefghijkl", prepend_bos=False)[0]
    b, f = letters[0], letters[4]
    inputs = text_inputs(model, path)
    windows = [[0, b, b + 1, b + 2, b + 3], [0, f, f + 1, f + 2, f + 3]]
    assert inputs.batches[0].tokens.tolist() == windows
    assert inputs.description == "2 windows of 5 tokens from x.txt, each led by BOS = 0"
    assert inputs.params == {"shape": [2, 5], "text": "x.txt", "bos": 0}
    assert (inputs.unrepeated[0].tokens == 0).sum(dim=1).tolist() == [1, 1]
    assert (inputs.unrepeated[0].tokens[:, 0] == 0).all()
    bare = text_inputs(model, path, prepend_bos=False)
    assert bare.batches[0].tokens.tolist() == [letters[:5], letters[5:10]]
    assert bare.description == "2 windows of 5 tokens from x.txt, no BOS"
    path.write_text(END + "bcdefghijkl")
    assert text_inputs(model, path).batches[0].tokens.tolist() == windows
    path.write_text("b")
    assert text_inputs(model, path).batches[0].tokens.tolist() == [[0, b]]
    without = reader(vocabulary=BytePairVocabulary(byte_pairs()))
    with pytest.raises(AnalysisError, match="has no BOS token"):
        text_inputs(without, path, prepend_bos=True)
    with pytest.raises(AnalysisError, match="a text of 1 tokens says nothing of attention"):
        text_inputs(without, path)


def test_a_window_is_never_wider_than_what_memory_was_planned_for(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("b" * 1200)
    model = reader(n_ctx=2000)
    inputs = text_inputs(model, path)
    assert inputs.batches[0].tokens.shape == (2, TEXT_WIDTH)
    assert inputs.description == "2 windows of 512 tokens from x.txt, each led by BOS = 0"
    assert text_inputs(model, path, 100).batches[0].tokens.shape == (12, 100)


def test_an_encoders_windows_stand_between_cls_and_sep(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("the cat sat " * 3)
    model = reader(vocabulary=PretrainedVocabulary(wordpiece()), n_ctx=6)
    inputs = text_inputs(model, path)
    expected = [[2, 5, 6, 7, 5, 3], [2, 6, 7, 5, 6, 3]]
    assert inputs.batches[0].tokens.tolist() == expected
    assert inputs.description == "2 windows of 6 tokens from x.txt, each between the ids 2 and 3"
    assert inputs.unrepeated[0].tokens[:, [0, -1]].tolist() == [[2, 3], [2, 3]]
    assert text_inputs(model, path, prepend_bos=False).batches[0].tokens.tolist() == [
        [5, 6, 7, 5, 6, 7]
    ]
    with pytest.raises(AnalysisError, match="length = 2: at least 3 are needed, BOS and all"):
        text_inputs(model, path, 2)


def with_facts(model, **facts):
    """The model, whose `cfg` says something else."""
    known = replace(model.cfg, **facts)
    model.__class__ = type("Stated", (type(model),), {"cfg": property(lambda _: known)})
    return model


@pytest.mark.parametrize("lengths", [(12, 12), (9, 12)])
def test_an_encoders_null_spreads_over_every_real_token(lengths):
    tokens = torch.arange(24).reshape(2, 12)
    mask = torch.arange(12)[None] < torch.tensor(lengths)[:, None]
    given = token_inputs(reader(), tokens, mask)
    found = {
        direction: null_values(
            with_facts(reader(), attention_dir=direction), [registry.get("sinks")], given, {}
        )["sinks"]
        for direction in ("causal", "bidirectional")
    }
    for row, length in enumerate(lengths):
        assert found["bidirectional"][:, row] == pytest.approx(1 / length)
        # Query q of the eighth and later sees q + 1 keys.
        rows = [1 / (q + 1) for q in range(7, length)]
        assert found["causal"][:, row] == pytest.approx(np.mean(rows))


@pytest.mark.parametrize(
    ("d_vocab", "n_heads", "n_pos", "expected"),
    [
        (270, 4, 101, 16),
        (512, 4, 256, 16),
        (49152, 9, 101, 16),
        (49152, 9, 512, 4),
        (50257, 16, 8192, 1),
    ],
)
def test_as_many_sequences_run_together_as_memory_allows(d_vocab, n_heads, n_pos, expected):
    model = with_facts(reader(), d_vocab=d_vocab, n_heads=n_heads)
    assert sequences_at_once(model, n_pos) == expected
    numbers = n_pos * (d_vocab + n_heads * n_pos)
    assert expected == 1 or expected * numbers <= PASS_NUMBERS
    assert expected == 16 or (expected + 1) * numbers > PASS_NUMBERS


def test_scores_do_not_depend_on_how_many_sequences_run_together(monkeypatch):
    model = reader()
    whole = analyze(model, "induction", blocks=[6], batch=12).table
    monkeypatch.setattr("interp.measure.PASS_NUMBERS", 13 * (270 + 4 * 13) * 5)
    assert sequences_at_once(model, 13) == 5
    parts = analyze(model, "induction", blocks=[6], batch=12).table
    assert np.allclose(whole["induction"], parts["induction"], atol=1e-6)


# --- command line ---------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Hugging Face folders of one model, one for each kind of tokenizer."""
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        model = hf_models.gpt2(vocab_size=270, bos_token_id=0 if kind != "cannot" else None)
        model.save_pretrained(kind)
        wrapped(kind).save_pretrained(kind)
    Path("x.txt").write_text("the a the a " * 20)
    np.save("x.npy", np.arange(24).reshape(2, 12))


def printed(*words):
    result = CliRunner().invoke(app, [*words, "--format", "json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def refusal(*words):
    result = CliRunner().invoke(app, list(words))
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def test_the_command_line_says_whether_there_is_a_bos(folders):
    for kind, flag, bos in (
        ("adds", (), 0),
        ("does_not", (), 0),
        ("does_not", ("--bos",), 0),
        ("adds", ("--no-bos",), None),
        ("cannot", (), None),
        ("cannot", ("--no-bos",), None),
    ):
        for command in (("sinks", kind), ("ablate", kind, "--heads", "0.0")):
            found = printed(*command, "--block", "5", "--batch", "2", *flag)
            assert found["params"]["bos"] == bos
            assert found["inputs"].startswith("no BOS, " if bos is None else "[BOS = 0] + ")
            if command[0] == "sinks":
                found = printed(*command, "--text", "x.txt", *flag)
                assert found["params"]["bos"] == bos
                assert (", each led by BOS = 0" in found["inputs"]) == (bos == 0)
    assert "has no BOS token to put in front" in refusal("sinks", "cannot", "--bos")
    assert "has no BOS token to put in front" in refusal("ablate", "cannot", "--bos")
    message = "interp: --tokens and --{}: ids are taken exactly as given, with the BOS they have\n"
    assert refusal("sinks", "adds", "--tokens", "x.npy", "--bos") == message.format("bos")
    assert refusal("ablate", "adds", "--tokens", "x.npy", "--no-bos") == message.format("no-bos")
