"""Contributions in an inbox, and how many of one sender are checked.

To check a contribution costs a copy, memory and minutes. Two accounts are charged: the folder in the inbox, which
belongs to one key, and the signer. Contributions of theirs that lie refused in quarantine count, until the organizer
removes them there. What one person signed and another spoilt is charged to the folder alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ..artifacts import MANIFEST, Manifest, Store, UserError, sanitize
from .quarantine import FOLDER, read_reasons
from .thresholds import AdmissionThresholds

INBOX = "inbox"


class QuotaExceeded(UserError):
    """A contribution that is not checked now; it is left in the inbox."""


@dataclass
class Quota:
    """What each account may have checked, in `contributions` and bytes, less what lies in the run's quarantine."""

    run: Store
    contributions: int = AdmissionThresholds.contributions
    contributed_bytes: int = AdmissionThresholds.contributed_bytes
    checked: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in self.run.child(FOLDER).children():
            accounts = read_reasons(self.run, name).get("accounts")
            if isinstance(accounts, list):
                self.checked.update(account for account in accounts if isinstance(account, str))

    def charge(self, contributor: str | None, source: Store, manifest: Manifest) -> tuple[str, ...]:
        """Charge one contribution; returns the accounts charged, or raises QuotaExceeded."""
        folder = f"{INBOX}/{sanitize(source.parent.name, 40)}"
        accounts = (folder,) if contributor is None else (folder, contributor)
        size = sum(entry.bytes for entry in manifest.files.values())
        for account in accounts:
            if self.checked[account] >= self.contributions:
                raise QuotaExceeded(
                    f"{source}: left in the inbox, {account} had {self.checked[account]} checked or refused; remove "
                    f"settled ones from {self.run}/{FOLDER}, or raise --max-per-contributor"
                )
            if self.bytes[account] + size > self.contributed_bytes:
                raise QuotaExceeded(
                    f"{source}: left in the inbox, with its {size:,} bytes more than {self.contributed_bytes:,} of "
                    f"{account} would be checked at once; run the same command again"
                )
        self.checked.update(accounts)
        self.bytes.update(dict.fromkeys(accounts, size))
        return accounts

    def refund(self, contributor: str) -> None:
        """The files were not the ones this contributor signed."""
        self.checked[contributor] -= 1


def inbox_of(place: str | Path | Store) -> list[Store]:
    """Every finished contribution below an inbox, INBOX/<key>/<name>/, sorted by name; links are not followed."""
    senders = folders(Store.at(place))
    found = [folder for sender in senders for folder in (sender, *folders(sender))]
    return [folder for folder in found if folder.exists(MANIFEST)]


def folders(store: Store) -> list[Store]:
    """Folders directly below; a link, or a name that no folder of ours has, is left out."""
    names = [name for name in store.children() if name.isprintable() and name[0] != "." and not set(name) & {"\\", ":"}]
    found = [store.child(name) for name in names]
    return [one for one in found if not one.is_local or (one.path.is_dir() and not one.path.is_symlink())]
