"""Sinks: hand-made heads, what a head reads and writes there, sinks at any place, Gu's metric."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hf_models import gpt2, llama, mistral, native
from hf_models import tokens as tokens_of_theirs
from tiny_models import oracle, padding, some_tokens, tiny
from tiny_tokenizers import reader

import interp
from interp import registry
from interp.config import ModelConfig
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.inputs import token_inputs
from interp.measure import analyze, measure
from interp.models.layer_attention import LayerAttention, uniform_attention
from interp.models.patterns import Pattern
from interp.models.transformer import Transformer

# Sums of a few float32 probabilities in another order.
ROUNDING = 1e-6
# Float32 through a whole tiny model, against float64.
MODEL_ROUNDING = 1e-5

NEWLINE = 7


def batch_of(tokens, mask=None):
    return TokenBatch(tokens, torch.full_like(tokens, -1), mask)


def sinks_of(patterns, tokens, mask=None, *, causal=True, window=None, **values):
    """The columns of hand-made patterns, `[sequence, head, query, key]`."""
    settings = {name: values.pop(name) for name in ("min_keys", "epsilon", "ids") if name in values}
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    attention = LayerAttention(0, Pattern(patterns), real, causal=causal, window=window, **values)
    return registry.get("sinks").measure(attention, batch_of(tokens, mask), **settings)


def spread(n_pos):
    rows = torch.ones(n_pos, n_pos).tril()
    return rows / rows.sum(-1, keepdim=True)


def parked(n_pos, key, share):
    """From query `key` on, so much on that key and the rest on the query itself."""
    pattern = torch.eye(n_pos)
    for query in range(key + 1, n_pos):
        pattern[query, key], pattern[query, query] = share, 1 - share
    return pattern


class HandMade:
    """A model of one layer with these patterns, whatever its tokens are."""

    source = hook_dict = blocks = run_with_cache = None

    def __init__(self, *patterns, vocabulary=None):
        self.pattern = torch.stack(patterns)
        self.vocabulary = vocabulary
        self.hook_dict = ()
        self.cfg = SimpleNamespace(
            n_layers=1,
            n_heads=len(patterns),
            pruned_heads={},
            heads=lambda layer: tuple(range(len(patterns))),
            n_ctx=64,
            d_vocab=50,
            bos_token_id=None,
            attention_dir="causal",
            device="cpu",
            model_name="by hand",
        )
        self.blocks = [SimpleNamespace(attn=SimpleNamespace(window=None))]

    def to_tokens(self, text):
        raise AssertionError

    def modules(self):
        return iter(())

    def run_with_hooks(self, tokens, *, fwd_hooks, return_type, attention_mask=None):
        n_pos = tokens.shape[1]
        for _, hook in fwd_hooks:
            hook(self.pattern[:, :n_pos, :n_pos].expand(len(tokens), -1, -1, -1), hook=None)


class Lines:
    """A vocabulary in which id 7 is a line break."""

    bos_token_id = None
    special_ids = frozenset()

    def __len__(self):
        return 50

    def encode(self, text, *, prepend_bos=None):
        raise AssertionError

    def decode(self, ids):
        return "".join(self.token_texts(ids))

    def token_texts(self, ids):
        return ["\n" if i == NEWLINE else f" w{i}" for i in ids]

    def single_token(self, text):
        raise AssertionError


# --- known answers --------------------------------------------------------------------------


@pytest.mark.parametrize("n_pos", [8, 16, 64])
def test_a_uniform_head_and_an_untrained_model_have_no_sink_at_any_length(n_pos):
    """On 8 tokens a uniform head puts 0.340 on the first token, counting every query."""
    tokens = some_tokens(6, n_pos, d_vocab=50)
    uniform = analyze(HandMade(spread(n_pos), spread(n_pos)), "sinks", tokens)
    fresh = Transformer(
        ModelConfig(n_layers=2, d_model=24, n_ctx=64, d_vocab=50, attention={"n_heads": 4})
    )
    for scores in (uniform, analyze(fresh, "sinks", tokens)):
        assert not scores.table["selected"].any()
        assert scores.summary["selected"] == scores.summary["heads_raw"] == 0
        assert scores.summary["sink_tokens"] == []
        assert (scores.table["sinks"] < 0.3).all()
    rows = 1 / np.arange(1, n_pos + 1)
    assert uniform.table["gu_alpha"].tolist() == pytest.approx([rows.mean()] * 2, abs=ROUNDING)
    # Gu's figure counts the first query: it is for 64 tokens, and calls 8 even ones a sink.
    assert uniform.summary["gu_metric_percent"] == (100.0 if n_pos == 8 else 0.0)
    if n_pos == 64:
        assert "gu_length" not in uniform.summary
    else:
        assert uniform.summary["gu_length"] == (
            f"sequences of {n_pos} tokens; published values are for 64"
        )


def test_four_tokens_are_too_few_for_a_sink():
    with pytest.raises(AnalysisError, match="sinks is not measurable on these tokens"):
        analyze(HandMade(spread(4)), "sinks", some_tokens(2, 4))


def test_a_first_token_sink_is_called_one_and_a_head_between_epsilon_and_its_null_is_not():
    n_pos = 20
    tokens = some_tokens(4, n_pos, d_vocab=50)
    patterns = [parked(n_pos, 0, share) for share in (1.0, 0.5, 0.3)] + [spread(n_pos)]
    table = analyze(HandMade(*patterns), "sinks", tokens).table
    assert table["sinks"].tolist()[:3] == pytest.approx([1.0, 0.5, 0.3], abs=ROUNDING)
    assert table["selected"].tolist() == [True, True, False, False]
    lenient = analyze(HandMade(*patterns), "sinks", tokens, effect=0.2).table
    assert lenient["selected"].tolist() == [True, True, True, False]


def test_a_sink_on_a_later_line_break_is_found_with_its_place_and_text():
    n_pos = 20
    tokens = some_tokens(3, n_pos, d_vocab=6)
    tokens[:, 3] = NEWLINE
    model = HandMade(
        parked(n_pos, 3, 0.8), parked(n_pos, 0, 1.0), spread(n_pos), vocabulary=Lines()
    )
    scores = analyze(model, "sinks", tokens)
    table = scores.table
    assert table["position"].tolist() == [3, 0, 0]
    assert table["token"].tolist()[0] == "\\n"
    assert table["anywhere"].tolist()[:2] == pytest.approx([0.8, 1.0], abs=ROUNDING)
    assert table["sinks"].tolist()[:2] == pytest.approx([0.0, 1.0], abs=ROUNDING)
    assert table["selected"].tolist() == [False, True, False]
    listed = scores.summary["sink_tokens"]
    assert {"position": 3, "token": "\\n", "heads": 1, "sequences": 3} in listed
    assert {entry["position"] for entry in listed} == {0, 3}


@pytest.mark.parametrize("place", [0, 3, 8, 11])
def test_a_late_key_is_judged_by_the_queries_that_see_it(place):
    """Twenty tokens: divided by all queries, a sink at place 11 would get 0.8 * 8 / 13."""
    tokens = some_tokens(1, 20)
    columns = sinks_of(parked(20, place, 0.8)[None, None], tokens)
    # Where the sink is itself a counted query, it gives all to itself.
    own = place >= 7
    n_seeing = 20 - max(place, 7)
    expected = (0.8 * (n_seeing - own) + own) / n_seeing
    assert columns["anywhere"][0, 0, 0].item() == pytest.approx(expected, abs=ROUNDING)
    assert columns["anywhere_position"][0, 0, 0] == place
    assert columns["anywhere_token"][0, 0, 0] == tokens[0, place]


def test_the_last_keys_do_not_win_by_having_few_queries():
    """A head that looks at itself gives every key 1 of itself; the last key has no other query."""
    columns = sinks_of(torch.eye(20)[None, None], some_tokens(1, 20))
    # Of the keys that eight queries see, the last one is seen by exactly eight.
    assert columns["anywhere"][0, 0].tolist() == pytest.approx([1 / 8, 1 / 9, 1 / 10], abs=ROUNDING)
    assert columns["anywhere_position"][0, 0].tolist() == [12, 11, 10]


def test_a_sequence_too_short_to_compare_keys_has_no_strongest_key():
    scores = analyze(HandMade(parked(14, 0, 1.0)), "sinks", some_tokens(2, 14))
    assert scores.table["sinks"].tolist() == [1.0]
    assert scores.table["anywhere"].isna().all()
    assert scores.table["position"].tolist() == [-1]
    assert scores.table["token"].tolist() == [""]


def test_the_place_of_a_sink_is_counted_without_padding():
    pattern = parked(24, 3, 0.8)
    left = torch.zeros(24, 24)
    left[4:, 4:] = pattern[:20, :20]
    patterns = torch.stack([pattern, left])[:, None]
    mask = torch.stack([torch.arange(24) < 20, torch.arange(24) >= 4])
    columns = sinks_of(patterns, some_tokens(2, 24), mask)
    assert columns["anywhere_position"][:, 0, 0].tolist() == [3, 3]
    assert torch.equal(columns["anywhere"][0], columns["anywhere"][1])
    assert columns["length"].flatten().tolist() == [20, 20]


def test_gus_metric_is_strict_and_counts_the_first_query():
    """Ten queries: 0.25 of each but the first, which gives 1: (1 + 9 * 0.25) / 10 = 0.325."""
    columns = sinks_of(parked(10, 0, 0.25)[None, None], some_tokens(1, 10))
    assert columns["sinks"].item() == pytest.approx(0.25, abs=ROUNDING)
    alpha = columns["gu_alpha"].item()
    assert alpha == pytest.approx(0.325, abs=ROUNDING)
    assert columns["gu_sink"].item() == 1.0
    at = sinks_of(parked(10, 0, 0.25)[None, None], some_tokens(1, 10), epsilon=alpha)
    assert at["gu_sink"].item() == 0.0


def test_mass_on_a_token_that_writes_nothing_weighs_nothing():
    """Three heads with 0.9 on the first token, whose values are 0, 1 and 3 times the others'."""
    n_pos, n_heads = 12, 3
    patterns = parked(n_pos, 0, 0.9).expand(1, n_heads, -1, -1)
    v = torch.ones(1, n_pos, n_heads, 2)
    v[:, 0] *= torch.tensor([0.0, 1.0, 3.0])[:, None]
    z = torch.einsum("bhqk,bkhd->bqhd", patterns, v)
    W_O = torch.eye(2).expand(n_heads, 2, 2)
    columns = sinks_of(patterns, some_tokens(1, n_pos), v=v, z=z, W_O=W_O)
    assert columns["sinks"][0].tolist() == pytest.approx([0.9] * 3, abs=ROUNDING)
    assert columns["weighted"][0].tolist() == pytest.approx([0.0, 0.9, 2.7 / 2.8], abs=ROUNDING)
    # The first writes a tenth of the median head, which writes sqrt(2) at every token.
    analysis = registry.get("sinks")
    whole = {name: value.numpy()[None] for name, value in columns.items()}
    _, figures = analysis.finish(registry.Found(whole, analysis.params, str))
    names = ("heads_raw", "heads_weighted", "heads_dormant")
    assert [figures[name] for name in names] == [3, 2, 1]
    assert columns["dormant"][0].tolist() == [1.0, 0.0, 0.0]
    # Query 0 writes what it reads at key 0.
    expected = np.sqrt(2) * np.array([(0 + 11 * 0.1) / 12, 1.0, (3 + 11 * 2.8) / 12])
    assert columns["output_norm"][0].tolist() == pytest.approx(expected.tolist(), abs=ROUNDING)


