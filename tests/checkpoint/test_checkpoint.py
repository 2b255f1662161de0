"""The promise: what `Checkpoint` says of files is true to the byte, and files that are not sound are refused.

Sound files are written by the safetensors library itself; damaged ones are copies of those, altered by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import headrace
from checks import raising
from headrace.checkpoint.safetensors_header import Checkpoint, FileFingerprint, FileTensor
from headrace.errors import CheckpointError
from headrace.stores.file_reads import DiskOptions, File

INDEX = "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bytes, NaN payloads included; a bool has 0 or 1 only."""
    result = torch.empty(shape, dtype=dtype)
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    count = result.numel() * result.element_size()
    raw = torch.randint(high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if count else result


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert raw_bytes(found) == raw_bytes(expected)


def refusal(path: Path, name: str | None = None) -> str:
    """The message of the error that opening `path` raises; it names the file, the expected and the found."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert message.startswith(f"{path if name is None else name}: expected ")
    assert "; found " in message
    return message


def craft(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file of any header, true to the format or not. `length` overrides the header's length field."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """`a`: 24 bytes at 0, `b`: 16 bytes at 24."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0)}, path)
    return path


@pytest.fixture
def damage(sound: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """Rewrites the sound file's header by a function that alters it in place; the data stays."""

    def apply(alter: Callable[[dict[str, Any]], object]) -> Path:
        raw = sound.read_bytes()
        data_start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:data_start])
        alter(header)
        return craft(sound, header, raw[data_start:])

    return apply


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards of two tensors each, and their index."""
    files = {"model-00001-of-00002.safetensors": ("d", "a"), "model-00002-of-00002.safetensors": ("c", "b")}
    for file, names in files.items():
        save_file({name: random_tensor(torch.float32, (3,), ord(name)) for name in names}, tmp_path / file)
    write_index(tmp_path, {name: file for file, names in files.items() for name in names})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> Path:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map}))
    return folder / INDEX


class FourBits(nn.Module):
    """Reads all bytes of a weight of 4 bits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_tensor(torch.float4_e2m1fn_x2, (64, 8), seed), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.view(torch.uint8).float().sum(0)


