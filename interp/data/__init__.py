"""Token sequences: repeated random tokens, text corpora, and the tokenizer trained on them."""
