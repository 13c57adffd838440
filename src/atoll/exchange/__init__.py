"""Work going out and coming back: contributions are checked before they are trusted."""
