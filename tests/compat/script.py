"""A user's Trainer script on two ranks; `make.py` ran it with an earlier version, the tests run it with this one.

    torchrun --nproc-per-node 2 script.py [CHECKPOINT]

Reads `model/` in the working folder, writes `trainer/`, and the losses of the steps to `losses.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

import ithaca

rows = [[3 + (place * step) % 50 for place in range(32)] for step in range(1, 25)]
dataset = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
model: Any = AutoModelForCausalLM.from_pretrained("model")
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "trainer",
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        parallelism_config=ithaca.UlyssesConfig(sp_size=2, memory={"layers": "save"}, memory_budget="2GB"),
    ),
    train_dataset=dataset,
    data_collator=default_data_collator,
)
trainer.train(resume_from_checkpoint=sys.argv[1] if len(sys.argv) > 1 else None)
trainer.save_model()
if os.environ["RANK"] == "0":
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    Path("losses.json").write_text(json.dumps(losses))
trainer.end()
