"""Which sequences calibrate, and what the projections are found to read on them."""

from dataclasses import replace

import pytest
import torch
from pruning_cases import SETS
from test_quantization_schemes import what_is_read
from tiny_models import FAMILIES, padding, some_tokens, tiny

from interp.activations import massive
from interp.data.repeated import TokenBatch
from interp.inputs import Inputs, random_inputs, token_inputs
from interp.models.pruning import prune_heads
from interp.quantization.calibration import calibrate, split

MODEL = tiny()


def numbered(n_sequences, documents=None, n_pos=6):
    """Sequences that differ in their first token, with a document each where some are given."""
    tokens = torch.zeros(n_sequences, n_pos, dtype=torch.long)
    tokens[:, 0] = torch.arange(n_sequences)
    inputs = token_inputs(MODEL, tokens)
    if documents is None:
        return inputs
    numbers = torch.tensor(documents)
    return replace(inputs, batches=[replace(own, documents=numbers) for own in inputs.batches])


def firsts(batches):
    """The first token of every sequence."""
    return [int(row[0]) for batch in batches for row in batch.tokens]


# --- who calibrates -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_sequences", "calibrating"),
    [(1, []), (2, [1]), (3, [2]), (4, [3]), (5, [3]), (8, [3, 7]), (9, [3, 7])],
)
def test_every_fourth_sequence_calibrates_and_the_last_of_two_or_three(n_sequences, calibrating):
    evaluated, apart = split(numbered(n_sequences))
    assert firsts(apart) == calibrating
    assert firsts(evaluated.batches) == [n for n in range(n_sequences) if n not in calibrating]


@pytest.mark.parametrize("n_documents", [1, 2, 3, 4, 9])
def test_all_sequences_of_a_document_are_on_one_side(n_documents):
    documents = [3 * n % n_documents for n in range(18)]
    evaluated, apart = split(numbered(18, documents))
    sides = [
        {int(n) for batch in batches for n in batch.documents}
        for batches in (evaluated.batches, apart)
    ]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(documents)
    kinds = sorted(set(documents))
    assert sorted(sides[1]) == (kinds[3::4] or kinds[1:][-1:])
    # In the order they came, and none lost.
    assert firsts(evaluated.batches) == sorted(firsts(evaluated.batches))
    assert sorted(firsts(evaluated.batches) + firsts(apart)) == list(range(18))


def test_a_document_in_two_batches_of_unlike_lengths_is_on_one_side():
    first, second = numbered(6, [0, 1, 2, 3, 4, 5]), numbered(4, [3, 4, 5, 3], n_pos=4)
    both = replace(first, batches=[*first.batches, *second.batches])
    evaluated, apart = split(both)
    assert {int(n) for batch in apart for n in batch.documents} == {3}
    assert [len(batch.tokens) for batch in apart] == [1, 2]
    assert not any(3 in batch.documents for batch in evaluated.batches)


def test_sequences_of_several_batches_are_counted_through():
    short, long = numbered(3), numbered(3, n_pos=8)
    evaluated, apart = split(replace(short, batches=[*short.batches, *long.batches]))
    assert [list(batch.tokens.shape) for batch in apart] == [[1, 8]]
    assert [list(batch.tokens.shape) for batch in evaluated.batches] == [[3, 6], [2, 8]]
    # One sequence in each: none of the batches is left empty.
    alone = [batch for n in range(4, 8) for batch in numbered(1, n_pos=n).batches]
    evaluated, apart = split(replace(short, batches=alone))
    assert [batch.tokens.shape[1] for batch in evaluated.batches] == [4, 5, 6]
    assert [batch.tokens.shape[1] for batch in apart] == [7]


def test_a_sequence_that_is_also_evaluated_does_not_calibrate():
    tokens = some_tokens(8, 6)
    tokens[3] = tokens[0]
    evaluated, apart = split(token_inputs(MODEL, tokens))
    assert len(apart) == 1
    assert torch.equal(apart[0].tokens, tokens[7:])
    assert len(evaluated.batches[0].tokens) == 6
    assert split(token_inputs(MODEL, tokens[:1].expand(8, -1)))[1] == []


def test_padding_hides_no_sequence_that_is_also_evaluated():
    tokens = torch.tensor([[3, 4, 5, 0, 0], [6, 7, 8, 9, 1], [2, 2, 8, 1, 7], [0, 0, 3, 4, 5]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [1] * 5, [0, 0, 1, 1, 1]])
    assert split(token_inputs(MODEL, tokens, mask))[1] == []
    mask[0] = 1  # now its first sequence is another one
    assert len(split(token_inputs(MODEL, tokens, mask))[1]) == 1


