"""Check the files below a root, and delete those that no run needs."""
