"""The store as a state machine: two connections, kills, damage, other machines, other strides, read-only and newer files.

At any time: what is found was put, under exactly this key and fingerprint; while nothing damaged the file, it is the last put.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import tempfile
import warnings
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_cases import KEYS, MACHINES, failure, fork, journals, row, status_of

from gemmtune.settings import Settings
from gemmtune.store.database import Database
from gemmtune.store.row import Row
from gemmtune.store.store import Store, open_store

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where files need no disk: the machine makes hundreds of stores."""
Identity = tuple[str, str, str]
ROWS = st.builds(
    lambda index, key, fingerprint, fails: (failure if fails else row)(index, key=key, fingerprint=fingerprint),
    st.integers(0, 4),
    st.sampled_from(KEYS),
    st.sampled_from(MACHINES),
    st.booleans(),
)
BATCHES = st.lists(ROWS, min_size=1, max_size=12)


def found_in(store: Store) -> dict[Identity, Row]:
    """Everything that look-ups find; each row must say itself that it belongs where it was found."""
    found: dict[Identity, Row] = {}
    for key in KEYS:
        for fingerprint in MACHINES:
            for content_hash, known in store.rows(key, fingerprint).items():
                assert known.identity == (key, fingerprint, content_hash)
                found[known.identity] = known
    return found


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gemmtune-test-", dir=MEMORY))
        self.history: dict[Identity, list[Row]] = {}
        self.begin()

    def begin(self) -> None:
        """A new store at a new place."""
        self.path = Path(tempfile.mkdtemp(dir=self.folder)) / "store.sqlite"
        self.expected: dict[Identity, Row] = {}
        self.restart()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.close()
            shutil.rmtree(self.folder)

    def close(self) -> None:
        self.store.close()
        self.other.close()

    @rule()
    def restart(self) -> None:
        self.store, self.other = Store.open(self.path), Store.open(self.path)

    @rule(batch=BATCHES, by_other=st.booleans())
    def put(self, batch: list[Row], by_other: bool) -> None:
        (self.other if by_other else self.store).put(batch)
        self.remember(batch)
        self.expected |= {r.identity: r for r in batch}

    def remember(self, batch: list[Row]) -> None:
        for r in batch:
            self.history.setdefault(r.identity, []).append(r)

    @invariant()
    def both_connections_find_the_last_put(self) -> None:
        if hasattr(self, "store"):
            assert found_in(self.store) == self.expected
            assert found_in(self.other) == self.expected

    @rule(batch=BATCHES)
    def die_in_a_write(self, batch: list[Row]) -> None:
        def work() -> None:
            database = Database(self.path)
            with database.transaction():
                database.write(batch)
                os.kill(os.getpid(), signal.SIGKILL)

        assert status_of(fork(work)) == -signal.SIGKILL

    @rule(batch=BATCHES)
    def write_to_a_read_only_file(self, batch: list[Row]) -> None:
        shared = Store(Database(self.path, read_only=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shared.put(batch)
        assert len(caught) == 1
        assert found_in(shared) == self.expected | {r.identity: r for r in batch}
        shared.close()

    @rule(batch=BATCHES)
    def meet_a_newer_version(self, batch: list[Row]) -> None:
        self.set_version(99)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            old = Store(Database(self.path))
            old.put(batch)
            assert found_in(old) == {r.identity: r for r in batch}
        assert len(caught) == 1
        self.set_version(1)

    def set_version(self, version: int) -> None:
        connection = sqlite3.connect(self.path)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.close()

    @rule(where=st.floats(0, 1), in_journal=st.booleans(), batch=BATCHES)
    def truncate(self, where: float, in_journal: bool, batch: list[Row]) -> None:
        file = self.file_to_damage(in_journal)
        os.truncate(file, int(where * file.stat().st_size))
        self.work_on_damage(batch)

    @rule(
        flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), min_size=1, max_size=6),
        in_journal=st.booleans(),
        batch=BATCHES,
    )
    def flip_bits(self, flips: list[tuple[float, int]], in_journal: bool, batch: list[Row]) -> None:
        file = self.file_to_damage(in_journal)
        data = bytearray(file.read_bytes())
        for where, bit in flips:
            if data:
                data[int(where * (len(data) - 1))] ^= 1 << bit
        file.write_bytes(data)
        self.work_on_damage(batch)

    def file_to_damage(self, in_journal: bool) -> Path:
        """A copy of the store as a kill at this moment leaves it, its main file or its journal."""
        if not in_journal:
            # Closing the last connection moves everything into the main file.
            self.close()
        copy = Path(tempfile.mkdtemp(dir=self.folder)) / "store.sqlite"
        for file in journals(self.path):
            shutil.copy(file, copy.with_name(copy.name + file.name.removeprefix(self.path.name)))
        self.close()
        self.path = copy
        return journals(copy)[-1 if in_journal else 0]

    def work_on_damage(self, batch: list[Row]) -> None:
        """Nothing wrong is found, and the store can be used at once; afterwards the machine goes on with a new one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            store = open_store(Settings(store_path=str(self.path)))
            self.check_nothing_is_wrong(found_in(store))
            self.remember(batch)
            store.put(batch)
            self.check_nothing_is_wrong(found_in(store))
            self.check_nothing_is_wrong({r.identity: r for r in store.every_row()})
            store.close()
            again = Store(Database(self.path))
            self.check_nothing_is_wrong(found_in(again))
            again.close()
        self.begin()

    def check_nothing_is_wrong(self, found: dict[Identity, Row]) -> None:
        for identity, known in found.items():
            assert known in self.history.get(identity, []), "a row was found that nobody put"


StoreMachine.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=15,
    deadline=None,
    print_blob=True,
    # Making a failing run shorter takes minutes, for each step makes files.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
TestStoreMachine = StoreMachine.TestCase