def test_the_position_is_the_most_frequent_one_and_the_token_what_stands_there_most_often():
    n_pos = 20
    tokens = torch.arange(5 * n_pos).reshape(5, n_pos)
    tokens[:4, 3] = torch.tensor([8, 9, 9, 7])
    keys = (3, 3, 3, 5, 0)
    patterns = torch.stack([parked(n_pos, key, 0.9) for key in keys])[:, None]
    columns = sinks_of(patterns, tokens)
    whole = {name: value.numpy()[None] for name, value in columns.items()}
    analysis = registry.get("sinks")
    made, figures = analysis.finish(registry.Found(whole, analysis.params, str))
    assert made["position"].tolist() == [[3]]
    assert made["token"] == [["9"]]
    assert made["anywhere"].item() == pytest.approx(0.9, abs=ROUNDING)
    assert figures["sink_tokens"] == [
        {"position": 3, "token": "9", "heads": 1, "sequences": 2},
        {"position": 0, "token": "80", "heads": 1, "sequences": 1},
        {"position": 3, "token": "8", "heads": 1, "sequences": 1},
        {"position": 5, "token": "65", "heads": 1, "sequences": 1},
    ]


def test_where_only_weights_are_known_what_heads_write_is_not():
    scores = analyze(HandMade(parked(20, 0, 1.0)), "sinks", some_tokens(2, 20))
    assert scores.table[["weighted", "dormant", "output_norm"]].isna().all(axis=None)
    assert "heads_weighted" not in scores.summary
    assert scores.summary["heads_raw"] == 1


