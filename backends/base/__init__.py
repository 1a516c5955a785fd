"""What every real endpoint shares: the transfer state machine, control messages beside the engine, memory, liveness."""
