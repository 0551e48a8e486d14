"""Kernels of curation: figures of documents, masks, scripts and signatures."""
