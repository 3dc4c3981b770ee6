"""The transformer with a hook on every head, under TransformerLens's names.

It subclasses `HookedRootModule` and tightens what that class leaves loose: caches hold copies,
unknown hook names are refused, positions are sliced on every hook, and temporary hooks never take
a user's own hooks away. This is the one module that imports transformer_lens at its top.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice

from interp.config import ModelConfig
from interp.errors import ModelError, ShapeError
from interp.models.block import Block
from interp.models.flat_config import FlatConfig as FlatConfig
from interp.models.hooks import HookName, NamesFilter, kept_copy, matching_hooks
from interp.models.hub import Source
from interp.models.inputs import ReadsTokens, checked_key_mask
from interp.models.kv_cache import KVCache, empty_cache, grown
from interp.models.layers import Rotary, bias_of, hook_point, norm
from interp.models.losses import mean_loss, next_token_losses
from interp.models.vocabulary import Vocabulary, is_text

ReturnType = Literal["logits", "loss", "both"] | None


class HeadCache(ActivationCache):
    """TransformerLens's `ActivationCache`, which knows that shortformer positions are never added
    to the residual stream, so that its decompositions sum to it."""

    def __init__(
        self, cache_dict: dict[str, Tensor], model: "Transformer", has_batch_dim: bool = True
    ):
        super().__init__(cache_dict, model, has_batch_dim)
        if model.cfg.positional_embedding_type == "shortformer":
            self.has_pos_embed = False

    def apply_slice_to_batch_dim(self, batch_slice: object) -> "HeadCache":
        """The cache of the chosen sequences only."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return HeadCache(sliced.cache_dict, self.model, sliced.has_batch_dim)


