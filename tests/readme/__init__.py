"""README in bare machines."""