def test_everything_of_a_sequence_goes_with_it():
    inputs = random_inputs(MODEL, [5], 6)
    mask = padding("left", [10, 9, 8, 7, 6, 5], 10)
    (whole,) = (replace(batch, key_mask=mask.bool()) for batch in inputs.batches)
    evaluated, apart = split(replace(inputs, batches=[whole]))
    rows = [0, 1, 2, 4, 5]
    (kept,) = evaluated.batches
    assert torch.equal(kept.tokens, whole.tokens[rows])
    assert torch.equal(kept.targets, whole.targets[rows])
    assert torch.equal(kept.key_mask, whole.key_mask[rows])
    assert torch.equal(apart[0].key_mask, whole.key_mask[[3]])
    assert torch.equal(inputs.batches[0].tokens, whole.tokens)


# --- what projections read ------------------------------------------------------------------------


def statistics(model, tokens, mask=None):
    """Of every projection, from one plain pass over the whole model: largest, mean and gram."""
    found = {}
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    original = model.forward

    def forward(ids):
        return original(ids, attention_mask=mask)

    model.forward = forward
    try:
        read = what_is_read(model, tokens)
    finally:
        del model.forward
    for name, x in read.items():
        own = x[real.flatten()].double()
        found[name] = (own.abs().amax(0), own.abs().mean(0), own.T @ own)
    return found


def check(model, batches, expected, *, grams=True):
    """Layer by layer, every projection of every reading."""
    names = []
    for layer, channels in calibrate(model, batches, grams=grams):
        for reading, own in channels.items():
            for projection in reading.projections:
                name = f"blocks.{layer}.{projection}"
                names.append(name)
                largest, mean, gram = expected[name]
                assert torch.allclose(own.largest.double(), largest, rtol=1e-5, atol=1e-5), name
                assert torch.allclose(own.mean.double(), mean, rtol=1e-5, atol=1e-5), name
                if grams:
                    assert torch.allclose(own.gram.double(), gram, rtol=1e-4, atol=1e-3), name
                else:
                    assert own.gram is None
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_channels_are_those_of_a_plain_pass_over_the_whole_model(family):
    model, tokens = tiny(family), some_tokens(5, 9)
    expected = statistics(model, tokens)
    names = check(model, token_inputs(model, tokens).batches, expected)
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["mha", "llama", "shortformer", "rotary_smeared"])
def test_padding_is_not_read(family, side):
    model, tokens = tiny(family), some_tokens(3, 9)
    mask = padding(side, [9, 4, 6], 9)
    expected = statistics(model, tokens, mask)
    assert check(model, token_inputs(model, tokens, mask).batches, expected)


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
def test_a_layer_without_heads_has_no_projections_of_attention(heads):
    model, tokens = prune_heads(tiny("gqa"), heads), some_tokens(3, 9)
    expected = {
        name: own
        for name, own in statistics(model, tokens).items()
        if model.get_parameter(f"{name}.weight").numel()
    }
    names = check(model, token_inputs(model, tokens).batches, expected)
    assert sorted(names) == sorted(expected)


def test_how_many_sequences_go_through_together_does_not_matter(monkeypatch):
    model, tokens = tiny("llama"), some_tokens(7, 9)
    expected = statistics(model, tokens)
    for size in (1, 3):
        monkeypatch.setattr(massive, "sequences_at_once", lambda *_, size=size: size)
        assert check(model, token_inputs(model, tokens).batches, expected, grams=False)


def test_batches_of_unlike_lengths_are_read_together():
    model = tiny("rotary")
    batches = [
        batch
        for n_pos in (5, 9)
        for batch in token_inputs(model, some_tokens(2, n_pos, seed=n_pos)).batches
    ]
    apart = [statistics(model, batch.tokens) for batch in batches]
    expected = {
        name: (
            torch.maximum(apart[0][name][0], apart[1][name][0]),
            (apart[0][name][1] * 10 + apart[1][name][1] * 18) / 28,
            apart[0][name][2] + apart[1][name][2],
        )
        for name in apart[0]
    }
    assert check(model, batches, expected)


def test_between_two_layers_the_model_is_as_it_was():
    model = tiny("llama", dropout=0.5).train()
    batches = token_inputs(model, some_tokens(3, 9)).batches
    layers = calibrate(model, batches)
    for _ in layers:
        assert torch.is_grad_enabled()
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert all(module.training for module in model.modules())
    assert check(model, batches, statistics(model.eval(), batches[0].tokens))


def test_inputs_without_sequences_of_their_own_kind_keep_what_they_say():
    given = Inputs([TokenBatch(some_tokens(1, 5), torch.full((1, 5), -1))], [], "words", {"a": 1})
    evaluated, apart = split(given)
    assert (evaluated.description, evaluated.params, apart) == ("words", {"a": 1}, [])
