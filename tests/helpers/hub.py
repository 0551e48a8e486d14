"""A cache of the Hugging Face hub, as its tools lay it out."""

import hashlib
import shutil
from pathlib import Path


def fill_hub_cache(cache: Path, name: str, files: Path, commit: str = "0a1b2c", reference: str = "main") -> Path:
    """Put the files of a directory into a cache as the model ``name``, and return its snapshot, of links to blobs."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs, ref = folder / "snapshots" / commit, folder / "blobs", folder / "refs" / reference
    for path in (snapshot, blobs, ref.parent):
        path.mkdir(parents=True, exist_ok=True)
    for file in files.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    ref.write_text(commit)
    return snapshot
