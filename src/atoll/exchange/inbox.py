"""What came into an inbox, and how much of it one sender gets judged.

To judge costs the organizer a copy, memory and minutes, so nobody may have it without end. Two accounts are kept: of
the folder in the inbox, which is a key's own, and of whoever of the organizer's list signed. Each has so many
contributions and bytes at a time, and what the quarantine holds of theirs counts: who only ever sent what was refused
has to wait until the organizer has looked, and removed it there. What somebody signed and another spoilt is on the
account of the folder alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..artifacts import MANIFEST, Manifest, Store, UserError, sanitize
from .quarantine import FOLDER, read_reasons

INBOX = "inbox"
MOST_EACH = 8
MOST_BYTES_EACH = 64 * 2**30


class HadTheirShare(UserError):
    """A contribution that nobody looks at now; it stays where it is."""


@dataclass
class Allowance:
    """`most` contributions and `most_bytes` for each account; what the run's quarantine holds already is counted."""

    run: Store
    most: int = MOST_EACH
    most_bytes: int = MOST_BYTES_EACH
    judged: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in self.run.child(FOLDER).children():
            accounts = (read_reasons(self.run, name) or {}).get("accounts")
            if isinstance(accounts, list):
                self.judged.update(account for account in accounts if isinstance(account, str))

    def spend(self, contributor: str | None, source: Store, manifest: Manifest) -> tuple[str, ...]:
        """Let one more be copied and judged; returns on whose accounts, HadTheirShare if one of them is spent."""
        folder = f"{INBOX}/{sanitize(source.parent.name, 40)}"
        accounts = (folder,) if contributor is None else (folder, contributor)
        size = sum(entry.bytes for entry in manifest.files.values())
        for account in accounts:
            if self.judged[account] >= self.most:
                raise HadTheirShare(
                    f"{source}: left where it is, {account} had {self.judged[account]} judged or refused; look at "
                    f"{self.run}/{FOLDER}, remove there what is done with, or use --most-each"
                )
            if self.bytes[account] + size > self.most_bytes:
                raise HadTheirShare(
                    f"{source}: left where it is, with its {size:,} bytes {account} would have more than "
                    f"{self.most_bytes:,} judged at once; run the same command again"
                )
        self.judged.update(accounts)
        self.bytes.update(dict.fromkeys(accounts, size))
        return accounts

    def refund(self, contributor: str | None) -> None:
        """It was not what they signed: somebody else's doing."""
        if contributor is not None:
            self.judged[contributor] -= 1


def inbox_of(run: Store, place: str | None) -> list[Store]:
    """Every finished contribution below an inbox, INBOX/<key>/<name>/, sorted by name; links are not followed."""
    inbox = run.child(INBOX) if place is None else Store.at(place)
    found = []
    for sender in folders(inbox):
        if sender.exists(MANIFEST):
            found.append(sender)
        found += [contribution for contribution in folders(sender) if contribution.exists(MANIFEST)]
    return found


def folders(store: Store) -> list[Store]:
    """Folders directly below; a link, or a name no folder of ours has, is not followed."""
    named = []
    for name in store.children():
        if name.startswith(".") or not name.isprintable() or any(c in name for c in "\\:"):
            continue
        child = store.child(name)
        if not child.is_local or (child.path.is_dir() and not child.path.is_symlink()):
            named.append(child)
    return named
