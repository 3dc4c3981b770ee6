"""Windows of text that heads are measured on, of one file or of a corpus of documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from interp.data.corpus import HELD_OUT, NAMES, check_corpus, read_corpus, read_text
from interp.data.drawing import REPEATED, Drawing
from interp.errors import AnalysisError, ModelError
from interp.inputs import Inputs, leading_bos, random_inputs, token_inputs, without_bos
from interp.models.watch import HookedModel

TEXT_WIDTH = 512
"""Tokens in a window of text unless it is said otherwise: a bridged model's patterns of longer ones
are large, and the in-context-learning score is published for 512."""

CORPUS_SEQUENCES = 32
"""Windows of a corpus unless it is said otherwise."""


def text_inputs(
    model: HookedModel,
    path: Path,
    length: int | None = None,
    prepend_bos: bool | None = None,
    *,
    sequences: int | None = None,
) -> Inputs:
    """A text file in windows of `length` tokens, BOS and all; a shorter rest is not used.

    `length` is 512, or `n_ctx` where that is less, unless given; a shorter text is one window. Each
    window begins as a text of its own: led by BOS where the model expects one. At most `sequences`
    of them are taken, evenly over the text; all by default. They count as independent, which
    windows of one text are only roughly.

    Raises: ConfigError for a file that is empty or not text; ModelError for a model without a
    tokenizer; AnalysisError for a text shorter than two tokens, a `length` that does not fit the
    model, or `prepend_bos=True` without BOS.
    """
    text = read_text(path)
    around = _around(model, prepend_bos)
    (ids,) = _encoded(model, [text], around)
    width = min(_window_length(model, length, around), len(around) + len(ids))
    taken = width - len(around)
    if width < 2 or taken < 1:
        raise AnalysisError(f"{path}: a text of {len(ids)} tokens says nothing of attention")
    every = _windows(ids, taken)
    n_windows = len(every) if sequences is None else min(_at_least_one(sequences), len(every))
    chosen = every[np.arange(n_windows) * len(every) // n_windows]
    inputs = token_inputs(model, _surrounded(chosen, around))
    description = f"{n_windows} {_word(n_windows)} of {width} tokens from {path.name}"
    params = {**inputs.params, "text": path.name, "bos": around[0] if around else None}
    return replace(inputs, description=description + _lead(around, prepend_bos), params=params)


def corpus_inputs(
    model: HookedModel,
    name: str,
    length: int | None = None,
    prepend_bos: bool | None = None,
    *,
    sequences: int | None = None,
    skip: int = 0,
    seed: int = 0,
) -> Inputs:
    """Windows of `length` tokens of a corpus's held-out files, over as many files as there are.

    `name` is `docs`, `stdlib`, or the path of a text file or of a folder of them; of these the
    files, or of one file the part, that training runs hold out. `length` is 512, or `n_ctx` where
    that is less, unless given; at most `sequences` windows are taken, 32 by default: the first
    window of each document, in an order drawn from `seed`, then the second of each, and so on;
    `skip` leaves so many of these out, for windows that another call does not have.
    Documents shorter than a window are left out. Windows know their document, by which standard
    errors are clustered; those of a single document count as independent.

    Raises: ConfigError for a corpus that is missing, empty or not text; ModelError for a model
    without a tokenizer; AnalysisError for documents that are all too short, a `length` that does
    not fit the model, or `prepend_bos=True` without BOS.
    """
    windows = corpus_windows(model, name, length, prepend_bos)
    return windows_inputs(model, windows, windows.counts, sequences=sequences, skip=skip, seed=seed)


def inputs_from(
    model: HookedModel,
    tokens: object = None,
    *,
    attention_mask: Tensor | None = None,
    blocks: Sequence[int] | None = None,
    batch: int | None = None,
    corpus: str | None = None,
    length: int | None = None,
    sequences: int | None = None,
    prepend_bos: bool | None = None,
    exclude_bos: bool = False,
    seed: int = 0,
    drawing: Drawing = REPEATED,
) -> Inputs:
    """Given tokens, windows of a corpus, or without either random tokens as `drawing` has them.

    Raises: AnalysisError for two sources of tokens, settings that belong to another one, or what
    the source itself refuses.
    """
    if sum(given is not None for given in (tokens, blocks, corpus)) > 1:
        raise AnalysisError("tokens, blocks or corpus: one source of tokens at a time")
    if corpus is None and not (length is None and sequences is None):
        raise AnalysisError("length and sequences belong to a corpus, and none was given")
    if tokens is None and attention_mask is not None:
        raise AnalysisError("an attention_mask belongs to tokens, and none were given")
    if corpus is not None:
        inputs = corpus_inputs(model, corpus, length, prepend_bos, sequences=sequences, seed=seed)
    elif tokens is None:
        inputs = random_inputs(model, blocks, batch, seed, prepend_bos, drawing)
    else:
        inputs = token_inputs(model, tokens, attention_mask, prepend_bos)
    return without_bos(model, inputs) if exclude_bos else inputs


@dataclass(frozen=True)
class CorpusWindows:
    """A corpus's held-out documents as one model reads them, each cut into windows of `width`."""

    name: str
    sha256: str
    width: int
    around: list[int]
    lead: str
    of_document: list[Int[np.ndarray, "_ taken"]]

    @property
    def counts(self) -> Int[np.ndarray, " document"]:
        """How many windows each document has; 0 where it is shorter than one."""
        return np.array([len(own) for own in self.of_document])


