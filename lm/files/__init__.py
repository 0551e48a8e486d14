"""Files and URLs: retries, decompression, atomic writes, checksums, and the user's cache."""
