"""Identities between what hooks hold: sums, products, angles.

An error is relative to the size of what was added up, position by position, since a position
with a massive activation would hide the others. Numbers are compared in float64.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.doctor.diagnosis import Measured, NotApplicable
from interp.doctor.subject import LAZY, Subject


def heads_sum(subject: Subject) -> Measured:
    """`hook_result` of all heads and `b_O` make the `hook_attn_out` of an unwatched layer."""
    _branch_reaches_hook(subject)
    cfg = subject.model.cfg
    errors = []
    for layer, result in enumerate(subject.results):
        _, bias = _output(subject, layer)
        attn_out = subject.value(layer, "hook_attn_out")
        errors.append(_relative(result["sum"] + bias, attn_out, result["size"] + bias.abs()))
    return _worst(errors, subject.rounding(cfg.n_heads * cfg.d_head))


def projected_heads(subject: Subject) -> Measured:
    """`hook_z` times each head's `W_O`, with `b_O`, makes `hook_attn_out`."""
    _branch_reaches_hook(subject)
    cfg = subject.model.cfg
    errors = []
    for layer in subject.layers:
        weight, bias = _output(subject, layer)
        result = torch.einsum("bphd,hdm->bphm", subject.value(layer, "attn.hook_z"), weight)
        attn_out = subject.value(layer, "hook_attn_out")
        size = result.abs().sum(2) + bias.abs()
        errors.append(_relative(result.sum(2) + bias, attn_out, size))
    return _worst(errors, subject.rounding(cfg.n_heads * cfg.d_head))


def stream_sum(subject: Subject) -> Measured:
    """What enters a block and what its branches write make what leaves it."""
    errors = []
    for layer in subject.layers:
        before, after = (subject.value(layer, f"hook_resid_{end}") for end in ("pre", "post"))
        parts = [subject.value(layer, "hook_attn_out")]
        if subject.has(layer, "hook_mlp_out"):
            parts.append(subject.value(layer, "hook_mlp_out"))
        for name, given, made in _norm_traffic(subject, layer):
            if torch.equal(made, after):
                raise NotApplicable(
                    f"the block ends in a norm of the stream itself ({name}), not in a sum"
                )
            if any(torch.equal(given, part) for part in parts):
                raise NotApplicable(f"a branch goes through {name} before it is added")
        terms = torch.stack([before, *parts])
        errors.append(_relative(terms.sum(0), after, terms.abs().sum(0)))
    return _worst(errors, subject.rounding(3))


def weighted_values(subject: Subject) -> Measured:
    """Each head's pattern times the values of its group makes `hook_z`."""
    errors = _none_yet(subject)
    for layer in subject.attending:
        if subject.structure.gated(layer):
            raise NotApplicable("what heads read is gated before hook_z")
        pattern = subject.patterns[layer]
        v = subject.per_query_head(layer, subject.value(layer, "attn.hook_v"))
        expected = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        size = torch.einsum("bhqk,bkhd->bqhd", pattern.abs(), v.abs())
        errors[layer] = _relative(subject.value(layer, "attn.hook_z"), expected, size)
    bound = subject.rounding(subject.tokens.shape[1]) + subject.score_rounding()
    return _worst(errors, bound)


def watching(subject: Subject) -> Measured:
    """A layer whose scores, pattern or results are read computes what it computes unwatched.

    Another path computes it, so that rounding differs, but nothing else may.
    """
    if not subject.names(LAZY):
        raise NotApplicable("the model has no hook_attn_scores, hook_pattern or hook_result")
    errors = _none_yet(subject)
    for layer in subject.attending:
        held = subject.dense[layer]
        v = subject.per_query_head(layer, subject.value(layer, "attn.hook_v"))
        size = torch.einsum("bhqk,bkhd->bqhd", held["attn.hook_pattern"].abs(), v.abs())
        plain = subject.value(layer, "attn.hook_z")
        errors[layer] = _relative(held["attn.hook_z"], plain, size)
    if subject.names(["attn.hook_result"]):
        for layer, held in enumerate(subject.results):
            plain = subject.value(layer, "hook_attn_out")
            size = torch.maximum(held["size"], plain.abs())
            error = _relative(held["hook_attn_out"], plain, size)
            errors[layer] = torch.maximum(errors[layer], error)
    cfg = subject.model.cfg
    terms = max(subject.tokens.shape[1], cfg.n_heads * cfg.d_head)
    return _worst(errors, subject.rounding(terms) + subject.score_rounding())


