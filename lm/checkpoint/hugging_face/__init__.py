"""Models in the files of Hugging Face: read and written."""