class TestOpen:
    @pytest.mark.slow
    def test_single_file(self, sound: Path) -> None:
        checkpoint = Checkpoint.open(sound)
        data_start = 8 + int.from_bytes(sound.read_bytes()[:8], "little")
        assert checkpoint.root == sound.parent
        assert checkpoint.files == (sound,)
        assert checkpoint.num_bytes == 40
        assert checkpoint["a"] == FileTensor("a", torch.float32, (2, 3), sound, data_start, 24)
        assert checkpoint["b"] == FileTensor("b", torch.float32, (4,), sound, data_start + 24, 16)

    def test_stamp_is_the_files_own(self, sound: Path) -> None:
        status = sound.stat()
        expected = FileFingerprint(sound, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
        assert Checkpoint.open(sound).stamps == (expected,)

    def test_folder_with_one_model_file(self, sound: Path) -> None:
        save_file({"other": torch.zeros(1)}, sound.parent / "adapter.safetensors")
        assert set(Checkpoint.open(sound.parent).tensors) == {"a", "b"}

    def test_folder_as_text_and_relative(self, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(sound.parent)
        for path in (".", "model.safetensors"):
            checkpoint = Checkpoint.open(path)
            monkeypatch.chdir("/")
            assert_same(checkpoint.read("b"), torch.arange(4.0))
            monkeypatch.chdir(sound.parent)

    @pytest.mark.parametrize("by_index_path", [False, True])
    def test_sharded(self, sharded: Path, by_index_path: bool) -> None:
        checkpoint = Checkpoint.open(sharded / INDEX if by_index_path else sharded)
        assert checkpoint.root == sharded
        assert [file.name for file in checkpoint.files] == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ]
        assert sorted(checkpoint.tensors) == ["a", "b", "c", "d"]
        for name in "abcd":
            assert_same(checkpoint.read(name), random_tensor(torch.float32, (3,), ord(name)))

    def test_order_is_file_then_offset(self, sharded: Path) -> None:
        (sharded / INDEX).unlink()
        header = {"late": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}
        header["early"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
        craft(sharded / "a.safetensors", header, b"xy")
        tensors = list(Checkpoint.open(sharded).tensors.values())
        assert [tensor.name for tensor in tensors[:2]] == ["early", "late"]
        assert tensors == sorted(tensors, key=lambda tensor: (tensor.path, tensor.offset))

    def test_order_by_index_is_file_then_offset_too(self, tmp_path: Path) -> None:
        files = [f"{i:02}.safetensors" for i in range(20)]
        for file in files:
            save_file({file: torch.zeros(1)}, tmp_path / file)
        write_index(tmp_path, {file: file for file in reversed(files)})
        checkpoint = Checkpoint.open(tmp_path)
        assert list(checkpoint.tensors) == files
        assert [path.name for path in checkpoint.files] == files

    def test_a_model_file_comes_before_an_index(self, sharded: Path) -> None:
        save_file({"whole": torch.zeros(1)}, sharded / "model.safetensors")
        assert list(Checkpoint.open(sharded).tensors) == ["whole"]

    def test_several_files_without_index(self, sharded: Path) -> None:
        (sharded / INDEX).unlink()
        (sharded / "._model-00001-of-00002.safetensors").write_bytes(b"macOS leaves these")
        checkpoint = Checkpoint.open(sharded)
        assert sorted(checkpoint.tensors) == ["a", "b", "c", "d"]
        assert len(checkpoint.files) == 2

    def test_one_file_of_any_name(self, tmp_path: Path) -> None:
        save_file({"w": torch.ones(2)}, tmp_path / "diffusion_pytorch_model.safetensors")
        assert list(Checkpoint.open(tmp_path).tensors) == ["w"]

    def test_only_tensors_that_the_index_names(self, sharded: Path) -> None:
        shard = "model-00001-of-00002.safetensors"
        write_index(sharded, {"a": shard})
        checkpoint = Checkpoint.open(sharded)
        assert list(checkpoint.tensors) == ["a"]
        assert [file.name for file in checkpoint.files] == [shard]
        assert checkpoint.num_bytes == 12

    def test_index_settles_a_tensor_that_two_shards_hold(self, sharded: Path) -> None:
        save_file({"a": torch.zeros(9), "e": torch.ones(1)}, sharded / "z.safetensors")
        write_index(sharded, {"a": "model-00001-of-00002.safetensors", "e": "z.safetensors"})
        assert Checkpoint.open(sharded)["a"].shape == (3,)

    def test_shards_in_a_subfolder_and_behind_links(self, sharded: Path, tmp_path: Path) -> None:
        # A Hugging Face cache: the snapshot folder holds links to `../../buffers/...`.
        snapshot = tmp_path / "snapshots" / "main"
        (snapshot / "sub").mkdir(parents=True)
        (snapshot / "sub" / "one.safetensors").symlink_to(sharded / "model-00001-of-00002.safetensors")
        write_index(snapshot, {"a": "sub/one.safetensors", "d": "./sub/one.safetensors"})
        checkpoint = Checkpoint.open(snapshot)
        assert checkpoint.files == (snapshot / "sub" / "one.safetensors",)
        assert_same(checkpoint.read("a"), random_tensor(torch.float32, (3,), ord("a")))
        checkpoint.stamps[0].check()

    def test_metadata_padding_and_no_tensors(self, tmp_path: Path) -> None:
        path = craft(tmp_path / "x.safetensors", b'{"__metadata__": {"format": "pt"}}      ')
        checkpoint = Checkpoint.open(path)
        assert (len(checkpoint.tensors), checkpoint.num_bytes, checkpoint.files) == (0, 0, (path,))

    def test_header_longer_than_the_first_read(self, tmp_path: Path) -> None:
        tensors = {f"{'long.' * 20}{i}": torch.tensor(i) for i in range(2000)}
        save_file(tensors, tmp_path / "x.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        assert checkpoint.tensors.keys() == tensors.keys()
        assert_same(checkpoint.read(f"{'long.' * 20}1234"), torch.tensor(1234))

    def test_one_read_and_no_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_file({"w": torch.zeros(1 << 20)}, tmp_path / "x.safetensors")
        preadv, counts = os.preadv, []

        def pluralize(fd: int, buffers: list[memoryview], offset: int) -> int:
            counts.append(preadv(fd, buffers, offset))
            return counts[-1]

        monkeypatch.setattr(os, "preadv", pluralize)
        Checkpoint.open(tmp_path)
        assert len(counts) == 1
        assert counts[0] <= 128 * 1024


class TestRead:
    @pytest.mark.parametrize("code", [*DTYPES, "F4"])
    @pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (3, 1, 7)], ids=str)
    def test_every_dtype_to_the_byte(self, tmp_path: Path, code: str, shape: tuple[int, ...]) -> None:
        if code == "F4" and not shape:
            pytest.skip("half a byte")
        expected = random_tensor(DTYPES.get(code, torch.float4_e2m1fn_x2), shape)
        save_file({"pad": torch.zeros(3, dtype=torch.uint8), "w": expected}, tmp_path / "x.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        assert json.loads(header_text(tmp_path / "x.safetensors"))["w"]["dtype"] == code
        assert_same(checkpoint.read("w"), expected)
        assert checkpoint["w"].num_bytes == expected.nbytes

    def test_four_bits_are_offloaded(self, tmp_path: Path) -> None:
        model = nn.Sequential(FourBits(0), FourBits(1), FourBits(2), FourBits(3)).eval()
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        expected = model(torch.ones(2, 8))
        every = headrace.Prefetch(1, 1, 1, ("ALL_MODEL_PARAMS",), mode="disk")
        with headrace.offload(model, every, checkpoint=tmp_path) as handle:
            assert torch.equal(model(torch.ones(2, 8)), expected)
            assert handle.stats().bytes_moved > 0

    def test_new_memory_each_time(self, sound: Path) -> None:
        checkpoint = Checkpoint.open(sound)
        checkpoint.read("a").zero_()
        assert_same(checkpoint.read("a"), torch.arange(6.0).reshape(2, 3))

    def test_cpu_whatever_the_default_device(self, sound: Path) -> None:
        with torch.device("meta"):
            found = Checkpoint.open(sound).read("a")
        assert_same(found, torch.arange(6.0).reshape(2, 3))

    def test_partial_reads_are_continued(self, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:3]], at))
        assert_same(Checkpoint.open(sound).read("a"), torch.arange(6.0).reshape(2, 3))

    def test_short_read(self, sound: Path) -> None:
        checkpoint = Checkpoint.open(sound)
        os.truncate(sound, sound.stat().st_size - 10)
        with pytest.raises(CheckpointError, match=r"expected 16 bytes at byte \d+; found 6 and the end"):
            checkpoint.read("b")

    def test_disk_error(self, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoint = Checkpoint.open(sound)

        monkeypatch.setattr(os, "preadv", raising(OSError(5, "Input/output error")))
        with pytest.raises(CheckpointError, match=r"model\.safetensors: .*Input/output error.*the disk"):
            checkpoint.read("b")

    def test_changed_file(self, sound: Path) -> None:
        checkpoint = Checkpoint.open(sound)
        save_file({"b": torch.zeros(4), "a": torch.zeros(2, 3)}, sound)
        os.utime(sound, ns=(0, 0))
        with pytest.raises(CheckpointError, match="changed while in use"):
            checkpoint.read("a")

    @pytest.mark.slow
    def test_unknown_name_lists_the_nearest(self, tmp_path: Path) -> None:
        names = [f"layers.{i}.{part}.weight" for i in range(500) for part in ("mlp", "attn")]
        save_file({name: torch.zeros(1) for name in names}, tmp_path / "x.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        with pytest.raises(CheckpointError, match=r"'layers.77.mpl.weight'; found 1000 .*layers\.77\.mlp"):
            checkpoint["layers.77.mpl.weight"]
        with pytest.raises(CheckpointError, match=r"nearest are layers"):
            checkpoint.read("")


def header_text(path: Path) -> bytes:
    raw = path.read_bytes()
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


class TestStamp:
    def test_unchanged(self, sound: Path) -> None:
        stamp = Checkpoint.open(sound).stamps[0]
        stamp.check()
        stamp.check()

    def test_rewritten_in_place(self, sound: Path) -> None:
        stamp = Checkpoint.open(sound).stamps[0]
        os.utime(sound, ns=(stamp.modified_ns, stamp.modified_ns + 1))
        with pytest.raises(CheckpointError, match="changed while in use"):
            stamp.check()

    def test_rewritten_in_place_with_its_time(self, sound: Path) -> None:
        """As ``cp -p``, ``rsync --inplace -t`` and tar do it."""
        stamp = Checkpoint.open(sound).stamps[0]
        time.sleep(0.02)  # longer than the ticks in which file systems count time
        sound.write_bytes(sound.read_bytes()[:-8] + bytes(8))
        os.utime(sound, ns=(stamp.modified_ns, stamp.modified_ns))
        with pytest.raises(CheckpointError, match="changed while in use"):
            stamp.check()

    def test_resized(self, sound: Path) -> None:
        stamp = Checkpoint.open(sound).stamps[0]
        os.truncate(sound, 9)
        os.utime(sound, ns=(stamp.modified_ns, stamp.modified_ns))
        with pytest.raises(CheckpointError, match=r"num_bytes=9\b"):
            stamp.check()

    def test_replaced_by_an_equal_file(self, sound: Path) -> None:
        stamp = Checkpoint.open(sound).stamps[0]
        copy = sound.with_name("copy")
        copy.write_bytes(sound.read_bytes())
        os.utime(copy, ns=(stamp.modified_ns, stamp.modified_ns))
        copy.replace(sound)
        with pytest.raises(CheckpointError, match="inode"):
            stamp.check()

    def test_gone(self, sound: Path) -> None:
        stamp = Checkpoint.open(sound).stamps[0]
        sound.unlink()
        with pytest.raises(CheckpointError, match=r"model\.safetensors: .*No such file"):
            stamp.check()


class TestMissing:
    def test_path(self, tmp_path: Path) -> None:
        assert "No such file" in refusal(tmp_path / "nope")
        assert "No such file" in refusal(tmp_path / "nope.safetensors")

    def test_folder_with_nothing(self, tmp_path: Path) -> None:
        assert "expected safetensors files; found an empty folder. Give the folder" in refusal(tmp_path)

    def test_folder_without_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").touch()
        assert "found 1 (config.json)" in refusal(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model-Q4_K_M.gguf"])
    def test_other_format_says_how_to_convert(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"weights")
        for path in (tmp_path, tmp_path / name):
            message = refusal(path)
            assert name in message
            assert "another format" in message
            assert "model.save_pretrained(folder)" in message

    def test_other_format_beside_safetensors_is_no_matter(self, sound: Path) -> None:
        (sound.parent / "pytorch_model.bin").write_bytes(b"weights")
        assert set(Checkpoint.open(sound.parent).tensors) == {"a", "b"}

    @pytest.mark.parametrize("what", ["file", "folder", "index"])
    def test_permission(self, sharded: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        shard = sharded / "model-00001-of-00002.safetensors"
        closed = {"file": shard, "folder": sharded, "index": sharded / INDEX}[what]
        mode = closed.stat().st_mode

        def as_a_user(call: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
            if path == closed:
                raise PermissionError(13, "Permission denied")
            return call(path, *args, **kwargs)

        if os.geteuid() == 0:  # nothing is closed to root
            monkeypatch.setattr("builtins.open", partial(as_a_user, open))
            monkeypatch.setattr(os, "listdir", partial(as_a_user, os.listdir))
        closed.chmod(0)
        try:
            message = refusal(sharded, str(closed))
        finally:
            closed.chmod(mode)
        assert f"user {os.geteuid()}" in message
        assert "Permission denied" in message
        assert "chmod" in message

    def test_folder_named_like_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.safetensors").mkdir()
        message = refusal(tmp_path, str(tmp_path / "x.safetensors"))
        assert "Is a directory" in message or "8 bytes" in message  # by file system


class TestNoFile:
    """Refused by what they are: to open a pipe is to wait until somebody writes to it."""

    def test_pipe(self, sharded: Path) -> None:
        shard, index = sharded / "model-00002-of-00002.safetensors", sharded / INDEX
        for path, found_in in ((shard, sharded), (index, sharded), (index, index)):
            path.unlink()
            os.mkfifo(path)
            assert "expected a regular file; found a named pipe. Write the" in refusal(found_in, str(path))
        with pytest.raises(CheckpointError, match="found a named pipe"):
            File(shard, DiskOptions())

    def test_socket_and_device(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            assert "found a socket" in refusal(path)
        path.unlink()
        path.symlink_to("/dev/zero")
        assert "found a device" in refusal(path)

    def test_replaced_by_a_pipe_while_in_use(self, sound: Path) -> None:
        checkpoint = Checkpoint.open(sound)
        sound.unlink()
        os.mkfifo(sound)
        for use in (lambda: checkpoint.read("a"), checkpoint.stamps[0].check):
            with pytest.raises(CheckpointError, match="found a named pipe"):
                use()


class TestDamagedHeader:
    @pytest.mark.parametrize("count", [0, 1, 7])
    def test_shorter_than_eight_bytes(self, sound: Path, count: int) -> None:
        os.truncate(sound, count)
        message = refusal(sound)
        assert "at least the 8 bytes" in message
        assert f"a file of {count} bytes" in message

    def test_length_beyond_the_file(self, sound: Path) -> None:
        os.truncate(sound, 20)
        message = refusal(sound)
        assert "a file of 20 bytes, it is truncated" in message

    def test_length_beyond_the_limit(self, sound: Path) -> None:
        craft(sound, {}, length=100_000_001)
        os.truncate(sound, 200_000_000)  # sparse
        message = refusal(sound)
        assert "at most 100000000 bytes; found a length of 100000001" in message

    def test_git_lfs_pointer(self, sound: Path) -> None:
        sound.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        assert "git lfs pull" in refusal(sound)

    @pytest.mark.parametrize(
        "header",
        [b"", b"not json", b'{"a": ', b"\xff\xfe{}", b"{}\0\0", b"[" * 100_000, b"1" * 5000],
        ids=["empty", "text", "cut", "not UTF-8", "zero padding", "nested", "huge number"],
    )
    def test_not_json(self, sound: Path, header: bytes) -> None:
        assert "expected UTF-8 JSON" in refusal(craft(sound, header))

    @pytest.mark.parametrize("header", [[], "text", 3, None])
    def test_not_an_object(self, sound: Path, header: object) -> None:
        assert "expected a JSON object" in refusal(craft(sound, header))

    def test_name_given_twice(self, sound: Path) -> None:
        entry = '{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
        path = craft(sound, f'{{"a": {entry}, "a": {entry}}}'.encode(), b"x")
        assert "'a'" in refusal(path)

    @pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
    @pytest.mark.parametrize("value", [..., None, 3, "F32x", [1.0, 2.0], [True, 24], ["0", "24"], {}, [0, 1, 2]])
    def test_field_missing_or_of_the_wrong_type(self, damage: Any, field: str, value: object) -> None:
        def alter(header: dict[str, Any]) -> None:
            header["a"].pop(field) if value is ... else header["a"].update({field: value})

        assert "'a'" in refusal(damage(alter))

    @pytest.mark.parametrize("entry", [None, [], "F32", 4])
    def test_entry_is_not_an_object(self, damage: Any, entry: object) -> None:
        assert "'a' as {dtype" in refusal(damage(lambda header: header.update(a=entry)))

    def test_unknown_field_is_ignored(self, damage: Any) -> None:
        assert Checkpoint.open(damage(lambda header: header["a"].update(more=1)))["a"].num_bytes == 24

    def test_unknown_dtype_lists_the_supported(self, damage: Any) -> None:
        message = refusal(damage(lambda header: header["a"].update(dtype="F128")))
        assert "the unknown 'F128'" in message
        assert all(code in message for code in DTYPES)

    @pytest.mark.parametrize("shape", [[], [16, 3]])
    def test_four_bits_that_fill_no_bytes(self, damage: Any, shape: list[int]) -> None:
        assert "the sub-byte 'F4'" in refusal(damage(lambda header: header["a"].update(dtype="F4", shape=shape)))

    @pytest.mark.parametrize("code", ["F6_E2M3", "F6_E3M2"])
    def test_sub_byte_dtype(self, damage: Any, code: str) -> None:
        message = refusal(damage(lambda header: header["a"].update(dtype=code)))
        assert f"the sub-byte {code!r}" in message
        assert "U8" in message


class TestDamagedLayout:
    @pytest.mark.parametrize("shape", [[0, 2**63], [2**40, 0, 2**40]])
    def test_a_shape_that_torch_cannot_have(self, tmp_path: Path, shape: list[int]) -> None:
        """Without elements any shape has the bytes that it says."""
        header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        file = tmp_path / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        assert f"'a' of a shape that torch can have; found {shape}" in refusal(tmp_path, str(file))

    @pytest.mark.parametrize(("name", "changes", "message"), [
        *(
            ("a", changes, "found 24 bytes, data_offsets [0, 24]")
            for changes in ({"shape": [2, 4]}, {"dtype": "BF16"}, {"shape": []})
        ),
        *(("a", {"data_offsets": offsets}, str(offsets)) for offsets in ([-24, 0], [24, 0], [0, -24])),
        ("a", {"shape": [True, 6]}, "True"),  # in Python it is the integer 1, in JSON it is not
        ("a", {"shape": [-2, -3]}, "[-2, -3]"),
        ("b", {"data_offsets": [20, 36]}, "'b' at data byte 24; found an overlap: it begins at byte 20"),
        ("b", {"data_offsets": [28, 44]}, "'b' at data byte 24; found a hole: it begins at byte 28"),
    ])  # fmt: skip
    def test_an_entry_at_odds_with_itself_or_the_data(
        self, damage: Any, name: str, changes: dict[str, Any], message: str
    ) -> None:
        found = refusal(damage(lambda header: header[name].update(changes)))
        assert message in found
        assert f"'{name}' " in found

    def test_hole_at_the_start(self, damage: Any) -> None:
        assert "'b' at data byte 0; found a hole" in refusal(damage(lambda header: header.pop("a")))

    @pytest.mark.parametrize(("more", "what"), [(-1, "is truncated"), (1, "has trailing bytes")])
    def test_length_of_the_data(self, sound: Path, more: int, what: str) -> None:
        size = sound.stat().st_size
        os.truncate(sound, size + more)
        assert f"a file of {size} bytes; found {size + more} bytes, it {what}" in refusal(sound)


class TestSeveralFiles:
    def test_tensor_in_two_files_without_index(self, sharded: Path) -> None:
        (sharded / INDEX).unlink()
        save_file({"a": torch.zeros(1), "new": torch.zeros(1)}, sharded / "z.safetensors")
        message = refusal(sharded, str(sharded / "z.safetensors"))
        assert "1 (a) also in" in message
        assert "model-00001-of-00002.safetensors" in message

    def test_damaged_shard_is_named(self, sharded: Path) -> None:
        shard = sharded / "model-00002-of-00002.safetensors"
        os.truncate(shard, shard.stat().st_size - 4)
        assert "truncated" in refusal(sharded, str(shard))

    @pytest.mark.parametrize("text", ["", "{", "\udcff"])
    def test_index_is_not_json(self, sharded: Path, text: str) -> None:
        (sharded / INDEX).write_bytes(text.encode(errors="surrogateescape"))
        assert "UTF-8 JSON" in refusal(sharded, str(sharded / INDEX))

    @pytest.mark.parametrize(
        "name", ["x" * 5000, "a/" * 3000 + "x", "half \ud800", "nul \0"], ids=["long", "deep", "half", "nul"]
    )
    def test_index_with_names_of_no_files(self, sharded: Path, name: str) -> None:
        write_index(sharded, {"a": f"{name}.safetensors"})
        message = refusal(sharded, str(sharded / INDEX))
        assert "expected 1 shards" in message
        assert len(message.encode()) < 1000, "and can be printed"

    @pytest.mark.parametrize("weight_map", [None, [], {}, "a", {"a": 1}, {"a": ["x"]}])
    def test_index_without_weight_map(self, sharded: Path, weight_map: object) -> None:
        write_index(sharded, weight_map)
        assert 'an index with "weight_map"' in refusal(sharded, str(sharded / INDEX))

    def test_some_other_json(self, sharded: Path) -> None:
        (sharded / "config.json").write_text('{"model_type": "llama"}')
        assert '"weight_map"' in refusal(sharded / "config.json")

    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00002.safetensors").unlink()
        message = refusal(sharded, str(sharded / INDEX))
        assert "2 shards" in message
        assert "missing: 1 (" in message
        assert "model-00002-of-00002.safetensors" in message
        assert "expected 2 shards in its folder; found 1, missing: 1 (" in message
        assert message.endswith(" Download or copy what is missing.")

    def test_link_to_nothing_is_missing(self, sharded: Path) -> None:
        shard = sharded / "model-00002-of-00002.safetensors"
        shard.rename(sharded / "buffer")
        shard.symlink_to("incomplete")
        assert "missing: 1 (" in refusal(sharded, str(sharded / INDEX))

    def test_tensor_that_the_shard_lacks(self, sharded: Path) -> None:
        shard = "model-00001-of-00002.safetensors"
        write_index(sharded, {"a": shard, "ghost": shard})
        message = refusal(sharded, str(sharded / shard))
        assert "expected all 2 tensors that the index places here; found 1 of them, missing: 1 (ghost). One" in message

    @pytest.mark.parametrize("file", ["../x.safetensors", "sub/../../x.safetensors", "/x.safetensors", "", "."])
    def test_shard_outside_the_folder(self, sharded: Path, file: str) -> None:
        save_file({"a": torch.zeros(1)}, sharded.parent / "x.safetensors")
        write_index(sharded, {"a": file})
        message = refusal(sharded, str(sharded / INDEX))
        assert f"inside its folder; found {file!r}" in message


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@pytest.mark.slow
@given(st.dictionaries(names, st.tuples(st.sampled_from(list(DTYPES.values())), shapes), max_size=8))
@settings(deadline=None)
def test_any_tensors_come_back(kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    tensors = {name: random_tensor(*kind, seed) for seed, (name, kind) in enumerate(kinds.items())}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "x.safetensors")
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.tensors.keys() == tensors.keys()
        assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        for name, expected in tensors.items():
            assert_same(checkpoint.read(name), expected)


@pytest.mark.slow
@given(st.data())
@settings(deadline=None, max_examples=300)
def test_random_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever byte changes: a CheckpointError, or what the safetensors library reads too; nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        save_file({"a": torch.arange(6.0), "b": torch.arange(4)}, path)
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
        with contextlib.suppress(CheckpointError):
            checkpoint = Checkpoint.open(path)
            expected = load_file(path)
            assert checkpoint.tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert_same(checkpoint.read(name), tensor)
