"""The start after a stop or crash: journal replay, quarantine, the offline cache."""
