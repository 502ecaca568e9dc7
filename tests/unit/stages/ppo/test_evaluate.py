"""Numbers of a policy on held-out prompts, against hand tables and plain transformers."""

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.config.schema import HybridEngineSettings, PPOConfig
from rlhf_app.errors import ConfigError
from rlhf_app.models.scalar_head import ScalarHead, ScalarHeadModel, ScoreStats
from rlhf_app.training.accumulate import NonFiniteError
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import setup
from stages.ppo.evaluate import HeldOutAnswer, PolicyReport, evaluate_policy
from stages.ppo.held_out import sample_rows
from stages.ppo.models import PPOModels
from stages.ppo.reward import RewardScorer
from stages.ppo.reward_sources.build import combine

EOS = 2


def answer(uid, tokens, reward, *, kl=0.0, entropy=0.0, gold=None, stopped=True):
    return HeldOutAnswer(uid, f"answer {uid}", tokens, stopped, reward, kl, entropy, gold)


def test_by_hand():
    report = PolicyReport.of([
        answer(1, [5, 6, 7, 8], 3.0, kl=1.0, entropy=2.0, gold=0.0, stopped=False),
        answer(0, [5, 6], 1.0, kl=0.5, entropy=1.0, gold=1.0),
    ])  # fmt: skip
    assert report.answers == ["answer 0", "answer 1"]
    assert report.numbers() == pytest.approx({
        "reward": 2.0, "reward_std": 1.0, "gold": 0.5, "kl_per_answer": 0.75, "entropy": 3 / 6,
        "distinct_3": 1.0, "answer_length": 3.0, "eos_rate": 0.5,
        "reward_length_correlation": 1.0, "gold_length_correlation": -1.0,
    })  # fmt: skip


def test_complaint_openrlhf236_peers25_reward_that_is_bought_with_length_shows():
    """Against torch's own correlation; the mean reward alone would look like learning."""
    lengths = [3, 9, 4, 7, 12, 5]
    rewards = [0.1, 0.9, 0.35, 0.6, 0.8, 0.5]
    report = PolicyReport.of(
        answer(uid, [7] * n, r) for uid, (n, r) in enumerate(zip(lengths, rewards, strict=True))
    )
    expected = torch.corrcoef(torch.tensor([rewards, [float(n) for n in lengths]]))[0, 1].item()
    assert expected > 0.8
    assert report.reward_length_correlation == pytest.approx(expected, abs=1e-6)


def test_a_correlation_that_is_not_defined_is_left_out():
    alike = PolicyReport.of([answer(0, [5, 6], 1.0), answer(1, [7, 8], 2.0)])
    assert alike.reward_length_correlation is None
    assert "reward_length_correlation" not in alike.numbers()
    assert "gold_length_correlation" not in alike.numbers()
    assert PolicyReport.of([answer(0, [5], 1.0)]).reward_length_correlation is None


def test_a_non_finite_evaluation_is_an_error():
    good, bad = answer(0, [1, 2, 3], 0.5), answer(1, [1, 2, 3], float("nan"))
    assert PolicyReport.of([good]).reward == 0.5
    with pytest.raises(NonFiniteError, match="1 of 2 held-out answers"):
        PolicyReport.of([good, bad])


def test_samples_are_of_the_first_prompts():
    record = Record((Message("user", ""),))
    prompts = [PromptExample(str(i), [1], f"prompt {i}", record) for i in range(2)]
    rows = [answer(i, [5] * (i + 1), i / 2, kl=0.25, gold=2.0, stopped=i != 1) for i in range(3)]
    assert sample_rows(prompts, PolicyReport.of(rows))[1] == {
        "prompt": "prompt 1", "answer": "answer 1", "reward": 0.5, "gold": 2.0, "kl": 0.25,
        "tokens": 2, "stopped": False,
    }  # fmt: skip
    assert len(sample_rows(prompts, PolicyReport.of(rows))) == 2


@dataclass
class IdFormat:
    """Stands in for a chat format where no text is needed."""

    stop_ids: tuple[int, ...] = (EOS,)

    def decode(self, ids):
        return " ".join(map(str, ids))


def settings(**changes):
    return PPOConfig(
        rollout_batch_size=4, micro_batch_size=2, max_prompt_length=8, max_response_length=10,
        reward_clip=100.0, missing_eos="ignore", **changes,
    )  # fmt: skip


