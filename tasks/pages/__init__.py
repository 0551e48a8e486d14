"""The Markdown pages of the stages."""
