"""What all rooms run on: worker threads, the journal writer, the LIST and HEAD client, /proc."""
