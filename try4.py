import torch, transformers as tf
m=tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=97,hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=4))
c,e=m._prepare_generation_config(None, do_sample=True, max_new_tokens=4)
print(c.top_k,c.top_p,c.temperature,c.num_return_sequences,c.num_beams, e)
c,e=m._prepare_generation_config(None, max_new_tokens=4)
print(c.top_k,c.do_sample,c.num_return_sequences, e, c.max_length)