def rows_sum(subject: Subject) -> Measured:
    """A row of the pattern sums to 1, and to 0 where nothing may be attended to."""
    errors = _none_yet(subject)
    for layer in subject.attending:
        reason = subject.structure.missing_mass(layer)
        if reason is not None:
            raise NotApplicable(reason)
        sink = subject.structure.sink(layer)
        share = 1.0 if sink is None else _kept(subject, layer, sink)
        errors[layer] = (subject.patterns[layer].sum(-1) - share).abs().max()
    for side in ("left", "right"):
        tokens, mask, _ = subject.padded(side)
        names = subject.names(["attn.hook_pattern"], subject.attending)
        padded = subject.recorded(names, mask, tokens=tokens)
        for layer, pattern in zip(subject.attending, padded.values(), strict=True):
            expected = subject.allowed(layer, mask).any(-1).double()
            off = pattern.sum(-1) - expected
            # Of a padded row only that it sums to no more is told where a sink takes a share.
            some = subject.structure.sink(layer) is not None
            error = (off.clamp(min=0.0) if some else off.abs()).max()
            errors[layer] = torch.maximum(errors[layer], error)
    return _worst(errors, subject.rounding(subject.tokens.shape[1]))


def nothing_forbidden(subject: Subject) -> Measured:
    """No weight lies on a key that causality, the window or the padding forbids.

    The bound is 0: such a weight is the exponential of a number beyond the smallest float.
    """
    errors, notes = _none_yet(subject), []
    for layer in subject.attending:
        forbidden = ~subject.allowed(layer)
        errors[layer] = subject.patterns[layer].abs().mul(forbidden).max()
        window = subject.structure.window(layer)
        if window is not None and window >= subject.tokens.shape[1]:
            notes = [f"the window of {window} is longer than the {subject.tokens.shape[1]} tokens"]
    for side in ("left", "right"):
        tokens, mask, _ = subject.padded(side)
        names = subject.names(["attn.hook_pattern"], subject.attending)
        padded = subject.recorded(names, mask, tokens=tokens)
        for layer, pattern in zip(subject.attending, padded.values(), strict=True):
            error = pattern.abs().mul(~subject.allowed(layer, mask)).max()
            errors[layer] = torch.maximum(errors[layer], error)
    worst = _worst(errors, 0.0)
    return Measured(worst.error, worst.bound, worst.note or "; ".join(notes))


def gathered(subject: Subject) -> Measured:
    """exp(scale q·k − lse) of the queries and keys that the hooks hold makes the pattern."""
    errors = _none_yet(subject)
    for layer in subject.attending:
        reason = subject.structure.softmax_term(layer)
        if reason is not None:
            raise NotApplicable(reason)
        scores = _scores(subject, layer)
        lse = scores.logsumexp(-1, keepdim=True)
        sink = subject.structure.sink(layer)
        if sink is not None:
            lse = torch.logaddexp(lse, sink[:, None, None])
        errors[layer] = ((scores - lse).exp() - subject.patterns[layer]).abs().max()
    return _worst(errors, subject.score_rounding() + subject.rounding())


def _scores(subject: Subject, layer: int) -> Float[Tensor, "batch n_heads query key"]:
    q = subject.heads(layer, "q")
    k = subject.per_query_head(layer, subject.heads(layer, "k"))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * subject.structure.scale(layer)
    return scores.masked_fill(~subject.allowed(layer), -torch.inf)


def _kept(
    subject: Subject, layer: int, sink: Float[Tensor, " n_heads"]
) -> Float[Tensor, "batch n_heads query"]:
    """The share of each row that its keys have beside a sink logit."""
    return (_scores(subject, layer).logsumexp(-1) - sink[:, None]).sigmoid()


