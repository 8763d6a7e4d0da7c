"""Files of documents: found, opened, read, checked for changes."""
