"""Connect RDMA queue pairs in one call."""
