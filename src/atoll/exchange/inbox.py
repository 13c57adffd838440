"""The inbox: INBOX/<sender>/<contribution>/. On S3 a sender is a key, which may write to no other folder.

To check a contribution costs a copy, memory and minutes, so only so many of a sender are checked. Refused ones count
until the organizer removes them from the quarantine.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ..artifacts import MANIFEST, Store, UserError
from .quarantine import FOLDER, read_reasons

INBOX = "inbox"


class LeftInInbox(UserError):
    """A contribution that is not checked now, since its sender has had enough checked."""


def inbox_of(place: str | Path | Store) -> list[Store]:
    """Every finished contribution below an inbox, sorted by name; no link is followed."""
    senders = folders(Store.at(place))
    found = [folder for sender in senders for folder in (sender, *folders(sender))]
    return [folder for folder in found if folder.exists(MANIFEST)]


def folders(store: Store) -> list[Store]:
    """Folders directly below; a link, or a name that no folder of ours has, is left out."""
    names = [name for name in store.children() if name.isprintable() and name[0] != "." and not set(name) & {"\\", ":"}]
    found = [store.child(name) for name in names]
    return [one for one in found if not one.is_local or (one.path.is_dir() and not one.path.is_symlink())]


def refused_by_sender(run: Store) -> Counter[str]:
    """How many contributions of each sender lie in the quarantine."""
    senders = (read_reasons(run, name).get("sender") for name in run.child(FOLDER).children())
    return Counter(sender for sender in senders if isinstance(sender, str))
