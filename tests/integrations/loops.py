"""A plain Accelerator script, as in accelerate's own documentation: prepare, backward, clip, step, save."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ithaca.verify.small_models.features import small_model
from tests.integrations.runs import collate, config, examples, reset, weights


def loop(
    folder: str,
    sp: int | None,
    *,
    rows: int = 24,
    batch: int = 2,
    steps: int = 10,
    accumulate: int = 1,
    shuffle: bool = False,
    save_at: int | None = None,
    resume: bool = False,
    **accelerator_options: Any,
) -> dict[str, Any]:
    reset()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, parallelism_config=config(sp), **accelerator_options
    )
    model = small_model("llama", dtype=torch.float32)
    # A script that seeds nothing: every process has a state of its own.
    torch.manual_seed(accelerator.state.process_index)
    loader = DataLoader(examples(rows), batch_size=batch, collate_fn=collate, shuffle=shuffle)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    start = 0
    if resume:
        accelerator.load_state(f"{folder}/state")
        assert save_at is not None
        start = save_at
    losses, norms, rates, seen = [], [], [], []
    batches = accelerator.skip_first_batches(loader, start) if start else loader
    for at, rows_of_step in enumerate(batches, start):
        if at == steps:
            break
        with accelerator.accumulate(model):
            loss = model(**rows_of_step).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        rates.append(scheduler.get_last_lr()[0])
        seen.append(int(accelerator.gather(rows_of_step["input_ids"].sum()).sum()))
        if not resume and at + 1 == save_at:
            accelerator.save_state(f"{folder}/state")
    accelerator.unwrap_model(model).save_pretrained(f"{folder}/model")
    saved = weights(f"{folder}/model") if accelerator.is_main_process else None
    return {"losses": losses, "norms": norms, "rates": rates, "seen": seen, "weights": saved}
