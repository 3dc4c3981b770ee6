"""Config files: what they resolve to, and the one line that says what is wrong with one."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from pydantic import ValidationError

import interp.config
from interp.config import ModelConfig, config_tables, load_config
from interp.errors import ConfigError
from interp.models.transformer import Transformer

TOML = """
[model]
n_layers = 1
d_model = 24
n_ctx = 16
d_vocab = 19

[model.attention]
n_heads = 4

[train]
steps = 2
batch_size = 2
lr = 1e-3

[data]
kind = "repeated"
span = [3, 5]

[probe]
icl_early = [1, 3]
icl_late = [10, 15]
blocks = [4]
"""
TEXT = TOML.replace('kind = "repeated"\nspan = [3, 5]', 'kind = "text"\ncorpus = "stdlib"')


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    return file


def fault(path, *overrides):
    """The one line of a config that does not load, without the file it begins with."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: "), message
    return message.removeprefix(f"{path}: ")


# --- what a config resolves to --------------------------------------------------------------


def test_what_a_file_leaves_out_has_the_documented_defaults(path):
    config = load_config(path)
    model, train = config.model, config.train
    assert (model.d_head, model.n_key_value_heads, model.mlp) == (6, 4, None)
    assert (model.positional_embedding_type, model.normalization_type) == ("standard", "LN")
    assert (model.tie_embeddings, model.bos_token_id, model.dropout) == (False, None, 0.0)
    assert (train.seed, train.device, train.dtype, train.warmup_steps) == (0, "cpu", "float32", 0)
    assert (config.data.frequencies, config.data.distinct) == ("zipf", False)
    assert config.probe.every == 50
    assert config.experiment is None


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.lr=1e-4", lambda c: c.train.lr, 1e-4),
        ("train.steps = 7", lambda c: c.train.steps, 7),
        ("train.lr=1", lambda c: c.train.lr, 1.0),
        ("train.device=cuda:1", lambda c: c.train.device, "cuda:1"),
        ('train.device="cpu"', lambda c: c.train.device, "cpu"),
        ("probe.blocks=[3, 5]", lambda c: c.probe.blocks, (3, 5)),
        ("data.span=[3,3]", lambda c: c.data.span, (3, 3)),
        ("model.mlp.d_mlp=8", lambda c: c.model.mlp.d_mlp, 8),
        ("data.distinct=true", lambda c: c.data.distinct, True),
    ],
)
def test_an_override_is_read_as_toml_and_an_unquoted_word_as_text(path, override, read, value):
    found = read(load_config(path, [override]))
    assert found == value
    assert type(found) is type(value)


def test_the_last_of_several_overrides_wins(path):
    assert load_config(path, ["train.steps=3", "train.steps=4"]).train.steps == 4


@pytest.mark.parametrize(
    ("word", "tied"), [("false", False), ("False", False), ("true", True), ("no", False)]
)
def test_a_boolean_can_be_switched_off_and_acts_on_the_weights(path, word, tied):
    config = load_config(path, ["model.tie_embeddings=true", f"model.tie_embeddings={word}"])
    assert config.model.tie_embeddings is tied
    model = Transformer(config.model)
    assert (model.unembed.weight is model.embed.weight) is tied
    assert f"tie_embeddings = {str(tied).lower()}" in tomli_w.dumps(config_tables(config))


def test_the_head_size_is_the_quotient_unless_given(path):
    assert load_config(path).model.attention.d_head == 6
    wide = load_config(path, ["model.attention.d_head=10"]).model
    assert wide.d_head == 10
    assert Transformer(wide).blocks[0].attn.W_O.shape == (4, 10, 24)
    # 7 heads do not divide 24; a head size that is given makes no quotient.
    assert load_config(path, ["model.attention.n_heads=7", "model.attention.d_head=3"])


@pytest.mark.parametrize("n_key_value_heads", [1, 2, 4])
def test_key_value_heads_that_divide_are_taken(path, n_key_value_heads):
    override = f"model.attention.n_key_value_heads={n_key_value_heads}"
    assert load_config(path, [override]).model.n_key_value_heads == n_key_value_heads


