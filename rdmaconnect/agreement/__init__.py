"""What two ends agree on: pure."""
