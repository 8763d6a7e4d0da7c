"""Exit codes of the command line and of its ranks; `ithaca VERB --help` lists those of each verb.

Invariant: nothing is imported here; the first lines of the command line, which handle Ctrl-C, read this file.
"""

from __future__ import annotations

FAILED = 1  # any error without a code of its own
MISTAKE = 2  # a mistake of the user: in what was typed, or in a file that it names
UNTRAINED = 65  # EX_DATAERR: every step of a stage was skipped
HANG = 70  # EX_SOFTWARE: the watchdog ended ranks that made no progress
PEER = 71  # EX_OSERR: this rank ended because another one did
PREEMPTED = 75  # EX_TEMPFAIL: stopped by a signal and saved; schedulers start the same command again
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
