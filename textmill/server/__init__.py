"""An HTTP server for a model, with OpenAI's API."""
