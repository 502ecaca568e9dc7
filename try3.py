import sys; sys.path.insert(0,'tests/unit/hybrid_engine')
import torch, transformers as tf
import conftest as c, random
from rlhf_app.hybrid_engine import Generator, SamplingParams
exec(open('try.py').read().split("for f in c.CONFIGS")[0])
m=c.build_model("recurrent-gemma"); m.generation_config=tf.GenerationConfig()
g=Generator(m)
one=[hf(m,[p],14)[0] for p in prompts]
un=[None]*len(prompts)
for l in sorted(set(lens)):
    gi=[i for i in range(len(lens)) if lens[i]==l]
    for i,t in zip(gi,hf(m,[prompts[i] for i in gi],14)): un[i]=t
eng=g.rollout(prompts,SamplingParams(14,greedy=True)).tokens
for i in range(len(prompts)):
    print(i,lens[i],one[i]==un[i],one[i]==eng[i])
    if one[i]!=un[i]:
        k=next(j for j in range(14) if one[i][j]!=un[i][j])
        for w in (one[i],un[i]):
            lg=m(torch.tensor([prompts[i]+w]),use_cache=False).logits[0,len(prompts[i])-1:-1]
            print(w,lg.argmax(-1).tolist(), lg.topk(2).values[k].tolist())
