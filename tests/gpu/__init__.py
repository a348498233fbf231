"""Checks of a device: CUDA, where there is one, and the simulated one."""
