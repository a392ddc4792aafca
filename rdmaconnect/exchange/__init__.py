"""What touches the network: the TCP connections by which two hosts exchange their endpoints."""
