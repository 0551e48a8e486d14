"""Masks of personal data: e-mail addresses, telephone numbers and IP addresses (CS336, assignment 4)."""

import numpy as np

from lm.curate.config import PersonalData
from lm.curate.document_batch import PADDING_BYTES, DocumentBatch, pack_documents
from lm.kernels.curation import personal_data
from lm.kernels.jit import Int64s, log_compilation

_KINDS = {"email": personal_data.EMAIL, "phone": personal_data.PHONE, "ip": personal_data.IP}
MASKS: dict[PersonalData, str] = {
    "email": "|||EMAIL_ADDRESS|||",
    "phone": "|||PHONE_NUMBER|||",
    "ip": "|||IP_ADDRESS|||",
}
"""What stands in place of personal data."""

_LOCAL, _LABEL = r"[A-Za-z0-9_%+\-]+", r"[A-Za-z0-9](?:[A-Za-z0-9\-]*[A-Za-z0-9])?"
_NO_NUMBER_BEFORE, _NO_NUMBER_AFTER = r"(?<![A-Za-z0-9_])(?<![0-9][.,\-/])", r"(?![A-Za-z0-9_])(?![.,\-/][0-9])"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
PATTERNS: dict[PersonalData, str] = {
    "email": rf"{_LOCAL}(?:\.{_LOCAL})*@(?:{_LABEL}\.)+[A-Za-z]{{2,}}(?![A-Za-z0-9])",
    "phone": rf"(?:{_NO_NUMBER_BEFORE}(?=[0-9])|(?=[+(]))(?:\+?1[\-. ]?)?"
    rf"(?:\([2-9][0-9]{{2}}\)|[2-9][0-9]{{2}})[\-. ]?[0-9]{{3}}[\-. ]?[0-9]{{4}}{_NO_NUMBER_AFTER}",
    "ip": rf"{_NO_NUMBER_BEFORE}{_OCTET}(?:\.{_OCTET}){{3}}{_NO_NUMBER_AFTER}",
}
"""What is found, as regular expressions of ``re`` and ``regex``. The kernel is faster and finds the same."""


def mask_emails(text: str) -> tuple[str, int]:
    """Replace each e-mail address by ``|||EMAIL_ADDRESS|||``; return the text and the number of addresses.

    Characters of an address are ASCII, and its domain has a dot.
    """
    return _mask_text(text, "email")


def mask_phone_numbers(text: str) -> tuple[str, int]:
    """Replace each telephone number of the USA by ``|||PHONE_NUMBER|||``; return the text and their number.

    A number has ten digits, such as 283-182-3829, (283) 182 3829, (283)-182-3829, 283.182.3829 or 2831823829. +1 or 1
    may be before it. The area code does not begin with 0 or 1.
    """
    return _mask_text(text, "phone")


def mask_ips(text: str) -> tuple[str, int]:
    """Replace each IPv4 address by ``|||IP_ADDRESS|||``; return the text and their number.

    An address has four numbers from 0 to 255. 1.2.3.4.5 and v1.2.3.4 are no addresses.
    """
    return _mask_text(text, "ip")


def _mask_text(text: str, kind: PersonalData) -> tuple[str, int]:
    masked, counts = mask_batch(pack_documents([text]), kind)
    return masked.data[: masked.offsets[1]].tobytes().decode(), int(counts[0])


def mask_batch(batch: DocumentBatch, kind: PersonalData) -> tuple[DocumentBatch, Int64s]:
    """Return D documents with personal data of a kind replaced by its mask, and the replacements in each, int64 (D,).

    Without any, the batch itself is returned. Releases the GIL while it searches.
    """
    data, offsets = batch
    counts = np.empty(len(offsets) - 1, np.int64)
    begins, ends = (np.empty(int(offsets[-1]) // personal_data.MIN_BYTES + 1, np.int64) for _ in range(2))
    with log_compilation("curation masks"):
        total = personal_data.find_personal_data(data, offsets, _KINDS[kind], begins, ends, counts)
    if not total:
        return batch, counts
    mask = MASKS[kind].encode()
    starts, stops = [0, *ends[:total].tolist()], [*begins[:total].tolist(), int(offsets[-1])]
    view = data.data
    masked = mask.join(view[start:stop] for start, stop in zip(starts, stops, strict=True))
    growth = np.concatenate([[0], np.cumsum(len(mask) - (ends[:total] - begins[:total]))])
    new_offsets = offsets + growth[np.concatenate([[0], np.cumsum(counts)])]
    return DocumentBatch(np.frombuffer(masked + bytes(PADDING_BYTES), np.uint8), new_offsets), counts
