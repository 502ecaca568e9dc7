"""Limits of PPO's phases against hand-worked numbers and a published table."""

from dataclasses import replace

import pytest

from rlhf_app.bench.limits import LayerCost, Machine, ModelCost
from rlhf_app.bench.ppo_limits import PPOWork, adam_bytes, ppo_limits
from rlhf_app.report.bench_ppo import Loop, PhaseLimit, PPOReport

ACTOR = ModelCost(
    weight_bytes=2_623_119_360,
    layer_weights=1_207_959_552,
    head_weights=102_957_056,
    layers=(LayerCost(kv_bytes=8192, width=2048),) * 24,
)
CRITIC = ModelCost(
    weight_bytes=606_715_904,
    layer_weights=303_038_464,
    head_weights=0,
    layers=(LayerCost(kv_bytes=4096, width=1024),) * 24,
)
RECIPE = PPOWork(
    prompt=256,
    answers=[256] * 1024,
    slots=512,
    epochs=1,
    optimizer_steps=1,
    actor_lora=False,
    critic_lora=False,
    # Half-precision weights, fp32 gradients: 4 + 6 x 4 + 2 bytes.
    optimizer_bytes=30 * (1_315_758_080 + 331_196_929),
)
H200 = Machine(4.16e12, 790e12)


def test_the_published_recipe():
    """The table of one H200, to the digits that it is given in."""
    phases = ppo_limits(RECIPE, ACTOR, CRITIC, CRITIC, H200)
    training = phases["actor_forward_backward"].seconds + phases["critic_forward_backward"].seconds
    found = {name: phase.seconds for name, phase in phases.items()} | {"training": training}
    table = {"prefill": 0.8, "old": 1.7, "reference": 1.7, "reward": 0.4, "values": 0.4}
    for name, seconds in (table | {"training": 6.4}).items():
        assert found[name] == pytest.approx(seconds, abs=0.05), name
    assert phases["decode"].reading_seconds == pytest.approx(5.1, abs=0.05)
    # "about 12 ms of memory traffic"
    assert phases["step"].seconds == pytest.approx(0.012, abs=5e-4)


def small(**changes) -> dict[str, PhaseLimit]:
    cost = ModelCost(
        weight_bytes=100, layer_weights=30, head_weights=10, layers=(LayerCost(4, width=2),)
    )
    work = PPOWork(
        prompt=2, answers=[2], slots=1, epochs=1, optimizer_steps=1, actor_lora=False,
        critic_lora=False, optimizer_bytes=1800,
    )  # fmt: skip
    trunk = replace(cost, head_weights=0)
    return ppo_limits(replace(work, **changes), cost, trunk, trunk, Machine(10.0, 1000.0))


def test_every_phase_by_hand():
    """One row of 2 + 2 tokens. GEMMs of the actor: 2 x (4 x 30 + 2 x 10) = 280; of a trunk: 240.
    Attention: 4 x 2 x (1 + 2 + 3 + 4) = 80."""
    flops = {name: phase.flops for name, phase in small().items()}
    assert flops == {
        "prefill": 2 * (2 * 30 + 10) + 8 * 3,
        "decode": 2 * 40 + 8 * 3,
        "old": 360,
        "reference": 360,
        "values": 320,
        "reward": 320,
        "actor_forward_backward": 3 * 360,
        "critic_forward_backward": 3 * 320,
        "step": 0,
    }
    # One step: KV of 3 tokens, and the weights; then 60 parameters of 30 bytes.
    assert small()["decode"].seconds == pytest.approx((3 * 4 + 100) / 10)
    assert small()["step"].seconds == pytest.approx(1800 / 10)


def test_frozen_weights_get_no_gradient():
    phases = small(actor_lora=True, critic_lora=True)
    assert phases["actor_forward_backward"].flops == 2 * 280 + 3 * 80
    assert phases["critic_forward_backward"].flops == 2 * 240 + 3 * 80


def test_bytes_of_an_adam_step():
    """fp32: gradient read, weight and two moments read and written. Half: the weight as well."""
    assert adam_bytes(weight_bytes=4, gradient_bytes=4) == 4 + 8 + 8 + 8
    assert adam_bytes(weight_bytes=2, gradient_bytes=4) == 4 + 8 + 8 + 8 + 2
    assert adam_bytes(weight_bytes=2, gradient_bytes=2) == 2 + 8 + 8 + 8 + 2


def test_epochs_and_steps_multiply():
    phases = small(epochs=3, optimizer_steps=6)
    assert phases["actor_forward_backward"].flops == 3 * 3 * 360
    assert phases["step"].seconds == pytest.approx(6 * 1800 / 10)


def test_phases_without_work_are_left_out():
    assert "reference" not in small(reference=False)
    assert "decode" not in small(answers=[1])


def test_without_a_critic_it_has_no_phases():
    phases = ppo_limits(RECIPE, ACTOR, None, CRITIC, H200)
    whole = ppo_limits(RECIPE, ACTOR, CRITIC, CRITIC, H200)
    assert whole.keys() - phases.keys() == {"values", "critic_forward_backward"}
    assert all(phases[name] == whole[name] for name in phases)


def report(steps: int = 1) -> PPOReport:
    loops = [
        Loop("engine", seconds=[9.0, 10.0, 30.0], phases={"prefill": 2.0, "old": 4.0}, tokens=50),
        Loop("native", seconds=[25.0], phases={"rollout": 20.0}, tokens=50),
    ]
    return PPOReport(
        models={},
        device={"peak": 100.0},
        costs={},
        work={"answers": 20, "optimizer_steps": steps},
        limits={
            "prefill": PhaseLimit(1.0, 100.0),
            "decode": PhaseLimit(3.0, 20.0, reading_seconds=2.0),
            "old": PhaseLimit(2.0, 200.0),
        },
        loops=loops,
    )


def test_rates_follow_from_the_seconds():
    found = report()
    assert found.limit_seconds == 6.0
    assert found.rates(found.loops[0]) == {
        "sequences_per_second": 2.0,
        "tokens_per_second": 5.0,
        "limit_sequences_per_second": pytest.approx(20 / 6),
        "fraction": 0.6,
        "fraction_reading": 0.5,
        "fraction_without_old": 0.4,
        "model_flops_utilisation": pytest.approx(320 / 1000),
    }
    assert found.speedup == 2.5
    assert report(steps=2).limit_without_old == 6.0


def test_phases_beside_their_limits():
    found = report()
    rates = found.phase_rates(found.loops[0])
    assert rates["old"] == {"fraction": 0.5, "model_flops_utilisation": 0.5}
    # Native generation is one phase, with the limits of both.
    native = found.phase_rates(found.loops[1])["rollout"]
    assert native == {"fraction": 0.2, "model_flops_utilisation": pytest.approx(0.06)}
