"""The structure of our own `Transformer`, as its config states it."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.config import LinearScaling, Llama3Scaling
from interp.doctor.rope import Rope
from interp.models.transformer import Transformer
from interp.models.weights import stored_weights


class NativeStructure:
    """What the config of a `Transformer` says its hooks should hold."""

    causal = True
    experts = False

    def __init__(self, model: Transformer):
        self._model = model
        self._config = model.config

    def window(self, layer: int) -> int | None:
        return self._config.window(layer)

    def scale(self, layer: int) -> float:
        return self._config.attention_scale(layer)

    def softmax_term(self, layer: int) -> str | None:
        return None

    def sink(self, layer: int) -> Float[Tensor, " n_heads"] | None:
        attention: Any = self._model.blocks[layer].attn
        kind = self._config.attention.sink_logit
        if kind == "none":
            return None
        if kind == "zero":
            return torch.zeros(attention.n_heads, dtype=torch.float64)
        return attention.sink_logit.detach().cpu().double()

    def gated(self, layer: int) -> bool:
        return self._config.attention.gated_output

    def missing_mass(self, layer: int) -> str | None:
        return None

    def rope(self, layer: int) -> Rope | None:
        if self._config.positional_embedding_type != "rotary":
            return None
        return Rope(
            {
                "rope_theta": self._config.rotary_base,
                **_scaling_settings(self._config.rotary_scaling),
            },
            n_turned=self._config.d_rotary,
            first=self._config.d_head if self._config.attention.kind == "latent" else 0,
        )

    def head_norm(self, layer: int) -> bool:
        return self._config.attention.qk_norm

    def normed(
        self, layer: int, which: str, x: Float[Tensor, "batch pos heads d_head"]
    ) -> Float[Tensor, "batch pos heads d_head"]:
        if not self.head_norm(layer):
            return x
        gain = getattr(self._model.blocks[layer].attn, f"{which}_norm").w.detach().cpu()
        return x * (x.square().mean(-1, keepdim=True) + self._config.eps).rsqrt() * gain

    def biases(self, layer: int) -> list[str]:
        heads, mlp = self._config.attention, self._config.mlp
        return [
            *(["q", "k", "v"] if heads.bias else []),
            *(["o"] if heads.output_bias else []),
            *(["mlp"] if mlp is not None and mlp.bias else []),
        ]

    def norms(self, layer: int) -> Mapping[str, nn.Module]:
        return {}  # they all stand before the branches

    def unembedded(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab"]:
        return self._model.unembed(self._model.ln_final(resid))

    def output(
        self, layer: int
    ) -> tuple[Float[Tensor, "n_heads d_head d_model"], Float[Tensor, " d_model"]]:
        attention: Any = self._model.blocks[layer].attn
        return attention.W_O.detach(), attention.b_O.detach()

    def weights(self) -> Mapping[str, Tensor]:
        return stored_weights(self._model)

    def weights_of(self, original: nn.Module) -> Mapping[str, Tensor]:
        from interp.models.pretrained import native_weights
        from interp.models.pruning import unpruned, with_heads_of

        state = original.state_dict()
        stated: Any = original.config
        config: dict[str, object] = stated.to_dict()
        # A file's quantization: the tensors of a loaded model are plain numbers.
        config.pop("quantization_config", None)
        dtype: torch.dtype = self._model.cfg.dtype
        whole = native_weights(config, state.keys(), state.__getitem__, "original", dtype)
        # An original has all the heads that a pruned model once had.
        return with_heads_of(whole, unpruned(self._config), self._config)


def _scaling_settings(scaling: LinearScaling | Llama3Scaling | None) -> dict[str, object]:
    if scaling is None:
        return {"rope_type": "default"}
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_n_ctx,
    }
