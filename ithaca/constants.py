"""Numbers that many folders share: the label of a token that is not learned, a GiB, the usual size of a node.

This file imports nothing, so that the planner and the tokenizing processes read it without torch.
"""

from __future__ import annotations

# Cross-entropy in torch and transformers leaves out targets of this value.
IGNORE_INDEX = -100
GIB = 2**30
# Cards of a node, as vendors build them; a machine that says otherwise is believed.
CARDS_PER_NODE = 8
