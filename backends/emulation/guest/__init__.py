"""What ``hw.guest`` describes, made real: a machine with an RDMA device, emulated over this machine's own files."""
