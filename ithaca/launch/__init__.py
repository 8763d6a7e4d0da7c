"""Launcher: ranks are started, watched and ended on one machine or several, under Slurm or torchrun."""
