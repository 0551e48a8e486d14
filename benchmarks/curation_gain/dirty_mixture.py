"""A dirty mixture of text with known kinds: children's stories among what a crawl has besides good text.

``python -m benchmarks.curation_gain.dirty_mixture FOLDER [--scale 1]`` writes a file of JSON Lines for each kind, so
that what a filter removes can be counted by kind. HTML documentation, manual pages in 20 languages and tables are those
of Debian packages, which ``apt-get`` downloads; licences are those of the packages on this machine. Near-copies, logs
and spam are made up. A document's hash decides whether it is taken, so the same packages give the same files.

``examples/`` has other documents, to train a classifier on: stories, and unwanted text of the kinds ``TUNED``. The
other kinds are for the test alone: no limit and no example of a classifier may be chosen by them.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from benchmarks.texts import END, stories
from lm.common.errors import UserError
from lm.curate import extract_text

LANGUAGES = [
    "cs",
    "da",
    "de",
    "el",
    "es",
    "fi",
    "fr",
    "hu",
    "id",
    "it",
    "ja",
    "nl",
    "pl",
    "pt-br",
    "ro",
    "ru",
    "sr",
    "sv",
    "uk",
    "zh",
]
PACKAGES = [
    *("python3.11-doc", "git-doc", "postgresql-doc-15"),  # HTML
    *(f"manpages-{language}" for language in LANGUAGES),
    *("unicode-data", "hwdata", "pci.ids", "usb.ids", "ieee-data"),  # tables
]
CLEAN_MB = 36.0
DIRTY_MB = {"html": 10.0, "manuals": 9.0, "licences": 6.0, "copies": 8.0, "tables": 5.0, "logs": 4.0, "spam": 4.0}
TUNED = ("html", "manuals", "copies", "tables", "spam")
EXAMPLES = 400  # of stories, and of each kind of TUNED but copies
_BLOCK_CHARACTERS = 4000  # of a long text that is cut into documents


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="size of all kinds, relative to 80 MB")
    options = parser.parse_args()
    try:
        write_mixture(options.folder, options.scale)
    except (UserError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"dirty_mixture: {error}")


def write_mixture(folder: Path, scale: float) -> None:
    """Write all kinds to ``folder``."""
    packages = folder / "packages"
    _unpack_packages(packages)
    good = [part.removesuffix(END).decode().strip() for part in stories().split(END) if part.strip()]
    kinds: dict[str, Callable[[], Iterator[str]]] = {
        "stories": lambda: iter(good),
        "html": lambda: _html_pages(packages),
        "manuals": lambda: _manual_pages(packages),
        "licences": lambda: _licences(packages),
        "tables": lambda: _tables(packages),
        "logs": lambda: islice(_logs(random.Random(1)), 20_000),
        "spam": lambda: islice(_spam(random.Random(2)), 20_000),
    }
    (folder / "examples").mkdir(parents=True, exist_ok=True)
    unwanted: list[str] = []
    for kind, read in kinds.items():
        megabytes = scale * (CLEAN_MB if kind == "stories" else DIRTY_MB[kind])
        chosen = _choose(read())
        held = EXAMPLES if kind in ("stories", *TUNED) else 0
        examples, texts = chosen[:held], list(_take(chosen[held:], megabytes * 1e6))
        if kind == "stories":
            _write(folder / "examples" / "wanted.jsonl", examples)
            _write(
                folder / "copies.jsonl",
                list(_take(_near_copies(texts, random.Random(3)), scale * 1e6 * DIRTY_MB["copies"])),
            )
        else:
            unwanted += examples
        _write(folder / f"{kind}.jsonl", texts)
    _write(folder / "examples" / "unwanted.jsonl", unwanted)


def _unpack_packages(folder: Path) -> None:
    done = folder / "done"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, folder / "files"], check=True)
        package.unlink()
    done.touch()


def _choose(texts: Iterable[str]) -> list[str]:
    """Return the different texts, in the order of their hashes."""
    different = {hashlib.blake2b(text.encode(), digest_size=8).digest(): text for text in texts if text.strip()}
    return [different[key] for key in sorted(different)]


def _take(texts: Iterable[str], size: float) -> Iterator[str]:
    for text in texts:
        if size <= 0:
            return
        size -= len(text.encode())
        yield text


def _write(path: Path, texts: list[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    print(f"{path.name:<16} {len(texts):7,} documents {path.stat().st_size / 1e6:6.1f} MB")


def _blocks(text: str, separator: str) -> Iterator[str]:
    """Cut a text before lines or paragraphs into documents of some 4,000 characters."""
    block, length = list[str](), 0
    for part in text.split(separator):
        block.append(part)
        length += len(part)
        if length > _BLOCK_CHARACTERS:
            yield separator.join(block)
            block, length = [], 0
    if block:
        yield separator.join(block)


def _html_pages(packages: Path) -> Iterator[str]:
    for path in sorted((packages / "files/usr/share/doc").rglob("*.html")):
        if text := extract_text(path.read_bytes()):
            yield text


def _manual_pages(packages: Path) -> Iterator[str]:
    """Yield the text of manual pages, without requests, fonts and escapes of troff."""
    for path in sorted((packages / "files/usr/share/man").rglob("*.gz")):
        if path.is_symlink() or not path.is_file():
            continue
        source = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        lines = [re.sub(r"^\.(SH|SS|TH|B|I|BR|IR|TP|IP|RB|RI)\b", "", line) for line in source.splitlines()]
        text = "\n".join(line for line in lines if not line.startswith((".", "'")))
        yield re.sub(r"\\(f[A-Z]|f\[\w*\]|[&%/|^]|\(\w\w)", "", text).replace("\\-", "-")


def _licences(packages: Path) -> Iterator[str]:
    folders = [Path("/usr/share/doc"), packages / "files/usr/share/doc"]
    for path in sorted(path for folder in folders for path in folder.glob("*/copyright")):
        if not path.is_symlink():
            yield from _blocks(path.read_bytes().decode("utf-8", "replace"), "\n\n")


def _tables(packages: Path) -> Iterator[str]:
    share = packages / "files/usr/share"
    names = ("unicode/*.txt", "misc/*.ids", "hwdata/*", "ieee-data/*.csv", "ieee-data/*.txt")
    for path in sorted(path for name in names for path in share.glob(name)):
        if path.is_file() and not path.is_symlink():
            yield from _blocks(path.read_bytes().decode("utf-8", "replace"), "\n")


def _logs(rng: random.Random) -> Iterator[str]:
    """Yield pieces of the logs of made-up machines."""
    programs = ("sshd", "cron", "kernel", "systemd", "postfix/smtpd", "nginx", "dhclient")
    messages = (
        "Accepted publickey for {user} from {ip} port {number} ssh2",
        "Failed password for invalid user {user} from {ip} port {number} ssh2",
        "({user}) CMD (test -x /usr/sbin/anacron || run-parts --report /etc/cron.daily)",
        "eth0: link up, {number} Mbps, full duplex",
        "Started Session {number} of user {user}.",
        "connect from unknown[{ip}]",
        '{ip} - - "GET /articles/{number}/index.html HTTP/1.1" 200 {number}',
        "bound to {ip} -- renewal in {number} seconds.",
        "The backup of the home of {user} has ended, and {number} files of the old one were removed.",
    )
    users = ("anna", "ben", "clara", "david", "eva", "root", "backup", "www-data")
    while True:
        host, clock, process = f"host{rng.randint(1, 99)}", rng.randint(0, 86_000), rng.randint(300, 9000)
        lines = []
        for _ in range(rng.randint(10, 60)):
            clock += rng.randint(0, 40)
            message = rng.choice(messages).format(
                user=rng.choice(users),
                ip=".".join(str(rng.randint(1, 254)) for _ in range(4)),
                number=rng.randint(1, 65_000),
            )
            time = f"{clock // 3600 % 24:02}:{clock // 60 % 60:02}:{clock % 60:02}"
            lines.append(f"Mar {rng.randint(1, 28):2} {time} {host} {rng.choice(programs)}[{process}]: {message}")
        yield "\n".join(lines)


def _spam(rng: random.Random) -> Iterator[str]:
    """Yield pages that sell something: full sentences, with the same words again and again."""
    goods = ("watches", "pills", "loans", "shoes", "tickets", "casino bonus", "phone cases", "web hosting", "perfume")
    towns = ("Berlin", "Austin", "Leeds", "Oslo", "Lyon", "Perth", "Porto", "Dublin", "Denver")
    lines = (
        "Are you looking for cheap {good} in {town}? You have come to the right place!",
        "Our {good} are the best {good} that money can buy, and they ship to {town} today.",
        "Click here to get {number} % off all {good} now.",
        "Thousands of people in {town} trust us with their {good}, and you should, too.",
        "Do not wait: this offer for {good} ends in {number} minutes!",
        "Compare prices of {good}, read reviews of {good}, and buy {good} online.",
        "{town} {good}, {good} {town}, buy {good} {town}, best {good} near {town}.",
        "Sign up with your e-mail address, and we send you a code that is worth {number} dollars.",
        "FREE SHIPPING!!! No questions asked. 100 % money back.",
        "With the help of our experts, the {good} of your dreams are only one click away.",
    )
    while True:
        good, town = rng.choice(goods), rng.choice(towns)
        chosen = [rng.choice(lines) for _ in range(rng.randint(8, 30))]
        text = [line.format(good=good, town=town, number=rng.randint(5, 95)) for line in chosen]
        yield rng.choice((" ", "\n")).join(text)


def _near_copies(texts: list[str], rng: random.Random) -> Iterator[str]:
    """Yield copies of stories with some words left out or replaced, each story one to six times."""
    words = [word for text in texts[:200] for word in text.split(" ")]
    for text in texts:
        for _ in range(rng.randint(1, 6)):
            parts = text.split(" ")
            for _ in range(max(1, len(parts) // 60)):
                parts[rng.randrange(len(parts))] = rng.choice(("", rng.choice(words)))
            yield " ".join(parts)


if __name__ == "__main__":
    main()
