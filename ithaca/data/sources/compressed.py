"""Files opened for reading as bytes, decompressed if their names end in .gz, .bz2, .xz or .zst.

The first bytes of a file must agree with its name: a compressed file under a plain name would be read as nonsense, and
each library has its own message for the other cases.

Invariant: a compressed file is read to the end of its last frame, or raises one of `FAULTS`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, BinaryIO

from ithaca.errors import DataError, MisnamedError, ZstdError

_KINDS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
# bzip2 is recognized in `_kind`: plain text may begin with BZh, so the mark of the first block is compared too.
_MAGIC = {"gzip": b"\x1f\x8b", "xz": b"\xfd7zXZ\0", "zstd": b"\x28\xb5\x2f\xfd", "zip": b"PK\3\4", "parquet": b"PAR1"}
_SUFFIX = {kind: suffix for suffix, kind in _KINDS.items()} | {"parquet": ".parquet"}
_CHUNK = 1 << 14

# Exceptions of reading a file that is cut short, changed, misnamed or missing.
FAULTS = (OSError, EOFError, lzma.LZMAError, zlib.error, ZstdError, MisnamedError)


def open_file(file: str) -> Any:
    """Open a file for reading; its content is decompressed as its name says."""
    named = _KINDS.get(PurePath(file).suffix.lower())
    with open(file, "rb") as opened:
        head = opened.read(10)  # the longest mark, bzip2's
    found = _kind(head)
    if head and found != named:
        raise MisnamedError(_misnamed(found, named))
    openers: dict[str | None, Any] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open, "zstd": _open_zstd}
    return openers.get(named, open)(file, "rb")


def _kind(head: bytes) -> str | None:
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return "bzip2"
    return next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), None)


def _misnamed(found: str | None, named: str | None) -> str:
    if found is None:
        return f"not {named}, as its name says, by its first bytes"
    if found in _SUFFIX:
        return f"it is {found} by its first bytes: give it a name that ends in {_SUFFIX[found]}"
    return f"it is {found} by its first bytes: unpack it"


def _open_zstd(file: str, _: str) -> Any:
    make, error = _zstd(file)
    return io.BufferedReader(ZstdReader(open(file, "rb"), make, error))


def _zstd(file: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return a factory of one-frame decompressors and their exception: Python's own from 3.14 on, else zstandard's."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]

        return zstd.ZstdDecompressor, zstd.ZstdError
    except ImportError:
        pass
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DataError(
            f"{file} is compressed by zstd, which needs the package zstandard: `pip install 'ithaca[zstd]'`, or unpack it"
        ) from None
    # Windows up to 2 GiB, which `zstd --long=31` makes; the default refuses them.
    return (lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()), zstandard.ZstdError


class ZstdReader(io.RawIOBase):
    """Content of zstd frames, one after the other.

    `make` returns a decompressor of one frame, with `decompress`, `eof` and `unused_data` as in the standard library.
    """

    def __init__(self, source: BinaryIO, make: Callable[[], Any], error: type[Exception]) -> None:
        self._source, self._make, self._error = source, make, error
        self._frame: Any = None
        self._rest = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            given = self._rest or self._source.read(_CHUNK)
            self._rest = b""
            if not given:
                if self._frame is not None:
                    raise EOFError("it ended before the end of a compressed frame")
                return 0
            self._ready = self._decompress(given)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, given: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._make()
        try:
            found: bytes = self._frame.decompress(given)
        except self._error as error:
            raise ZstdError(str(error)) from None
        # A zstd file may be several frames in a row, as `cat a.zst b.zst` or parallel compression makes it.
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return found

    def close(self) -> None:
        self._source.close()
        super().close()
