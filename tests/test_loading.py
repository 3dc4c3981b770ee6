"""Models on disk: what is written comes back, and what is incomplete is named."""

import json
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, perturbed, some_tokens, tiny, tiny_config

import interp
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import ConfigError, ModelError
from interp.models.hub import resolve
from interp.models.loading import (
    checkpoint_steps,
    load_model,
    save_model,
    stored_weights,
    torch_device,
)


@pytest.fixture
def saved(tmp_path):
    """The folder of a small model."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(tiny("gqa"), folder)
    return folder


def made_run(folder, steps=(0, 5, 10)):
    """A run's folder with a different model at each step."""
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        save_model(tiny("mha", seed=step), checkpoint)
    return folder


def fault(ref, kind=ModelError, **given):
    with pytest.raises(kind) as caught:
        load_model(ref, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- round trips ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_with_the_same_weights_config_and_logits(family, tmp_path):
    model, tokens = tiny(family), some_tokens(2, 9)
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert torch.equal(again(tokens), model(tokens))
    assert not again.training


def test_every_parameter_is_stored_once_and_every_stored_tensor_is_a_parameter(tmp_path):
    for family in ("gqa", "relu_tied", "llama"):
        model = tiny(family)
        save_model(model, tmp_path)
        stored = load_file(tmp_path / "model.safetensors")
        # named_parameters names a shared storage once.
        assert stored.keys() == dict(model.named_parameters()).keys()
        assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())


def test_tied_embeddings_are_stored_once_and_share_storage_again(tmp_path):
    model = tiny("relu_tied")
    save_model(model, tmp_path)
    assert "unembed.weight" not in load_file(tmp_path / "model.safetensors")
    again = load_model(tmp_path)
    assert again.W_U.data_ptr() == again.W_E.data_ptr()
    assert torch.equal(again.W_U.T, again.W_E)
    with torch.no_grad():
        again.W_E[3] = 7.0
    assert (again.W_U[:, 3] == 7.0).all()


def test_untied_embeddings_stay_apart(tmp_path):
    model = tiny("mha")
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.W_U.data_ptr() != again.W_E.data_ptr()
    assert not torch.equal(again.W_U.T, again.W_E)
    assert torch.equal(again.W_U, model.W_U)


def test_weights_that_are_views_are_stored_as_what_they_show(tmp_path):
    model = tiny("mha")
    weight = model.blocks[0].attn.o_proj.weight
    before = weight.detach().clone()
    weight.data = before.T.contiguous().T
    assert not weight.is_contiguous()
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path).blocks[0].attn.o_proj.weight, before)


def test_the_loaded_model_is_its_own(saved):
    first, second = load_model(saved), load_model(saved)
    with torch.no_grad():
        first.W_E.zero_()
    assert second.W_E.abs().sum() > 0
    assert load_model(saved).W_E.abs().sum() > 0


def test_loading_leaves_the_callers_random_state_alone(saved):
    state = torch.get_rng_state()
    load_model(saved)
    assert torch.equal(torch.get_rng_state(), state)


def test_loading_draws_no_weights(saved, monkeypatch):
    """On the meta device it would cost a second, in which torch loads its compiler."""

    def drawn(*given, **named):
        raise AssertionError("weights were drawn, only to be replaced")

    for method in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, method, drawn)
    load_model(saved)
    with pytest.raises(AssertionError, match="were drawn"):
        torch.nn.Linear(2, 2)


def test_nothing_is_pickled_and_a_pickle_is_not_read(saved):
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json"}
    json.loads((saved / "config.json").read_text())

    class Explosive:
        def __reduce__(self):
            return (exec, ("raise AssertionError('the pickle was run')",))

    (saved / "model.safetensors").write_bytes(pickle.dumps(Explosive()))
    assert "is not a safetensors file" in fault(saved)
    (saved / "model.safetensors").unlink()
    torch.save(tiny("gqa").state_dict(), saved / "model.pt")
    assert fault(saved) == f"{saved}/model.safetensors is missing: the checkpoint is incomplete"


