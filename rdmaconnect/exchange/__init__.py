"""What touches the network: frames between two hosts over ZeroMQ."""