def test_mass_on_given_ids_is_that_on_every_key_that_holds_one():
    n_pos = 12
    tokens = torch.arange(n_pos)[None].repeat(2, 1) + 20
    tokens[0, 2], tokens[0, 9] = 5, 6
    patterns = torch.stack([spread(n_pos), parked(n_pos, 2, 0.8)]).expand(2, -1, -1, -1)
    columns = sinks_of(patterns, tokens, ids="5, 6")
    even = np.mean([(1 + (q >= 9)) / (q + 1) for q in range(7, n_pos)])
    # Query 9 gives key 2 its 0.8 and itself the rest.
    assert columns["on_ids"][0].tolist() == pytest.approx([even, (5 * 0.8 + 0.2) / 5], abs=ROUNDING)
    assert columns["on_ids_uniform"][0].tolist() == pytest.approx([even] * 2, abs=ROUNDING)
    # The second sequence holds neither.
    assert columns["on_ids"][1].isnan().all()
    assert "on_ids" not in sinks_of(patterns, tokens)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_keys": 0}, "min_keys = 0 should be at least 1"),
        ({"epsilon": 1.0}, "epsilon = 1.0 should be at least 0 and below 1"),
        ({"ids": "5,x"}, "ids = '5,x' should be token ids with commas between: 198,13"),
        ({"ids": "-5"}, "ids = '-5' should be token ids with commas between: 198,13"),
    ],
)
def test_settings_without_a_meaning_are_refused(given, message):
    with pytest.raises(AnalysisError) as caught:
        analyze(HandMade(spread(20)), "sinks", some_tokens(1, 20), **given)
    assert str(caught.value) == message


