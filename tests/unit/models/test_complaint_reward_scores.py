"""What users reported of reward scores, each as a test."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

from data_sources.examples import PairExample, SequenceExample
from rlhf_app.config.schema import PPOConfig, RewardConfig
from rlhf_app.models.scalar_head import (
    RewardFacts,
    ScoreStats,
    load_scalar_model,
    new_scalar_model,
    save_scalar_model,
)
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import Dist, close, setup
from rlhf_app.training.micro_batches import BatchLimit
from stages.ppo.experience import lay_out
from stages.ppo.reward import RewardScorer
from stages.reward.batches import collate
from stages.reward.evaluate import evaluate
from stages.reward.loss import final_token_loss

CPU = torch.device("cpu")
EOS = 2
# Prompt and answer; each answer ends with the EOS, which is the padding as well.
ROWS = [([1, 5], [6, 7, EOS]), ([1, 8, 9, 10], [EOS]), ([1, 4], [4, 4, 4, 4, 4, EOS])]


@pytest.fixture
def dist():
    yield setup()
    close()


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, bos_token_id=1, eos_token_id=EOS, pad_token_id=EOS,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def tokenizer():
    fast = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": EOS}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def new(path, seed=3):
    return new_scalar_model(path, dtype=torch.float32, device=CPU, seed=seed)


def test_complaint_trl937_trl2758_peers9_dsc15_a_score_does_not_depend_on_padding(base):
    """Alone, batched, padded left and right: the same score, though padding and EOS are one id."""
    model = new(base).eval()
    ids = [prompt + answer for prompt, answer in ROWS]
    with torch.no_grad():
        alone = torch.stack([model(torch.tensor([row]))[0, -1] for row in ids])
        assert len(alone.unique()) == 3

        # Left-padded, by plain transformers with a mask and positions.
        width = max(map(len, ids))
        left = torch.tensor([[EOS] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = model.backbone(
            input_ids=left, attention_mask=mask, position_ids=positions
        ).last_hidden_state
        by_hand = hidden[:, -1] @ model.head.weight.T + model.head.bias
        torch.testing.assert_close(by_hand.squeeze(1), alone, atol=1e-5, rtol=1e-5)

        # As the reward stage batches pairs, and as PPO scores answers.
        pairs = [
            PairExample("", *(SequenceExample("", ids[i], len(ROWS[i][0]), False) for i in two), 0)
            for two in ((0, 1), (2, 0))
        ]
        batch = collate(pairs, EOS, CPU, limit=64, use_margin=True, filler=pairs[0])
        chosen, rejected = batch.at_last(model(batch.input_ids_2BT))
        torch.testing.assert_close(chosen, alone[[0, 2]], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rejected, alone[[1, 0]], atol=1e-5, rtol=1e-5)

    settings = PPOConfig(reward_clip=100.0)
    scorer = RewardScorer(model, ScoreStats(), settings, None)
    prompts, answers = [row[0] for row in ROWS], [row[1] for row in ROWS]
    scored = scorer(lay_out(prompts, answers), [None] * 3, answers, [True] * 3)
    torch.testing.assert_close(scored, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_complaint_openrlhf209_peers11_a_loaded_head_is_the_saved_one(
    base, tokenizer, tmp_path, dist, zero_stage
):
    """The head was drawn anew on load, or saved while it lay in pieces on the ranks."""
    model = new(base)
    with torch.no_grad():
        model.head.bias.fill_(0.75)
    rows = torch.tensor([prompt + answer for prompt, answer in ROWS[:2]])
    expected = model.eval()(rows).detach()
    weight = model.head.weight.detach().clone()
    engine = engine_for(
        model, RewardConfig(zero_stage=zero_stage), dtype=torch.float32, micro_batch_size=2,
        total_steps=1, dist=dist,
    )  # fmt: skip
    save_scalar_model(engine, tokenizer, tmp_path / "reward", dist, RewardFacts())
    for seed in (1, 2):
        torch.manual_seed(seed)
        loaded = load_scalar_model(str(tmp_path / "reward"), dtype=torch.float32, device=CPU).eval()
        assert torch.equal(loaded.head.weight, weight)
        assert loaded.head.bias.item() == 0.75
        with torch.no_grad():
            assert torch.equal(loaded(rows), expected)


class Scores:
    """A reward model that scores every token by a table."""

    def __init__(self, table):
        self.table = torch.tensor(table)

    def __call__(self, input_ids, position_ids=None):
        return self.table[input_ids]

    def eval(self):
        pass

    train = eval


def test_complaint_dse527_dse737_dsc14_offset_and_scale_of_a_reward_model_do_not_reach_ppo():
    """DSE#527, #737: chosen answers at -30 with accuracy .9, a bad one at 25.6 over a good one at
    22.6: against such scores a KL term, a clip at 5 and a penalty of 1 mean nothing.

    What one model says, seven times as large and 30 lower, gives the same scores in PPO.
    """
    found = []
    dist = Dist(0, 0, 1, CPU)
    answers = [SequenceExample("", [5, last], 1, False) for last in (6, 7, 8, 9)]
    pairs = [PairExample("", answers[0], answers[1], 0), PairExample("", answers[2], answers[3], 0)]
    for scale, offset in ((1.0, 0.0), (7.0, -30.0)):
        raw = [scale * score + offset for score in (1.0, -1.0, 2.0, 0.5)]
        model = Scores([0.0] * 6 + raw)
        measured = evaluate(
            model, [2, 2],
            lambda rows: collate(
                [pairs[row] for row in rows], EOS, CPU, limit=9, use_margin=False, filler=pairs[0]
            ),
            lambda batch, scores: final_token_loss(
                *batch.at_last(scores), batch.margin_B, batch.weight_B
            ),
            BatchLimit(2), dist,
        )  # fmt: skip
        stats = ScoreStats(measured.mean, measured.std)
        scorer = RewardScorer(model, stats, PPOConfig(missing_eos="ignore"), None)
        responses = [[6], [7], [8], [9]]
        prompts = [[5]] * 4
        scores = scorer(lay_out(prompts, responses), [None] * 4, responses, [True] * 4)
        found.append(scores.tolist())
    # Mean .625 and variance (1 + 1 + 4 + .25)/4 - .625^2 = 1.171875.
    expected = [(score - 0.625) / 1.171875**0.5 for score in (1.0, -1.0, 2.0, 0.5)]
    assert found[0] == pytest.approx(expected, abs=1e-5)
    assert found[1] == pytest.approx(expected, abs=1e-5)
