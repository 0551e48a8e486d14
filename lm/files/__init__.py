"""Files: written atomically, with checksums, and copied to the cache of the user."""
