"""Habits: the things people do around a model, door by door, each with one of three outcomes.

A *door* is a way into Ithaca: a plain PyTorch loop, Accelerator, Trainer, one of TRL's trainers. A *habit* is what
users of that door do anyway: make the optimizer first, hang a hook on a layer, write a loss of their own, copy the
model. Every habit is

    exact     the numbers of one process of plain transformers
    refused   one sentence, on every rank, that names the way that works
    absent    nothing that this door has

and nothing else: no habit may be silently wrong, hang or end in a traceback from inside a library.

`habits.py` has the type, `table.py` collects the entries of every door, `test_doors.py` runs them, and
`python -m tests.doors.page --write` writes docs/habits.md from the same entries.
"""