@pytest.mark.parametrize("text", [TOML, TEXT], ids=["repeated", "text"])
def test_resolved_tables_load_to_the_same_config(tmp_path, text):
    (tmp_path / "given.toml").write_text(text)
    overrides = ["model.mlp.d_mlp=8", "model.d_vocab=300", "experiment.file=x.py"]
    config = load_config(tmp_path / "given.toml", overrides)
    tables = config_tables(config)
    assert tables["model"]["attention"]["d_head"] == 6  # as resolved, not as written
    (tmp_path / "resolved.toml").write_text(tomli_w.dumps(tables))
    again = load_config(tmp_path / "resolved.toml")
    assert again == config
    assert config_tables(again) == tables == tomllib.loads(tomli_w.dumps(tables))


def test_a_config_cannot_be_changed_after_it_was_checked(path):
    with pytest.raises(ValidationError, match="frozen"):
        load_config(path).train.steps = 3


def test_configs_are_checked_without_importing_torch():
    code = "import interp.config, sys; print(sorted({'torch', 'pandas'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.attention.n_key_value_heads=3",
            "model.attention.n_key_value_heads = 3 does not divide n_heads = 4; one of 1, 2, 4 "
            "would",
        ),
        (
            "model.attention.n_heads=5",
            "model.attention.n_heads = 5 does not divide d_model = 24, so attention.d_head has "
            "to be given",
        ),
        ("train.steps=0", "train.steps = 0: input should be greater than 0"),
        ("train.lr=nan", "train.lr = nan: input should be a finite number"),
        ("model.dropout=1.0", "model.dropout = 1.0: input should be less than 1"),
        ("model.bos_token_id=19", "model.bos_token_id = 19 is outside d_vocab = 19"),
        ("train=3", "train = 3: input should be a valid dictionary or instance of TrainConfig"),
        (
            "model.tie_embeddings=maybe",
            "model.tie_embeddings = 'maybe': input should be a valid boolean, unable to "
            "interpret input",
        ),
        (
            "data.span=[5,4]",
            "data.span = [5, 4] should be [shortest, longest] with 3 <= shortest <= longest",
        ),
        ("data.span=[3,16]", "data.span reaches 16: nothing repeats within n_ctx = 16"),
        (
            "probe.blocks=[8, 2]",
            "probe.blocks = [8, 2] should be at least 3: with 1 the induction target is the query "
            "itself, with 2 it is the previous token",
        ),
        ("probe.blocks=[9]", "probe.blocks holds 9: twice that is longer than n_ctx = 16"),
        (
            "probe.icl_late=[10,16]",
            "probe.icl_late = [10, 16] should lie within 1 and n_ctx - 1 = 15",
        ),
        (
            "probe.icl_early=[0,3]",
            "probe.icl_early = [0, 3] should lie within 1 and n_ctx - 1 = 15",
        ),
        (
            "probe.icl_early=[3,1]",
            "probe.icl_early = [3, 1] should lie within 1 and n_ctx - 1 = 15",
        ),
    ],
)
def test_a_fault_names_file_key_value_and_rule(path, override, message):
    assert fault(path, override) == message


def test_twelve_heads_list_every_number_that_would_divide(path):
    overrides = ["model.d_model=36", "model.attention.n_heads=12"]
    message = fault(path, *overrides, "model.attention.n_key_value_heads=5")
    assert message.endswith("= 5 does not divide n_heads = 12; one of 1, 2, 3, 4, 6, 12 would")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.steps=3", "unknown key trian; did you mean train? known: data, experiment, model,"),
        ("train.step=3", "unknown key train.step; did you mean steps? known: batch_size, betas,"),
        (
            "model.attention.n_head=2",
            "unknown key model.attention.n_head; did you mean n_heads? known: bias, d_head,",
        ),
        ("model.mlp.d_ml=2", "unknown key model.mlp.d_ml; did you mean d_mlp? known: act_fn,"),
        (
            "data.spam=2",
            "unknown key data.spam; did you mean span? known: distinct, frequencies, kind, span",
        ),
        ("data.zzz=2", "unknown key data.zzz; known: distinct, frequencies, kind, span"),
        ("data.text=x", "unknown key data.text; known: distinct, frequencies, kind, span"),
    ],
)
def test_an_unknown_key_lists_the_known_ones_of_its_table(path, override, message):
    assert message in fault(path, override)


