"""Router, prefill and decode engines, and the workloads that they serve."""
