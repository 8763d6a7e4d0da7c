"""The two models whose plans are worked out by hand in these tests."""

from ithaca.planning.model.model_sizes import ModelSizes

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LLAMA_1B = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
B8 = ModelSizes.from_config(LLAMA_8B)
B1 = ModelSizes.from_config(LLAMA_1B)
K = 1024
