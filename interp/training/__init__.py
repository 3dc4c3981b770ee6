"""Training: the loop, checkpoints, probes and change-point detection."""
