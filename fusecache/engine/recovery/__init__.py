"""What happens after a stop or crash: journal replay, quarantine, and the offline cache."""
