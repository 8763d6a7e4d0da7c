"""Numbers that several folders share.

Invariant: nothing is imported here, so that the planner and the tokenizing processes read this file without torch.
"""

from __future__ import annotations

# Label of a token that is not in the loss: the default `ignore_index` of torch's cross-entropy.
IGNORE_INDEX = -100
GIB = 2**30
# GPUs of one node, where the user or the launcher gives no other number.
CARDS_PER_NODE = 8
