"""A fuzz of files: what Ithaca reads is damaged, and a verb is run over it.

A disk that fails, a copy that was cut, a file under another's name: for every kind of file that Ithaca reads (run file,
data, model, tokenizer, cache, run folder, checkpoint, export, calibration) the outcome is one of two. Either the result
is the one that the undamaged files give, or one sentence says what is wrong. Never a traceback, never another result,
never the loss of a file that was good.

`damage.py` has the kinds of damage, `house.py` the undamaged files, `verbs.py` what is run over them and what may come
of it, and `test_fuzz.py` draws cases from a seed, which is also the number of the damage: every kind of file is damaged in every
way once, a few of them in the quick tests.
`python -m tests.fuzz.test_fuzz KIND SEED` runs one case again and shows what it did.
"""
