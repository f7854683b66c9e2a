"""A wrong path of the model: said at once, before any process is started."""

import pytest
from other_user import as_another_user

from neuron_di.config import ServeOptions, local_folder, model_name_of
from neuron_di.errors import CheckpointError
from neuron_di.serve import Fleet


async def test_a_folder_that_is_not_there_starts_no_process(tmp_path):
    heard = []
    options = ServeOptions(model=str(tmp_path / "nowhere"), port=0)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        async with Fleet(options, lambda name, _: heard.append(name)):
            pass
    assert heard == []


def test_a_file_is_told_from_a_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    assert local_folder(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match=r"is a file: give the folder that has config\.json"):
        local_folder(str(file))


@pytest.mark.parametrize("model", ["gpt2", "meta-llama/Llama-3.2-1B"])
def test_a_hub_id_is_no_path(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_folder(model) is None


@pytest.mark.parametrize("model", ["~nobody-of-that-name/x", "x" * 300])
def test_a_path_that_cannot_be_is_refused_in_words(model):
    with pytest.raises(CheckpointError, match="cannot look for the model folder"):
        local_folder(model)


def test_a_folder_that_this_user_may_not_look_into_is_refused_in_words(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir(mode=0o600)
    words = f"cannot look for the model folder {folder}: Permission denied"
    with as_another_user(tmp_path), pytest.raises(CheckpointError, match=words):
        local_folder(str(folder))


def test_clients_name_a_model_by_its_folder_however_that_was_given(tmp_path, monkeypatch):
    (tmp_path / "llama" / "weights").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "llama")
    monkeypatch.setenv("HOME", str(tmp_path / "llama"))
    for model in (".", "./", "weights/..", "../llama/", "~", str(tmp_path / "llama")):
        assert model_name_of(model) == "llama"
    monkeypatch.chdir("weights")
    assert model_name_of("..") == "llama"
    assert model_name_of("meta-llama/Llama-3.2-1B") == "Llama-3.2-1B"
