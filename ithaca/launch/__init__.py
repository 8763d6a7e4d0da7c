"""Ranks started, watched and ended: torchrun's elastic agent, nodes, slurm, signals."""