def run_of(ppo, dist, texts=None):
    """A policy in training, its reference, a reward model, and five prompts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    policy = LlamaForCausalLM(config)
    reference = copy.deepcopy(policy).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    reward = ScalarHeadModel(LlamaModel(config), ScalarHead(32)).eval()
    engine = engine_for(
        policy, ppo.actor, hybrid=HybridEngineSettings(), dist=dist, dtype=torch.float32,
        micro_batch_size=2, total_steps=1,
    )  # fmt: skip
    scorer = RewardScorer(reward, ScoreStats(0.5, 2.0), ppo, IdFormat())
    if texts:
        scorer = combine(ppo, scorer, texts, IdFormat(), dist)
    models = PPOModels(
        actor=engine, critic=None, reference=reference, scorer=scorer, tokenizer=None,
        chat_format=IdFormat(), tokenizer_id="", suppress_ids=(),
    )  # fmt: skip
    record = Record((Message("user", ""),))
    prompts = [PromptExample(str(i), [1, *range(3, 4 + i)], str(i), record) for i in range(5)]
    return models, policy, reward, prompts


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_answer_against_plain_transformers(dist, temperature):
    """KL and entropy of every answer from whole logits, its score from the model alone."""
    ppo = settings(temperature=temperature)
    models, policy, reward, prompts = run_of(ppo, dist)
    engine, reference = models.actor, models.reference
    report = evaluate_policy(
        engine, engine, models, prompts, ppo, dist, gold=lambda p, a: [len(t) for t in a], seed=7
    )
    assert len({len(row.tokens) for row in report.rows}) > 1
    for prompt, row in zip(prompts, report.rows, strict=True):
        ids = torch.tensor([[*prompt.input_ids, *row.tokens]])
        first = len(prompt.input_ids) - 1
        with torch.no_grad():
            new, old = (
                (model(ids).logits[0, first:-1] / temperature).log_softmax(-1)
                for model in (policy, reference)
            )
            score = (reward(ids)[0, -1].item() - 0.5) / 2.0
        taken = ids[0, first + 1 :, None]
        kl = (new - old).gather(1, taken).sum().item()
        entropy = -(new.exp() * new).sum().item()
        assert (row.kl, row.entropy) == pytest.approx((kl, entropy), abs=1e-4)
        assert (row.reward, row.gold) == pytest.approx((score, len(row.text)), abs=1e-4)
        assert row.stopped == (row.tokens[-1] == EOS)
        assert row.text == IdFormat().decode(row.tokens)


def two_ranks(scratch):
    """Five prompts on two ranks: run on each of them, by the test below."""
    dist = setup()
    calls = []

    def place(answers):
        """The prompt's place: 0, 2, 4 on one rank, 1, 3 and nothing else on the other."""
        calls.append([prompt.text for prompt in answers.prompts])
        return [float(text) for text in calls[-1]]

    ppo = settings(rewards=["model", "m:place"])
    models, _, _, prompts = run_of(ppo, dist, {"place": place})

    def evaluate(gold, prompts=prompts):
        return evaluate_policy(models.actor, models.actor, models, prompts, ppo, dist, gold=gold,
                               seed=7)  # fmt: skip

    report = evaluate(None)
    assert [row.uid for row in report.rows] == [0, 1, 2, 3, 4]
    assert calls == [["0", "2", "4"] if dist.is_main else ["1", "3"]], calls
    means = models.scorer.take_means()
    assert means["reward_place"] == 2.0, means  # (0 + 1 + 2 + 3 + 4) / 5
    # The reward is the sum of both, each answer once.
    assert abs(report.reward - means["reward_place"] - means["reward_model"]) < 1e-5
    evaluate(None, prompts[:1])  # nothing to do for the second rank
    assert models.scorer.take_means()["reward_place"] == 0.0

    def fails(prompts, answers):
        if dist.is_main:
            return [1.0] * len(answers)
        raise ConfigError("scorer m:gold: no")

    with pytest.raises(ConfigError) as caught:
        evaluate(fails)
    assert str(caught.value) == ("on rank 1: " if dist.is_main else "") + "scorer m:gold: no"
    (Path(scratch) / f"done{dist.rank}").touch()


@pytest.mark.slow
def test_prompts_that_two_ranks_do_not_share_evenly_and_a_gold_scorer_that_fails_on_one(
    tmp_path, run_ranks
):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys\n"
        "from rlhf_app.commands.worker import leave\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_evaluate\n"
        f"test_evaluate.two_ranks({str(tmp_path)!r})\n"
        "leave(0)\n"
    )
    done = run_ranks(script, ranks=2, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()
