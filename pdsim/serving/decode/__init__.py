"""The decode side of serving: scheduler, block manager, worker."""
