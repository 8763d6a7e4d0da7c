"""An SFTTrainer script with sequence parallelism, packing and LoRA: the one changed line is marked.

    torchrun --nproc-per-node 2 examples/sft.py

Needs `pip install -e '.[trl,peft]'`. Runs anywhere: two CPU processes, or one process a GPU. Model, tokenizer and
chats are small and made on the spot.
"""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import ithaca

set_seed(0)
words = ["<pad>", "<s>", "</s>", *(str(number) for number in range(100)), "+", "="]
splitter = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
splitter.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
config = LlamaConfig(
    vocab_size=len(words), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
sums = [f"{a} + {b} = {a + b}" for a in range(50) for b in range(50)]
texts = [" ".join(sums[start : start + 5]) for start in range(0, len(sums), 5)]

trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=SFTConfig(
        "sft_model",
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        packing=True,
        max_length=128,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        parallelism_config=ithaca.UlyssesConfig(sp_size=2),  # the one line: every row is split over two ranks
    ),
    train_dataset=Dataset.from_list([{"text": text} for text in texts]),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, target_modules="all-linear", modules_to_save=["embed_tokens"]),
)
trainer.train()
trainer.save_model()  # the adapter, as peft writes it
trainer.end()
