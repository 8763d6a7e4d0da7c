"""Small configs of every architecture, for tests, the survey and `ithaca verify --model TYPE`."""