# --- what a reference names -----------------------------------------------------------------


def test_a_run_is_its_last_checkpoint_and_a_step_is_that_one(tmp_path):
    run = made_run(tmp_path / "run", (0, 5, 10, 1_000_000))
    assert list(checkpoint_steps(run)) == [0, 5, 10, 1_000_000]
    assert resolve(run).path == run / "checkpoints" / "step-1000000"
    for step in (0, 5, 10):
        assert torch.equal(interp.load_model(f"{run}@{step}").W_E, tiny("mha", seed=step).W_E)
    folder = run / "checkpoints" / "step-000005"
    assert torch.equal(load_model(folder).W_E, tiny("mha", seed=5).W_E)


def test_unpublished_checkpoints_are_not_seen(tmp_path):
    run = made_run(tmp_path / "run")
    (run / "checkpoints" / ".making").mkdir()
    (run / "checkpoints" / "step-99x").mkdir()
    assert list(checkpoint_steps(run)) == [0, 5, 10]


@pytest.mark.parametrize("wanted", ["7", "last", "-5", ""])
def test_an_unknown_step_lists_the_steps_there_are(tmp_path, wanted):
    run = made_run(tmp_path / "run")
    assert fault(f"{run}@{wanted}") == f"{run} has no checkpoint {wanted!r}; its steps: 0, 5, 10"


def test_a_folder_without_steps_has_none(saved):
    assert fault(f"{saved}@3") == f"{saved} has no checkpoint '3'; its steps: none"


def test_an_at_sign_in_a_folders_name_is_part_of_it(tmp_path):
    run = made_run(tmp_path / "a@b" / "run")
    assert resolve(run).path.name == "step-000010"
    assert resolve(f"{run}@5").path.name == "step-000005"
    assert "step" not in fault(tmp_path / "a@c")


def test_what_is_no_model_says_what_one_is(tmp_path):
    missing = tmp_path / "nowhere"
    assert fault(missing) == (
        f"no model {str(missing)!r}: no such file or folder; {tmp_path} has no 'nowhere'"
    )
    assert fault(tmp_path) == f"{tmp_path} is empty: it holds no model"
    (tmp_path / "notes.txt").write_text("nothing\n")
    assert fault(tmp_path) == f"{tmp_path} has no checkpoint, and no config.json: it is no model"


def test_an_experiment_asks_for_one_of_its_runs(tmp_path):
    made_run(tmp_path / "runs" / "b")
    made_run(tmp_path / "runs" / "a")
    assert fault(tmp_path) == (
        f"{tmp_path} is an experiment of several runs: choose one, such as {tmp_path}/runs/a"
    )


# --- faults of a checkpoint -----------------------------------------------------------------


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_left_over_and_misshapen_tensors_are_all_listed(saved):
    def spoil(tensors):
        tensors["nonsense"] = torch.zeros(2)
        tensors["extra"] = torch.zeros(2)
        del tensors["embed.weight"]
        del tensors["blocks.0.attn.o_proj.bias"]
        tensors["blocks.1.attn.k_proj.bias"] = torch.zeros(3)

    rewrite(saved, spoil)
    assert fault(saved) == (
        f"{saved}/model.safetensors does not fit its config: missing blocks.0.attn.o_proj.bias, "
        "embed.weight; unknown extra, nonsense; blocks.1.attn.k_proj.bias is [3], not [12]"
    )


def test_an_untied_model_without_its_output_head_is_refused(saved):
    rewrite(saved, lambda tensors: tensors.pop("unembed.weight"))
    assert fault(saved).endswith("does not fit its config: missing unembed.weight")


