"""Models on disk: `load_model(ref)`, and what a checkpoint of a run holds.

Tensors are safetensors, everything else JSON beside them; no pickle is read or written. Every
tensor of a file is used exactly once and every parameter is set exactly once.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, overload

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from interp.config import ModelConfig, config_tables, explain
from interp.data.pretrained_tokenizer import PretrainedVocabulary, load_pretrained_vocabulary
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import ConfigError, ModelError
from interp.models.bridge import BridgedModel
from interp.models.bridging import bridge_model, load_bridge
from interp.models.gguf import read_gguf
from interp.models.hf_config import model_config
from interp.models.hf_folder import read_tensor, tensor_files
from interp.models.hub import CHECKPOINTS, CONFIG, WEIGHTS, Source, read_json, resolve
from interp.models.hub import checkpoint_steps as checkpoint_steps
from interp.models.new_folder import new_folder
from interp.models.pretrained import native_weights, save_pretrained
from interp.models.transformer import Transformer
from interp.models.vocabulary import Vocabulary
from interp.models.weights import model_with_weights, read_tensors, stored_weights

TOKENIZER = "tokenizer.json"
PRETRAINED_TOKENIZER = "tokenizer"
"""A folder of its own: beside a config.json, transformers reads a tokenizer as that config's."""

Ref = str | Path | Source | nn.Module
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@overload
def load_model(
    ref: Ref,
    *,
    backend: Literal["native"] = "native",
    device: str = "cpu",
    dtype: str = "float32",
    tokenizer: object | None = None,
) -> Transformer: ...
@overload
def load_model(
    ref: Ref,
    *,
    backend: Literal["bridge"],
    device: str = "cpu",
    dtype: str = "float32",
    tokenizer: object | None = None,
) -> BridgedModel: ...
@overload
def load_model(
    ref: Ref,
    *,
    backend: str,
    device: str = "cpu",
    dtype: str = "float32",
    tokenizer: object | None = None,
) -> Transformer | BridgedModel: ...
def load_model(
    ref: Ref,
    *,
    backend: str = "native",
    device: str = "cpu",
    dtype: str = "float32",
    tokenizer: object | None = None,
) -> Transformer | BridgedModel:
    """The model that `ref` names, in eval mode.

    `ref` is a training run's folder (its last checkpoint), `FOLDER@STEP` or a checkpoint's own
    folder; a Hugging Face folder; a Hub id with an optional `@REVISION`; a `.gguf` file; the name
    `smollm2-135m`; what `resolve` made of one of these; or a model of `transformers` in memory,
    which is left as it is. The native backend reads weights of GPT-2 and Llama type into our
    `Transformer`; the bridge takes whatever TransformerLens's `TransformerBridge` boots. Weights
    and activations have `dtype`. `tokenizer`, one of `transformers` or a `Vocabulary`, takes the
    place of the model's own.

    Raises: ModelError where there is no such model, or it is incomplete, or would be computed
    otherwise than its config says; ConfigError for an unknown backend, device or dtype.
    """
    if backend not in ("native", "bridge"):
        raise ConfigError(f"backend = {backend!r}: one of 'native', 'bridge'")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: one of {', '.join(map(repr, _DTYPES))}")
    place, numbers = torch_device(device), _DTYPES[dtype]
    vocabulary = _vocabulary(tokenizer)
    if isinstance(ref, nn.Module):
        if backend == "bridge":
            name = type(ref).__name__
            return bridge_model(ref, vocabulary, name=name, device=place, dtype=numbers)
        return _from_memory(ref, numbers, vocabulary).to(place)
    source = ref if isinstance(ref, Source) else resolve(ref, pickles=backend == "bridge")
    if backend == "bridge":
        bridge = _bridged_run if source.kind == "run" else load_bridge
        return bridge(source, device=place, dtype=numbers, vocabulary=vocabulary)
    model = _native(source, numbers, vocabulary).to(place)
    model.source = source
    return model


def _native(source: Source, dtype: torch.dtype, given: Vocabulary | None) -> Transformer:
    if source.kind == "run":
        return _checkpoint(source, given).to(dtype)
    if source.kind == "huggingface":
        return _huggingface(source, dtype, given)
    config, weights = read_gguf(source.path, dtype)
    vocabulary = given
    if vocabulary is None:
        vocabulary = load_pretrained_vocabulary(source.path.parent, gguf_file=source.path.name)
    _check_vocabulary(vocabulary, config, f"the tokenizer of {source.path}")
    return model_with_weights(
        config, weights, source.path, vocabulary=vocabulary, model_name=source.name
    )


