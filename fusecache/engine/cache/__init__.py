"""The block cache: reads of immutable object versions from memory, local disk or bucket."""
