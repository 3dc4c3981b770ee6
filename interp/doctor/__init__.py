"""The doctor: does a model's every hook hold what its name says?

Each check is an identity that holds for any healthy model, with the error measured and the bound
that rounding sets. Bounds follow from the dtype and the numbers of roundings, not from results.
"""

import warnings
from collections.abc import Callable
from functools import partial

from torch import nn

from interp.doctor import arithmetic, effects, origin
from interp.doctor.bridged import BridgedStructure
from interp.doctor.diagnosis import Diagnosis, Finding, Measured, NotApplicable
from interp.doctor.native import NativeStructure
from interp.doctor.structure import Structure
from interp.doctor.subject import Subject, random_tokens
from interp.errors import ModelError
from interp.models.bridge import BridgedModel
from interp.models.modes import looking_at
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel, as_hooked

__all__ = ["CHECKS", "Diagnosis", "Finding", "NotApplicable", "Structure", "doctor", "structure_of"]

CHECKS: dict[str, Callable[[Subject], Measured]] = {
    "sum of hook_result + b_O = hook_attn_out": arithmetic.heads_sum,
    "hook_z @ W_O + b_O = hook_attn_out": arithmetic.projected_heads,
    "resid_pre + attn_out + mlp_out = resid_post": arithmetic.stream_sum,
    "pattern @ v = z": arithmetic.weighted_values,
    "pattern rows sum to 1": arithmetic.rows_sum,
    "no weight on forbidden keys": arithmetic.nothing_forbidden,
    "gathered = dense attention": arithmetic.gathered,
    "rotary angles = the config's": arithmetic.rotary_angles,
    "unembed(ln_final(resid_post)) = logits": arithmetic.unembedding,
    "editing hook_z changes the logits": effects.z_acts,
    "editing any hook changes the logits": effects.every_hook_acts,
    "returning what was given changes nothing": effects.returning,
    "watching scores, pattern, result only rounds": arithmetic.watching,
    "patching a cache back changes nothing": effects.patching_back,
    "a token changes no earlier logit": effects.nothing_leaks_back,
    "a row alone = the row padded": effects.alone_or_padded,
    "weights = the source's": origin.same_weights,
    "log-probs = the original's": origin.same_log_probs,
}
"""The identities by name, in the order of the table."""


def doctor(
    model: HookedModel | nn.Module, *, original: nn.Module | None = None, seed: int = 0
) -> Diagnosis:
    """Every identity of a model's hooks, with its measured error, its bound and the verdict.

    `model` is ours or bridged; it is left as it was. `original` is the transformers model it was
    made from, for models that do not know their source. The tokens are random and follow from
    `seed`. A check that raises is a line that fails.

    Raises: AnalysisError for a model whose context is shorter than 4 tokens; ModelError for what is
    neither our model nor a bridge.
    """
    model = as_hooked(model)
    structure = structure_of(model)
    rows = random_tokens(model, structure, seed)
    find = partial(origin.original_of, model) if original is None else lambda: original
    subject = Subject(model, structure, rows, find, given=original is not None)
    with looking_at(model), warnings.catch_warnings():
        # A bridge warns of edits at a norm's scale; returning the same value is one to it.
        warnings.filterwarnings("ignore", "A forward hook edited hook_scale/hook_normalized")
        findings = tuple(_examine(name, check, subject) for name, check in CHECKS.items())
    bos = model.cfg.bos_token_id
    lead = "no BOS, " if bos is None else f"BOS {bos}, "
    return Diagnosis(
        model=model.cfg.model_name,
        findings=findings,
        inputs=f"2 sequences of {rows.shape[1]} random tokens, {lead}seed {seed}",
        dtype=str(model.cfg.dtype).removeprefix("torch."),
        seed=seed,
    )


def _examine(name: str, check: Callable[[Subject], Measured], subject: Subject) -> Finding:
    try:
        found = check(subject)
    except NotApplicable as reason:
        return Finding(name, None, None, "not applicable", f"because {reason}")
    except Exception as error:  # whatever a model does, the other lines still count
        line = " ".join(str(error).split())
        return Finding(name, None, None, "FAIL", f"{type(error).__name__}: {line}")
    passed = found.error <= found.bound  # NaN is at most nothing
    return Finding(name, found.error, found.bound, "pass" if passed else "FAIL", found.note)


def structure_of(model: HookedModel) -> Structure:
    """What a model's config and modules say that its hooks should hold."""
    if isinstance(model, Transformer):
        return NativeStructure(model)
    if isinstance(model, BridgedModel):
        return BridgedStructure(model)
    raise ModelError(f"{type(model).__name__} is neither our Transformer nor a BridgedModel")
