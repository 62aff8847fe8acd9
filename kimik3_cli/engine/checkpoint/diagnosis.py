"""What a file is, told from its first bytes, when it is not a zip archive."""

from typing import BinaryIO

HEAD_BYTES = 1024
NEEDED = "kimik3 reads a checkpoint of format version 7, written by torch.save"
OLD_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
MAGIC = {
    b"version https://git-lfs": "is a Git LFS pointer, not the file itself; run git lfs pull",
    OLD_TORCH_MAGIC: "is in the torch.save format before torch 1.6; load it with torch and save it again",
    b"GGUF": f"is a GGUF file; {NEEDED}",
    b"\x89HDF": f"is an HDF5 file; {NEEDED}",
    b"\x1f\x8b": "is compressed by gzip; decompress it first",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; decompress it first",
    b"BZh": "is compressed by bzip2; decompress it first",
    b"\xfd7zXZ": "is compressed by xz; decompress it first",
    b"PK\x05\x06": "is an empty zip archive; save the checkpoint again",
}


def what_it_is(file: BinaryIO, file_size: int) -> str:
    """Return what the file is and what to do, empty when it starts like a zip archive."""
    head = file.read(HEAD_BYTES)
    if head.startswith(b"PK\x03\x04"):
        return ""
    if not head:
        return "is empty: the download or the save did not finish; copy or save it again"
    for magic, sentence in MAGIC.items():
        if head.startswith(magic):
            return sentence
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "is an HTML page, probably a login or error page that was saved; download the file itself"
    if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "is a bare pickle; save the checkpoint with torch.save"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= file_size - 8:
        return "is a safetensors file; give the directory that holds it and its config.json"
    if not any(head):
        return "starts with zeros: the download or the save did not finish; copy or save it again"
    return f"is not a zip archive (it starts with {head[:8]!r}), so no torch.save file; check the path"
