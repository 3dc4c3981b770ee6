"""The parts of a block that are not attention: norms, rotary positions, the MLP.

A hook that returns what it was given changes nothing, bit for bit, so the arithmetic does not
depend on whether anybody is looking.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.config import Activation, MLPConfig


@runtime_checkable
class HookSite(Protocol):
    """The part of a TransformerLens `HookPoint` that a layer uses: an identity people can edit."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def has_hooks(self, dir: str = "both") -> bool:
        """Whether anybody watches this activation (`fwd`), its gradient (`bwd`) or either."""
        ...


def hook_point() -> HookSite:
    """A new TransformerLens `HookPoint`.

    transformer_lens takes seconds to import, and the arithmetic here does not need it.
    """
    from transformer_lens.hook_points import HookPoint

    return HookPoint()


class LayerNorm(nn.Module):
    """Layer normalisation with TransformerLens's two hooks.

    `hook_scale` is sqrt(variance + eps), `hook_normalized` the centred input over that scale,
    before gain and bias.
    """

    def __init__(self, d_model: int, eps: float):
        super().__init__()
        self.eps = eps
        self.w = nn.Parameter(torch.ones(d_model))
        self.b = nn.Parameter(torch.zeros(d_model))
        self.hook_scale = hook_point()
        self.hook_normalized = hook_point()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.hook_scale.has_hooks():
            centred = wide - wide.mean(-1, keepdim=True)
            rms = (centred.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
            normalized = _rescaled(self.hook_scale, centred, rms, self._normalize(wide))
        else:
            normalized = self._normalize(wide)
        normalized = self.hook_normalized(normalized)
        return torch.addcmul(self.b.to(wide.dtype), normalized, self.w.to(wide.dtype)).to(x.dtype)

    def _normalize(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32 at least; no centring and no bias."""

    def __init__(self, d_model: int, eps: float):
        super().__init__()
        self.eps = eps
        self.w = nn.Parameter(torch.ones(d_model))
        self.hook_scale = hook_point()
        self.hook_normalized = hook_point()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normalized = F.rms_norm(wide, wide.shape[-1:], eps=self.eps)
        if self.hook_scale.has_hooks():
            rms = (wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
            normalized = _rescaled(self.hook_scale, wide, rms, normalized)
        normalized = self.hook_normalized(normalized)
        return (normalized.to(x.dtype) * self.w.to(x.dtype)).to(x.dtype)


def _rescaled(
    hook_scale: HookSite,
    numerator: Float[Tensor, "batch pos d_model"],
    scale: Float[Tensor, "batch pos 1"],
    unedited: Float[Tensor, "batch pos d_model"],
) -> Float[Tensor, "batch pos d_model"]:
    """The normalised input after the hooks on the scale have had their say.

    Where they changed nothing, the fused kernel's own result stands, so that reading a scale or
    patching it with itself is exactly free. The gradient is the division's all the same: a hook
    may detach the scale without changing its value.
    """
    before = scale.detach().clone()
    edited = hook_scale(scale)
    quotient = numerator / edited
    if not torch.equal(edited, before):
        return quotient
    # Two floats so close subtract without rounding, so the sum is `unedited` bit for bit.
    return quotient + (unedited - quotient).detach()


class Identity(nn.Module):
    """No normalisation, and no hooks: there is no scale to look at."""

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return x


def norm(kind: str, d_model: int, eps: float) -> LayerNorm | RMSNorm | Identity:
    """The normalisation a config names: `LN`, `RMS` or `none`."""
    if kind == "none":
        return Identity()
    return LayerNorm(d_model, eps) if kind == "LN" else RMSNorm(d_model, eps)


class Rotary(nn.Module):
    """Rotary positions as Hugging Face lays them out: dimension i turns with i + d_head / 2.

    Source: Su et al. 2021, RoFormer; pairing of halves as in `transformers`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, n_ctx: int, d_head: int, base: float):
        super().__init__()
        # float64: the angle of position 8,191 has few correct digits left in float32.
        frequencies = base ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
        angles = torch.outer(torch.arange(n_ctx, dtype=torch.float64), frequencies)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(
        self,
        x: Float[Tensor, "batch pos heads d_head"],
        positions: Int[Tensor, "#batch pos"],
    ) -> Float[Tensor, "batch pos heads d_head"]:
        """`x` turned by the angle of each position."""
        cos = self.cos[positions].unsqueeze(2).to(x.dtype)
        sin = self.sin[positions].unsqueeze(2).to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    """The MLP of a block; gated MLPs multiply a second projection by the activation of the first.

    `hook_pre` and `hook_post` are what goes into the activation and into the output projection;
    `hook_pre_linear` is the ungated branch.
    """

    def __init__(self, d_model: int, config: MLPConfig):
        super().__init__()
        self.act_fn = config.act_fn
        self.gated = config.gated
        self.in_proj = nn.Linear(d_model, config.d_mlp, bias=config.bias)
        if config.gated:
            self.gate_proj = nn.Linear(d_model, config.d_mlp, bias=config.bias)
            self.hook_pre_linear = hook_point()
        self.out_proj = nn.Linear(config.d_mlp, d_model, bias=config.bias)
        self.hook_pre = hook_point()
        self.hook_post = hook_point()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        if self.gated:
            pre = self.hook_pre(self.gate_proj(x))
            post = _activate(self.act_fn, pre) * self.hook_pre_linear(self.in_proj(x))
        else:
            post = _activate(self.act_fn, self.hook_pre(self.in_proj(x)))
        return self.out_proj(self.hook_post(post))

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        """Input weights, in TransformerLens's layout."""
        return self.in_proj.weight.T

    @property
    def W_gate(self) -> Float[Tensor, "d_model d_mlp"] | None:
        """Gate weights, in TransformerLens's layout; None where the MLP is not gated."""
        return self.gate_proj.weight.T if self.gated else None

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """Output weights, in TransformerLens's layout."""
        return self.out_proj.weight.T

    @property
    def b_in(self) -> Float[Tensor, " d_mlp"]:
        """Input bias; zeros where there is none."""
        return bias_of(self.in_proj)

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """Output bias; zeros where there is none."""
        return bias_of(self.out_proj)


def bias_of(linear: nn.Linear) -> Float[Tensor, " out"]:
    """The bias of a projection; zeros where there is none."""
    if linear.bias is None:
        return linear.weight.new_zeros(linear.out_features)
    return linear.bias


def _activate(name: Activation, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    if name == "relu":
        return F.relu(x)
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_new" else "none")
