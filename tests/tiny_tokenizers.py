"""Small tokenizers of every kind that pretrained models have, made on the spot."""

from tiny_models import FAMILIES, perturbed, tiny_config
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from interp.data.pretrained_tokenizer import PretrainedVocabulary

END = "<|endoftext|>"
# The emoji's four bytes are three tokens; " a" and "é" are one each.
MERGES = [("Ġ", "a"), ("Ã", "©"), ("ð", "Ł"), ("t", "h"), ("th", "e"), ("Ġ", "the")]
EMOJI = "😀"
SAMPLES = ["the cat", " a\n\té", f"x {EMOJI}{EMOJI} y", "  two  spaces .", "日本"]


def byte_pairs(*specials):
    """A byte-level BPE of all bytes and a few merges; special tokens come first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*specials, *alphabet, *(a + b for a, b in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def wrapped(kind, **settings):
    """`adds`: BOS by itself; `does_not`: has one, leaves it to the caller; `cannot`: has none."""
    if kind == "cannot":
        return PreTrainedTokenizerFast(tokenizer_object=byte_pairs(), **settings)
    tokenizer = byte_pairs("<s>", "</s>")
    if kind == "adds":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", **settings
    )


KINDS = ("adds", "does_not", "cannot")
SIZE = {"adds": 264, "does_not": 264, "cannot": 262}


def gpt2_like(**settings):
    """GPT-2's situation: one token begins, ends and pads."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(END), bos_token=END, eos_token=END, pad_token=END, **settings
    )


def wordpiece():
    """BERT's: lower case, pieces of words, CLS in front and SEP behind."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "a", "un"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )


def metaspace():
    """Llama's kind: a word begins with ▁, and the decoder takes the first space away."""
    words = ["<unk>", "<s>", "▁a", "a", "▁the", "▁", "<0x0A>", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            [("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def numbered(size):
    """A tokenizer of so many words w0, w1, ..."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def reader(family="mha", vocabulary=None, **changes):
    """A tiny model that reads text."""
    vocabulary = vocabulary or PretrainedVocabulary(gpt2_like())
    fields = {**FAMILIES[family], "d_vocab": 270, "n_ctx": 40, **changes}
    return perturbed(tiny_config(**fields), vocabulary=vocabulary)
