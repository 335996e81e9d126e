"""The disk tier of a shard on a CPU: blocks of the pool in slots of a file, which a later process finds again.

A block is opaque bytes. What a file is of, and so whether its slots are of use to this process, is its fingerprint: the
files of the model, every setting that may change keys and values, and the layout of the pool.
"""

import hashlib
import json
import logging
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

from funitel.model_server.files.manifest import VERIFIED
from funitel.model_server.hub.resolve import cache_folder
from funitel.model_server.kv_cache.pool import KVCache, check_slots
from funitel.model_server.kv_cache.slot_file import KEY_BYTES, SlotFile, SlotLayout
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.process.version import version
from funitel.proto.step import BlockCopy, StoredBlock

logger = logging.getLogger(__name__)

FORMAT = 1
"""To be raised where the same settings give blocks of another meaning."""
GIB = 2**30
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14  # of a file of weights
_MAX_NAME = 40  # characters of a model in the name of a file
# Settings that cannot change keys and values; every other one, a new one too, is part of the fingerprint.
_WITHOUT_EFFECT = frozenset(
    "model_id cache_dir master_addr master_port uds_path listen shard_tls_cert shard_tls_key shard_tls_ca local_rank "
    "cuda_memory_fraction replicas_on_host cpu_offload_gb kv_host_gb kv_disk_gb kv_disk_dir attention cuda_graphs "
    "folder_fd num_threads most_threads thread_spin_us cores memory_node prefill_chunking prefix_caching "
    "enable_prefill_logprobs max_lora_rank reserved_loras disable_forced_spans watermark_gamma watermark_delta "
    "media_cache_gb otlp_endpoint otlp_service_name json_output logger_level exit_with_parent "
    "deployment_file".split()
)


class DiskBlocks:
    """Slots of a file for blocks of one pool and of its companion, all layers of a block together as they lie there."""

    is_disk = True

    def __init__(self, file: SlotFile, cache: KVCache) -> None:
        self._file = file
        self._num_blocks = cache.num_blocks
        self._pools = [_bytes_of(each.pool) for each in cache.with_companion()]  # each [num_blocks, bytes]

    def check(self, copies: Iterable[BlockCopy]) -> None:
        """Raise InvalidRequest for a block or slot that is not there, or a copy without the key of its content.

        A save without a key lets its slot hold nothing.
        """
        copies = tuple(copies)
        check_slots(copies, self._num_blocks, self._file.layout.num_slots, "the file")
        for copy in copies:
            if len(copy.key) != KEY_BYTES and (copy.key or copy.is_load):
                raise InvalidRequest(f"a copy of slot {copy.slot} has a key of {len(copy.key)} bytes, not {KEY_BYTES}")

    def carry_out(self, copy: BlockCopy) -> bool:
        """Copy a block to or from its slot; whether the slot holds what it is thought to hold."""
        if not copy.key:
            self._file.wipe(copy.slot)
            return True
        content = [memoryview(pool[copy.block]) for pool in self._pools]
        if copy.is_load:
            return self._file.load(copy.slot, copy.key, content)
        return self._file.save(copy.slot, copy.key, content, time.time() - copy.age_seconds)

    def stored(self) -> tuple[StoredBlock, ...]:
        """The slots with content, of this run and of earlier ones."""
        now = time.time()
        return tuple(StoredBlock(each.slot, each.key, max(0.0, now - each.used_at)) for each in self._file.entries())


