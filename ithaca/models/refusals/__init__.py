"""Models, calls and settings that would be silently wrong over shards, refused by name."""
