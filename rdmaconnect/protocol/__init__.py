"""What two ends say to each other, and its bytes: pure."""
