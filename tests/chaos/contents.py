"""What files hold: a content is described by its pieces, so that it need not be kept."""

from tests.s3server import synthetic_bytes

# A piece is a literal text, or (seed, size) of the server's synthetic bytes. As JSON, the pair is a list.
Piece = str | list[int]
Content = list[Piece]


def bytes_of(content: Content) -> bytes:
    """Return the bytes that a content describes."""
    return b"".join(
        piece.encode() if isinstance(piece, str) else synthetic_bytes(piece[0], 0, piece[1])
        for piece in content
    )


def is_expected(data: bytes | None, allowed: list[Content | None]) -> bool:
    """Return whether the bytes (None: no file) are one of the allowed contents."""
    return any((content is None) if data is None else is_content(data, content) for content in allowed)


def is_content(data: bytes, content: Content | None) -> bool:
    """Return whether the bytes are that content."""
    return content is not None and data == bytes_of(content)
