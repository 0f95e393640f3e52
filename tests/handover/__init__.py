"""What one daemon leaves to the next: every short history of two names, killed at every step."""