def test_an_unknown_key_of_text_data_lists_those_of_text_data(tmp_path):
    path = tmp_path / "text.toml"
    path.write_text(TEXT.replace("d_vocab = 19", "d_vocab = 256"))
    message = "unknown key data.corpse; did you mean corpus? known: corpus, held_out_fraction, kind"
    assert fault(path, "data.corpse=2") == message


@pytest.mark.parametrize("key", ["n_layers", "d_model"])
def test_a_missing_key_is_named(path, key):
    path.write_text(re.sub(rf"{key} = \d+\n", "", TOML))
    assert fault(path) == f"model.{key} is missing"


def test_a_text_vocabulary_has_a_token_for_every_byte(tmp_path):
    path = tmp_path / "text.toml"
    path.write_text(TEXT)
    assert load_config(path, ["model.d_vocab=256"]).model.d_vocab == 256
    assert fault(path, "model.d_vocab=255") == (
        "model.d_vocab = 255 is below 256: a byte-level tokenizer needs a token for every byte"
    )


def test_distinct_tokens_have_to_be_there(path):
    small = ["model.d_vocab=6", "data.span=[3,6]", "data.distinct=true"]
    assert load_config(path, small)
    assert "more distinct tokens than a vocabulary of 6" in fault(path, *small, "data.span=[3,7]")
    # BOS is in no block.
    assert "data.span reaches 6" in fault(path, *small, "model.bos_token_id=0")
    assert "a vocabulary of 3 has too few distinct tokens" in fault(path, "model.d_vocab=3")


def test_with_bos_a_block_of_the_whole_rest_repeats_nothing(path):
    assert load_config(path, ["data.span=[3,15]"])
    assert "data.span reaches 15" in fault(path, "data.span=[3,15]", "model.bos_token_id=0")


@pytest.mark.parametrize("value", ["24.0", '"24"'])
def test_a_size_that_is_no_whole_number_is_refused_and_not_left_without_a_head_size(path, value):
    assert "d_model and attention.n_heads should be written as whole numbers" in fault(
        path, f"model.d_model={value}"
    )


ROTARY = "model.positional_embedding_type=rotary"
LINEAR = 'model.rotary_scaling={kind = "linear", factor = 4.0}'
LLAMA3 = (
    'model.rotary_scaling={kind = "llama3", factor = 8.0, low_freq_factor = 1.0, '
    "high_freq_factor = 4.0, original_n_ctx = 8}"
)


@pytest.mark.parametrize(
    ("overrides", "output_bias"),
    [
        ([], True),
        (["bias=false"], False),
        (["output_bias=false"], False),
        (["bias=false", "output_bias=true"], True),
        (["bias=true", "output_bias=true"], True),
    ],
)
def test_the_output_bias_follows_the_others_unless_it_is_given(path, overrides, output_bias):
    model = load_config(path, [f"model.attention.{text}" for text in overrides]).model
    assert model.attention.output_bias is output_bias
    attn = Transformer(model).blocks[0].attn
    assert (attn.o_proj.bias is not None) is output_bias
    assert (attn.q_proj.bias is not None) is model.attention.bias


def test_a_window_is_in_every_layer_unless_some_are_named(path):
    window = ["model.n_layers=3", "model.attention.window=4"]
    every = load_config(path, window).model
    assert [every.window(layer) for layer in range(3)] == [4, 4, 4]
    some = load_config(path, [*window, "model.attention.windowed_layers=[0, 2]"]).model
    assert [some.window(layer) for layer in range(3)] == [4, None, 4]
    none = load_config(path, ["model.n_layers=3"]).model
    assert [none.window(layer) for layer in range(3)] == [None, None, None]


def test_the_scale_is_one_over_the_root_of_the_head_size_and_falls_with_the_layer_if_asked(path):
    usual = load_config(path).model
    assert usual.attention_scale(0) == usual.attention_scale(2) == 6**-0.5
    fallen = load_config(
        path, ["model.attention.scale=0.5", "model.attention.scale_by_inverse_layer=true"]
    ).model
    assert [fallen.attention_scale(layer) for layer in range(3)] == [0.5, 0.25, 0.5 / 3]


