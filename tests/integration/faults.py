"""Faults that a test plants in processes of their own: a `sitecustomize` that patches a module."""

from __future__ import annotations

from pathlib import Path

_PLANT = """
import importlib.abc
import importlib.util
import sys


class Planter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def patched(module):
            execute(module)
            fault(module)

        spec.loader.exec_module = patched
        return spec


def fault(module):
{body}

sys.meta_path.insert(0, Planter())
"""

# Module, and what is done to it. None of them disturbs the engine's own probe of the model.
FAULTS = {
    "positions one late": (
        "decode_state",
        """
    admit = module.DecodeState.admit

    def shifted(self, first, requests, slots, lengths):
        state = admit(self, first, requests, slots, lengths)
        state[module.POSITION] += 1
        return state

    module.DecodeState.admit = shifted
""",
    ),
    "one layer's cache shifted": (
        "decode_step",
        """
    run = module.DecodeStep._run

    def shifted(self, rows, longest, equal):
        keys = self._workspace.keys[1]
        keys[:rows] = keys[:rows].roll(1, 0)
        return run(self, rows, longest, equal)

    module.DecodeStep._run = shifted
""",
    ),
    "always the same token": (
        "sampling",
        """
    draw = module.Sampler.__call__

    def same(self, logits, uniforms):
        if self._params.greedy:
            return draw(self, logits, uniforms)
        scores = self.filtered(logits).log_softmax(1)
        return 0 * scores.argmax(1) + 7, scores[:, 7]

    module.Sampler.__call__ = same
""",
    ),
    "a weight moves": (
        "generator",
        """
    rollout = module.Generator.rollout

    def moving(self, *arguments, **named):
        answers = rollout(self, *arguments, **named)
        weight = next(self._model.model.parameters())
        weight.data = weight.data.clone()
        return answers

    module.Generator.rollout = moving
""",
    ),
    "a weight is not put back": (
        "generator",
        """
    rollout = module.Generator.rollout

    def spoiling(self, *arguments, **named):
        answers = rollout(self, *arguments, **named)
        next(self._model.model.parameters()).data[:, 0] += 1e-6
        return answers

    module.Generator.rollout = spoiling
""",
    ),
    "decoding from old weights": (
        "inference_model",
        """
    decode = module.InferenceModel.decode
    kept = []

    def stale(self, *arguments):
        head = self.model.get_output_embeddings()
        if len(kept) < 40:  # the first rollouts
            kept.append(head.weight.detach().clone())
        live, head.weight.data = head.weight.data, kept[0]
        try:
            return decode(self, *arguments)
        finally:
            head.weight.data = live

    module.InferenceModel.decode = stale
""",
    ),
}


def plant(name: str, directory: Path) -> dict[str, str]:
    """Write the fault down; the environment of the processes that shall have it.

    Args:
        name: of FAULTS.
        directory: where the file goes.
    """
    module, body = FAULTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    text = _PLANT.format(module=f"rlhf_app.hybrid_engine.{module}", body=body)
    (directory / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(directory)}
