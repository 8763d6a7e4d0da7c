"""State of training over ranks: `weights/` (FSDP2), `optimizer/`, `checkpoint/` (DCP)."""
