"""What hooks and tokens do: edits act, returned values change nothing, nothing leaks backwards."""

import torch
from jaxtyping import Float
from torch import Tensor

from interp.doctor.diagnosis import Measured, NotApplicable, listed
from interp.doctor.subject import LAZY, Hook, Subject
from interp.errors import ModelError

SHORT = 8
"""Tokens of one sequence for the edits, of which there are many."""

_EDITED = (
    "hook_resid_pre",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "attn.hook_attn_scores",
    "attn.hook_pattern",
    "attn.hook_result",
    "hook_attn_out",
    "hook_resid_mid",
    "mlp.hook_pre",
    "mlp.hook_post",
    "hook_mlp_out",
    "hook_resid_post",
)


def z_acts(subject: Subject) -> Measured:
    """Editing `hook_z` of any layer changes the logits. Counts the layers where it does not."""
    if not subject.attending:
        raise NotApplicable("every head of the model is pruned")
    names = [subject.name(layer, "attn.hook_z") for layer in subject.attending]
    return _dead(subject, names)


def every_hook_acts(subject: Subject) -> Measured:
    """Editing any other activation changes the logits. Counts the hooks where it does not.

    Tried in the first, middle and last layer.
    """
    n_layers = len(subject.layers)
    layers = sorted({0, n_layers // 2, n_layers - 1})
    top = [name for name in ("hook_embed", "hook_pos_embed") if name in subject.model.hook_dict]
    names = [name for layer in layers for name in subject.names(_edited(subject, layer), [layer])]
    return _dead(subject, [*top, *names])


def _edited(subject: Subject, layer: int) -> list[str]:
    """The kinds of hooks that hold something in this layer."""
    silent = layer not in subject.attending
    return [kind for kind in _EDITED if not (silent and kind.startswith("attn."))]


def _dead(subject: Subject, names: list[str]) -> Measured:
    """How many hooks do not act: their edit leaves every logit as it was."""
    tokens = subject.tokens[:, :SHORT]
    clean = subject.run(tokens)
    dead, refused = [], []
    for name in names:
        # A lazy hook computes by another path, so that watching alone may round otherwise.
        before = subject.run(tokens, [(name, _watch)]) if name.endswith(LAZY) else clean
        try:
            edited = subject.run(tokens, [(name, _noise)])
        except ModelError:  # what says that it cannot be edited pretends nothing
            refused.append(name)
            continue
        if torch.equal(edited, before):
            dead.append(name)
    note = f"edits are refused at {listed(refused)}" if refused else ""
    return Measured(float(len(dead)), 0.0, listed(dead) or note)


def returning(subject: Subject) -> Measured:
    """Hooks that return what they were given leave every bit of the logits as it was.

    The lazily built activations are held against hooks that only read them.
    """
    clean, eager = subject.logits, _eager(subject)
    lazy = subject.names(LAZY)
    watched = subject.run(hooks=[(name, _watch) for name in lazy])
    groups = [(eager, clean), (lazy, watched)]
    error = max(_change(subject, names, expected, _give_back) for names, expected in groups)
    faulty = []
    for names, expected in groups if error != 0.0 else ():
        for kind in dict.fromkeys(map(_kind, names)):
            chosen = [name for name in names if _kind(name) == kind]
            before = expected
            if names is lazy:
                before = subject.run(hooks=[(name, _watch) for name in chosen])
            if _change(subject, chosen, before, _give_back) != 0.0:
                faulty.append(kind)
    return Measured(error, 0.0, listed(faulty))


def patching_back(subject: Subject) -> Measured:
    """Putting every cached activation back leaves every bit of the logits as it was."""
    tokens = subject.tokens
    logits, cache = subject.model.run_with_cache(tokens)
    assert isinstance(logits, Tensor)
    cached = dict(cache.items())

    def patch(name: str) -> Hook:
        def put_back(value: Tensor, hook: object) -> Tensor:
            return cached[name]

        return put_back

    patched = subject.run(tokens, [(name, patch(name)) for name in cached])
    error = float((patched.double() - logits.detach().cpu().double()).abs().max())
    faulty = []
    for kind in dict.fromkeys(map(_kind, cached)) if error != 0.0 else ():
        chosen = [name for name in cached if _kind(name) == kind]
        hooks = [(name, _watch) for name in cached if name not in chosen]
        again = subject.run(tokens, [*hooks, *((name, patch(name)) for name in chosen)])
        if not torch.equal(again, logits.detach().cpu()):
            faulty.append(kind)
    return Measured(error, 0.0, listed(faulty))


def nothing_leaks_back(subject: Subject) -> Measured:
    """Another token at t leaves every bit of the logits before t as it was.

    The bound is 0: a later key has weight 0, and no other part mixes positions. Only experts, which
    are given their tokens together, may round otherwise.
    """
    if not subject.structure.causal:
        raise NotApplicable("the model is not causal: every token sees every other")
    tokens, clean = subject.tokens, subject.logits
    n_pos = tokens.shape[1]
    worst, note = 0.0, ""
    for place in sorted({1, n_pos // 4, n_pos // 2, n_pos - 1}):
        changed = tokens.clone()
        # Any other token: the first one of the other sequence that differs.
        others = subject.rows[1]
        changed[0, place] = others[others != tokens[0, place]][-1]
        earlier = slice(0, place)
        error = _difference(subject.run(changed)[:, earlier], clean[:, earlier])
        if error > worst:
            worst, note = error, f"token {place} changes earlier logits"
    bound = subject.pass_rounding() if subject.structure.experts else 0.0
    return Measured(worst, bound, note if worst > bound else "")


def alone_or_padded(subject: Subject) -> Measured:
    """A row's log-probs are the same alone and beside padding, on the left and on the right."""
    worst, note = 0.0, ""
    for side in ("left", "right"):
        tokens, mask, real = subject.padded(side)
        batch = subject.run(tokens, mask=mask).double().log_softmax(-1)
        alone = subject.run(tokens[1:, real]).double().log_softmax(-1)
        full = subject.run(tokens[:1]).double().log_softmax(-1)
        error = max(_difference(batch[1:, real], alone), _difference(batch[:1], full))
        if not error <= worst:
            worst, note = error, f"with padding on the {side}"
    bound = subject.pass_rounding()
    return Measured(worst, bound, "" if worst <= bound else note)


def _eager(subject: Subject) -> list[str]:
    return [name for name in subject.model.hook_dict if not name.endswith(LAZY)]


def _change(
    subject: Subject, names: list[str], expected: Float[Tensor, "batch pos d_vocab"], hook: Hook
) -> float:
    if not names:
        return 0.0
    return _difference(subject.run(hooks=[(name, hook) for name in names]), expected)


def _difference(
    actual: Float[Tensor, "batch pos d_vocab"], expected: Float[Tensor, "batch pos d_vocab"]
) -> float:
    worst = (actual.double() - expected.double()).abs().max()
    return float(worst.nan_to_num(nan=torch.inf))


def _watch(value: Tensor, hook: object) -> None:
    return None


def _give_back(value: Tensor, hook: object) -> Tensor:
    return value


def _noise(value: Tensor, hook: object) -> Tensor:
    """The value with noise of its own size; scores get a nat's worth."""
    name = str(getattr(hook, "name", ""))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    if name.endswith("hook_attn_scores"):
        return value + noise
    return value + noise * (value.float().std() + 1e-3).to(value.dtype)


def _kind(name: str) -> str:
    parts = name.split(".")
    return ".".join(part for part in parts if not part.isdecimal())
