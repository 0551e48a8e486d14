from .config import RulesConfig as RulesConfig
from .document_batch import DocumentBatch as DocumentBatch
from .document_batch import pack_documents as pack_documents
from .rules import RULES as RULES
from .rules import compute_figures as compute_figures
from .rules import first_failed_rule as first_failed_rule
from .rules import gopher_quality_filter as gopher_quality_filter
