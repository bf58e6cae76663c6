"""What a run looks like to people and to other tools: the summary, the parquet table, the live view."""
