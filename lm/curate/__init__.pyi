from .classifier import ClassifierConfig as ClassifierConfig
from .classifier import TextClassifier as TextClassifier
from .classifier import score_quantile as score_quantile
from .document_batch import DocumentBatch as DocumentBatch
from .document_batch import pack_documents as pack_documents
from .extract import extract_text as extract_text
