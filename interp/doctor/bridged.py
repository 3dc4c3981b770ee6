"""The structure of a bridged model, read from Hugging Face's config and the wrapped modules."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.doctor.diagnosis import NotApplicable
from interp.doctor.rope import Rope
from interp.models.bridge import BridgedModel

# TransformerLens puts its own module around each of Hugging Face's under this name.
_WRAPPED = "._original_component"


class BridgedStructure:
    """What Hugging Face's config and modules say the hooks of a bridged model should hold."""

    def __init__(self, model: BridgedModel):
        self._model = model
        # Their attributes differ from one architecture to the next.
        self._bridge: Any = model.bridge
        self._hf: Any = self._bridge.original_model
        whole = self._hf.config
        self._config: Any = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
        self.causal = model.cfg.attention_dir == "causal"
        self.experts = any("expert" in type(m).__name__.lower() for m in self._hf.modules())

    def window(self, layer: int) -> int | None:
        window = self._stated("sliding_window")
        kinds = self._stated("layer_types")
        if kinds is not None:
            return window if kinds[layer] == "sliding_attention" else None
        return window if self._stated("use_sliding_window", True) else None

    def scale(self, layer: int) -> float:
        for module in self._attention(layer):
            if isinstance(vars(module).get("scaling"), float | int):
                return float(vars(module)["scaling"])
        raise NotApplicable("its attention modules state no scale")

    def softmax_term(self, layer: int) -> str | None:
        cap = self._attention_fact(layer, "attn_logit_softcapping")
        if cap is not None:
            return f"scores are soft-capped at {cap:g}"
        if self._attention_fact(layer, "sinks") is not None:
            return "a sink logit stands in every row's softmax"
        kind = self._bridge.cfg.positional_embedding_type
        if kind not in ("standard", "rotary", "none"):
            return f"positions of kind {kind!r} are added to the scores"
        return None

    def sink(self, layer: int) -> Float[Tensor, " n_heads"] | None:
        return None  # softmax_term and missing_mass name it

    def gated(self, layer: int) -> bool:
        return False

    def missing_mass(self, layer: int) -> str | None:
        if self._attention_fact(layer, "sinks") is not None:
            return "a sink logit takes a share of every row"
        return None

    def rope(self, layer: int) -> Rope | None:
        if self._bridge.cfg.positional_embedding_type != "rotary":
            return None
        settings = self._stated("rope_parameters")
        if settings is None:
            raise NotApplicable("its config has no rope_parameters")
        kinds = self._stated("layer_types")
        if kinds is not None and kinds[layer] in settings:  # one table for each kind of layer
            settings = settings[kinds[layer]]
        share = settings.get("partial_rotary_factor") or self._stated("partial_rotary_factor", 1.0)
        return Rope(
            settings,
            n_turned=int(self._model.cfg.d_head * share),
            neighbours=any(
                getattr(self._bridge.cfg, name, False)
                for name in ("rotary_adjacent_pairs", "rotary_interleaved_cos_sin")
            ),
        )

    def head_norm(self, layer: int) -> bool:
        return self._attention_fact(layer, "q_norm") is not None

    def normed(
        self, layer: int, which: str, x: Float[Tensor, "batch pos heads d_head"]
    ) -> Float[Tensor, "batch pos heads d_head"]:
        module = self._attention_fact(layer, f"{which}_norm")
        if not isinstance(module, nn.Module):
            return x
        if getattr(self._bridge.cfg, "qk_norm_after_rope", False):
            raise NotApplicable("queries and keys are normalised after they are turned")
        gain = next(module.parameters())
        given = x.to(gain.device, gain.dtype)
        if gain.numel() == x.shape[2] * x.shape[3] and gain.ndim == 1:  # over all heads at once
            out = module(given.flatten(2)).unflatten(2, x.shape[2:])
        else:
            out = module(given)
        return out.to(x.device, x.dtype)

    def biases(self, layer: int) -> list[str]:
        block = self._bridge.blocks[layer]
        parts = {part: getattr(block.attn, part, None) for part in ("q", "k", "v", "o")}
        parts["mlp"] = getattr(getattr(block, "mlp", None), "out", None)
        return [
            name
            for name, part in parts.items()
            if getattr(getattr(part, "original_component", None), "bias", None) is not None
        ]

    def norms(self, layer: int) -> Mapping[str, nn.Module]:
        return {
            name.replace(_WRAPPED, "").removeprefix("_original_component."): module
            for name, module in self._bridge.blocks[layer].named_modules()
            if "norm" in type(module).__name__.lower() and not name.endswith(("q_norm", "k_norm"))
        }

    def unembedded(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab"]:
        if hasattr(self._bridge, "mlm_head"):
            raise NotApplicable("a transform of its own stands between the stream and ln_final")
        for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
            factor = self._stated(name)
            if factor not in (None, 1, 1.0):
                raise NotApplicable(f"logits are scaled after the unembedding ({name} = {factor})")
        logits = self._bridge.unembed(self._bridge.ln_final(resid))
        cap = self._stated("final_logit_softcapping")
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def output(
        self, layer: int
    ) -> tuple[Float[Tensor, "n_heads d_head d_model"], Float[Tensor, " d_model"]]:
        attention = self._model.blocks[layer].attn
        factor = getattr(self._bridge.blocks[layer], "residual_contribution_scale", 1.0)
        return attention.W_O.detach() * factor, attention.b_O.detach() * factor

    def weights(self) -> Mapping[str, Tensor]:
        # TransformerLens cuts joint matrices into parts beside the whole: both have names here.
        return {
            name.replace(_WRAPPED, ""): value.detach()
            for name, value in self._hf.named_parameters(remove_duplicate=False)
        }

    def weights_of(self, original: nn.Module) -> Mapping[str, Tensor]:
        return {name: value.detach() for name, value in original.named_parameters()}

    def _stated(self, name: str, default: object = None) -> Any:
        return getattr(self._config, name, default)

    def _attention(self, layer: int) -> Iterator[nn.Module]:
        return self._bridge.blocks[layer].attn.original_component.modules()

    def _attention_fact(self, layer: int, name: str) -> object:
        return getattr(self._bridge.blocks[layer].attn.original_component, name, None)
