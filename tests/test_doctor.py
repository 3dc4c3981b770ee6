"""The doctor: healthy models pass every line, and each fault made by hand fails its own line."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import hf_models
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from tiny_models import FAMILIES, tiny, tiny_config
from transformer_lens.hook_points import HookPoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

from interp.cli import app
from interp.doctor import CHECKS, doctor, structure_of
from interp.doctor.diagnosis import NotApplicable
from interp.doctor.rope import Rope
from interp.doctor.subject import random_tokens
from interp.errors import AnalysisError, ModelError
from interp.models import attention, head_attention
from interp.models.block import Block
from interp.models.head_attention import HeadAttention
from interp.models.loading import load_model, save_model
from interp.models.masks import AttentionMask
from interp.models.transformer import Transformer

HEADS = "sum of hook_result + b_O = hook_attn_out"
PROJECTED = "hook_z @ W_O + b_O = hook_attn_out"
STREAM = "resid_pre + attn_out + mlp_out = resid_post"
VALUES = "pattern @ v = z"
ROWS = "pattern rows sum to 1"
FORBIDDEN = "no weight on forbidden keys"
GATHERED = "gathered = dense attention"
ROTARY = "rotary angles = the config's"
UNEMBED = "unembed(ln_final(resid_post)) = logits"
Z_ACTS = "editing hook_z changes the logits"
ANY_ACTS = "editing any hook changes the logits"
RETURNING = "returning what was given changes nothing"
WATCHING = "watching scores, pattern, result only rounds"
PATCHING = "patching a cache back changes nothing"
CAUSAL = "a token changes no earlier logit"
PADDED = "a row alone = the row padded"
WEIGHTS = "weights = the source's"
ORIGINAL = "log-probs = the original's"


def lines(diagnosis, verdict):
    return {finding.check for finding in diagnosis.findings if finding.verdict == verdict}


def line(diagnosis, check):
    (found,) = (finding for finding in diagnosis.findings if finding.check == check)
    return found


def failures(diagnosis):
    """The failing lines in full, for the message of an assertion."""
    return [finding for finding in diagnosis.findings if finding.verdict == "FAIL"]


# --- healthy models -------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_our_own_is_healthy(family):
    model = tiny(family)
    diagnosis = doctor(model)
    assert diagnosis.healthy, failures(diagnosis)
    absent = {WEIGHTS}
    if model.config.positional_embedding_type != "rotary":
        absent.add(ROTARY)
    # Only some have a shape that transformers knows.
    assert lines(diagnosis, "not applicable") - {ORIGINAL} == absent
    parity = line(diagnosis, ORIGINAL)
    if family == "llama":
        assert parity.verdict == "pass"
    assert parity.reason == "" or parity.reason.startswith("because nothing else implements this")
    reason = line(diagnosis, WEIGHTS).reason
    assert reason == "because the model was given in memory: there is nothing to compare with"


NATIVE = ("gpt2", "llama", "mistral", "llama3_scaled")  # and qwen3 below


@pytest.mark.parametrize("name", NATIVE)
def test_pretrained_weights_in_our_model_are_healthy(name):
    hf = getattr(hf_models, name)()
    diagnosis = doctor(load_model(hf), original=hf)
    assert diagnosis.healthy, failures(diagnosis)
    assert lines(diagnosis, "not applicable") == ({ROTARY} if name == "gpt2" else set())


def test_bounds_follow_the_dtype():
    hf = hf_models.qwen3()
    exact = doctor(load_model(hf), original=hf)
    half = doctor(load_model(hf, dtype="bfloat16"), original=hf.bfloat16())
    assert exact.healthy, failures(exact)
    assert half.healthy, failures(half)
    assert half.dtype == "bfloat16"
    for check in (HEADS, STREAM, VALUES, GATHERED, PADDED, ORIGINAL):
        assert line(half, check).bound > 100 * line(exact, check).bound, check
        # A bound so loose that nothing fails would prove nothing.
        assert line(half, check).bound < 0.3, check
    for check in (FORBIDDEN, RETURNING, PATCHING, CAUSAL, WEIGHTS):
        assert line(half, check).bound == 0.0


BRIDGED = {
    "gpt2": {ROTARY: "the model has no rotary positions"},
    "llama": {},
    # Parallel blocks, a part of each head turned, and no hook after the turn.
    "gpt_neox": {ROTARY: "the model has no hook_rot_q"},
    "gemma2": {
        HEADS: "hook_attn_out comes after a norm of the branch (post_attention_layernorm)",
        PROJECTED: "hook_attn_out comes after a norm of the branch (post_attention_layernorm)",
        GATHERED: "scores are soft-capped at 5",
    },
    "olmo2": {
        HEADS: "hook_attn_out comes after a norm of the branch (post_attention_layernorm)",
        PROJECTED: "hook_attn_out comes after a norm of the branch (post_attention_layernorm)",
    },
    "bert": {
        HEADS: "the model has no hook_result",
        STREAM: "the block ends in a norm of the stream itself (output.LayerNorm), not in a sum",
        ROTARY: "the model has no rotary positions",
        UNEMBED: "a transform of its own stands between the stream and ln_final",
        CAUSAL: "the model is not causal: every token sees every other",
    },
}


@pytest.mark.parametrize("name", BRIDGED)
def test_a_bridge_passes_what_applies_to_it_and_says_what_does_not(name):
    hf = getattr(hf_models, name)()
    diagnosis = doctor(load_model(hf, backend="bridge"), original=hf)
    assert diagnosis.healthy, failures(diagnosis)
    reasons = {
        finding.check: finding.reason.removeprefix("because ")
        for finding in diagnosis.findings
        if finding.verdict == "not applicable"
    }
    assert reasons == BRIDGED[name]
    if name == "bert":
        assert line(diagnosis, ANY_ACTS).reason == (
            "edits are refused at blocks.0.attn.hook_pattern, blocks.1.attn.hook_pattern"
        )


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_a_model_that_scales_what_it_adds_to_the_stream():
    config = transformers.GraniteConfig(**SMALL, residual_multiplier=0.5, logits_scaling=2.0)
    hf = hf_models.perturbed(transformers.GraniteForCausalLM(config))
    diagnosis = doctor(load_model(hf, backend="bridge"), original=hf)
    assert diagnosis.healthy, failures(diagnosis)
    assert lines(diagnosis, "not applicable") == {UNEMBED}
    assert line(diagnosis, UNEMBED).reason == (
        "because logits are scaled after the unembedding (logits_scaling = 2.0)"
    )


def test_a_mixture_of_experts_with_sink_logits():
    config = transformers.GptOssConfig(
        **SMALL,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    hf = hf_models.perturbed(transformers.GptOssForCausalLM(config))
    diagnosis = doctor(load_model(hf, backend="bridge"), original=hf)
    assert diagnosis.healthy, failures(diagnosis)
    assert lines(diagnosis, "not applicable") == {ROWS, GATHERED}
    # Other tokens, other batches of an expert, other roundings.
    assert 0.0 < line(diagnosis, CAUSAL).bound < 1e-4


# --- faults, each with the lines it has to fail -------------------------------------------------


class Halved(HookPoint):
    """Shows hooks half of what is really there; the model computes on unharmed."""

    def __call__(self, x):
        return super().__call__(x * 0.5) * 2.0


class Deaf(HookPoint):
    """Runs its hooks and ignores what they return."""

    def __call__(self, x):
        super().__call__(x.clone())
        return x


class Rounding(HookPoint):
    """Passes through bfloat16 whenever somebody looks."""

    def __call__(self, x):
        return super().__call__(x).bfloat16().to(x.dtype) if self.has_hooks() else x


def replace_hook(model, name, kind):
    """Another hook point under the same name."""
    *path, last = name.split(".")
    setattr(model.get_submodule(".".join(path)), last, kind())
    model.setup()


def hook_fault(name, kind):
    return lambda model, patch: replace_hook(model, name, kind)


def perturbed_output_bias(model, patch):
    with torch.no_grad():
        model.blocks[1].attn.o_proj.bias[3] += 0.01


def perturbed_frequency(model, patch):
    model.rotary.frequencies[1] *= 1.1


def attention_before_its_bias(model, patch):
    def forward(self, resid, *, rotation, shortformer, key_mask, last=None, past=None):
        resid = self.hook_resid_pre(resid)
        out = self.attn(self.ln1(resid), rotation=rotation, shortformer=None, key_mask=key_mask)
        resid = resid + self.hook_attn_out(out - self.attn.b_O) + self.attn.b_O
        resid = self.hook_resid_mid(resid)
        return self.hook_resid_post(resid + self.hook_mlp_out(self.mlp(self.ln2(resid))))

    patch.setattr(Block, "forward", forward)


def wrong_head_layout(model, patch):
    """W_O cut into heads as if d_head came first; the fused projection is right."""
    right = HeadAttention.W_O.fget

    def wrong(self):
        return right(self).flatten(0, 1).unflatten(0, (-1, self.n_heads)).transpose(0, 1)

    patch.setattr(HeadAttention, "W_O", property(wrong))


def tiled_groups(model, patch):
    """KV heads given to query heads in turn: 0,1,0,1 and not 0,0,1,1."""
    patch.setattr(attention, "_per_query_head", lambda x, n: x.repeat(1, 1, n // x.shape[2], 1))


def softmax_over_queries(model, patch):
    patch.setattr(
        head_attention, "attention_pattern", lambda s, sink: s.softmax(dim=-2).nan_to_num()
    )


def uniform_empty_rows(model, patch):
    """A row of minus infinities becomes uniform, as a finite mask constant would have it."""
    right = head_attention.attention_pattern

    def pattern(scores, sink):
        empty = (scores == -math.inf).all(-1, keepdim=True)
        return torch.where(empty, 1 / scores.shape[-1], right(scores))

    patch.setattr(head_attention, "attention_pattern", pattern)


def sees_the_next_key(model, patch):
    """The dense path alone: patterns are not those of the fused path."""
    right = AttentionMask.allowed

    def allowed(self, n_query, *rest):
        seen = right(self, n_query, *rest)
        return seen | torch.eye(n_query, dtype=torch.bool).roll(1, 1).triu()

    patch.setattr(AttentionMask, "allowed", allowed)


def wider_window(model, patch):
    for block in model.blocks:
        block.attn.window += 1


def wrong_scale(model, patch):
    model.blocks[1].attn.scale *= 1.1


def scaled_logits(model, patch):
    right = Transformer.forward
    patch.setattr(Transformer, "forward", lambda self, *a, **k: right(self, *a, **k) * 1.01)


def inexact_dense_path(model, patch):
    right = head_attention.weighted_values
    patch.setattr(head_attention, "weighted_values", lambda p, v: right(p, v).bfloat16().float())


def rounded_cache(model, patch):
    right = Transformer.run_with_cache

    def run(self, *args, **kwargs):
        out, cache = right(self, *args, **kwargs)
        cache.cache_dict = {name: x.bfloat16().float() for name, x in cache.cache_dict.items()}
        return out, cache

    patch.setattr(Transformer, "run_with_cache", run)


def broken_causality(model, patch):
    block = model.blocks[0]
    forward = block.mlp.forward
    patch.setattr(block.mlp, "forward", lambda x: forward(x) + 1e-3 * x.mean(dim=1, keepdim=True))


def padding_off_by_one(model, patch):
    right = Transformer._positions

    def positions(self, n_pos, key_mask):
        found = right(self, n_pos, key_mask)
        return found if key_mask is None else (found + 1).clamp(max=self.config.n_ctx - 1)

    patch.setattr(Transformer, "_positions", positions)


def other_activation(model, patch):
    model.blocks[0].mlp.act_fn = "relu"


def raising_hook(model, patch):
    def broken(tensor, hook):
        raise RuntimeError("out of\nmemory")

    model.add_hook("blocks.0.attn.hook_pattern", broken, is_permanent=True)


def skipped_hook(model, patch):
    """The name is known, but the value does not pass through it."""
    known = model.hook_dict["blocks.1.attn.hook_v"]
    model.blocks[1].attn.hook_v = HookPoint()
    model.hook_dict["blocks.1.attn.hook_v"] = known


# Model, fault, and every line that fails. Faults of the arithmetic change the log-probs too.
FAULTS = {
    "perturbed b_O": ("llama", perturbed_output_bias, {WEIGHTS, ORIGINAL}),
    "perturbed frequency": ("llama", perturbed_frequency, {ROTARY, ORIGINAL}),
    "attn_out before its bias": (
        "llama",
        attention_before_its_bias,
        {HEADS, PROJECTED, STREAM},
    ),
    "hook_result halved": ("llama", hook_fault("blocks.0.attn.hook_result", Halved), {HEADS}),
    "W_O cut wrongly": ("llama", wrong_head_layout, {HEADS, PROJECTED, WATCHING}),
    "hook_mlp_out halved": ("llama", hook_fault("blocks.1.hook_mlp_out", Halved), {STREAM}),
    "hook_v halved": ("llama", hook_fault("blocks.0.attn.hook_v", Halved), {VALUES}),
    "groups tiled": ("llama", tiled_groups, {VALUES, GATHERED, WATCHING}),
    "softmax over queries": (
        "llama",
        softmax_over_queries,
        {VALUES, ROWS, GATHERED, WATCHING},
    ),
    "empty rows uniform": ("llama", uniform_empty_rows, {ROWS, FORBIDDEN}),
    "next key seen": ("llama", sees_the_next_key, {VALUES, ROWS, FORBIDDEN, GATHERED, WATCHING}),
    "window of one more": ("mistral", wider_window, {FORBIDDEN, GATHERED, ORIGINAL}),
    "wrong scale": ("llama", wrong_scale, {GATHERED, ORIGINAL}),
    "hook_rot_k halved": (
        "llama",
        hook_fault("blocks.1.attn.hook_rot_k", Halved),
        {GATHERED, ROTARY},
    ),
    "logits scaled": ("llama", scaled_logits, {UNEMBED, ORIGINAL}),
    "hook_z deaf": ("llama", hook_fault("blocks.1.attn.hook_z", Deaf), {Z_ACTS}),
    "pattern deaf": ("llama", hook_fault("blocks.1.attn.hook_pattern", Deaf), {ANY_ACTS}),
    "hook rounds": ("llama", hook_fault("ln_final.hook_normalized", Rounding), {RETURNING}),
    "dense path inexact": ("llama", inexact_dense_path, {WATCHING}),
    "cache rounded": ("llama", rounded_cache, {PATCHING}),
    "causality broken": ("llama", broken_causality, {CAUSAL, PADDED, ORIGINAL}),
    "padding off by one": ("gpt2", padding_off_by_one, {PADDED}),
    "other activation": ("llama", other_activation, {ORIGINAL}),
}


# Where a failing line says that it fails.
PLACES = {
    "perturbed b_O": {WEIGHTS: "blocks.1.attn.o_proj.bias"},
    "hook_mlp_out halved": {STREAM: "worst in layer 1"},
    "hook_z deaf": {Z_ACTS: "blocks.1.attn.hook_z"},
    "pattern deaf": {ANY_ACTS: "blocks.1.attn.hook_pattern"},
    "hook rounds": {RETURNING: "ln_final.hook_normalized"},
    "causality broken": {CAUSAL: "token 10 changes earlier logits"},
    "padding off by one": {PADDED: "with padding on the left"},
}


def broken(name, fault, monkeypatch):
    """The diagnosis of a model made from `name`, with a fault."""
    hf = getattr(hf_models, name)()
    model = load_model(hf)
    fault(model, monkeypatch)
    return doctor(model, original=hf)


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_fails_its_own_lines_and_no_other(what, monkeypatch):
    name, fault, expected = FAULTS[what]
    diagnosis = broken(name, fault, monkeypatch)
    assert not diagnosis.healthy
    assert lines(diagnosis, "FAIL") == expected, failures(diagnosis)
    for check, where in PLACES.get(what, {}).items():
        assert line(diagnosis, check).reason == where


def test_every_line_has_a_fault_that_it_alone_or_nearly_alone_finds():
    expected = [set(lines) for _, _, lines in FAULTS.values()]
    assert set(CHECKS) == set().union(*expected)
    for check in CHECKS:
        assert min(len(found) for found in expected if check in found) <= 3, check


def test_a_bridge_fails_the_lines_of_its_faults():
    hf = hf_models.llama()
    model = load_model(hf, backend="bridge")
    with torch.no_grad():
        model.bridge.original_model.model.layers[1].self_attn.o_proj.bias[3] += 0.01
    diagnosis = doctor(model, original=hf)
    assert lines(diagnosis, "FAIL") == {WEIGHTS, ORIGINAL}, failures(diagnosis)
    assert line(diagnosis, WEIGHTS).reason == "model.layers.1.self_attn.o_proj.bias"
    model = load_model(hf, backend="bridge")
    model.bridge.original_model.model.rotary_emb.inv_freq[1] *= 1.1
    assert lines(doctor(model, original=hf), "FAIL") == {ROTARY, ORIGINAL}


def test_many_differing_tensors_are_counted_and_the_first_named():
    hf, other = hf_models.llama(), hf_models.llama(seed=7)
    found = line(doctor(load_model(hf), original=other), WEIGHTS)
    assert found.measured == len(load_model(hf).state_dict())
    assert found.reason.startswith("embed.weight, ")
    assert found.reason.endswith(f" and {found.measured - 3:.0f} more")


def test_a_check_that_raises_is_a_line_and_not_the_end(monkeypatch):
    diagnosis = broken("llama", raising_hook, monkeypatch)
    found = line(diagnosis, GATHERED)
    assert (found.verdict, found.measured) == ("FAIL", None)
    assert found.reason == "RuntimeError: out of memory"
    assert len(diagnosis.findings) == len(CHECKS)


def test_a_hook_that_never_fires_is_named(monkeypatch):
    diagnosis = broken("llama", skipped_hook, monkeypatch)
    found = line(diagnosis, VALUES)
    assert found.verdict == "FAIL"
    assert found.reason.endswith("blocks.1.attn.hook_v is a hook of the model, but never fires")
    assert line(diagnosis, ANY_ACTS).reason == "blocks.1.attn.hook_v"


def test_numbers_that_are_none_fail(monkeypatch):
    def poison(model, patch):
        with torch.no_grad():
            model.unembed.weight[0, 0] = math.nan

    diagnosis = broken("llama", poison, monkeypatch)
    assert {PADDED, ORIGINAL, WEIGHTS} <= lines(diagnosis, "FAIL")
    json.loads(diagnosis.to_json(), parse_constant=pytest.fail)


# --- rotary angles by formulas of their own ----------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_frequencies_are_those_of_transformers(settings):
    config = SimpleNamespace(
        rope_parameters=settings,
        head_dim=64,
        hidden_size=64,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    theirs, _ = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu")
    ours = Rope(settings, n_turned=64).frequencies()
    # Theirs are float32.
    np.testing.assert_allclose(ours, theirs.double().numpy(), rtol=3e-7)


def test_llama3_frequencies_have_the_published_ends():
    settings = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = Rope(settings, n_turned=64).frequencies()
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(9.4183e-08, rel=1e-4)


def test_a_quarter_turn_by_hand():
    rope = Rope({"rope_theta": 10000.0}, n_turned=4)
    x = torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]], dtype=torch.float64)
    halves = rope.turned(x, torch.tensor([1]))[0, 0, 0].tolist()
    assert halves == pytest.approx([math.cos(1), 0.0, math.sin(1), 0.0])
    neighbours = Rope({"rope_theta": 10000.0}, n_turned=4, neighbours=True)
    found = neighbours.turned(x, torch.tensor([1]))[0, 0, 0].tolist()
    assert found == pytest.approx([math.cos(1), math.sin(1), 0.0, 0.0])
    # Only the first two dimensions turn.
    x[..., 3] = 5.0
    part = Rope({"rope_theta": 10000.0}, n_turned=2).turned(x, torch.tensor([1]))[0, 0, 0]
    assert part.tolist() == pytest.approx([math.cos(1), math.sin(1), 0.0, 5.0])


def test_an_unknown_scaling_is_not_judged():
    with pytest.raises(NotApplicable, match="the angles of rope type 'yarn' have no independent"):
        Rope({"rope_theta": 1.0, "rope_type": "yarn"}, n_turned=4).frequencies()


# --- the model, its inputs, the result ------------------------------------------------------------


def test_the_model_is_left_as_it_was():
    hf = hf_models.llama()
    model = load_model(hf)
    model.train()
    model.add_hook("blocks.0.attn.hook_z", lambda z, hook: z * 0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    doctor(model, original=hf)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert len(model.hook_dict["blocks.0.attn.hook_z"].fwd_hooks) == 1
    assert sum(len(point.fwd_hooks) for point in model.hook_dict.values()) == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_same_seed_gives_the_same_diagnosis():
    model = tiny("gqa")
    first, again = (doctor(model, seed=1) for _ in range(2))
    assert first.to_json() == again.to_json()
    rows = [random_tokens(model, structure_of(model), seed) for seed in (1, 2)]
    assert not torch.equal(*rows)
    assert not torch.equal(*rows[0])
    assert first.inputs == "2 sequences of 16 random tokens, no BOS, seed 1"


def test_tokens_begin_with_bos_and_reach_beyond_a_window():
    model = load_model(hf_models.mistral(sliding_window=50, max_position_embeddings=128))
    rows = random_tokens(model, structure_of(model), 0)
    assert rows.shape == (2, 58)
    assert rows[:, 0].tolist() == [1, 1]
    assert (rows[:, 1:] != 1).all()
    model = load_model(hf_models.mistral(sliding_window=1000))
    diagnosis = doctor(model)
    assert line(diagnosis, FORBIDDEN).reason == "the window of 1000 is longer than the 40 tokens"
    assert ", BOS 1, seed 0" in diagnosis.inputs
    assert diagnosis.healthy, failures(diagnosis)


def test_what_is_no_hooked_model_is_refused():
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no hooks"):
        doctor(hf_models.gpt2())


def test_a_context_too_short_to_tell_is_refused():
    with pytest.raises(AnalysisError, match="needs 4 tokens or more, and n_ctx = 3"):
        doctor(Transformer(tiny_config(n_ctx=3)))
    assert doctor(Transformer(tiny_config(n_ctx=4))).healthy


def test_the_table_and_the_files(tmp_path, monkeypatch):
    diagnosis = broken("gpt2", perturbed_output_bias, monkeypatch)
    assert list(diagnosis.table.columns) == ["check", "measured", "bound", "verdict", "reason"]
    assert list(diagnosis.table["check"]) == list(CHECKS)
    paths = diagnosis.save(tmp_path / "out")
    assert [path.name for path in paths] == ["doctor.csv", "doctor.json"]
    table = pd.read_csv(paths[0])
    assert list(table["verdict"]) == list(diagnosis.table["verdict"])
    np.testing.assert_array_equal(table["measured"], diagnosis.table["measured"].astype(float))
    data = json.loads(paths[1].read_text(), parse_constant=pytest.fail)
    assert data["healthy"] is False
    assert data["findings"][list(CHECKS).index(ROTARY)] == {
        "check": ROTARY,
        "measured": None,
        "bound": None,
        "verdict": "not applicable",
        "reason": "because the model has no rotary positions",
    }
    assert {"torch", "interp"} <= data["versions"].keys()


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    save_model(tiny("gqa"), folder)
    return Path("run")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_prints_the_table_and_ends_with_0(run_folder):
    result = call("doctor", run_folder)
    assert result.exit_code == 0, result.output
    for check in CHECKS:
        assert check.split(" = ")[0][:20] in result.stdout
    assert "healthy" in result.stdout
    result = call("doctor", run_folder, "--format", "csv", "--out", "out")
    assert result.stdout.splitlines()[0] == "check,measured,bound,verdict,reason"
    assert len(result.stdout.splitlines()) == 1 + len(CHECKS)
    assert result.stdout == Path("out/doctor.csv").read_text()


def test_a_run_of_llama_shape_is_held_against_transformers(tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    save_model(tiny("llama"), folder)
    for backend in ("native", "bridge"):
        model = load_model(tmp_path / "run", backend=backend)
        diagnosis = doctor(model)
        assert diagnosis.healthy, failures(diagnosis)
        assert {WEIGHTS, ORIGINAL} <= lines(diagnosis, "pass")
    model = load_model(tmp_path / "run")
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight[0, 0] += 0.1
    diagnosis = doctor(model)
    assert lines(diagnosis, "FAIL") == {WEIGHTS, ORIGINAL}
    assert line(diagnosis, WEIGHTS).reason == "blocks.0.attn.q_proj.weight"


def test_a_pretrained_folder_is_held_against_transformers(tmp_path):
    hf = hf_models.gpt2()
    hf.save_pretrained(tmp_path)
    diagnosis = doctor(load_model(tmp_path))
    assert diagnosis.healthy, failures(diagnosis)
    assert lines(diagnosis, "not applicable") == {ROTARY}


def test_the_command_ends_with_1_where_a_line_fails(run_folder, monkeypatch):
    scaled_logits(None, monkeypatch)
    result = call("doctor", run_folder)
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "1 of 18 lines fail" in result.stdout
    result = call("doctor", run_folder, "--format", "json", "--seed", "3")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["seed"] == 3


def test_a_users_mistake_ends_with_2(run_folder):
    result = call("doctor", "nowhere")
    assert result.exit_code == 2
    assert result.stderr.startswith("interp: ")
    assert result.stderr.count("\n") == 1
    assert call("doctor", run_folder, "--backend", "other").exit_code == 2
