"""The state of the control plane: what is written survives, what fails leaves it as it was; SQLite and PostgreSQL."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, text

from funitel.launcher.config.sockets import free_port
from funitel.launcher.control_plane import schema
from funitel.launcher.control_plane import store as store_module
from funitel.launcher.control_plane.records import (
    LaunchRequest,
    ModelEntry,
    ModelEvent,
    ModelState,
    Registration,
    ReplicaEntry,
    ReplicaStage,
)
from funitel.launcher.control_plane.store import StateStore, StateThread
from funitel.proto.errors import SettingsError, StorageFailed

REPLICA = ReplicaEntry(
    id=2,
    address="unix:///run/x-2",
    state=ReplicaStage.READY,
    pids=(11,),
    executor="worker",
    record={"pids": [[11, 99]]},
)


def entry(name: str, **changes: object) -> ModelEntry:
    return replace(ModelEntry(name=name, model_id=name, state=ModelState.QUEUED, created=1.0), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL server of its own, without a database's name."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = str(found[-1]) if found else shutil.which("initdb")
    if initdb is None:
        pytest.skip("no PostgreSQL is installed")
    pytest.importorskip("psycopg")
    programs, folder = Path(initdb).parent, tmp_path_factory.mktemp("pg")
    as_other = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        if shutil.which("setpriv") is None:
            pytest.skip("PostgreSQL does not run as root, and there is no setpriv")
        folder = Path("/tmp") / f"funitel-pg-{os.getpid()}"
        folder.mkdir(mode=0o700)
        shutil.chown(folder, "nobody")
        as_other = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    data, port = folder / "data", free_port()
    options = ["-D", str(data), "-U", "funitel", "-A", "trust", "--no-sync", "-E", "UTF8"]
    subprocess.run([*as_other, initdb, *options], check=True, capture_output=True, cwd="/")
    process = subprocess.Popen(
        [*as_other, str(programs / "postgres"), "-D", str(data), "-p", str(port), "-k", str(folder), "-F"],
        stderr=subprocess.PIPE,
        cwd="/",
    )
    assert process.stderr is not None
    for line in process.stderr:
        if b"ready to accept" in line:
            break
    else:
        pytest.fail("PostgreSQL did not start")
    yield f"postgresql+psycopg://funitel@127.0.0.1:{port}"
    process.send_signal(signal.SIGINT)
    process.wait(30)
    process.stderr.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    if request.param == "sqlite":
        return tmp_path / "fleet.db"
    server: str = request.getfixturevalue("postgres")
    name = f"test_{abs(hash(request.node.nodeid))}"
    engine = create_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{server}/{name}"


@pytest.fixture
def opened(database: str | Path) -> Iterator[Callable[[], StateStore]]:
    """Open the state again and again; what was open is closed first."""
    stores: list[StateStore] = []

    def reopen() -> StateStore:
        for store in stores:
            store.close()
        stores.append(StateStore(database))
        return stores[-1]

    yield reopen
    for store in stores:
        store.close()


def test_a_model_with_its_replicas_and_their_records_survives(opened: Callable[[], StateStore]) -> None:
    request = LaunchRequest(model="x", retries=2, settings={"max_batch_size": 4})
    whole = entry("x", state=ModelState.READY, replicas=(REPLICA,), pinned=True, ttl=3.5, router={"a": [1]})
    opened().save_model(whole, request, is_wanted=True)
    (stored,) = opened().models()
    assert stored.entry == whole
    assert stored.request == request
    assert stored.is_wanted


def test_saving_again_replaces_the_model_and_its_replicas(opened: Callable[[], StateStore]) -> None:
    store = opened()
    store.save_model(entry("x", replicas=(REPLICA,)), LaunchRequest(model="x"), is_wanted=True)
    other = replace(REPLICA, id=5)
    store.save_model(entry("x", replicas=(other,)), None, is_wanted=False)
    (stored,) = opened().models()
    assert (stored.entry.replicas, stored.request, stored.is_wanted) == ((other,), None, False)


def test_models_come_by_priority_then_in_the_order_of_their_launch(opened: Callable[[], StateStore]) -> None:
    store = opened()
    for name, priority in (("b", 0), ("a", 0), ("urgent", 5), ("late", -1), ("c", 0)):
        store.save_model(entry(name), LaunchRequest(model=name, priority=priority), is_wanted=True)
    store.save_model(entry("b", pinned=True), LaunchRequest(model="b"), is_wanted=True)  # keeps its place
    assert [stored.entry.name for stored in opened().models()] == ["urgent", "b", "a", "c", "late"]


def test_a_model_that_is_forgotten_leaves_no_replica(opened: Callable[[], StateStore]) -> None:
    store = opened()
    store.save_model(entry("x", replicas=(REPLICA,)), None, is_wanted=True)
    store.forget_model("x")
    assert store.models() == []
    store.save_model(entry("x"), None, is_wanted=True)
    assert opened().models()[0].entry.replicas == ()


def test_registrations_survive_by_type_and_name(opened: Callable[[], StateStore]) -> None:
    store = opened()
    first = Registration(type="LLM", name="b", model="/b", spec={"num_layers": 1}, definition={"model_name": "b"})
    for each in (first, replace(first, name="a"), replace(first, type="embedding")):
        store.save_registration(each)
    store.save_registration(replace(first, description="again"))
    found = opened().registrations()
    assert [(each.type, each.name) for each in found] == [("LLM", "a"), ("LLM", "b"), ("embedding", "b")]
    assert found[1] == replace(first, description="again")
    store = opened()
    store.forget_registration("LLM", "b")
    assert [(each.type, each.name) for each in store.registrations()] == [("LLM", "a"), ("embedding", "b")]


def test_events_are_bounded_for_a_model_and_in_all(
    opened: Callable[[], StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_EVENTS_OF_A_MODEL", 3)
    monkeypatch.setattr(store_module, "MAX_EVENTS", 5)
    store = opened()
    for number in range(6):
        store.add_event("x", ModelEvent(at=float(number), stage="loading", message=f"{number}"))
    assert [event.message for event in store.events("x")] == ["3", "4", "5"]
    for _ in range(3):
        store.add_event("y", ModelEvent(at=9.0, stage="ready", message="y"))
    assert [event.message for event in opened().events("x")] == ["4", "5"]


def test_the_expected_duration_is_the_median_of_the_last_loads(
    opened: Callable[[], StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_LOADS", 3)
    store = opened()
    assert store.expected_load_seconds("x") is None
    for seconds in (100.0, 1.0, 2.0, 30.0):
        store.add_load("x", seconds)
    store.add_load("y", 7.0)
    assert opened().expected_load_seconds("x") == 2.0


# Versions


def test_a_later_version_is_refused_and_left_as_it_is(opened: Callable[[], StateStore], database: str | Path) -> None:
    opened().close()
    url = f"sqlite:///{database}" if isinstance(database, Path) else database
    engine = create_engine(url)
    with engine.begin() as db:
        db.execute(text("UPDATE schema_version SET version = 99"))
    with pytest.raises(StorageFailed, match=f"tables of version 99, this program knows {schema.VERSION}") as refused:
        opened()
    assert "\n" not in refused.value.message
    with engine.begin() as db:
        assert db.execute(text("SELECT version FROM schema_version")).scalar() == 99
    engine.dispose()


def test_an_earlier_version_is_migrated_version_by_version(opened: Callable[[], StateStore]) -> None:
    store = opened()
    store.save_model(entry("x"), None, is_wanted=True)
    now = schema.VERSION

    def add_colour(db: Connection) -> None:
        db.execute(text("ALTER TABLE models ADD COLUMN colour TEXT DEFAULT 'red'"))

    def paint(db: Connection) -> None:
        db.execute(text("UPDATE models SET colour = colour || 'dish'"))

    with store.transaction() as db:
        schema.bring_up_to_date(db, now + 2, {now + 1: add_colour, now + 2: paint})
    with store.transaction() as db:
        assert db.execute(text("SELECT name, colour FROM models")).all() == [("x", "reddish")]
        assert db.execute(text("SELECT version FROM schema_version")).scalar() == now + 2


def test_a_migration_that_fails_leaves_the_earlier_version(opened: Callable[[], StateStore]) -> None:
    store, now = opened(), schema.VERSION

    def fail(db: Connection) -> None:
        db.execute(text("ALTER TABLE models ADD COLUMN colour TEXT"))
        db.execute(text("UPDATE nowhere SET x = 1"))

    with pytest.raises(StorageFailed, match="nowhere"), store.transaction() as db:
        schema.bring_up_to_date(db, now + 1, {now + 1: fail})
    with store.transaction() as db:
        assert db.execute(text("SELECT version FROM schema_version")).scalar() == now
    with store.transaction() as db, pytest.raises(Exception, match="colour"):
        db.execute(text("SELECT colour FROM models"))


def test_a_state_of_the_first_version_gets_users_and_an_audit(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    StateStore(path).close()
    database = sqlite3.connect(path)
    for table in (*(each.name for each in schema.OF_TENANTS), "schema_version"):
        database.execute(f"DROP TABLE {table}")
    database.execute("CREATE TABLE schema_version (version INTEGER NOT NULL)")
    database.execute("INSERT INTO schema_version VALUES (1)")
    database.commit()
    database.close()
    store = StateStore(path)
    with store.transaction() as db:
        assert db.execute(text("SELECT count(*) FROM users")).scalar() == 0
        assert db.execute(text("SELECT version FROM schema_version")).scalar() == schema.VERSION
        db.execute(text("INSERT INTO audit (at, actor, object, content) VALUES (1, 'a', 'b', '{}')"))
    with pytest.raises(StorageFailed, match="append-only"), store.transaction() as db:
        db.execute(text("DELETE FROM audit"))


# What goes wrong


def test_a_full_disk_is_one_line_and_leaves_the_state(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "fleet.db")
    store.save_model(entry("x", replicas=(REPLICA,)), None, is_wanted=True)
    with store.transaction() as db:
        pages = db.exec_driver_sql("PRAGMA page_count").scalar()
        db.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFailed, match="disk is full") as failed:
        store.save_model(entry("x", error="e" * 100_000), None, is_wanted=False)
    assert failed.value.http_status == 507
    assert "\n" not in failed.value.message
    assert "INSERT" not in failed.value.message
    (stored,) = store.models()
    assert (stored.entry.error, stored.entry.replicas, stored.is_wanted) == (None, (REPLICA,), True)
    with store.transaction() as db:
        db.exec_driver_sql("PRAGMA max_page_count = 1000000")
    store.save_model(entry("x", error="e" * 100_000), None, is_wanted=False)  # there is room again
    store.close()


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "fleet.db").write_text("never a database" * 100)
    with pytest.raises(StorageFailed, match="fleet.db: file is not a database"):
        StateStore(tmp_path / "fleet.db")


def test_what_was_answered_survives_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from funitel.launcher.control_plane.store import StateStore\n"
        "from funitel.launcher.control_plane.records import ModelEvent\n"
        "store = StateStore(Path(sys.argv[1]))\n"
        "for number in range(20): store.add_event('x', ModelEvent(at=0.0, stage='ready', message=str(number)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "fleet.db"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code, str(path)], env=environ).returncode == -signal.SIGKILL
    store = StateStore(path)
    assert len(store.events("x")) == 20
    store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_second_control_plane_on_a_postgresql_database_is_refused(postgres: str) -> None:
    first = StateStore(f"{postgres}/postgres")
    with pytest.raises(SettingsError, match=f"another control plane that runs: funitel, process {os.getpid()} on"):
        StateStore(f"{postgres}/postgres")
    first.close()
    StateStore(f"{postgres}/postgres").close()


def test_a_connection_to_postgresql_that_ends_is_made_again(postgres: str) -> None:
    store = StateStore(f"{postgres}/postgres")
    engine = create_engine(f"{postgres}/postgres")
    with engine.begin() as db:
        db.execute(text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"))
    engine.dispose()
    store.add_event("again", ModelEvent(at=0.0, stage="ready", message="hi"))
    assert len(store.events("again")) == 1
    with pytest.raises(SettingsError, match="belongs to another"):
        StateStore(f"{postgres}/postgres")
    store.close()


@pytest.mark.parametrize("url", ["mysql://x/y", "fleet.db", "", "sqlite:///x"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="--database must be like postgresql"):
        StateStore(url)


def test_a_database_that_does_not_answer_is_one_line_without_the_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageFailed) as failed:
        StateStore(f"postgresql://someone:secret@127.0.0.1:{free_port()}/x")
    assert "\n" not in failed.value.message
    assert "someone:***@127.0.0.1" in failed.value.message
    assert "secret" not in failed.value.message


async def test_a_thread_calls_the_store_and_raises_its_errors(tmp_path: Path) -> None:
    state = StateThread(StateStore(tmp_path / "fleet.db"))
    await state(StateStore.save_model, entry("x"), None, is_wanted=True)
    assert [each.entry.name for each in await state(StateStore.models)] == ["x"]
    await state.close()


def test_memory_is_a_state_too() -> None:
    store = StateStore(None)
    store.save_model(entry("x"), None, is_wanted=True)
    assert len(store.models()) == 1
    store.close()


def test_the_file_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        store = StateStore(tmp_path / "fleet.db")
        store.add_event("tiny", ModelEvent(at=1.0, stage="ready", message="ready"))
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert {*modes.values()} == {"0o600"}, modes
    store.close()
