"""Files of weights cannot run code. Each poisoned file would leave a marker behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_app.errors import ConfigError
from rlhf_app.models.load import load_causal_lm
from rlhf_app.training.checkpoint.checkpointer import Checkpointer
from rlhf_app.training.safe_load import FORCE, force_safe_loading, refused_files

WORKER = Path(__file__).with_name("safe_load_worker.py")


class Poison:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


@pytest.fixture(autouse=True)
def _unforced(monkeypatch):
    """Each test starts as a fresh process does, and leaves nothing behind."""
    monkeypatch.setenv(FORCE, "0")


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code_was_run"


FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


@FORMATS
def test_a_poisoned_file_does_run_without_the_force(tmp_path, marker, zipped):
    """The tests below would see it."""
    file = tmp_path / "weights.pt"
    torch.save({"w": Poison(marker)}, file, _use_new_zipfile_serialization=zipped)
    torch.load(file, weights_only=False)
    assert marker.exists()


@FORMATS
def test_a_poisoned_file_is_refused_in_one_line(tmp_path, marker, zipped):
    file = tmp_path / "weights.pt"
    torch.save({"w": Poison(marker)}, file, _use_new_zipfile_serialization=zipped)
    force_safe_loading()
    force_safe_loading()
    with pytest.raises(ConfigError) as caught, refused_files(f"checkpoint {file}"):
        torch.load(file, weights_only=False)
    assert str(caught.value) == (
        f"checkpoint {file}: a file of weights asks for posix.system, which is no part of weights; "
        "nothing of it was run; take a copy in safetensors from a place that you trust"
    )
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:")
def test_a_bare_pickle_and_a_program_are_refused(tmp_path, marker):
    bare, program = tmp_path / "bare.pt", tmp_path / "program.pt"
    bare.write_bytes(pickle.dumps(Poison(marker), protocol=2))
    # No layer: DeepSpeed replaces the functional forms of some, which then cannot be traced.
    torch.jit.save(torch.jit.trace(torch.nn.Identity(), torch.ones(1, 2)), program)
    force_safe_loading()
    for file, why in ((bare, "asks for posix.system"), (program, "TorchScript program")):
        with pytest.raises(ConfigError, match=why), refused_files("it"):
            torch.load(file, weights_only=False)
    assert not marker.exists()


def test_what_checkpoints_of_ours_hold_is_read(tmp_path):
    state = {
        "step": 3,
        "name": "sft",
        "loss": [1.5, None, True],
        "rng": torch.get_rng_state(),
        "nested": {("a", 1): torch.arange(3, dtype=torch.bfloat16), "dtype": torch.float32},
    }
    torch.save(state, tmp_path / "rank0.pt")
    force_safe_loading()
    read = torch.load(tmp_path / "rank0.pt", weights_only=False)
    assert read["loss"] == state["loss"]
    assert read["nested"]["dtype"] is torch.float32
    assert torch.equal(read["rng"], state["rng"])


@pytest.mark.parametrize("asked", ["1", "yes", "TRUE"])
def test_the_opposite_variable_goes_with_a_warning(monkeypatch, caplog, asked):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", asked)
    force_safe_loading()
    force_safe_loading()
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
    assert os.environ[FORCE] == "1"
    assert [record.getMessage() for record in caplog.records] == [
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is ignored: files of weights are read as data only, "
        "without their code"
    ]


@FORMATS
def test_a_poisoned_pytorch_model_bin_is_refused(model_dir, marker, zipped, monkeypatch):
    """Also where transformers itself would read it the unsafe way."""
    import transformers.modeling_utils as modeling

    torch.save(
        {"lm_head.weight": Poison(marker)},
        model_dir / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    real = modeling.load_state_dict
    monkeypatch.setattr(
        modeling, "load_state_dict", lambda *a, **k: real(*a, **{**k, "weights_only": False})
    )
    with pytest.raises(ConfigError) as caught:
        load_causal_lm(str(model_dir), dtype=torch.float32, device=torch.device("cpu"))
    assert f"model.actor {model_dir}: a file of weights asks for posix.system" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("poisoned", ["rank0.pt", "actor/mp_rank_00_model_states.pt"])
def test_a_stage_refuses_a_poisoned_checkpoint(tmp_path, marker, poisoned):
    """The engine stands for DeepSpeed's, which loads the unsafe way."""

    class Engine:
        def load_checkpoint(self, directory, tag, **_):
            file = Path(directory) / tag / "mp_rank_00_model_states.pt"
            return str(file), torch.load(file, weights_only=False)

    (tmp_path / "actor").mkdir()
    for name in ("rank0.pt", "actor/mp_rank_00_model_states.pt"):
        torch.save({"a": Poison(marker) if name == poisoned else 1}, tmp_path / name)
    part = SimpleNamespace(_engines={"actor": Engine()}, _dist=SimpleNamespace(rank=0), _state={})
    force_safe_loading()
    with pytest.raises(ConfigError, match=f"checkpoint {tmp_path}: .* posix.system"):
        Checkpointer._load(part, tmp_path)
    assert not marker.exists()


@pytest.mark.slow
def test_deepspeeds_checkpoints_need_the_listed_types_and_no_poison_passes(tmp_path, repo_root):
    """In a process of its own: the list of allowed types belongs to the process."""
    done = subprocess.run(
        [sys.executable, WORKER, tmp_path],
        cwd=repo_root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (tmp_path / "code_was_run").exists()
    rows = [tuple(line.split()[1:]) for line in done.stdout.splitlines() if line[:4] == "type"]
    assert rows == [
        ("fp32", "0"),
        ("fp32", "1", "LossScaler", "ZeroStageEnum", "fragment_address"),
        ("fp32", "2", "LossScaler", "ZeroStageEnum", "fragment_address"),
        ("fp32", "3", "LossScaler", "ZeroStageEnum"),
        ("bf16", "1", "LossScaler", "ZeroStageEnum", "fragment_address"),
        ("bf16", "2", "LossScaler", "ZeroStageEnum", "fragment_address"),
        ("bf16", "3", "LossScaler", "ZeroStageEnum"),
        ("fp16", "1", "DynamicLossScaler", "ZeroStageEnum", "fragment_address"),
        ("fp16", "2", "DynamicLossScaler", "ZeroStageEnum", "fragment_address"),
        ("fp16", "3", "DynamicLossScaler", "ZeroStageEnum"),
    ]
    assert "allowed DynamicLossScaler LossScaler ZeroStageEnum fragment_address" in done.stdout
    assert "refused engine: a file of weights asks for posix.system" in done.stdout