@dataclass(slots=True)
class DiskTier:
    """The disk tier that settings ask for; it keeps its file open from the first warm-up on.

    Args:
        folder: of the file.
        stem: what the names of its files begin with.
        num_bytes: maximum of the file.
        identity: text of all that keys and values depend on but for the layout of the pool.
        num_files: of the ranks on this machine.
    """

    folder: Path
    stem: str
    num_bytes: int
    identity: str
    num_files: int = 1
    _file: SlotFile | None = field(default=None, init=False)

    def num_slots(self, block_bytes: int) -> int:
        """Slots that there is room for.

        Raises:
            SettingsError: for none.
        """
        count = SlotLayout.within(self.num_bytes, block_bytes, b"").num_slots
        if not count:
            raise SettingsError(
                f"--kv-disk-gb {self.num_bytes / GIB:.4g} has no room for a block, which has {block_bytes} bytes"
            )
        return count

    @property
    def number(self) -> int:
        """Of the open file; -1 where none is open."""
        return -1 if self._file is None else self._file.number

    def open(self, cache: KVCache, num_slots: int, wanted: int | None = None) -> DiskBlocks:
        """Slots for blocks of a pool, with what the file holds; file `wanted` where no other process has it.

        Raises:
            SettingsError: the file cannot be used.
        """
        pools = [each.pool for each in cache.with_companion()]
        content_bytes = sum(_bytes_of(pool).shape[1] for pool in pools)
        shapes = [(str(pool.dtype), *pool.shape[1:]) for pool in pools]
        fingerprint = hashlib.sha256(f"{self.identity} {cache.block_size} {shapes}".encode()).digest()
        layout = SlotLayout(num_slots, content_bytes, fingerprint)
        if self._file is not None and self._file.layout != layout:
            self.close()
        if self._file is None:
            self._file = SlotFile.open(self.folder, self.stem, layout, self.num_files, wanted)
        blocks = DiskBlocks(self._file, cache)
        message = "KV disk tier blocks=%d bytes=%d stored=%d folder=%s"
        logger.info(message, num_slots, layout.num_bytes, len(blocks.stored()), self.folder)
        return blocks

    def close(self) -> None:
        """Let go of the file; another process may have it."""
        if self._file is not None:
            self._file.close()
        self._file = None


def disk_tier_of(
    settings: ModelServerSettings, folder: Path, device: torch.device, step: str, precision: str
) -> DiskTier | None:
    """The disk tier of a rank; None where none is asked for.

    Args:
        settings: the shard's.
        folder: of the model.
        device: of the pool.
        step: what computes the model.
        precision: of its weights.

    Raises:
        SettingsError: the pool is not on a CPU, or a file of the model cannot be read.
    """
    if not settings.kv_disk_gb:
        if settings.kv_disk_dir is not None:
            logger.warning("--kv-disk-dir %s changes nothing without --kv-disk-gb", settings.kv_disk_dir)
        return None
    if device.type != "cpu":
        raise SettingsError(f"--kv-disk-gb {settings.kv_disk_gb:g} is for CPUs; a GPU has --kv-host-gb")
    if not settings.prefix_caching:
        logger.warning("--kv-disk-gb %g changes nothing without --prefix-caching", settings.kv_disk_gb)
        return None
    where = Path(settings.kv_disk_dir).expanduser() if settings.kv_disk_dir else cache_folder(settings.cache_dir) / "kv"
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", settings.model_id.strip("/").rpartition("/")[2])[:_MAX_NAME].strip("-.")
    place = hashlib.sha256(settings.model_id.encode()).hexdigest()[:8]
    stem = f"{name or 'model'}-{place}-rank{settings.rank}of{settings.world_size}"
    given = {each.name: str(getattr(settings, each.name)) for each in fields(settings)}
    given = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    others = [Path(other) for other in (settings.draft_model, settings.model_spec) if other is not None]
    try:
        files = [_files_of(path) for path in (folder, *others) if path.exists()]
    except OSError as error:
        raise SettingsError(f"--kv-disk-gb: {error.filename} cannot be read: {error.strerror}") from error
    identity = json.dumps([FORMAT, version(), step, precision, given, files], sort_keys=True)
    num_files = settings.world_size if settings.listen is None else 1  # ranks on TCP may be on other machines
    return DiskTier(where, stem, int(settings.kv_disk_gb * GIB), identity, num_files)


def _bytes_of(pool: torch.Tensor) -> np.ndarray:
    """A pool as bytes, [num_blocks, bytes of a block], in the same memory."""
    return pool.view(pool.shape[0], -1).view(torch.uint8).numpy()


def _files_of(path: Path) -> list[tuple[str, int, int, str]]:
    """Name, size, time of change and a digest of each file of a model; of a large file its digest is of samples."""
    files = sorted(each for each in path.iterdir() if each.name != VERIFIED) if path.is_dir() else [path]
    return [
        (file.name, found.st_size, found.st_mtime_ns, _sampled(file, found.st_size))
        for file in files
        if stat.S_ISREG((found := file.stat()).st_mode)
    ]


def _sampled(path: Path, num_bytes: int) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        if num_bytes <= _SAMPLES * _SAMPLE_BYTES:
            found.update(file.read())
        else:
            for index in range(_SAMPLES):
                file.seek((num_bytes - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()
