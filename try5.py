import sys; sys.path.insert(0,'tests/unit/hybrid_engine')
exec(open('try.py').read().split("for f in c.CONFIGS")[0])
L=dict(c._LLAMA)
def llava():
    return tf.LlavaForConditionalGeneration(tf.LlavaConfig(vision_config=tf.CLIPVisionConfig(hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,image_size=16,patch_size=8), text_config=tf.LlamaConfig(**L), image_token_index=96))
def qwenvl():
    return tf.Qwen2_5_VLForConditionalGeneration(tf.Qwen2_5_VLConfig(text_config=dict(**L, rope_parameters={"rope_type":"default","rope_theta":1e4,"mrope_section":[2,1,1]}), vision_config=dict(depth=1,hidden_size=32,intermediate_size=48,num_heads=4,out_hidden_size=32,patch_size=4), image_token_id=90,video_token_id=91,vision_start_token_id=92,vision_end_token_id=93))
def gemma3():
    return tf.Gemma3ForConditionalGeneration(tf.Gemma3Config(text_config=dict(**L,head_dim=8,sliding_window=5,query_pre_attn_scalar=8), vision_config=dict(hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=4,image_size=16,patch_size=8), mm_tokens_per_image=4, image_token_index=96,boi_token_index=94,eoi_token_index=95))
for mk in (llava,qwenvl,gemma3):
    try:
        torch.manual_seed(0); m=mk().eval(); m.generation_config=tf.GenerationConfig()
        with torch.no_grad():
            for n,w in m.named_parameters():
                if w.dim()>=2: w.normal_(0,.25)
        cap=probe(InferenceModel(m)); print(mk.__name__, cap.missing, cap.max_positions)
        left=hf(m,prompts,10); eng=Generator(m).rollout(prompts,SamplingParams(10,greedy=True)).tokens
        print(sum(a!=b for a,b in zip(left,eng)))
    except Exception as e: traceback.print_exc(limit=3)
for C in (tf.T5Config(vocab_size=97,d_model=32,d_kv=8,d_ff=48,num_layers=2,num_heads=4,decoder_start_token_id=0,pad_token_id=0,eos_token_id=1), tf.BartConfig(vocab_size=97, d_model=32, decoder_layers=2, decoder_attention_heads=4,decoder_ffn_dim=48, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,max_position_embeddings=64)):
    m=tf.AutoModelForSeq2SeqLM.from_config(C).eval()
    g=Generator(m); 
    try: g.rollout(prompts,SamplingParams(4))
    except Exception as e: print(type(e).__name__,e)
    ids=torch.tensor([[5,6,7]]); print(g.generate(ids,max_new_tokens=4).tolist(), m.generate(ids,max_new_tokens=4).tolist())
