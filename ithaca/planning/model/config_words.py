"""Names that transformers 5.23 accepts in a config.json, copied here so that `ithaca plan` needs no transformers.

`tests/planning/model/test_config_check.py` compares every set with transformers' own, and prints the changes to make here.
"""

# Model types that AutoModelForCausalLM builds (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).
CAUSAL = frozenset((
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bart", "beam", "bert",
    "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet", "blenderbot", "blenderbot-small",
    "bloom", "blt", "camembert", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cpmant",
    "ctrl", "cwm", "data2vec-text", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
    "diffllama", "doge", "dots1", "dots3_note", "dots3_note_text", "electra", "emu3", "ernie", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint", "fuyu",
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_assistant",
    "gemma4_text", "gemma4_unified", "gemma4_unified_assistant", "gemma4_unified_text", "git", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
    "hy_v4", "hyperclovax", "inkling2_text", "inkling_text", "internlm3", "iquestcoder", "jais2", "jamba",
    "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4", "llama4_text",
    "longcat_flash", "mamba", "mamba2", "marian", "mbart", "megatron-bert", "mellum", "mimo_v2_flash", "minicpm3",
    "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "mllama",
    "modernbert-decoder", "moshi", "moss_transcribe_diarize", "mpt", "musicgen", "musicgen_melody", "mvp",
    "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt",
    "pegasus", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "plbart", "prophetnet", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "rwkv", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "trocr",
    "vaultgemma", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "youtu",
    "zamba", "zamba2", "zaya",
))  # fmt: skip
# Activation functions (ACT2FN).
ACTIVATIONS = frozenset((
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu",
    "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
))  # fmt: skip
# Types of RoPE (ROPE_INIT_FUNCTIONS), and the one without scaling.
ROPES = frozenset((
    "default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn",
))  # fmt: skip
# Kinds of layers (ALLOWED_LAYER_TYPES), and older names that transformers converts to one of them.
LAYERS = frozenset((
    "attention", "chunked_attention", "compressed_sparse_attention", "conv", "deepseek_sparse_attention", "dense",
    "full_attention", "heavily_compressed_attention", "hybrid", "hybrid_sliding", "indexed_attention",
    "linear_attention", "mamba", "minimax_m3_sparse", "moe", "qwen_sparse_attention",
    "reference_sliding_attention", "sliding_attention", "sparse", "window_attention",
))  # fmt: skip
# Types whose hidden_size must be a multiple of the number of heads, even if head_dim is given.
DIVIDES_HEADS = frozenset(("llama", "gpt2"))
# Prefixes of types whose widths may be lists with one entry a layer.
SIZES_BY_LAYER = ("gemma3n", "nemotron_h", "zamba")
# Names of torch dtypes for weights.
DTYPES = frozenset((
    "float16", "half", "bfloat16", "float32", "float", "float64", "double", "float8_e4m3fn", "float8_e5m2",
))  # fmt: skip
# Types that accept null: gpt_neo for a width of 4 * hidden_size, cohere2_moe as its norm's key has another name.
NULLS = {"intermediate_size": ("gpt_neo",), "rms_norm_eps": ("cohere2_moe",)}
