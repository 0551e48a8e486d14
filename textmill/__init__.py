"""Commands and the HTTP server: all that a person types or calls."""
