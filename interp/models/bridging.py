"""Making bridged models: from one of `transformers` in memory, or from a source on disk or a hub.

A bridge that computes something else than the model it was made of is refused.
"""

import copy
import difflib
import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.errors import ModelError
from interp.models.bridge import BridgedModel
from interp.models.hub import Source
from interp.models.modes import looking_at
from interp.models.original import original_model
from interp.models.vocabulary import Vocabulary


def bridge_model(
    hf_model: nn.Module,
    tokenizer: object | None = None,
    *,
    name: str,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> BridgedModel:
    """A bridged copy of a model of `transformers`, which is left as it was.

    `tokenizer` is one of `transformers` or a `Vocabulary`; without one the model takes ids only.
    `device` and `dtype` are the given model's own unless named.

    Raises: ModelError for what is no model of `transformers`, or of a kind that TransformerLens or
    this toolkit does not know.
    """
    own = copy.deepcopy(hf_model)
    if dtype is not None:
        # Parameters only: buffers, such as rotary frequencies, are exact in float32.
        for parameter in own.parameters():
            parameter.data = parameter.data.to(dtype)
    own = own.to(device) if device is not None else own
    return _bridged(own, _vocabulary(tokenizer), name)


def load_bridge(
    source: Source,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    vocabulary: Vocabulary | None = None,
) -> BridgedModel:
    """The model at `source`, loaded by `transformers` and bridged without a second copy.

    `vocabulary` takes the place of the source's own tokenizer.

    Raises: ModelError where the source cannot be loaded or bridged.
    """
    own = original_model(source, dtype).to(device)
    if vocabulary is None:
        from interp.data.pretrained_tokenizer import load_pretrained_vocabulary

        vocabulary = (
            load_pretrained_vocabulary(source.path.parent, gguf_file=source.path.name)
            if source.kind == "gguf"
            else load_pretrained_vocabulary(source.path)
        )
    return _bridged(own, vocabulary, source.name, source)


def _bridged(
    own: nn.Module, vocabulary: Vocabulary | None, name: str, source: Source | None = None
) -> BridgedModel:
    """`own` belongs to the bridge from here on: its modules are wrapped in place."""
    architecture, config = type(own).__name__, getattr(own, "config", None)
    if not hasattr(own, "set_attn_implementation") or config is None:
        raise ModelError(f"{architecture} is no model of transformers: it has no config")
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    if architecture not in SUPPORTED_ARCHITECTURES:
        near = difflib.get_close_matches(architecture, SUPPORTED_ARCHITECTURES, n=3)
        hint = f"; it knows {', '.join(near)}" if near else ""
        raise ModelError(f"TransformerLens has no adapter for {architecture}{hint}")
    own.set_attn_implementation("eager")  # type: ignore[operator]
    own.eval()
    before = _probe_log_probs(own)
    try:
        with warnings.catch_warnings():
            # About aliases it could not place; the hooks are checked one by one afterwards.
            warnings.simplefilter("ignore", UserWarning)
            bridge = build_bridge_from_module(
                own, architecture, hf_config=copy.deepcopy(config), model_name=name
            )
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ModelError(f"TransformerLens cannot bridge {architecture}: {reason}") from error
    model = BridgedModel(bridge, vocabulary=vocabulary, source=source)
    if before is not None:
        _check_unchanged(model, before)
    return model


def _probe_tokens(n_tokens: int, device: torch.device | str) -> Int[Tensor, "1 pos"]:
    return torch.arange(8, device=device)[None] % n_tokens


def _probe_log_probs(own: nn.Module) -> Float[Tensor, "1 pos d_vocab"] | None:
    """What a model of `transformers` says of a few tokens; None for what does not read tokens."""
    embedding = own.get_input_embeddings()  # type: ignore[operator]
    if not isinstance(embedding, nn.Embedding) or own.config.is_encoder_decoder:  # type: ignore[union-attr]
        return None
    tokens = _probe_tokens(embedding.num_embeddings, embedding.weight.device)
    with torch.no_grad():
        logits = getattr(own(input_ids=tokens), "logits", None)
    return None if logits is None else logits.float().log_softmax(-1)


def _check_unchanged(model: BridgedModel, before: Float[Tensor, "1 pos d_vocab"]) -> None:
    """Refuse a bridge that computes something else than the model it was made of.

    TransformerLens computes some attention by itself, and a setting that it does not read, such as
    GPT-2's `scale_attn_weights` (4.3), changes the numbers in silence. The bound is half the digits
    of the dtype: the order of the sums may differ, their terms may not.

    Raises: ModelError with the largest difference.
    """
    with looking_at(model):
        logits = model(_probe_tokens(model.cfg.d_vocab, model.cfg.device))
    assert isinstance(logits, Tensor)
    gap = (logits.float().log_softmax(-1) - before).abs().max().item()
    if not gap <= torch.finfo(model.cfg.dtype).eps ** 0.5:
        raise ModelError(
            f"TransformerLens's bridge of {model.model_name} does not compute what transformers "
            f"does: their log-probs differ by {gap:.2g}; it may ignore one of the config's settings"
        )


def _vocabulary(tokenizer: object | None) -> Vocabulary | None:
    if tokenizer is None or isinstance(tokenizer, Vocabulary):
        return tokenizer
    from interp.data.pretrained_tokenizer import PretrainedVocabulary

    return PretrainedVocabulary(tokenizer)
