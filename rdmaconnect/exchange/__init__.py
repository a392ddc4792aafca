"""What touches the network: frames between two hosts, as ZeroMQ speaks."""