def _checkpoint(source: Source, given: Vocabulary | None) -> Transformer:
    folder = source.path
    run = folder.parent.parent
    path = run / TOKENIZER if folder.parent.name == CHECKPOINTS else folder / TOKENIZER
    vocabulary = given
    if vocabulary is None and path.is_file():
        vocabulary = BytePairVocabulary.load(path)
    elif vocabulary is None:
        path = folder / PRETRAINED_TOKENIZER
        vocabulary = load_pretrained_vocabulary(path) if path.is_dir() else None
    config = _read_config(folder)
    _check_vocabulary(vocabulary, config, str(path))
    path = folder / WEIGHTS
    return model_with_weights(
        config, read_tensors(path), path, vocabulary=vocabulary, model_name=source.name
    )


def _huggingface(source: Source, dtype: torch.dtype, given: Vocabulary | None) -> Transformer:
    folder = source.path
    hf = read_json(folder / CONFIG)
    config = model_config(hf, str(folder))
    files = tensor_files(folder)
    vocabulary = load_pretrained_vocabulary(folder) if given is None else given
    _check_vocabulary(vocabulary, config, f"the tokenizer of {folder}")
    weights = native_weights(
        hf, files.keys(), lambda name: read_tensor(files[name], name), str(folder), dtype
    )
    return model_with_weights(
        config, weights, folder, vocabulary=vocabulary, model_name=source.name
    )


def _bridged_run(
    source: Source, *, device: torch.device, dtype: torch.dtype, vocabulary: Vocabulary | None
) -> BridgedModel:
    """A run of GPT-2's or Llama's shape, as transformers reads it once it is saved for it."""
    model = _checkpoint(source, vocabulary)
    with TemporaryDirectory(prefix="interp-") as scratch:
        folder = save_pretrained(model, Path(scratch, "model"))
        saved = Source("huggingface", folder, source.name)
        bridged = load_bridge(saved, device=device, dtype=dtype, vocabulary=model.vocabulary)
    bridged.source, bridged.vocabulary = source, model.vocabulary
    return bridged


def _from_memory(
    module: nn.Module, dtype: torch.dtype, vocabulary: Vocabulary | None
) -> Transformer:
    name = type(module).__name__
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    if to_dict is None:
        raise ModelError(f"{name} is no model of transformers: it has no config")
    hf: Mapping[str, object] = to_dict()
    config = model_config(hf, name)
    _check_vocabulary(vocabulary, config, f"the tokenizer given for {name}")
    tensors = module.state_dict()
    weights = native_weights(hf, tensors.keys(), lambda key: tensors[key].detach(), name, dtype)
    return model_with_weights(config, weights, Path(name), vocabulary=vocabulary, model_name=name)


# --- vocabularies ---------------------------------------------------------------------------


def _vocabulary(tokenizer: object | None) -> Vocabulary | None:
    if tokenizer is None or isinstance(tokenizer, Vocabulary):
        return tokenizer
    return PretrainedVocabulary(tokenizer)


def _check_vocabulary(vocabulary: Vocabulary | None, config: ModelConfig, whose: str) -> None:
    if vocabulary is not None and len(vocabulary) > config.d_vocab:
        raise ModelError(
            f"{whose} has {len(vocabulary)} tokens, more than d_vocab = {config.d_vocab}"
        )


# --- checkpoints of a run, and models by themselves -----------------------------------------


def save_folder(model: Transformer, folder: Path | str) -> Path:
    """Write a folder that `load_model` reads back bit for bit: weights, config and tokenizer.

    A byte-pair vocabulary lies in `tokenizer.json`, one of `transformers` in `tokenizer/`. The
    folder appears whole or not at all.

    Raises: ModelError for a vocabulary of another kind, and for a folder that holds something.
    """
    vocabulary = model.vocabulary
    with new_folder(folder) as scratch:
        save_model(model, scratch)
        if isinstance(vocabulary, BytePairVocabulary):
            (scratch / TOKENIZER).write_text(vocabulary.to_json(), encoding="utf-8")
        elif isinstance(vocabulary, PretrainedVocabulary):
            vocabulary.tokenizer.save_pretrained(scratch / PRETRAINED_TOKENIZER)
        elif vocabulary is not None:
            raise ModelError(
                f"a vocabulary of {type(vocabulary).__name__} cannot be written into a folder"
            )
    return Path(folder)


def save_model(model: Transformer, folder: Path) -> None:
    """Write `model.safetensors` and `config.json` into an existing folder."""
    save_file(stored_weights(model), folder / WEIGHTS)
    text = json.dumps({"format": "interp", "model": config_tables(model.config)}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def torch_device(name: str) -> torch.device:
    """A device that is really there.

    Raises: ConfigError for an unknown or absent device.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the meta device has memory, but no values
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"device = {name!r} cannot be used here: {reason}") from None
    return device


def _read_config(folder: Path) -> ModelConfig:
    path = folder / CONFIG
    data = read_json(path)
    tables = data.get("model")
    if data.get("format") != "interp" or not isinstance(tables, dict):
        raise ModelError(f"{path} is not a config of this toolkit")
    try:
        return ModelConfig.model_validate(tables)
    except ValidationError as error:
        raise ModelError(f"{path}: {explain(error, ModelConfig)}") from None