# --- an oracle on real models ---------------------------------------------------------------


def oracle_columns(seen, layer, W_O, tokens, mask, min_keys, ids, window):
    """Every column by loops over queries, from float64 activations."""
    name = f"blocks.{layer}.attn"
    patterns, v = seen[f"{name}.hook_pattern"], seen[f"{name}.hook_v"]
    written = np.linalg.norm(seen[f"{name}.hook_result"], axis=-1)
    n_sequences, n_heads = patterns.shape[:2]
    columns = {}

    def put(column, b, h, values):
        grid = columns.setdefault(column, np.full((n_sequences, n_heads), np.nan))
        if values:
            grid[b, h] = np.mean(values)

    for b in range(n_sequences):
        real = [p for p in range(len(mask[b])) if mask[b, p]]
        visible = {q: [k for k in real if q - (window or 10**9) < k <= q] for q in real}
        enough = [q for q in real if len(visible[q]) >= min_keys]
        first = real[0]
        counted = [q for q in enough if first in visible[q]]
        for h in range(n_heads):
            p, group = patterns[b, h], v.shape[2] * h // n_heads
            length = {k: np.linalg.norm(v[b, k, group] @ W_O[h]) for k in real}
            put("sinks", b, h, [p[q, first] for q in counted])
            put("gu_alpha", b, h, [p[q, first] for q in real])
            put("output_norm", b, h, [written[b, q, h] for q in real])
            put(
                "weighted",
                b,
                h,
                [
                    p[q, first] * length[first] / sum(p[q, k] * length[k] for k in visible[q])
                    for q in counted
                ],
            )
            put(
                "dormant",
                b,
                h,
                [
                    p[q, first] > 0.3 and written[b, q, h] < 0.5 * np.median(written[b, q])
                    for q in counted
                ],
            )
            held = {q: [k for k in visible[q] if tokens[b, k] in ids] for q in enough}
            put("on_ids", b, h, [p[q, held[q]].sum() for q in enough if held[q]])
            shares = [len(held[q]) / len(visible[q]) for q in enough if held[q]]
            put("on_ids_uniform", b, h, shares)
            alphas = []
            for k in real:
                seeing = [q for q in enough if k in visible[q]]
                if len(seeing) >= min_keys:
                    alphas.append((np.mean([p[q, k] for q in seeing]), real.index(k), k))
            best = max(alphas, default=None)
            put("anywhere", b, h, [best[0]] if best else [])
            put("position", b, h, [best[1] if best else -1])
            put("token", b, h, [tokens[b, best[2]] if best else -1])
    columns["gu_sink"] = (columns["gu_alpha"] > 0.3).astype(float)
    return columns


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "wide_heads", "llama", "windowed"])
def test_every_column_equals_a_loop_in_float64(family, side):
    changes = {"attention": {"window": 6}} if family == "windowed" else {}
    model = tiny(family, **changes)
    tokens = some_tokens(3, 16, d_vocab=7)
    mask = padding(side, [16, 11, 2], 16)
    real = np.ones((3, 16), bool) if mask is None else mask.numpy().astype(bool)
    inputs = token_inputs(model, tokens, mask)
    analysis = registry.get("sinks").with_params({"min_keys": 4, "ids": "2,3"})
    found = measure(model, [analysis], inputs.batches)["sinks"]
    seen = oracle(model, tokens, mask)
    window = 6 if family == "windowed" else None
    for layer in range(2):
        W_O = model.blocks[layer].attn.W_O.detach().double().numpy()
        expected = oracle_columns(seen, layer, W_O, tokens.numpy(), real, 4, {2, 3}, window)
        ours = {name: values[layer] for name, values in found.items()}
        ours["anywhere"] = ours["anywhere"][..., 0]
        ours["position"] = ours.pop("anywhere_position")[..., 0]
        ours["token"] = ours.pop("anywhere_token")[..., 0]
        assert np.array_equal(ours.pop("length")[0, :, 0], [real[0].sum()] * 4)
        assert set(ours) == set(expected)
        for name, values in ours.items():
            assert values == pytest.approx(expected[name], abs=MODEL_ROUNDING, nan_ok=True), name
    assert not np.isnan(found["sinks"][:, 0]).any()


