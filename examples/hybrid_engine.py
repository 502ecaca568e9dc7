"""Train and generate with one copy of the weights: a DeepSpeed script with one import changed.

    python examples/hybrid_engine.py --deepspeed_config examples/ds_config.json
    torchrun --nproc-per-node 2 examples/hybrid_engine.py --deepspeed_config examples/ds_config.json

A small Llama with random weights learns to answer in even token ids, by policy gradient
(REINFORCE, Williams 1992).
"""

import argparse

import deepspeed
import torch
import transformers

from rlhf_app.hybrid_engine import initialize  # the one change; was: from deepspeed import ...

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
args = deepspeed.add_config_arguments(parser).parse_args()

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
config = transformers.LlamaConfig(
    vocab_size=100, num_hidden_layers=2, bos_token_id=None, eos_token_id=None, **sizes
)
model = transformers.LlamaForCausalLM(config)
engine, _, _, _ = initialize(args=args, model=model, model_parameters=model.parameters())
rank = torch.distributed.get_rank()
torch.manual_seed(rank)

for step in range(args.steps):
    prompts = torch.randint(config.vocab_size, (16, 8), device=engine.device)
    engine.eval()
    sequences = engine.generate(input_ids=prompts, max_new_tokens=64, do_sample=True)
    engine.train()
    answers = sequences[:, prompts.shape[1] :]
    rewards = (answers % 2 == 0).float().mean(dim=1)
    logits = engine(input_ids=sequences).logits[:, prompts.shape[1] - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(2, answers[..., None])[..., 0].mean(dim=1)
    loss = -((rewards - rewards.mean()) * logprobs).mean() / rewards.std()
    engine.backward(loss)
    engine.step()
    print(f"rank {rank} step {step}: reward {rewards.mean():.3f}", flush=True)

torch.distributed.destroy_process_group()
