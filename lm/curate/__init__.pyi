from .document_batch import DocumentBatch as DocumentBatch
from .document_batch import pack_documents as pack_documents
from .mixture_law import MixtureLaw as MixtureLaw
from .mixture_law import fit_mixture_law as fit_mixture_law
