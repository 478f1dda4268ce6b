"""The engine: the scheduler and the block manager on real torch models."""