def test_a_tied_model_with_an_output_head_of_its_own_is_refused(tmp_path):
    save_model(tiny("relu_tied"), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"unembed.weight": torch.zeros(19, 24)}))
    assert fault(tmp_path).endswith("does not fit its config: unknown unembed.weight")


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_file_cut_short_is_named(saved, kept):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert fault(saved).startswith(f"{path} is cut short or is not a safetensors file: ")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    run = made_run(tmp_path / "run", (3,))
    path = run / "checkpoints" / "step-000003" / name
    path.unlink()
    assert fault(run) == f"{path} is missing: the checkpoint is incomplete"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " is cut short or is not JSON: "),
        ('{"format": "interp", "mo', " is cut short or is not JSON: "),
        ("[]", " is not a config of this toolkit"),
        ('{"model": {}}', " is not a config of this toolkit"),
        ('{"format": "interp"}', " is not a config of this toolkit"),
        ('{"format": "interp", "model": {"n_layers": 0}}', ": n_layers = 0: input should be great"),
    ],
)
def test_a_config_that_is_none_is_named(saved, text, message):
    path = saved / "config.json"
    path.write_text(text)
    assert fault(saved).startswith(f"{path}{message}")


def test_a_config_of_a_later_version_names_the_key(saved):
    path = saved / "config.json"
    data = json.loads(path.read_text())
    data["model"]["n_expert"] = 3
    path.write_text(json.dumps(data))
    assert fault(saved).startswith(f"{path}: unknown key n_expert; known: attention, ")


# --- the vocabulary -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary():
    return BytePairVocabulary.train(["the cat sat on the mat. " * 50], 270)


def test_the_vocabulary_lies_beside_the_checkpoints_or_the_weights(tmp_path, vocabulary):
    config = tiny_config(d_vocab=len(vocabulary))
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    save_model(perturbed(config), checkpoint)
    assert load_model(run).vocabulary is None
    (run / "tokenizer.json").write_text(vocabulary.to_json())
    alone = tmp_path / "alone"
    shutil.copytree(checkpoint, alone)
    (alone / "tokenizer.json").write_text(vocabulary.to_json())
    for ref in (run, f"{run}@1", checkpoint, alone):
        model = load_model(ref)
        assert model.to_tokens("the mat").tolist() == vocabulary.encode("the mat")
    (run / "tokenizer.json").write_text("{}")
    assert fault(run).startswith(f"{run}/tokenizer.json: not a tokenizer file: ")


def test_an_embedding_may_have_more_rows_than_the_vocabulary_but_not_fewer(tmp_path, vocabulary):
    size = len(vocabulary)
    for d_vocab in (size + 5, size - 1):
        save_model(perturbed(tiny_config(d_vocab=d_vocab)), tmp_path)
        (tmp_path / "tokenizer.json").write_text(vocabulary.to_json())
        if d_vocab > size:
            assert load_model(tmp_path).cfg.d_vocab == d_vocab
        else:
            assert fault(tmp_path) == (
                f"{tmp_path}/tokenizer.json has {size} tokens, more than d_vocab = {d_vocab}"
            )


# --- devices --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused(saved, name):
    message = fault(saved, ConfigError, device=name)
    assert message.startswith(f"device = {name!r} cannot be used here: ")


def test_the_cpu_is_a_device():
    assert torch_device("cpu").type == "cpu"


def test_stored_weights_are_copies_of_nothing_and_leave_the_model_alone():
    model = tiny("mha")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not any(value.requires_grad for value in stored_weights(model).values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_public_names_are_imported_when_used():
    code = (
        "import interp, sys\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'load_model' in dir(interp)\n"
        "from interp import ConfigError, InterpError\n"
        "assert issubclass(ConfigError, InterpError) and 'torch' not in sys.modules\n"
        "try: interp.nonsense\n"
        "except AttributeError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout == "module 'interp' has no attribute 'nonsense'\n"


def test_every_public_name_is_where_it_is_said_to_be():
    assert all(getattr(interp, name).__name__.rpartition(".")[2] == name for name in interp.__all__)
