"""Curation: rules, masks, languages, classifiers and deduplication, from a crawl to a corpus."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
