import sys; sys.path.insert(0,'tests/unit/hybrid_engine')
import torch, transformers as tf
import conftest as c, random
from rlhf_app.hybrid_engine import Generator, SamplingParams
exec(open('try.py').read().split("for f in c.CONFIGS")[0])
m=c.build_model("recurrent-gemma"); m.generation_config=tf.GenerationConfig()
g=Generator(m)
for rep in range(3):
    un=[None]*len(prompts)
    for i in range(len(prompts)): un[i]=hf(m,[prompts[i]],14)[0]
    eng=g.rollout(prompts,SamplingParams(14,greedy=True)).tokens
    for i in range(len(prompts)):
        if eng[i]!=un[i]: print(rep,i,len(prompts[i]),eng[i],un[i])
    # full forward
    for i,p in enumerate(prompts):
        with torch.no_grad():
            lg=m(torch.tensor([p+un[i]]),use_cache=False).logits[0,len(p)-1:-1]
        top=lg.topk(2).values
        w=lg.argmax(-1).tolist()
        if w!=un[i]: 
            k=next(j for j in range(14) if w[j]!=un[i][j]); print("hf gen != forward",i,k,(top[k,0]-top[k,1]).item())