def corpus_windows(
    model: HookedModel, name: str, length: int | None = None, prepend_bos: bool | None = None
) -> CorpusWindows:
    """Every window of `length` tokens of a corpus's held-out documents, one at least.

    Raises: as `corpus_inputs` does.
    """
    check_corpus(name)
    around = _around(model, prepend_bos)
    width = _window_length(model, length, around)
    corpus = read_corpus(name, HELD_OUT)
    encoded = _encoded(model, list(corpus.held_out.values()), around)
    of_document = [_windows(ids, width - len(around)) for ids in encoded]
    if not any(map(len, of_document)):
        longest = max(map(len, encoded)) + len(around)
        raise AnalysisError(
            f"{name}: none of the {len(encoded)} held-out documents has {width} tokens, BOS and "
            f"all; the longest has {longest}: a length of that is possible"
        )
    lead = _lead(around, prepend_bos)
    return CorpusWindows(name, corpus.sha256[:12], width, around, lead, of_document)


def windows_inputs(
    model: HookedModel,
    windows: CorpusWindows,
    counts: Int[np.ndarray, " document"],
    *,
    sequences: int | None = None,
    skip: int = 0,
    seed: int = 0,
) -> Inputs:
    """At most `sequences` windows, of each document those that `counts` allows it, not all none.

    Raises: AnalysisError where `skip` leaves none.
    """
    wanted = CORPUS_SEQUENCES if sequences is None else _at_least_one(sequences)
    order = np.random.default_rng([seed, 6]).permutation(np.flatnonzero(counts))
    rows = range(int(counts.max()))
    every = [(n, row) for row in rows for n in order if row < counts[n]]
    places = every[skip : skip + wanted]
    if not places:
        raise AnalysisError(f"{windows.name} has {len(every)} windows of {windows.width} tokens")
    chosen = np.stack([windows.of_document[n][row] for n, row in places])
    inputs = token_inputs(model, _surrounded(chosen, windows.around))
    numbers = np.unique([n for n, _ in places], return_inverse=True)[1]
    n_documents = int(numbers.max()) + 1
    if n_documents > 1:
        documents = torch.from_numpy(numbers.astype(np.int64))
        inputs = replace(
            inputs,
            batches=[replace(batch, documents=documents) for batch in inputs.batches],
            unrepeated=[replace(batch, documents=documents) for batch in inputs.unrepeated],
        )
    label = windows.name if windows.name in NAMES else Path(windows.name).resolve().name
    source = f"{n_documents} documents" if n_documents > 1 else "one text"
    n_short = int((counts == 0).sum())
    left_out = f"; {n_short} of {len(counts)} documents are shorter and left out"
    return replace(
        inputs,
        description=(
            f"{len(places)} {_word(len(places))} of {windows.width} tokens from {source} of "
            f"{label} (held out, sha256 {windows.sha256}){windows.lead}"
            f"{left_out if n_short else ''}"
        ),
        params={
            **inputs.params,
            "corpus": label,
            "documents": n_documents,
            "documents_left_out": n_short,
            "sha256": windows.sha256,
            "length": windows.width,
            "bos": windows.around[0] if windows.around else None,
        },
    )


def _around(model: HookedModel, prepend_bos: bool | None) -> list[int]:
    """The ids around every text: none, a BOS in front, or those that an encoder wants.

    Raises: ModelError for a model without a tokenizer.
    """
    if model.vocabulary is None:
        raise ModelError("this model has no tokenizer: give --tokens, not text")
    bos = leading_bos(model, prepend_bos)
    if prepend_bos is None:
        # An encoder's tokenizer puts more around a text than one token in front.
        return list(model.vocabulary.encode("")[0])
    return [] if bos is None else [bos]


def _encoded(model: HookedModel, texts: list[str], around: list[int]) -> list[list[int]]:
    assert model.vocabulary is not None  # `_around` has asked
    encoded = model.vocabulary.encode(texts, prepend_bos=False)
    # A text may begin with a BOS of its own.
    return [ids[1:] if around and ids[:1] == around[:1] else ids for ids in encoded]


def _window_length(model: HookedModel, length: int | None, around: list[int]) -> int:
    n_ctx = model.cfg.n_ctx
    if length is None:
        return min(TEXT_WIDTH, n_ctx)
    if length > n_ctx:
        raise AnalysisError(f"length = {length} is longer than n_ctx = {n_ctx}")
    least = max(2, len(around) + 1)
    if length < least:
        raise AnalysisError(f"length = {length}: at least {least} are needed, BOS and all")
    return length


def _at_least_one(sequences: int) -> int:
    if sequences < 1:
        raise AnalysisError(f"sequences = {sequences}: at least one is needed")
    return sequences


def _windows(ids: list[int], taken: int) -> Int[np.ndarray, "window taken"]:
    n_windows = len(ids) // taken
    return np.asarray(ids[: n_windows * taken], dtype=np.int64).reshape(n_windows, taken)


def _surrounded(
    parts: Int[np.ndarray, "window taken"], around: list[int]
) -> Int[np.ndarray, "window pos"]:
    front, behind = (
        np.broadcast_to(np.asarray(own, dtype=parts.dtype), (len(parts), len(own)))
        for own in (around[:1], around[1:])
    )
    return np.concatenate((front, parts, behind), axis=1)


def _lead(around: list[int], prepend_bos: bool | None) -> str:
    if len(around) > 1:
        return f", each between the ids {around[0]} and {', '.join(map(str, around[1:]))}"
    if around:
        return f", each led by BOS = {around[0]}"
    return "" if prepend_bos is None else ", no BOS"


def _word(number: int) -> str:
    return "window" if number == 1 else "windows"