class Transformer(ReadsTokens, HookedRootModule):
    """A decoder-only transformer with TransformerLens hook names, in eval mode until trained.

    `seed` fixes the weights without touching the caller's random state; None draws none, for a
    model whose weights are about to be set. `vocabulary`, where given,
    turns text into tokens and back; `model_name` is what results call it; `source` is where it was
    loaded from, None for one made in memory. In-place edits in hooks work without gradients only.
    """

    @torch.random.fork_rng(devices=[])  # layers draw weights as they are made, before ours
    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int | None = 0,
        vocabulary: Vocabulary | None = None,
        model_name: str = "custom",
    ):
        super().__init__()
        self.model_name = model_name
        self.config = config
        self.vocabulary = vocabulary
        self.source: Source | None = None
        self.embed = nn.Embedding(config.d_vocab, config.d_model)
        self.hook_embed = hook_point()
        if config.positional_embedding_type in ("standard", "shortformer"):
            self.pos_embed = nn.Embedding(config.n_ctx, config.d_model)
            self.hook_pos_embed = hook_point()
        self.rotary = (
            Rotary(config.d_rotary, config.rotary_base, config.rotary_scaling)
            if config.positional_embedding_type == "rotary"
            else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.ln_final = norm(config.normalization_type, config.d_model, config.eps)
        self.unembed = nn.Linear(config.d_model, config.d_vocab, bias=config.unembed_bias)
        if config.tie_embeddings:
            self.unembed.weight = self.embed.weight
        if seed is not None:
            self._initialise(seed)
        self.eval()
        self.setup()

    def _initialise(self, seed: int) -> None:
        std = self.config.init_std or self.config.d_model**-0.5
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def cfg(self) -> FlatConfig:
        """The model's facts, flat and under TransformerLens's names."""
        config, weight = self.config, self.embed.weight
        return FlatConfig(
            model_name=self.model_name,
            n_layers=config.n_layers,
            n_heads=config.attention.n_heads,
            n_key_value_heads=config.n_key_value_heads,
            d_model=config.d_model,
            d_head=config.d_head,
            d_mlp=config.mlp.d_mlp if config.mlp else None,
            d_vocab=config.d_vocab,
            n_ctx=config.n_ctx,
            act_fn=config.mlp.act_fn if config.mlp else None,
            normalization_type=(
                None if config.normalization_type == "none" else config.normalization_type
            ),
            positional_embedding_type=config.positional_embedding_type,
            attention_dir="causal",
            window_size=config.attention.window,
            attn_only=config.mlp is None,
            gated_mlp=bool(config.mlp and config.mlp.gated),
            eps=config.eps,
            rotary_base=config.rotary_base,
            tie_word_embeddings=config.tie_embeddings,
            bos_token_id=config.bos_token_id,
            device=str(weight.device),
            dtype=weight.dtype,
            sink_logit=config.attention.sink_logit,
            pruned_heads=config.attention.pruned_heads,
        )

    def forward(
        self,
        tokens: object,
        *,
        attention_mask: object = None,
        return_type: ReturnType = "logits",
        loss_per_token: bool = False,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        last: int | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """Logits `[batch, pos, d_vocab]`, the next-token loss in nats, both, or None.

        `tokens` are ids `[batch, pos]` or `[pos]`, or text where the model has a vocabulary:
        texts of different lengths are padded and masked as `tokenize` does it. With
        `start_at_layer` they are the residual stream `[batch, pos, d_model]` entering that layer.
        `stop_at_layer` returns the residual stream entering that layer instead. With `last` only so
        many last positions leave the last layer, which spares its MLP and the unembedding the
        rest. In `attention_mask` `[batch, pos]` 1 marks a real token; left padding corrects
        positions.
        With a `cache` of `new_cache` the tokens follow those that went through with it before, and
        are added to it; the mask is of the new tokens. Give chunks of any length, no loss across
        their edges.
        The loss is a mean over real next tokens; with `loss_per_token` it is `[batch, pos - 1]`,
        where element p belongs to the prediction of token p + 1 and padding holds 0.

        Raises: ShapeError for a sequence longer than `n_ctx`, ids outside the vocabulary, or a
        mask of another shape; ModelError for text without a vocabulary.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ModelError(
                f"return_type = {return_type!r}: one of 'logits', 'loss', 'both', None"
            )
        ids: Tensor | None = None
        if start_at_layer is None:
            if is_text(tokens):
                tokens, lengths = self.tokenize(tokens)
                attention_mask = lengths if attention_mask is None else attention_mask
            ids = self.to_tokens(tokens)
            shape = ids.shape
        else:
            # A copy: a hook may edit in place, and the residual is the caller's.
            resid = self._check_residual(tokens).clone()
            shape = resid.shape[:2]
            if return_type in ("loss", "both") and stop_at_layer is None:
                raise ModelError("a loss needs token ids; start_at_layer has only a residual")
        if last is not None and not 1 <= last <= shape[1]:
            raise ShapeError(f"last = {last}, but there are {shape[1]} positions")
        if last is not None and return_type in ("loss", "both"):
            raise ModelError("a loss is of all positions: last belongs to logits and residuals")
        if cache is not None and (start_at_layer is not None or stop_at_layer is not None):
            raise ModelError("a cache is of all layers: start_at_layer and stop_at_layer have none")
        n_seen = 0 if cache is None or cache.streaming else cache.n_seen
        if n_seen + shape[1] > self.config.n_ctx:
            before = f" after {n_seen} in the cache" if n_seen else ""
            raise ShapeError(f"sequence {shape[1]}{before} > n_ctx {self.config.n_ctx}")
        key_mask = checked_key_mask(attention_mask, shape, self.embed.weight.device)
        if cache is None:
            pasts = None
            positions = self._positions(shape[1], key_mask)
            rotation = None if self.rotary is None else self.rotary(positions)
        else:
            positions, rotation, pasts = grown(
                cache,
                self.config,
                self.rotary,
                key_mask,
                (shape[0], shape[1]),
                self.embed.weight.device,
            )
        placed = self._position_embedding(positions, shape[0])
        shortformer = None
        if self.config.positional_embedding_type == "shortformer":
            shortformer = placed
        if ids is not None:
            resid = self.hook_embed(self.embed(ids))
            if placed is not None and shortformer is None:
                resid = resid + placed
            resid = self.dropout(resid)
        layers = self._layers(start_at_layer, stop_at_layer)
        for place, block in enumerate(layers):
            resid = block(
                resid,
                rotation=rotation,
                shortformer=shortformer,
                key_mask=key_mask,
                last=last if block is layers[-1] else None,
                past=None if pasts is None else pasts[place],
            )
        if last is not None:  # there may have been no layer
            resid = resid[:, -last:]
        if stop_at_layer is not None:
            return resid
        final = self.ln_final(resid)
        if return_type is None:  # the unembedding is the dearest product, and has no hook
            return None
        logits = self.unembed(final)
        if return_type == "logits":
            return logits
        assert ids is not None  # checked above
        losses = next_token_losses(logits, ids, key_mask)
        loss = losses if loss_per_token else mean_loss(losses, key_mask)
        return loss if return_type == "loss" else (logits, loss)

    def new_cache(self, *, sinks: int | None = None, window: int | None = None) -> KVCache:
        """An empty KV cache, to be given to `forward` and filled by it.

        It keeps every token, and in layers with a window the latest that are seen. With `window`
        every layer keeps the first `sinks` tokens (4 unless given) and the latest `window`, as
        StreamingLLM does, without end: a token's position is then its place in the cache.

        Raises: ModelError for `sinks` without a window, or a streaming cache for a model whose
        positions are not rotary, whose keys are smeared, or that has windows of its own.

        Source: Xiao et al. 2023, "Efficient Streaming Language Models" (arXiv 2309.17453).
        """
        return empty_cache(self.config, self.model_name, sinks=sinks, window=window)

    def generate(
        self, tokens: object, max_new_tokens: int, **settings: Any
    ) -> Int[Tensor, "batch longer"]:
        """`interp.models.generation.generate` on this model."""
        from interp.models.generation import generate

        return generate(self, tokens, max_new_tokens, **settings)

    def _check_residual(self, resid: object) -> Float[Tensor, "batch pos d_model"]:
        if (
            not isinstance(resid, Tensor)
            or resid.ndim != 3
            or resid.shape[2] != self.config.d_model
        ):
            given = tuple(resid.shape) if isinstance(resid, Tensor) else type(resid).__name__
            raise ShapeError(
                f"start_at_layer takes a residual [batch, pos, {self.config.d_model}], got {given}"
            )
        return resid

    def _layers(self, start: int | None, stop: int | None) -> list[nn.Module]:
        n_layers = self.config.n_layers
        for name, layer in (("start_at_layer", start), ("stop_at_layer", stop)):
            if layer is not None and not -n_layers <= layer <= n_layers:
                raise ShapeError(f"{name} = {layer}, but the model has {n_layers} layers")
        return list(self.blocks)[start:stop]

    def _positions(
        self, n_pos: int, key_mask: Bool[Tensor, "batch pos"] | None
    ) -> Int[Tensor, "#batch pos"]:
        if key_mask is None:
            return torch.arange(n_pos, device=self.embed.weight.device)[None]
        return (key_mask.long().cumsum(dim=1) - 1).clamp(min=0)

    def _position_embedding(
        self, positions: Int[Tensor, "#batch pos"], batch: int
    ) -> Float[Tensor, "#batch pos d_model"] | None:
        if self.config.positional_embedding_type not in ("standard", "shortformer"):
            return None
        placed = self.pos_embed(positions)
        if not self.hook_pos_embed.has_hooks():
            return placed
        # A hook sees, and may edit, one row for each sequence.
        return self.hook_pos_embed(placed.expand(batch, -1, -1).clone())

    # --- tokens -----------------------------------------------------------------------------

    def tokens_to_residual_directions(self, tokens: object) -> Float[Tensor, "*tokens d_model"]:
        """The unembedding direction of each token, without the final norm's gain."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        return self.unembed.weight[torch.as_tensor(tokens, device=self.unembed.weight.device)]

    # --- hooks ------------------------------------------------------------------------------

    def add_hook(
        self,
        name: HookName,
        hook: Callable,
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Attach a hook that stays until `reset_hooks`. Returns nothing: there is no handle.

        Raises: ModelError for a name that is no hook, listing near ones.
        """
        for known in matching_hooks(name, self.hook_dict):
            self.hook_dict[known].add_hook(
                hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend
            )

    def _enable_hook(self, name: HookName, hook: Callable, dir: Literal["fwd", "bwd"]) -> None:
        self.add_hook(name, hook, dir=dir, level=self.context_level)

    def run_with_cache(
        self,
        *model_args: object,
        names_filter: NamesFilter = None,
        device: str | torch.device | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: object = None,
        **model_kwargs: object,
    ) -> tuple[Tensor | tuple[Tensor, Tensor] | None, HeadCache]:
        """The model's output, and copies of its activations in an `ActivationCache`.

        Without `names_filter` everything is kept except `hook_result`, which is d_model wide for
        every head and is built only when asked for. `pos_slice` slices positions (queries, for
        scores and patterns) on every hook. `incl_bwd` calls backward on the output, which has to
        be a scalar, and adds the gradients as `<name>_grad`.

        Raises: ModelError for names that match no hook; ShapeError for `remove_batch_dim` on a
        batch of several.
        """
        if names_filter is None:
            names = [name for name in self.hook_dict if not name.endswith("hook_result")]
        else:
            names = matching_hooks(names_filter, self.hook_dict)
        keep = Slice.unwrap(pos_slice)
        stored: dict[str, Tensor] = {}

        def store(tensor: Tensor, hook: HookPoint, suffix: str) -> None:
            square = str(hook.name).endswith(("hook_attn_scores", "hook_pattern"))
            stored[str(hook.name) + suffix] = kept_copy(
                tensor,
                pos_dim=2 if square else 1,
                keep=keep,
                device=device,
                remove_batch_dim=remove_batch_dim,
            )

        def keep_value(tensor: Tensor, hook: HookPoint) -> None:
            store(tensor, hook, "")

        def keep_gradient(tensor: Tensor, hook: HookPoint) -> None:
            store(tensor, hook, "_grad")

        with self.hooks(
            fwd_hooks=[(name, keep_value) for name in names],
            bwd_hooks=[(name, keep_gradient) for name in names] if incl_bwd else [],
            reset_hooks_end=reset_hooks_end,
            clear_contexts=clear_contexts,
        ):
            out = self(*model_args, **model_kwargs)
            if incl_bwd:
                out.backward()
        return out, HeadCache(stored, self, has_batch_dim=not remove_batch_dim)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"Transformer has no {name!r}; the TransformerLens tools that run on it are "
                "listed in docs/architecture.md"
            ) from None

    # --- weights in TransformerLens's layout ------------------------------------------------

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """Token embedding."""
        return self.embed.weight

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """Learned positions, standard or shortformer."""
        return self.pos_embed.weight

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """Unembedding."""
        return rearrange(self.unembed.weight, "vocab model -> model vocab")

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """Unembedding bias; zeros where there is none."""
        return bias_of(self.unembed)
