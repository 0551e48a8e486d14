from .document_batch import DocumentBatch as DocumentBatch
from .document_batch import pack_documents as pack_documents
