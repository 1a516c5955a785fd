"""The prefill side of serving: scheduler and worker."""
