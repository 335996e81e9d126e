"""Files of certificates and keys: what is wrong with them is one line that names the flag."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from funitel.proto.errors import SettingsError
from funitel.proto.security.tls import MutualTls, Pair, client_context, server_context
from funitel_testing.certificates import Authority, Files


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> Files:
    return authority.sign("server")


def message(pair: Pair) -> str:
    with pytest.raises(SettingsError) as caught:
        server_context(pair)
    return caught.value.message


def test_a_sound_pair_makes_a_context_of_tls_1_2_and_up(authority: Authority, files: Files) -> None:
    context = server_context(Pair(files.cert, files.key))
    assert context.minimum_version.name == "TLSv1_2"
    assert context.verify_mode.name == "CERT_NONE"
    assert server_context(Pair(files.cert, files.key), authority.ca).verify_mode.name == "CERT_REQUIRED"
    assert client_context().verify_mode.name == "CERT_REQUIRED"
    assert client_context(authority.ca, Pair(files.cert, files.key)).check_hostname


def test_a_file_that_is_missing_or_is_none(files: Files, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    assert message(Pair(absent, files.key)) == f"--tls-cert {absent}: No such file or directory"
    assert message(Pair(files.cert, absent)) == f"--tls-key {absent}: No such file or directory"
    assert message(Pair(str(tmp_path), files.key)) == f"--tls-cert {tmp_path}: Is a directory"
    empty = tmp_path / "empty"
    empty.touch()
    for pair in (Pair(str(empty), files.key), Pair(files.cert, str(empty)), Pair(files.key, files.cert)):
        assert "must be PEM files" in message(pair)


def test_a_key_of_another_certificate(authority: Authority, files: Files) -> None:
    other = authority.sign("other")
    assert message(Pair(files.cert, other.key)) == f"--tls-key {other.key} is not the key of --tls-cert {files.cert}"


def test_a_key_behind_a_passphrase_is_refused_and_asked_for_nowhere(files: Files, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization  # comes with trustme

    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"sesame"),
        )
    )
    assert message(Pair(files.cert, str(locked))) == f"--tls-key {locked} is encrypted: give a key without a passphrase"


READING = """
import os, sys
from funitel.proto.errors import SettingsError
from funitel.proto.security.tls import Pair, server_context
if os.getuid() == 0:
    os.seteuid(65534)
try:
    server_context(Pair(*sys.argv[1:]))
except SettingsError as error:
    print(error.message)
"""


def test_a_file_that_may_not_be_read(files: Files) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's are closed to other users
        os.chmod(folder, 0o755)
        cert, key = f"{folder}/cert.pem", f"{folder}/secret.key"
        shutil.copy(files.cert, cert)
        shutil.copy(files.key, key)
        os.chmod(cert, 0o644)
        os.chmod(key, 0o000)
        environ = {"PYTHONPATH": ":".join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", READING, cert, key], env=environ, capture_output=True, text=True)
        assert done.stdout == f"--tls-key {key}: Permission denied\n", done.stderr


def test_authorities_are_certificates(files: Files, tmp_path: Path) -> None:
    no_ca = tmp_path / "ca.pem"
    no_ca.write_text("nothing")
    with pytest.raises(SettingsError, match=f"--tls-client-ca {no_ca} must be a PEM file of certificates"):
        server_context(Pair(files.cert, files.key), str(no_ca))
    with pytest.raises(SettingsError, match="--tls-ca .*No such file"):
        client_context(str(tmp_path / "absent"))


def test_the_three_of_shards_need_each_other(authority: Authority, files: Files) -> None:
    assert MutualTls.of(None, None, None) is None
    for given in ((files.cert, None, None), (files.cert, files.key, None), (None, None, authority.ca)):
        with pytest.raises(SettingsError, match="give all three"):
            MutualTls.of(*given)
    whole = MutualTls.of(files.cert, files.key, authority.ca)
    assert whole is not None
    whole.channel_credentials()
    whole.server_credentials()
    wrong = MutualTls.of(files.cert, authority.ca, authority.ca)
    assert wrong is not None
    with pytest.raises(SettingsError, match="--shard-tls-cert .* and --shard-tls-key .* must be PEM files"):
        wrong.channel_credentials()
