"""Files that documents come from: found, opened, watched for changes."""
