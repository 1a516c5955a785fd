"""Who moves the KV: prefill pushes it, or decode pulls it."""
