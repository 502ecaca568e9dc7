"""DeepSpeed's seven `hybrid_engine` keys: its names, and the effect of each, observed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine.decode_step import DecodeStep
from rlhf_app.hybrid_engine.sampling import SamplingParams
from rlhf_app.hybrid_engine.weights import ResidentWeights

WORKER = Path(__file__).with_name("seven_keys_worker.py")
# Where our default is another: using our `initialize` asks for the engine; the workspace is sized
# by each call instead of once for all; graphs are on where they are possible.
OTHER_DEFAULTS = {
    "enabled": (False, True), "max_out_tokens": (512, None), "enable_cuda_graph": (False, True),
}  # fmt: skip


def test_names_and_defaults_are_deepspeeds():
    from deepspeed.runtime.config import HybridEngineConfig

    theirs = HybridEngineConfig().model_dump()
    ours = HybridEngineSettings().model_dump()
    assert ours.pop("compile_decode") == "auto"  # the one key more
    assert set(ours) == set(theirs)
    assert len(ours) == 7
    different = {key: (theirs[key], ours[key]) for key in ours if ours[key] != theirs[key]}
    assert different == OTHER_DEFAULTS


@pytest.mark.parametrize(
    ("value", "form"),
    [(True, "cuda graph"), (False, "eager (enable_cuda_graph is false)")],
)
def test_enable_cuda_graph_decides_how_steps_run_on_cuda(value, form):
    """Asked of the step itself, as if there were a GPU."""
    model = SimpleNamespace(
        device=torch.device("cuda"), weights=ResidentWeights(), fingerprint=lambda: (),
        kernels=None,
    )  # fmt: skip
    step = DecodeStep(model, (), value)
    state = SimpleNamespace(agree=None, addresses=())
    step.begin(SimpleNamespace(addresses=()), state, SamplingParams(4), 2)
    assert step.form == form


@pytest.fixture(scope="module")
def found(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    done = run_ranks(WORKER, folder, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


# Of the worker's model: 4 layers of 4 attention and 3 MLP matrices and 2 norms.
LAYER = 32 * (32 + 2 * 16 + 32) + 3 * 32 * 48 + 2 * 32
MODEL = 4 * LAYER + 2 * 97 * 32 + 32  # untied embeddings, last norm


@pytest.mark.slow
class TestEffects:
    def test_enabled(self, found):
        assert found["enabled"]["True"] == 0
        assert found["enabled"]["False"] > 0

    def test_max_out_tokens(self, found):
        fits, too_long = found["max_out_tokens"]
        assert fits == ""
        assert "exceed hybrid_engine.max_out_tokens (12)" in too_long

    def test_inference_tp_size(self, found):
        part, whole, tokens = found["inference_tp_size"]
        assert whole == 4 * MODEL
        assert part < 0.7 * whole  # embeddings and norms are whole on each of the two ranks
        assert tokens == found["reference"]
        assert "inference_tp_size" in found["tp refusal"]

    def test_release_inference_cache(self, found):
        # 2 rows of 16 positions, keys and values of 2 heads of 8 in 4 layers, fp32.
        size = 2 * 16 * 2 * 2 * 8 * 4 * 4
        assert found["release_inference_cache"] == {"True": [0, 0], "False": [size, size]}

    def test_pin_parameters_and_tp_gather_partition_size(self, found):
        most, gathered, tokens = found["gather"]["True 8"]
        assert (most, gathered, tokens) == (4, 4 * MODEL, found["reference"])
        for size in (1, 2):
            most, gathered, tokens = found["gather"][f"False {size}"]
            # Layers come and go: in each of the 8 forwards, or more where ranks wait.
            assert most == size
            assert gathered >= 4 * (8 * 4 * LAYER + MODEL - 4 * LAYER)
            assert tokens == found["reference"]

    def test_half_precision_models_from_dicts_and_files(self, found):
        assert found["half"] == {
            "half, file": ["torch.bfloat16", [2, 12]], "bf16, dict": ["torch.bfloat16", [2, 12]],
        }  # fmt: skip

    def test_deepspeed_never_sees_the_block(self, found):
        assert found["seen by DeepSpeed"] is False
        assert found["its engine"] == "DeepSpeedEngine"
