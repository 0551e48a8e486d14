"""The command line ``textmill``."""
