"""Exit codes of the command line and of its ranks; `ithaca VERB --help` lists those of each verb.

This file imports nothing: the first lines of the command line, which handle Ctrl-C, read it.
"""

from __future__ import annotations

FAILED = 1  # any error that has no code of its own
MISTAKE = 2  # the user's to mend: what was typed, or a file that it names
UNTRAINED = 65  # EX_DATAERR: no step of a stage was taken
HANG = 70  # EX_SOFTWARE: ranks made no progress
PEER = 71  # EX_OSERR: this rank ended because another did
PREEMPTED = 75  # EX_TEMPFAIL: told to stop, and saved; schedulers start the same command again
INTERRUPTED = 130  # as a shell has it for what SIGINT ended
