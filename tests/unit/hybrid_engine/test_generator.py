import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_app.hybrid_engine import Generator, SamplingParams


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_sampled_logprobs_equal_a_fresh_forward(llama: LlamaForCausalLM) -> None:
    prompt = [5, 6, 7]
    params = SamplingParams(12, temperature=0.7, seed=3)
    rollout = Generator(llama).rollout([prompt], params)
    tokens = rollout.tokens[0]
    with torch.no_grad():
        logits = llama(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    want = torch.log_softmax(logits / 0.7, -1)[torch.arange(len(tokens)), tokens]
    torch.testing.assert_close(rollout.logprobs[0], want, atol=1e-4, rtol=0)
