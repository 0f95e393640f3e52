"""The ledger never promises more than there is."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusecache.policy.cache.space_ledger import SpaceLedger

LIMIT = 1000
sizes = st.integers(0, 400)


class LedgerMachine(RuleBasedStateMachine):
    """Every order of reservations, commits and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SpaceLedger(LIMIT)
        self.reserved: list[int] = []
        self.cached: list[int] = []
        self.staged: list[int] = []

    def _total(self) -> int:
        return sum(self.reserved) + sum(self.cached) + sum(self.staged) + self.ledger.overhead_bytes

    @rule(nbytes=sizes)
    def reserve_cache(self, nbytes: int) -> None:
        fits = self._total() + nbytes <= LIMIT
        assert (self.ledger.shortage_bytes(nbytes) == 0) == fits
        assert self.ledger.reserve_cache(nbytes) == fits
        if fits:
            self.reserved.append(nbytes)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit_cache(self, data: st.DataObject) -> None:
        nbytes = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.ledger.commit_cache(nbytes)
        self.cached.append(nbytes)

    @precondition(lambda self: self.reserved)
    @rule()
    def cancel_cache(self) -> None:
        self.ledger.cancel_cache(self.reserved.pop())

    @precondition(lambda self: self.cached)
    @rule()
    def evict(self) -> None:
        self.ledger.release_cache(self.cached.pop())

    @rule(nbytes=sizes)
    def reserve_staging(self, nbytes: int) -> None:
        fits = sum(self.staged) + nbytes <= LIMIT * 7 // 10 and self._total() + nbytes <= LIMIT
        assert self.ledger.reserve_staging(nbytes) == fits
        if fits:
            self.staged.append(nbytes)

    @rule(nbytes=st.integers(0, 200))
    def overhead_is_measured(self, nbytes: int) -> None:
        self.ledger.overhead_bytes = nbytes

    @precondition(lambda self: self.staged)
    @rule()
    def release_staging(self) -> None:
        self.ledger.release_staging(self.staged.pop())

    @precondition(lambda self: self.staged)
    @rule()
    def adopt(self) -> None:
        nbytes = self.staged.pop()
        self.ledger.adopt(nbytes)
        self.cached.append(nbytes)

    @invariant()
    def accounts_are_right_and_within_the_limit(self) -> None:
        assert self.ledger.cache_bytes == sum(self.cached)
        assert self.ledger.reserved_bytes == sum(self.reserved)
        assert self.ledger.staging_bytes == sum(self.staged)
        assert self.ledger.total_bytes == self._total()
        # Overhead grows when it likes; what is granted never does so beyond the limit.
        assert self.ledger.total_bytes - self.ledger.overhead_bytes <= LIMIT


TestLedger = LedgerMachine.TestCase


def test_a_limit_lowered_between_two_starts_grants_nothing_until_enough_is_evicted() -> None:
    ledger = SpaceLedger(100)
    ledger.restore_cache(150)
    assert ledger.shortage_bytes(10) == 60
    assert not ledger.reserve_cache(10)
    ledger.release_cache(60)
    assert ledger.reserve_cache(10)