@pytest.mark.parametrize("theirs", [gpt2, llama, mistral])
def test_a_bridged_model_gives_the_same_columns(theirs):
    original = theirs()
    own, bridged = native(original), interp.load_model(original, backend="bridge")
    analysis = registry.get("sinks").with_params({"ids": "2,3,4,5"})
    batches = token_inputs(own, tokens_of_theirs()).batches
    found, same = (measure(model, [analysis], batches)["sinks"] for model in (own, bridged))
    assert list(found) == list(same)
    for name, values in found.items():
        assert same[name] == pytest.approx(values, abs=MODEL_ROUNDING, rel=1e-4, nan_ok=True), name


def test_on_an_encoder_every_query_sees_every_key():
    n_pos = 10
    tokens = some_tokens(1, n_pos)
    pattern = torch.full((n_pos, n_pos), 0.2 / 9)
    pattern[:, 8] = 0.8
    columns = sinks_of(pattern[None, None], tokens, causal=False)
    assert columns["anywhere"][0, 0, 0].item() == pytest.approx(0.8, abs=ROUNDING)
    assert columns["anywhere_position"][0, 0, 0] == 8


# --- properties -----------------------------------------------------------------------------


def test_one_repeated_token_has_no_sink_where_positions_are_not_embedded():
    """All keys are alike: attention is even, by raw and by weighted mass."""
    model = tiny("no_positions", n_ctx=64)
    scores = analyze(model, "sinks", torch.full((2, 64), 5))
    rows = 1 / np.arange(8, 65)
    for column in ("sinks", "weighted"):
        assert scores.table[column].to_numpy() == pytest.approx(rows.mean(), abs=MODEL_ROUNDING)
    assert scores.summary["gu_metric_percent"] == 0.0
    assert scores.summary["selected"] == scores.summary["heads_weighted"] == 0


def test_with_rotary_positions_a_repeated_token_has_equal_values_so_weights_change_nothing():
    model = tiny("rotary", n_ctx=64)
    table = analyze(model, "sinks", torch.full((2, 64), 5)).table
    assert table["weighted"].to_numpy() == pytest.approx(
        table["sinks"].to_numpy(), abs=MODEL_ROUNDING
    )


def test_the_uniform_null_needs_no_values():
    tokens = some_tokens(2, 20)
    attention = uniform_attention(torch.ones_like(tokens, dtype=torch.bool))
    columns = registry.get("sinks").measure(attention, batch_of(tokens), ids="3")
    assert torch.equal(columns["on_ids"].isnan(), columns["on_ids_uniform"].isnan())
    assert torch.allclose(columns["on_ids"], columns["on_ids_uniform"], equal_nan=True)
    assert columns["anywhere"][0, 0, 0].item() == pytest.approx(
        np.mean(1 / np.arange(8, 21)), abs=ROUNDING
    )


def test_the_table_of_a_model_that_reads_text_is_written_and_read_back(tmp_path):
    model = reader("gqa")
    scores = analyze(model, "sinks", ["the\nthe\nthe\nthe\nthe\n\n\n", "a the a the a the a the a"])
    (_, record) = scores.save(tmp_path)
    again = interp.tables.HeadScores.load(record)
    assert again.table["token"].tolist() == scores.table["token"].tolist()
    assert again.summary["sink_tokens"] == scores.summary["sink_tokens"]
    assert not scores.table["token"].str.contains("\n").any()


def test_asking_for_sinks_changes_neither_the_model_nor_the_pattern():
    patterns = torch.rand(2, 3, 12, 12).tril()
    patterns /= patterns.sum(-1, keepdim=True)
    before = patterns.clone()
    tokens = some_tokens(2, 12)
    once = sinks_of(patterns, tokens, ids="1,2")
    twice = sinks_of(patterns, tokens, ids="1,2")
    assert torch.equal(patterns, before)
    for name in once:
        assert torch.equal(once[name].nan_to_num(-9), twice[name].nan_to_num(-9))
