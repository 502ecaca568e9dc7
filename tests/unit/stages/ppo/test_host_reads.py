"""No number is read on the host inside a micro-batch: on CUDA every such read is a wait."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from rlhf_app.hybrid_engine.host_reads import HostReads
from rlhf_app.training.phases import PhaseClock
from stages.ppo.update import update_models

# Everything that runs per micro-batch: scoring by four models, forwards and backwards.
QUIET = {
    "old", "reference", "values", "reward", "actor_forward_backward", "critic_forward_backward",
}  # fmt: skip


@pytest.fixture
def reads(monkeypatch):
    """Phase -> the first operation in it that read a number on the host, or None."""
    found: dict[str, str | None] = {}
    original = PhaseClock.phase

    @contextmanager
    def phase(clock, name):
        with original(clock, name):
            if name not in QUIET:
                yield
                return
            with HostReads() as mode:
                yield
            found[name] = found.get(name) or mode.first

    monkeypatch.setattr(PhaseClock, "phase", phase)
    return found


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_micro_batches_read_nothing(cases, dist, reads, zero_stage):
    trained = {"learning_rate": 3e-3, "zero_stage": zero_stage}
    ppo = cases.settings(actor=trained, critic=trained, mini_batches=2, micro_batch_tokens=40)
    models = cases.build(ppo, dist)
    for update in (1, 2):
        reads.clear()  # the first update also probes the models
        batch = cases.roll(models, ppo, dist, update)
        update_models(models, batch.experience, ppo, dist, seed=7, update=update)
    assert reads == dict.fromkeys(QUIET)


def test_a_read_is_seen(cases, dist, reads):
    """The check itself: a scorer that looks at its scores."""

    class Looks:
        def __call__(self, answers, prompts, responses, stopped):
            scores = answers.last_index_B.float()
            return scores if bool(scores.sum() > 0) else -scores

    ppo = cases.settings()
    models = cases.build(ppo, dist)
    from dataclasses import replace

    cases.roll(replace(models, scorer=Looks()), ppo, dist)
    assert reads["reward"] == "_local_scalar_dense"
    assert torch.is_grad_enabled()
