"""Discovery: facts about an architecture, found by recording runs of a few tokens."""
