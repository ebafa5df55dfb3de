"""Reads the corpus and sets a part of every domain aside for validation."""

from __future__ import annotations

from settings import CORPUS, DOMAINS

_BLOCK = 1 << 15  # characters; a whole block is either trained on or held out
_HELD_OUT = 40  # every 40th block is for validation


def read(domain: str) -> str:
    """The text of one domain."""
    import zstandard

    data = (CORPUS / f"{domain}.txt.zst").read_bytes()
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 28).decode()


def split(text: str) -> tuple[list[str], list[str]]:
    """Blocks to train on and blocks held out, cut at empty lines where there are any, else at line ends."""
    blocks, start = [], 0
    while start < len(text):
        end = _cut(text, start + _BLOCK)
        blocks.append(text[start:end])
        start = end
    held_out = blocks[_HELD_OUT // 2 :: _HELD_OUT]
    return [block for i, block in enumerate(blocks) if i % _HELD_OUT != _HELD_OUT // 2], held_out


def _cut(text: str, least: int) -> int:
    for mark in ("\n\n", "\n"):
        found = text.find(mark, least, least + _BLOCK)
        if found >= 0:
            return found + len(mark)
    return min(least, len(text))


def main() -> None:
    """Say how much there is."""
    for domain in DOMAINS:
        train, held_out = split(read(domain))
        print(f"{domain:>9} {sum(map(len, train)):>10,} characters to train on, {sum(map(len, held_out)):>8,} held out")


if __name__ == "__main__":
    main()