def rotary_angles(subject: Subject) -> Measured:
    """`hook_rot_q` and `hook_rot_k` are queries and keys turned by the angles of the config.

    The error is that of an angle, in radians. Angles are products of a position and a frequency,
    both float32 in most models, so that they are off by up to twice the position's rounding.
    """
    ropes = [subject.structure.rope(layer) for layer in subject.layers]
    if not any(ropes):
        raise NotApplicable("the model has no rotary positions")
    errors = _none_yet(subject)
    for layer in subject.attending:
        rope = ropes[layer]
        if rope is None:
            continue
        positions = torch.arange(subject.tokens.shape[1])
        error = torch.zeros((), dtype=torch.float64)
        for which in ("q", "k"):
            plain = subject.structure.normed(
                layer, which, subject.value(layer, f"attn.hook_{which}")
            )
            held = subject.value(layer, f"attn.hook_rot_{which}")
            expected = rope.turned(plain, positions)
            pairs = rope.pairs(expected)
            turn = _relative(rope.pairs(held), pairs, pairs.norm(dim=-1, keepdim=True))
            rest = (held - expected).abs()
            rest[..., rope.first : rope.first + rope.n_turned] = 0.0
            error = torch.stack([error, turn, _size(rest)]).max()
        errors[layer] = error
    normed = any(subject.structure.head_norm(layer) for layer in subject.layers)
    norm_rounding = subject.rounding(subject.model.cfg.d_head) if normed else 0.0
    float32 = torch.finfo(torch.float32).eps / 2
    bound = norm_rounding + subject.rounding() + 2 * subject.tokens.shape[1] * float32
    return _worst(errors, bound)


def unembedding(subject: Subject) -> Measured:
    """The last residual stream through `ln_final` and `unembed` makes the logits."""
    last = subject.layers[-1]
    kept: dict[str, Tensor] = {}

    def look(value: Tensor, hook: object) -> None:
        kept["resid"] = value.detach().clone()

    subject.run(hooks=[(subject.name(last, "hook_resid_post"), look)])
    expected = subject.structure.unembedded(kept["resid"]).detach().cpu().double()
    actual = subject.logits.double()
    error = _relative(expected, actual, actual.abs())
    return Measured(float(error), subject.rounding(subject.model.cfg.d_model))


def _output(
    subject: Subject, layer: int
) -> tuple[Float[Tensor, "n_heads d_head d_model"], Float[Tensor, " d_model"]]:
    weight, bias = subject.structure.output(layer)
    return weight.cpu().double(), bias.cpu().double()


def _branch_reaches_hook(subject: Subject) -> None:
    """Raises: NotApplicable where a norm stands between the heads and `hook_attn_out`."""
    for layer in subject.layers:
        attn_out = subject.value(layer, "hook_attn_out")
        for name, _, made in _norm_traffic(subject, layer):
            if torch.equal(made, attn_out):
                raise NotApplicable(f"hook_attn_out comes after a norm of the branch ({name})")


def _norm_traffic(subject: Subject, layer: int) -> list[tuple[str, Tensor, Tensor]]:
    """Name, input and output of each norm of a block that does not read the stream itself."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, given: tuple, made: object) -> None:
            out = made[0] if isinstance(made, tuple) else made
            if given and isinstance(given[0], Tensor) and isinstance(out, Tensor):
                seen[name] = (given[0].detach().cpu().double(), out.detach().cpu().double())

        return look

    norms = subject.structure.norms(layer)
    handles = [module.register_forward_hook(watch(name)) for name, module in norms.items()]
    try:
        if handles:
            subject.run()
    finally:
        for handle in handles:
            handle.remove()
    before = subject.value(layer, "hook_resid_pre")
    return [(name, *pair) for name, pair in seen.items() if not torch.equal(pair[0], before)]


def _relative(
    actual: Float[Tensor, "*dims last"],
    expected: Float[Tensor, "*dims last"],
    size: Float[Tensor, "*dims #last"],
) -> Float[Tensor, ""]:
    """The largest difference, relative to the largest size in the same vector."""
    difference = (actual - expected).abs().amax(-1)
    # Nothing was added up: any difference is an error, and 0 over 0 is none.
    worst = difference / size.amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return worst.max()


def _size(x: Float[Tensor, "*dims"]) -> Float[Tensor, ""]:
    return x.abs().max() if x.numel() else x.new_zeros(())


def _none_yet(subject: Subject) -> list[Tensor]:
    """An error of 0 for each layer, for those to be filled in that have heads.

    Raises: NotApplicable for a model in which no layer has any.
    """
    if not subject.attending:
        raise NotApplicable("every head of the model is pruned")
    return [torch.zeros((), dtype=torch.float64) for _ in subject.layers]


def _worst(errors: list[Tensor], bound: float) -> Measured:
    """The largest error, NaN above all, and its layer where it is beyond the bound."""
    values = torch.stack(errors).nan_to_num(nan=torch.inf)
    layer = int(values.argmax())
    error = float(values[layer])
    return Measured(error, bound, "" if error <= bound else f"worst in layer {layer}")
