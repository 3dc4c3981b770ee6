"""The parts of a block that are not attention: norms, rotary positions, the MLP.

A hook that returns what it was given changes nothing, bit for bit, so the arithmetic does not
depend on whether anybody is looking.
"""

import math
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.config import Activation, LinearScaling, Llama3Scaling, MLPConfig


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


class HeadNorm(nn.Module):
    """RMSNorm of each head's vector, with one gain for all heads; no hooks of its own.

    Source: Qwen3 normalises queries and keys so, after their projection and before rotary.
    """

    def __init__(self, d_head: int, eps: float):
        super().__init__()
        self.eps = eps
        self.w = nn.Parameter(torch.ones(d_head))

    def forward(
        self, x: Float[Tensor, "batch pos heads d_head"]
    ) -> Float[Tensor, "batch pos heads d_head"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normalized = F.rms_norm(wide, wide.shape[-1:], eps=self.eps)
        return normalized.to(x.dtype) * self.w.to(x.dtype)


Rotation = tuple[Float[Tensor, "#batch pos half"], Float[Tensor, "#batch pos half"]]
"""Cosine and sine of the angle by which each position turns each pair of dimensions."""


class Rotary(nn.Module):
    """The angles of rotary positions, made for the positions at hand and shared by all layers.

    Source: Su et al. 2021, RoFormer; scaled frequencies as their config's docstrings say.
    """

    def __init__(self, d_head: int, base: float, scaling: LinearScaling | Llama3Scaling | None):
        super().__init__()
        # Not a buffer: `model.to(bfloat16)` would round it. float64: the angle of position 8,191
        # has few correct digits left in float32.
        exponents = torch.arange(0, d_head, 2, dtype=torch.float64, device="cpu") / d_head
        self.frequencies = _scaled(base**-exponents, scaling)

    def forward(self, positions: Int[Tensor, "#batch pos"]) -> Rotation:
        """Cosines and sines `[batch, pos, d_head / 2]` in float32."""
        # Apple's GPUs know no float64.
        precise = torch.float32 if positions.device.type == "mps" else torch.float64
        angles = positions[..., None] * self.frequencies.to(positions.device, precise)
        return angles.cos().float(), angles.sin().float()


def _scaled(
    frequencies: Float[Tensor, " half"], scaling: LinearScaling | Llama3Scaling | None
) -> Float[Tensor, " half"]:
    if scaling is None:
        return frequencies
    slow = frequencies / scaling.factor
    if isinstance(scaling, LinearScaling):
        return slow
    turns = scaling.original_n_ctx * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * slow


def rotate(
    x: Float[Tensor, "batch pos heads d_head"], rotation: Rotation
) -> Float[Tensor, "batch pos heads d_head"]:
    """`x` turned by the angle of each position; dimension i is paired with i + d_head / 2.

    Hugging Face lays rotary weights out in these halves; others pair neighbours.
    """
    cos, sin = (part.unsqueeze(2).to(x.dtype) for part in rotation)
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
