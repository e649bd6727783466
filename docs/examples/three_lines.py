"""A Hugging Face model with its history in kvd, on a CPU or a GPU: python docs/examples/three_lines.py [DEVICE]

The model is a small one of GLM's structure with random weights, so that nothing has to be downloaded; with
``AutoModelForCausalLM.from_pretrained("zai-org/GLM-5")`` the lines around ``kvd_cache`` are the same.
"""

import sys
import time

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from compute.integrations.transformers import kvd_cache

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
torch.manual_seed(7)
config = GlmMoeDsaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=3,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=64,
    index_topk_freq=4,
    index_skip_topk_offset=3,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 8e6},
    attn_implementation="eager",
)
model = GlmMoeDsaForCausalLM(config).eval().to(device)
prompt = torch.randint(1, 256, (1, 600), device=device)

start = time.perf_counter()
with kvd_cache(model, max_tokens=1024) as cache:
    output = model.generate(prompt, max_new_tokens=64, do_sample=False, cache=cache)
    [counted] = cache.counters()
print(f"{output.shape[1]} tokens in {time.perf_counter() - start:.1f} s, the daemon's start included, on {device}")
print(f"rows hit {counted['hits']:,}, fetched {counted['misses']:,}, read in the ring {counted['ring_hits']:,}")
print("text, as token ids:", output[0, 600:616].tolist(), "…")
