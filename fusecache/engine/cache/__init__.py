"""The block cache: reads of immutable object versions through memory, local disk and bucket."""