@pytest.mark.parametrize(("override", "kind"), [(LINEAR, "linear"), (LLAMA3, "llama3")])
def test_a_rotary_scaling_resolves_and_loads_again(path, tmp_path, override, kind):
    config = load_config(path, [ROTARY, override])
    assert config.model.rotary_scaling.kind == kind
    again = tmp_path / "again.toml"
    again.write_text(tomli_w.dumps(config_tables(config)))
    assert load_config(again) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.attention.windowed_layers=[0]"],
            "model.attention.windowed_layers needs attention.window",
        ),
        (
            ["model.attention.window=4", "model.attention.windowed_layers=[0, 1]"],
            "model.attention.windowed_layers holds 1, beyond n_layers = 1",
        ),
        (
            ["model.attention.window=0"],
            "model.attention.window = 0: input should be greater than 0",
        ),
        (
            ["model.attention.window=4", "model.attention.windowed_layers=[-1]"],
            "model.attention.windowed_layers.0 = -1: input should be greater than or equal to 0",
        ),
        (
            [LINEAR],
            "model.rotary_scaling belongs to positional_embedding_type = 'rotary', not 'standard'",
        ),
        (
            [ROTARY, LLAMA3.replace("4.0", "1.0")],
            "model.rotary_scaling.low_freq_factor = 1 should be below high_freq_factor = 1",
        ),
        (
            [ROTARY, LLAMA3.replace("low_freq_factor = 1.0, ", "")],
            "model.rotary_scaling.low_freq_factor is missing",
        ),
        (
            [ROTARY, LINEAR.replace("linear", "yarn")],
            "model.rotary_scaling.kind = 'yarn': one of 'linear', 'llama3'",
        ),
        (
            [ROTARY, LINEAR.replace("4.0", "0.5")],
            "model.rotary_scaling.factor = 0.5: input should be greater than or equal to 1",
        ),
        (
            [ROTARY, LINEAR.replace("factor", "factr")],
            "unknown key model.rotary_scaling.factr; did you mean factor? known: factor, kind",
        ),
        (
            [ROTARY, LLAMA3.replace("original_n_ctx", "original_n_cxt")],
            "unknown key model.rotary_scaling.original_n_cxt; did you mean original_n_ctx? known: "
            "factor, high_freq_factor, kind, low_freq_factor, original_n_ctx",
        ),
        (
            [ROTARY, LINEAR.replace("4.0", "true")],
            "model.rotary_scaling.factor = true is not what belongs here",
        ),
        (["model.attention.scale=true"], "model.attention.scale = true is not what belongs here"),
        (["model.attention.window=true"], "model.attention.window = true is not what belongs here"),
        (["model.n_layers=true"], "model.n_layers = true is not what belongs here"),
        (["model.attention.scale=0"], "model.attention.scale = 0: input should be greater than 0"),
    ],
)
def test_a_rule_of_pretrained_shapes_that_is_broken_is_named(path, overrides, message):
    assert message in fault(path, *overrides)


def test_rates_of_adam_are_below_one(path):
    assert fault(path, "train.betas=[0.9, 1.0]").startswith("train.betas")


def test_rotary_needs_an_even_head_size(path):
    message = fault(path, "model.positional_embedding_type=rotary", "model.attention.d_head=5")
    assert message == "model.attention.d_head = 5 is odd; rotary turns pairs"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nonsense", "--set nonsense: expected key.subkey=value"),
        ("=3", "--set =3: expected key.subkey=value"),
        ("a..b=3", "--set a..b=3: expected key.subkey=value"),
        ("train.steps.x=3", "--set train.steps.x=3: steps is a value, not a table"),
    ],
)
def test_an_override_that_names_no_key_is_refused(path, override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such config file"),
        (b"a = = 3", "not valid TOML: Invalid value (at line 1, column 5)"),
        (b"\x80\x02K\x01.", "cannot be read: 'utf-8' codec can't decode byte 0x80"),
        (b"", "model is missing; train is missing; data is missing; probe is missing"),
    ],
    ids=["missing", "not_toml", "binary", "empty"],
)
def test_a_file_that_is_no_config_is_named(tmp_path, content, message):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    assert message in fault(path)


def test_a_folder_is_no_config(tmp_path):
    assert "Is a directory" in fault(tmp_path)


def test_every_config_of_the_repository_loads():
    configs = sorted((Path(interp.config.__file__).parents[2] / "configs").glob("*.toml"))
    assert configs
    for path in configs:
        assert isinstance(load_config(path).model, ModelConfig)
