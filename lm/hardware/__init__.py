"""The CPU cores, memory and accelerators of this machine."""
